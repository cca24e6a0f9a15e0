"""What Gloo does on the CPU and NCCL does not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rig.collectives import ones
from rig.kind import GLOO, OLD_TORCH
from rig.part import PAIR, Rank, part

JUST_GLOO = (GLOO,)


@part(kinds=JUST_GLOO)
def all_reduce_of_a_sparse_tensor(rank: Rank) -> Any:
    tensor = torch.sparse_coo_tensor([[rank.rank, 3]], [1.0, 2.0], (5,))
    dist.all_reduce(tensor)
    return tensor.to_dense()


@part(kinds=JUST_GLOO)
def all_reduce_coalesced(rank: Rank) -> Any:
    tensors = [rank.input(24), rank.input(24, seed=1)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@part(sizes=(PAIR,), kinds=JUST_GLOO)
def receive_from_anyone(rank: Rank) -> Any:
    got, other = torch.zeros(24), 1 - rank.rank
    if rank.rank == 0:
        dist.send(rank.input(24), other, tag=3)
        return got, dist.recv(got)
    source = dist.recv(got, other, tag=3)
    dist.send(got + 1, other)
    return got, source


@part(kinds=JUST_GLOO)
def objects_of_one_rank(rank: Rank) -> Any:
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list(range(rank.size)) if rank.rank == 0 else None, 0)
    at_root: list[Any] | None = [None] * rank.size if rank.rank == 0 else None
    dist.gather_object(rank.rank * 11, at_root, 0)
    return scattered, at_root


@part(kinds=JUST_GLOO)
def monitored_barriers(rank: Rank) -> Any:
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)


@part(kinds=JUST_GLOO, refused_on=JUST_GLOO if OLD_TORCH else ())
def split_group(rank: Rank) -> Any:
    half = max(1, rank.size // 2)
    ranks = [each for each in (list(range(half)), list(range(half, rank.size))) if each]
    group = dist.split_group(split_ranks=ranks)
    tensor = ones(rank)
    dist.all_reduce(tensor, group=group)
    return tensor, dist.get_rank(group), dist.get_world_size(group)


@part(sizes=(PAIR,), kinds=JUST_GLOO, fatal=True, refused_on=JUST_GLOO)
def a_late_rank_of_gloo_times_out(rank: Rank) -> Any:
    group = dist.new_group(list(range(rank.size)), timeout=timedelta(seconds=1))
    if rank.rank == 0:
        dist.all_reduce(torch.ones(4), group=group)
