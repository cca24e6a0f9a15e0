"""What both examples share: the command line, the log, and a file that steers a running job."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accelerator import Accelerator  # isort: skip


def arguments(description: str, **defaults: float) -> argparse.ArgumentParser:
    """A parser with the flags of both examples; ``defaults`` fills those that differ."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--backend", help="for init_process_group; by default the one that torch has for the device"
    )
    parser.add_argument("--device", default="cpu", help="type of device: cpu, cuda")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=defaults["batch"], help="rows of each rank")
    parser.add_argument("--lr", type=float, default=defaults["lr"], help="learning rate")
    parser.add_argument("--bucket-mb", type=float, default=1.0, help="gradient bucket, MB")
    parser.add_argument(
        "--accelerator-ms",
        type=float,
        default=0.0,
        metavar="M",
        help="let each layer take its share of the M milliseconds that an accelerator would need "
        "for a step; 0: as fast as this machine computes",
    )
    parser.add_argument("--log-file", type=Path, help="write one JSON line for each step of rank 0")
    parser.add_argument(
        "--control",
        type=Path,
        help='JSON file, read between steps: {"paused": true} makes the job wait, '
        '{"last_step": N} ends it early',
    )
    return parser


def start(args: argparse.Namespace) -> torch.device:
    """Make the default process group; the device of this rank."""
    device = torch.device(args.device)
    if device.type != "cpu":
        # Where ranks on one host outnumber its devices, they share them.
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]) % _devices())
        torch.accelerator.set_device_index(device.index)
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(args.backend or dist.get_default_backend_for_device(device))
    torch.manual_seed(args.seed)
    return device


def _devices() -> int:
    return max(1, torch.accelerator.device_count())


def train(
    model: torch.nn.Module,
    accelerator: Accelerator,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    device: torch.device,
    args: argparse.Namespace,
) -> float:
    """Train ``model`` with DDP in the default process group; the last loss of this rank."""
    model = model.to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9)
    computed = _GradientClock(model, device)
    control = Control(args.control, device)
    loss = torch.tensor(float("nan"))
    log = open(args.log_file, "w", buffering=1) if args.log_file and dist.get_rank() == 0 else None  # noqa: SIM115
    try:
        for step, (inputs, targets) in zip(range(args.steps), batches, strict=False):
            if not control.proceed(step):
                break
            start = time.monotonic()
            accelerator.begin_step()
            computed.begin()
            optimizer.zero_grad()
            loss = loss_of(ddp(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            seconds = computed.read()
            if log:
                record = {
                    "step": step,
                    "start": start,
                    "computed": start + seconds,
                    "end": time.monotonic(),
                    "loss": float.hex(loss.item()),
                }
                log.write(json.dumps(record) + "\n")
    finally:
        if log:
            log.close()
    return loss.item()


class Control:
    """Pauses a job between steps, or ends it early, as a file says.

    Only rank 0 obeys a pause; the others wait for it in their next collective. ``last_step`` is
    obeyed by all, so it must lie ahead: set it while the job is paused, two steps or more away.
    """

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._path = path
        # A collective that waits for a paused rank would occupy an accelerator that others share.
        self._on_host: Any = dist.new_group(backend="gloo") if device.type != "cpu" else None
        self._seen = -1
        self._paused = False
        self._last_step: int | None = None

    def proceed(self, step: int) -> bool:
        """Whether to do ``step``, once the job isn't paused."""
        self._read()
        while self._paused and dist.get_rank() == 0:
            time.sleep(0.005)
            self._read()
        if self._on_host is not None:
            dist.barrier(self._on_host)
        return self._last_step is None or step <= self._last_step

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            changed = os.stat(self._path).st_mtime_ns
            if changed == self._seen:
                return
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return
        self._seen = changed
        self._paused = bool(content.get("paused", False))
        self._last_step = content.get("last_step")


class _GradientClock:
    """When the last gradient of a step was computed, before its all-reduce was waited for.

    On an accelerator by events on the stream that computes, because the host runs ahead of it.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._events: Any = None
        if device.type != "cpu":
            self._events = [torch.Event(device, enable_timing=True) for _ in range(2)]
        self._begun = self._last = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._tick)

    def begin(self) -> None:
        """A step begins; the device is idle."""
        self._begun = time.monotonic()
        if self._events:
            self._events[0].record()

    def read(self) -> float:
        """Seconds of the step's computation, once the device is done with the step."""
        if not self._events:
            return self._last - self._begun
        torch.accelerator.synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3

    def _tick(self, _parameter: torch.Tensor) -> None:
        if self._events:
            self._events[1].record()
        else:
            self._last = time.monotonic()
