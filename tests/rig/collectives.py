"""Every operation of c10d and its streams, each checked against what it must give."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rig.kind import GLOO, OLD_TORCH
from rig.part import DEVICES, EVERY, PAIR, Rank, part

_SUM, _MAX, _PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT
#: Long enough that a missing order between streams shows, s.
DELAY_S = 0.02


def total(size: int, of: float = 1.0) -> float:
    """Sum over the ranks of ``of`` times rank + 1."""
    return of * size * (size + 1) / 2


def ones(rank: Rank, n: int = 1024) -> torch.Tensor:
    return torch.full((n,), float(rank.rank + 1), device=rank.device)


def all_are(tensor: torch.Tensor, value: float) -> None:
    assert bool((tensor == value).all()), f"not {value}: {tensor.flatten()[:4].tolist()}"


@part()
def all_reduce(rank: Rank) -> Any:
    out = []
    for op in (_SUM, _MAX, _PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            out.append(rank.input(1000, dtype=dtype))
            dist.all_reduce(out[-1], op)
    known = ones(rank)
    dist.all_reduce(known)
    all_are(known, total(rank.size))
    return out


@part()
def all_reduce_average(rank: Rank) -> Any:
    tensor = ones(rank)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    all_are(tensor, total(rank.size) / rank.size)
    return tensor


@part()
def all_reduce_async(rank: Rank) -> Any:
    tensors = [rank.input(1000 * (i + 1), seed=i) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    waited = [work.wait() for work in works]
    rank.synchronize()
    return tensors, waited, [work.is_completed() for work in works]


@part(kinds=DEVICES)
def streams_are_ordered(rank: Rank) -> Any:
    """A collective begins after what its stream did before, and what follows waits for it."""
    out = []
    for turn in range(3):
        stream = torch.Stream(rank.device)
        tensor = torch.zeros(1 << 16, device=rank.device)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            rank.kind.sleep(DELAY_S)
            tensor.fill_(float(rank.rank + 1 + turn))
            dist.all_reduce(tensor)
            after = tensor * 2
        torch.accelerator.current_stream().wait_stream(stream)
        all_are(after, 2 * (total(rank.size) + turn * rank.size))
        out.append(after)
    return out


@part(kinds=DEVICES)
def an_async_operation_overlaps_and_is_waited_for(rank: Rank) -> Any:
    tensor = ones(rank, 1 << 20)
    work = dist.all_reduce(tensor, async_op=True)
    meanwhile = rank.input(100) * 3
    rank.kind.sleep(DELAY_S)
    work.wait()
    tensor += 1
    all_are(tensor, total(rank.size) + 1)
    return tensor[:10], meanwhile


@part()
def futures(rank: Rank) -> Any:
    tensor = ones(rank)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    value = doubled.wait()
    all_are(value, 2 * total(rank.size))
    return value


@part()
def broadcast_and_reduce(rank: Rank) -> Any:
    last = rank.size - 1
    a, b = ones(rank), ones(rank)
    dist.broadcast(a, last)
    all_are(a, rank.size)
    dist.reduce(b, 0)
    if rank.rank == 0:
        all_are(b, total(rank.size))
    return a, b if rank.rank == 0 else None


@part()
def gathers(rank: Rank) -> Any:
    own = ones(rank, 6)
    listed = [torch.zeros_like(own) for _ in range(rank.size)]
    dist.all_gather(listed, own)
    flat = torch.zeros(6 * rank.size, device=rank.device)
    dist.all_gather_into_tensor(flat, own)
    at_root = [torch.zeros_like(own) for _ in range(rank.size)] if rank.rank == 0 else None
    dist.gather(own, at_root, 0)
    for i, each in enumerate(listed):
        all_are(each, i + 1)
    assert torch.equal(flat, torch.cat(listed))
    return listed, flat, at_root


@part()
def scatters(rank: Rank) -> Any:
    size, device = rank.size, rank.device
    out, reduced, flat = (torch.zeros(6, device=device) for _ in range(3))
    rows = [torch.full((6,), float(i), device=device) for i in range(size)]
    dist.scatter(out, rows if rank.rank == 0 else None, 0)
    all_are(out, rank.rank)
    dist.reduce_scatter(reduced, [row + rank.rank for row in rows])
    all_are(reduced, size * rank.rank + total(size) - size)
    dist.reduce_scatter_tensor(flat, ones(rank, 6 * size))
    all_are(flat, total(size))
    return out, reduced, flat


@part(refused_on=(GLOO,) if OLD_TORCH else ())
def all_to_all(rank: Rank) -> Any:
    size, device = rank.size, rank.device
    even = torch.zeros(4 * size, device=device)
    dist.all_to_all_single(even, ones(rank, 4 * size))
    uneven_sizes = [1 + (rank.rank + i) % 3 for i in range(size)]
    uneven = torch.zeros(sum(uneven_sizes), device=device)
    given = rank.input(sum(uneven_sizes))
    dist.all_to_all_single(uneven, given, uneven_sizes, uneven_sizes)
    listed = [torch.zeros(3, device=device) for _ in range(size)]
    dist.all_to_all(listed, [rank.input(3, seed=i) for i in range(size)])
    for i in range(size):
        all_are(even[4 * i : 4 * i + 4], i + 1)
    return even, uneven, listed


@part(sizes=(PAIR,))
def send_and_receive(rank: Rank) -> Any:
    got = torch.zeros(1 << 16, device=rank.device)
    other = 1 - rank.rank
    for first in (0, 1):
        if rank.rank == first:
            dist.send(ones(rank, 1 << 16), other)
        else:
            dist.recv(got, other)
            all_are(got, other + 1)
    works = [dist.isend(got + 1, other)] if rank.rank == 0 else [dist.irecv(got, other)]
    for work in works:
        work.wait()
    return got[:10]


@part(sizes=(PAIR,))
def batched_point_to_point(rank: Rank) -> Any:
    """Around a ring."""
    right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    out = []
    for n in (16, 1 << 16):
        got = torch.zeros(n, device=rank.device)
        operations = [
            dist.P2POp(dist.isend, ones(rank, n), right, tag=3),
            dist.P2POp(dist.irecv, got, left, tag=3),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        all_are(got, left + 1)
        out.append(got[:10])
    return out


@part(kinds=DEVICES)
def coalesced(rank: Rank) -> Any:
    n = 100
    tensors = [ones(rank, n) * (i + 1) for i in range(4)]
    with dist._coalescing_manager(device=rank.device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for i, tensor in enumerate(tensors):
        all_are(tensor, total(rank.size, i + 1))
    whole = [torch.zeros(n * rank.size, device=rank.device) for _ in range(3)]
    with dist._coalescing_manager(device=rank.device):
        for flat in whole:
            dist.all_gather_into_tensor(flat, ones(rank, n))
    parts = [torch.zeros(n, device=rank.device) for _ in range(3)]
    with dist._coalescing_manager(device=rank.device):
        for piece in parts:
            dist.reduce_scatter_tensor(piece, ones(rank, n * rank.size))
    for piece in parts:
        all_are(piece, total(rank.size))
    return tensors, whole, parts


@part()
def objects(rank: Rank) -> Any:
    gathered: list[Any] = [None] * rank.size
    dist.all_gather_object(gathered, {"rank": rank.rank, "pad": "x" * (10 + rank.rank)})
    shared = [f"from {rank.rank}", rank.rank]
    dist.broadcast_object_list(shared, 0, device=rank.device)
    return gathered, shared


@part(kinds=DEVICES)
def barriers(rank: Rank) -> Any:
    dist.barrier()
    dist.barrier(device_ids=[rank.device.index])
    dist.barrier(async_op=True).wait()


@part(refused_on=EVERY)
def wrong_shapes_are_refused(rank: Rank) -> Any:
    dist.all_gather_into_tensor(
        torch.zeros(3, device=rank.device), torch.zeros(4, device=rank.device)
    )
