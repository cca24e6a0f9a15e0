"""CUDA graphs: what is captured passes through Crux unrecorded, and is counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rig.collectives import all_are, ones, total
from rig.part import Rank, part
from rig.training import model

WHY = "CUDA graphs"
#: DDP's reducer settles its buckets in the first steps; torch's documentation asks for so many.
DDP_WARM_UP = 11


def capture(rank: Rank, body: Any) -> torch.cuda.CUDAGraph:
    """``body`` in a graph, after one run outside of it on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    rank.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


@part(needs_cuda=WHY)
def captured_collectives(rank: Rank) -> Any:
    inputs = ones(rank)
    reduced, gathered = torch.empty_like(inputs), torch.empty(1024 * rank.size, device=rank.device)

    def body() -> None:
        reduced.copy_(inputs)
        dist.all_reduce(reduced)
        dist.all_gather_into_tensor(gathered, inputs)

    graph = capture(rank, body)
    out = []
    for turn in range(1, 4):
        inputs.fill_(float((rank.rank + 1) * turn))
        graph.replay()
        all_are(reduced, total(rank.size, turn))
        out += [reduced.clone(), gathered.clone()]
    # The same group outside of a graph again.
    dist.all_reduce(inputs)
    return out, inputs


@part(needs_cuda=WHY)
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
    graph = capture(rank, step)
    losses = []
    for turn in range(5):
        rows.copy_(rank.input(8 * 16, seed=turn).view(8, 16))
        graph.replay()
        losses.append(loss.item().hex())
    assert len(set(losses)) == len(losses)
    return losses


@part(needs_cuda=WHY)
def captures_are_counted_not_recorded(rank: Rank) -> Any:
    """Returns what the stock backend would: nothing."""
    if not rank.crux:
        return None
    from crux_torch import backend

    recorder = backend.recorder()
    tensor = ones(rank)
    captured_before, recorded_before = recorder.captured, recorder.recorded
    graph = capture(rank, lambda: dist.all_reduce(tensor))
    once = recorder.recorded - recorded_before
    graph.replay()
    rank.synchronize()
    assert once == 1, f"{once} records of one operation outside and one inside of a capture"
    assert recorder.recorded - recorded_before == once, "a replay was recorded"
    assert recorder.captured - captured_before == 1
    return None
