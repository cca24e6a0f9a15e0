"""What Crux measured, against the truth: durations by events, W by arithmetic."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from drained import drain
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rig.part import ALONE, DEVICES, PAIR, Rank, part

TIMES = 15
#: Operations in which the recorder finds out what the device's clock says, on a busy host too.
SETTLING = 10
#: Longer than issuing an operation and two events takes, s.
ISSUE_S = 0.003


def _drain(count: int) -> Any:
    """``count`` records of the recorder by the order of issue."""
    from crux_torch.backend import register

    return np.sort(drain(register.recorder(), count), order="issue_ns")


def _forget() -> None:
    from crux_torch.backend import register

    time.sleep(1.5)
    register.recorder().drain(1 << 30)


def _operation(rank: Rank, nbytes: int, blocking: bool = True) -> Any:
    """An operation that takes time, and makes what follows on the stream wait for its end.

    A world of one moves only what is copied: its all-reduce does nothing at all.
    """
    whole = torch.ones(nbytes // 4, device=rank.device)
    out = torch.empty_like(whole) if rank.size == ALONE else None

    def call() -> None:
        if out is not None:
            work = dist.all_gather_into_tensor(out, whole, async_op=not blocking)
        else:
            work = dist.all_reduce(whole, async_op=not blocking)
        if not blocking:
            work.wait()

    return call


@part(measures=True)
def durations(rank: Rank) -> Any:
    """Pairs of recorded and true nanoseconds of each operation, by how it is issued and by size.

    The truth: events right before and after one collective on a stream with nothing else on the
    device, and all ranks at the start at about the same time. The device first sleeps for longer
    than issuing takes, or the time between two calls of the host would count as the operation's.
    """
    sizes = [int(size) for size in rank.arguments["sizes"].split(",")]
    truth: dict[str, list[Any]] = {}
    for nbytes in sizes:
        for how in ("blocking", "asynchronous"):
            call = _operation(rank, nbytes, how == "blocking")
            stream = torch.Stream(rank.device)
            pairs = [(rank.event(), rank.event()) for _ in range(TIMES)]
            with stream:
                for _ in range(3):
                    call()
                rank.synchronize()
                if rank.crux:
                    _forget()
                for before, after in pairs:
                    rank.kind.sleep(ISSUE_S)
                    before.record()
                    call()
                    after.record()
                    rank.synchronize()
            true = [1e6 * before.elapsed_time(after) for before, after in pairs]
            recorded = _drain(TIMES)["device_ns"].tolist() if rank.crux else true
            truth[f"{how} {nbytes}"] = list(zip(map(int, recorded), true, strict=True))
    return truth


@part(measures=True)
def overlap(rank: Rank) -> Any:
    """Recorded device intervals of operations that queue on one communicator: none overlap, and
    together they last as long as events say the queue did."""
    nbytes = int(rank.arguments["nbytes"])
    call = _operation(rank, nbytes)
    begin, end = rank.event(), rank.event()
    for _ in range(SETTLING):
        call()
        rank.synchronize()
    if rank.crux:
        _forget()
    rank.kind.sleep(ISSUE_S)
    begin.record()
    for _ in range(TIMES):
        call()
    end.record()
    rank.synchronize()
    true_ns = 1e6 * begin.elapsed_time(end)
    if not rank.crux:
        return {"true_ns": true_ns}
    rows = np.sort(_drain(TIMES), order="start_ns")
    gaps = rows["start_ns"][1:] - rows["end_ns"][:-1]
    return {
        "true_ns": true_ns,
        "busy_ns": int(np.sum(rows["end_ns"] - rows["start_ns"])),
        "span_ns": int(rows["end_ns"][-1] - rows["start_ns"][0]),
        "overlapping_ns": int(-np.minimum(gaps, 0).sum()),
    }


@part(kinds=DEVICES, sizes=(PAIR,), measures=True)
def records(rank: Rank) -> Any:
    """What the recorder says of one of everything, less its times; and the backend's class."""
    from crux_torch.agent import AGENT
    from crux_torch.backend import register
    from crux_torch.measure.records import OPS, from_bytes

    recorder = register.recorder()
    x, peer = torch.ones(6, device=rank.device), 1 - rank.rank
    both = torch.ones(12, device=rank.device)
    sub = dist.new_group([0, 1])

    def p2p() -> list[Any]:
        kinds = (dist.isend, dist.irecv)
        return dist.batch_isend_irecv([dist.P2POp(kind, x.clone(), peer) for kind in kinds])

    def coalesced() -> None:
        with dist.distributed_c10d._coalescing_manager(None, rank.device, async_ops=True) as block:
            dist.all_reduce(x)
            dist.broadcast(x, 0)
        block.wait()

    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, async_op=True, group=sub).wait(),
        lambda: dist.broadcast(x, 1),
        lambda: dist.reduce(x, 1),
        lambda: dist.all_gather([x.clone(), x.clone()], x),
        lambda: dist.all_gather_into_tensor(both, x),
        lambda: dist.all_gather([x.clone(), torch.ones(6, device=rank.device)], x, async_op=True),
        lambda: dist.gather(x, [x.clone(), x.clone()] if rank.rank == 0 else None, 0),
        lambda: dist.scatter(x, [x.clone(), x.clone()] if rank.rank == 0 else None, 0),
        lambda: dist.reduce_scatter(x, [x.clone(), x.clone()]),
        lambda: dist.reduce_scatter_tensor(x, both, async_op=True).wait(),
        lambda: dist.all_to_all_single(both, both.clone()),
        lambda: dist.all_to_all([x.clone(), x.clone()], [x.clone(), x.clone()], group=sub),
        lambda: (dist.send if rank.rank == 0 else dist.recv)(x, peer),
        lambda: [work.wait() for work in p2p()],
        lambda: dist.barrier(),
        lambda: dist.all_reduce_coalesced([x, both]),
        coalesced,
    ]
    rank.synchronize()
    # Nobody else drains, or decides what is timed, which an agent does once more as it ends.
    AGENT.world_ended()
    for thread in threading.enumerate():
        if thread.name == "crux":
            thread.join(60.0)
            assert not thread.is_alive(), thread
    recorder.drain(1 << 30)
    for timed in (False, True):
        recorder.timing = timed
        for call in calls:
            call()
            rank.synchronize()
    raw, wanted = b"", 2 * (len(calls) + 2 + 2)
    deadline = time.monotonic() + 60.0
    while len(raw) < wanted * from_bytes(b"").itemsize and time.monotonic() < deadline:
        time.sleep(0.05)
        raw += recorder.drain(1 << 30)
    names = [group.name for group in recorder.groups()]
    told = []
    for row in np.sort(from_bytes(raw), order=["issue_ns", "op"]):
        fields = [int(row[name]) for name in ("sequence", "bytes", "world_size", "peer", "device")]
        timed = [int(row[name]) >= 0 for name in ("start_ns", "end_ns", "device_ns")]
        flags = int(row["flags"])
        told.append(
            [OPS[row["op"]], names[row["group"]], *fields, int(row["status"]), flags, timed]
        )
    shown = dist.distributed_c10d._get_default_group()._get_backend(rank.device)
    return {"records": told, "type": type(shown).__name__, "name": shown.name()}


@part(kinds=DEVICES, sizes=(ALONE,), measures=True)
def gpus_of_this_host(rank: Rank) -> Any:
    """The GPUs that NVML lists, beside the one that torch sees."""
    from crux_torch.host.machine import this_host

    seen = torch.cuda.get_device_properties(rank.device)
    return {
        "names": sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}),
        "memory_bytes": seen.total_memory,
        "uuid": f"GPU-{seen.uuid}",
        "gpus": msgspec.to_builtins(list(this_host().gpus)),
    }


@part(kinds=DEVICES, sizes=(ALONE,), measures=True)
def counted_activity(rank: Rank) -> Any:
    """What NVML says of a second without work, and of a device that multiplies all the time."""
    from crux_torch.host.activity import ActivityMeter, current_device, own_gpu

    size = int(rank.arguments["size"])
    a = torch.randn(size, size, device=rank.device).to(torch.bfloat16)
    product = torch.empty_like(a)
    chosen = current_device()
    assert chosen is not None
    rank.synchronize()

    def watched() -> ActivityMeter:
        meter = ActivityMeter()
        meter.begin(lambda gpus: own_gpu(gpus, chosen.ordinal, chosen.uuid))
        return meter

    meter = watched()
    time.sleep(1.0)
    idle = meter.finish(10.0)
    meter = watched()
    begin, products = time.monotonic(), 0
    while time.monotonic() - begin < 3.0:
        for _ in range(20):
            torch.mm(a, a, out=product)
        products += 20
        rank.synchronize()
    elapsed_s = time.monotonic() - begin
    activity = meter.finish(10.0)
    return {
        "uuid": chosen.uuid,
        "gpu": None if meter.gpu is None else meter.gpu.name,
        "seconds": elapsed_s,
        "flops": products * 2.0 * size**3,
        "activity": msgspec.to_builtins(activity),
        "idle": msgspec.to_builtins(idle),
    }


class Attention(nn.Module):
    """Causal self-attention in four products, so that every device computes the same FLOPs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(split).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, device=x.device).triu(1).bool()
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class GPT(nn.Module):
    """A GPT over bytes with a head of its own."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        width = x.shape[-1:]
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(F.layer_norm(x, width))
            x = x + down(F.gelu(up(F.layer_norm(x, width))))
        return self.head(x)


def gpt_flops(layers: int, width: int, length: int, rows: int) -> int:
    """FLOPs of a training step of :class:`GPT`: 2 for each multiply-add, backward twice forward."""
    tokens = rows * length
    weights = layers * 12 * width * width + width * 256
    scores = layers * 2 * tokens * length * width
    return 3 * 2 * (tokens * weights + scores)


class Residual(nn.Module):
    """ResNet's basic block (He et al. 2016, Figure 2)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        self.short = (
            nn.Conv2d(before, after, 1, stride, bias=False)
            if stride != 1 or before != after
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(found)) + self.short(x))


#: Blocks of ResNet-18 by channels and stride, for images of 32 by 32 with a 3 by 3 stem.
RESNET = tuple((c, s) for c, first in ((64, 1), (128, 2), (256, 2), (512, 2)) for s in (first, 1))


def resnet(width: int) -> nn.Sequential:
    """ResNet-18 for small images, ``width`` channels for its 64."""
    channels = [width] + [c * width // 64 for c, _ in RESNET]
    blocks = [
        Residual(a, b, s) for a, b, (_, s) in zip(channels, channels[1:], RESNET, strict=False)
    ]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10)]
    return nn.Sequential(*stem, *blocks, *head)


def resnet_flops(width: int, rows: int, side: int = 32) -> int:
    """FLOPs of a training step; nobody asks for the gradient of the images."""
    stem = side * side * 9 * 3 * width
    forward, before = stem, width
    for c, stride in RESNET:
        after = c * width // 64
        side //= stride
        forward += side * side * 9 * after * (before + after)
        forward += side * side * before * after * (stride != 1 or before != after)
        before = after
    forward += before * 10
    return 2 * rows * (3 * forward - stem)


def _profiled(rank: Rank, net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """The job's profile, once Crux has measured training of ``net``."""
    import crux_torch

    wrapped = DistributedDataParallel(net.to(rank.device))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    inputs, targets = (each.to(rank.device) for each in batch)
    done = torch.zeros(1, device=rank.device)
    begin = time.monotonic()
    seconds: list[float] = []
    while not done.item() and time.monotonic() < begin + 40:
        start = time.monotonic()
        for _ in range(5):
            optimizer.zero_grad()
            logits = wrapped(inputs)
            F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
            optimizer.step()
        done.fill_(crux_torch.profile() is not None)
        # All ranks do the same number of steps.
        dist.all_reduce(done, dist.ReduceOp.MIN)
        rank.synchronize()
        seconds.append((time.monotonic() - start) / 5)
    profile = crux_torch.profile()
    assert profile is not None, crux_torch.status()
    return profile, statistics.median(seconds)


def _w(profile: Any, per_rank: int, rank: Rank, step_s: float) -> dict[str, Any]:
    return {
        "analytic": per_rank * rank.size,
        "step_s": step_s,
        "utilization": profile.utilization,
        "profile": msgspec.to_builtins(profile),
    }


@part(measures=True)
def w_of_a_gpt(rank: Rank) -> Any:
    layers, width, length, rows = (int(v) for v in rank.arguments["gpt"].split(","))
    net = GPT(layers, width, 4, length)
    tokens = torch.randint(0, 256, (rows, length))
    profile, step_s = _profiled(rank, net, (tokens, tokens.roll(1, 1)))
    return _w(profile, gpt_flops(layers, width, length, rows), rank, step_s)


@part(measures=True)
def w_of_a_resnet(rank: Rank) -> Any:
    width, rows = (int(v) for v in rank.arguments["resnet"].split(","))
    images, labels = torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,))
    profile, step_s = _profiled(rank, resnet(width), (images, labels))
    return _w(profile, resnet_flops(width, rows), rank, step_s)
