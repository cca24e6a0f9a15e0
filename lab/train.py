"""A job of the lab: a model of the examples, paced like an accelerator and steered by a file.

torchrun --nproc-per-node 2 -m lab.train gpt --accelerator-ms 150 --log-file steps.jsonl
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import stdlib_text
from train_gpt import GPT
from train_mlp import MLP

#: Model, rows of each rank and learning rate.
MODELS: dict[str, tuple[type[torch.nn.Module], int, float]] = {
    "gpt": (GPT, 4, 0.05),
    "mlp": (MLP, 16, 0.02),
}


def arguments() -> argparse.Namespace:
    """The command line; every argument of the model's constructor is a flag, too."""
    model, batch, lr = MODELS[sys.argv[1]]
    parser = argparse.ArgumentParser(prog="lab.train")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--backend", help="of the process group; by default torch's own choice")
    parser.add_argument("--device", default="cpu", help="type of device: cpu, cuda")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=batch, help="rows of each rank")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate")
    parser.add_argument("--accelerator-ms", type=float, default=0.0, help="see Accelerator")
    parser.add_argument("--servers", type=int, default=0, help="ranks at the end that only serve")
    parser.add_argument("--log-file", type=Path, help="gets one JSON line for each step of rank 0")
    parser.add_argument("--control", type=Path, help="see Control")
    for name, parameter in inspect.signature(model).parameters.items():
        parser.add_argument(f"--{name}", type=int, default=parameter.default)
    return parser.parse_args()


def start(args: argparse.Namespace) -> torch.device:
    """Makes the default process group; returns the device of this rank."""
    device = torch.device(args.device)
    if device.type != "cpu":
        # Where a host has fewer devices than ranks, the ranks share them.
        count = max(1, torch.accelerator.device_count())
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]) % count)
        torch.accelerator.set_device_index(device.index)
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(args.backend or dist.get_default_backend_for_device(device))
    torch.manual_seed(args.seed)
    return device


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Trains until ``--steps`` are done or the control file ends the job."""
    model_type = MODELS[args.model][0]
    names = inspect.signature(model_type).parameters
    model = model_type(**{name: getattr(args, name) for name in names}).to(device)
    workers = dist.get_world_size() - args.servers
    if args.servers:
        ddp: torch.nn.Module = model
        servers = range(workers, dist.get_world_size())
        optimizer: torch.optim.Optimizer = Remote(list(model.parameters()), servers)
    else:
        ddp = DistributedDataParallel(model, bucket_cap_mb=1.0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9)
    accelerator = Accelerator(args.accelerator_ms, list(model.layers))
    computed = GradientClock(model, device)
    control = Control(args.control, device)
    if dist.get_rank() >= workers:
        serve(args, model, control, workers)
        return
    text = stdlib_text.load()
    generator = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
    log = args.log_file if dist.get_rank() == 0 else None
    with open(log or os.devnull, "w", buffering=1) as lines:
        for step in range(args.steps):
            tokens, following = stdlib_text.sample(text, args.batch, args.context, generator)
            targets = following if args.model == "gpt" else following[:, -1]
            if not control.proceed(step):
                break
            begin = time.monotonic()
            accelerator.begin_step()
            computed.begin()
            optimizer.zero_grad()
            logits = ddp(tokens.to(device)).flatten(0, -2)
            loss = F.cross_entropy(logits, targets.to(device).flatten())
            loss.backward()
            optimizer.step()
            done = begin + computed.read()
            record = {"step": step, "start": begin, "computed": done, "end": time.monotonic()}
            lines.write(json.dumps(record | {"loss": float.hex(loss.item())}) + "\n")


def serve(args: argparse.Namespace, model: torch.nn.Module, control: Control, workers: int) -> None:
    """Serves the parameters of ``model`` to the ranks below ``workers``."""
    place = dist.get_rank() - workers
    parameters = list(model.parameters())
    server = Server(parameters, range(workers), place, args.servers, lr=args.lr, momentum=0.9)
    for step in range(args.steps):
        if not control.proceed(step):
            break
        server.step()


class Control:
    """Pauses a job between steps, or ends it early, as a JSON file says.

    ``{"paused": true}`` makes rank 0 wait; the other ranks then wait for it in their next
    collective. ``{"last_step": N}`` ends the job. All ranks obey that, so the file has to be
    written while the job is paused, with N two steps or more ahead.
    """

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._path = path
        # A collective that waits for a paused rank would occupy an accelerator that others share.
        self._on_host: Any = dist.new_group(backend="gloo") if device.type != "cpu" else None
        self._seen = -1
        self._content: dict[str, Any] = {}

    def proceed(self, step: int) -> bool:
        """Waits while the job is paused; returns whether to do ``step``."""
        self._read()
        while self._content.get("paused") and dist.get_rank() == 0:
            time.sleep(0.005)
            self._read()
        if self._on_host is not None:
            dist.barrier(self._on_host)
        last = self._content.get("last_step")
        return last is None or step <= last

    def _read(self) -> None:
        try:
            if self._path is not None and (now := self._path.stat().st_mtime_ns) != self._seen:
                self._content = json.loads(self._path.read_text())
                self._seen = now
        except (OSError, ValueError):
            return


class GradientClock:
    """When the last gradient of a step was computed, before its all-reduce was waited for.

    On an accelerator it uses events on the stream that computes, because the host runs ahead.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._events: Any = None
        if device.type != "cpu":
            self._events = [torch.Event(device, enable_timing=True) for _ in range(2)]
        self._begun = self._last = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._tick)

    def begin(self) -> None:
        """A step begins, and the device is idle."""
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


class Accelerator:
    """Paces the steps of a model: a third of each forward, two thirds backward.

    Args:
        step_ms: time that the accelerator takes to compute a step, milliseconds; 0 adds no wait.
        layers: of the model; each takes an equal share.
    """

    def __init__(self, step_ms: float, layers: Collection[torch.nn.Module]) -> None:
        self._forward_s = step_ms / 1e3 / 3 / len(layers)
        self._due = 0.0
        for layer in layers if step_ms else ():
            layer.register_forward_hook(lambda _layer, _inputs, output: _Pace.apply(output, self))

    def begin_step(self) -> None:
        """A step starts now."""
        self._due = time.monotonic()

    def wait(self, passes: int) -> None:
        """Waits until a layer has done ``passes`` times the work of its forward pass."""
        # Counted from the start of the step, so that real computation fills the time.
        self._due += passes * self._forward_s
        time.sleep(max(0.0, self._due - time.monotonic()))


class _Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
        ctx.accelerator = accelerator
        accelerator.wait(1)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.accelerator.wait(2)
        return gradient, None


#: Least bytes of a bucket but the last one, as DDP's here.
BUCKET_BYTES = 1 << 20


def buckets(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The parameters in their order, cut where a bucket is full."""
    found: list[list[Parameter]] = [[]]
    for parameter in parameters:
        if sum(p.nbytes for p in found[-1]) >= BUCKET_BYTES:
            found.append([])
        found[-1].append(parameter)
    return found


class Remote(torch.optim.Optimizer):
    """A worker's end. Its step pushes all gradients, and returns with the new parameters in place.

    Args:
        servers: their ranks; they own the buckets in turn.
    """

    def __init__(self, parameters: Sequence[Parameter], servers: Sequence[int]) -> None:
        super().__init__(parameters, {})
        self._buckets = buckets(parameters)
        self._servers = servers

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Exchange one iteration's gradients for its parameters."""
        pushed, pulled = [], []
        for tag, bucket in enumerate(self._buckets):
            server = self._servers[tag % len(self._servers)]
            gradients = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
            fresh = torch.empty_like(gradients)
            pulled.append((dist.irecv(fresh, server, tag=tag), fresh, bucket))
            # The buffer lives until it is sent.
            pushed.append((dist.isend(gradients, server, tag=tag), gradients))
        for work, fresh, bucket in pulled:
            work.wait()
            _spread(fresh, [p.data for p in bucket])
        for sent, _ in pushed:
            sent.wait()


class Server(torch.optim.Optimizer):
    """A server's end. Its step receives, averages, updates and sends its buckets, one by one.

    Args:
        parameters: of the whole model, with the values that the workers begin with.
        workers: their ranks. Gradients are added in this order, so that runs are equal.
        place: of this server in the order of all ``servers``.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        workers: Sequence[int],
        place: int,
        servers: int,
        **sgd: float,
    ) -> None:
        super().__init__(parameters, {})
        self._workers = workers
        owned = list(enumerate(buckets(parameters)))[place::servers]
        self._owned = [(tag, bucket, torch.optim.SGD(bucket, **sgd)) for tag, bucket in owned]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Serve one iteration."""
        arriving = []
        for tag, bucket, _ in self._owned:
            size = sum(p.numel() for p in bucket)
            room = [torch.empty(size) for _ in self._workers]
            pairs = zip(room, self._workers, strict=True)
            works = [dist.irecv(into, worker, tag=tag) for into, worker in pairs]
            arriving.append((works, room))
        sent = []
        for (tag, bucket, sgd), (works, room) in zip(self._owned, arriving, strict=True):
            for work in works:
                work.wait()
            for parameter in bucket:
                parameter.grad = torch.empty_like(parameter)
            mean = torch.stack(room).sum(0) / len(room)
            _spread(mean, [p.grad for p in bucket if p.grad is not None])
            sgd.step()
            updated = torch.cat([p.flatten() for p in bucket])
            sent += [(dist.isend(updated, worker, tag=tag), updated) for worker in self._workers]
        for work, _ in sent:
            work.wait()


def _spread(flat: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Copy the parts of a bucket to where they belong."""
    parts = flat.split([each.numel() for each in into])
    for part, each in zip(parts, into, strict=True):
        each.copy_(part.view_as(each))


if __name__ == "__main__":
    args = arguments()
    train(args, start(args))
    # No rank may leave while another one still talks to it.
    dist.barrier()
    dist.destroy_process_group()
