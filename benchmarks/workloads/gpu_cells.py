"""What the benchmark of the overhead on a GPU times, and how it times it; run in every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: How a cell is timed: issuing alone, by events on the device, or until the device is done.
HOST, DEVICE, STEP = "host", "device", "step"

Call = Callable[[], Any]


@dataclass(frozen=True)
class Cell:
    """One thing to time.

    Attributes:
        what: an operation of c10d, or a training step.
        nbytes: its payload; of a step, 0.
        how: HOST, DEVICE or STEP.
    """

    what: str
    nbytes: int
    how: str

    @property
    def title(self) -> str:
        size = f" {self.nbytes >> 10} KiB" if self.nbytes else ""
        return f"{self.what}{size}"


def call_of(cell: Cell, device: torch.device, quick: bool) -> Call:
    """What one repetition of ``cell`` does."""
    if cell.what == "DDP step":
        return _step(_mlp(), torch.randn(64, 512), device)
    if cell.what == "GPT step":
        layers, width, length, rows = (2, 64, 32, 2) if quick else (12, 768, 512, 8)
        return _step(_GPT(layers, width, length), torch.randint(0, 256, (rows, length)), device)
    return _operation(cell, device)


def _operation(cell: Cell, device: torch.device) -> Call:
    world = dist.get_world_size()
    whole = torch.ones(max(world, cell.nbytes // 4), device=device)
    part = torch.ones(whole.numel() // world, device=device)
    # Calls that are timed on the device follow one another on its stream.
    later = cell.how == HOST

    def coalesced() -> None:
        with dist._coalescing_manager(device=device):
            for _ in range(8):
                dist.all_reduce(whole)

    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, async_op=later),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, async_op=later),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, async_op=later),
        "broadcast": lambda: dist.broadcast(whole, 0, async_op=later),
        "8 coalesced": coalesced,
    }
    return calls[cell.what]


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))


class _GPT(nn.Module):
    """A GPT over bytes."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


def _step(model: nn.Module, batch: torch.Tensor, device: torch.device) -> Call:
    """A training step with DDP's default buckets; a GPT predicts its own next byte."""
    net = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    batch = batch.to(device)

    def step() -> None:
        optimizer.zero_grad()
        out = net(batch)
        if batch.is_floating_point():
            loss = out.square().mean()
        else:
            loss = F.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def block(cell: Cell, call: Call, repeats: int, device: torch.device) -> float:
    """Nanoseconds of one call in a block of ``repeats``; the device is idle before and after."""
    torch.accelerator.synchronize(device)
    if cell.how == DEVICE:
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.accelerator.synchronize(device)
        return float(begin.elapsed_time(end)) * 1e6 / repeats
    if cell.how == HOST:
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        taken = time.perf_counter_ns() - start
        torch.accelerator.synchronize(device)
        return taken / repeats
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter_ns() - start)
    return float(statistics.median(seconds))
