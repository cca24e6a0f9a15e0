"""CUDA graphs: what is captured passes through Crux unrecorded, and is counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rig.collectives import all_are, ones, total
from rig.part import DEVICES, Rank, part
from rig.training import model

#: DDP's reducer settles its buckets in the first steps; torch's documentation asks for so many.
DDP_WARM_UP = 11
#: Within which a record follows the end of its operation.
WATCHDOG_S = 2.5


def capture(rank: Rank, body: Callable[[], None]) -> Callable[[], None]:
    """Captures ``body`` after one run outside of a capture on a side stream; what replays it."""
    side, main = torch.Stream(rank.device), torch.accelerator.current_stream()
    side.wait_stream(main)
    with side:
        body()
    main.wait_stream(side)
    rank.synchronize()
    with rank.kind.capture() as replay:
        body()
    return replay


@part(kinds=DEVICES)
def captured_collectives(rank: Rank) -> Any:
    given, gathered = ones(rank), torch.empty(1024 * rank.size, device=rank.device)
    reduced = torch.empty_like(given)

    def body() -> None:
        dist.all_gather_into_tensor(gathered, given)
        dist.all_reduce(reduced)

    replay = capture(rank, body)
    out = []
    for turn in range(1, 4):
        given.fill_(float((rank.rank + 1) * turn))
        reduced.copy_(given)
        replay()
        all_are(reduced, total(rank.size, turn))
        for i, row in enumerate(gathered.view(rank.size, -1)):
            all_are(row, (i + 1) * turn)
        out += [reduced.clone(), gathered.clone()]
    # The same group outside of a graph again.
    dist.all_reduce(given)
    return out, given


@part(kinds=DEVICES)
def captured_training(rank: Rank) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        net = DistributedDataParallel(model(rank))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = rank.input(8 * 16).view(8, 16)
    loss = torch.zeros((), device=rank.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        found = net(rows).square().mean()
        found.backward()
        optimizer.step()
        loss.copy_(found.detach())

    with torch.cuda.stream(side):
        for _ in range(DDP_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    replay = capture(rank, step)
    losses = []
    for turn in range(5):
        rows.copy_(rank.input(8 * 16, seed=turn).view(8, 16))
        replay()
        losses.append(loss.item().hex())
    assert len(set(losses)) == len(losses)
    return losses


@part(kinds=DEVICES, only_crux=True)
def captures_are_counted_not_recorded(rank: Rank) -> Any:
    """Returns what the stock backend would: nothing."""
    if not rank.crux:
        return None
    from crux_torch.backend import register

    recorder = register.recorder()
    tensor = ones(rank)
    dist.all_reduce(tensor)
    seen = _recorded(recorder)
    captured = recorder.captured
    replay = capture(rank, lambda: _reduce(tensor))
    once = _recorded(recorder) - seen
    for _ in range(3):
        replay()
    rank.synchronize()
    assert once == 1, f"{once} records of one operation outside and one inside of a capture"
    assert _recorded(recorder) - seen == once, "a replay was recorded"
    assert recorder.captured - captured == 1
    return None


def _reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _recorded(recorder: Any) -> int:
    """Operations recorded, once nothing is under way any more."""
    time.sleep(WATCHDOG_S)
    return int(recorder.recorded)
