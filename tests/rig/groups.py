"""Process groups: made, split, bound to a device, asked for what they are."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from rig.collectives import all_are, ones, total
from rig.kind import OLD_TORCH, RIG
from rig.part import ALONE, DEVICES, EVERY, FOUR, PAIR, Rank, part


def inner(rank: Rank, group: Any) -> Any:
    """The backend of ``group`` as c10d has it."""
    return group._get_backend(rank.device)


@part()
def sub_groups(rank: Rank) -> Any:
    size = rank.size
    alone = [dist.new_group([i]) for i in range(size)]
    everyone = dist.new_group(list(range(size)), timeout=timedelta(seconds=50))
    own, all_of_them = ones(rank), ones(rank)
    dist.all_reduce(own, group=alone[rank.rank])
    all_are(own, rank.rank + 1)
    dist.all_reduce(all_of_them, group=everyone)
    all_are(all_of_them, total(size))
    found = dist.get_process_group_ranks(everyone), dist.get_rank(everyone)
    dist.destroy_process_group(everyone)
    for group in alone[rank.rank : rank.rank + 1]:
        dist.destroy_process_group(group)
    return own, all_of_them, found


@part(sizes=(PAIR,), eager=True, kinds=DEVICES)
def split_groups(rank: Rank) -> Any:
    """With a communicator bound to its device, new groups are split from it."""
    halves = dist.split_group(split_ranks=[[0], [1]])
    own = ones(rank)
    dist.all_reduce(own, group=halves)
    all_are(own, rank.rank + 1)
    pair = dist.new_group([0, 1])
    both = ones(rank)
    dist.all_reduce(both, group=pair)
    all_are(both, total(rank.size))
    nobody_else = dist.new_group([0])
    if rank.rank == 0:
        dist.all_reduce(own, group=nobody_else)
    return own, both, dist.get_world_size(halves)


@part(sizes=(ALONE, PAIR), eager=True, kinds=DEVICES)
def bound_to_a_device(rank: Rank) -> Any:
    group: Any = dist.group.WORLD
    tensor = ones(rank)
    dist.all_reduce(tensor)
    all_are(tensor, total(rank.size))
    return str(group.bound_device_id), tensor


@part(kinds=DEVICES)
def options(rank: Rank) -> Any:
    chosen = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # type: ignore[attr-defined]
    chosen.config.min_ctas = chosen.config.max_ctas = 1
    chosen.config.traffic_class = 96
    group: Any = dist.new_group(list(range(rank.size)), pg_options=chosen)
    tensor = ones(rank)
    dist.all_reduce(tensor, group=group)
    all_are(tensor, total(rank.size))
    kept = group._get_backend(rank.device).options
    found = kept.is_high_priority_stream, kept.config.max_ctas, kept.config.traffic_class
    assert found == (True, 1, 96), found
    return found, tensor


@part(kinds=DEVICES if OLD_TORCH else EVERY)
def names_and_timeouts(rank: Rank) -> Any:
    group: Any = dist.new_group(list(range(rank.size)), timeout=timedelta(seconds=40))
    backend = group._get_backend(rank.device)
    before = backend.options._timeout.total_seconds()
    c10d._set_pg_timeout(timedelta(seconds=33), group)
    return (
        dist.get_backend() in (rank.kind.backend, "crux"),
        group.rank(),
        group.size(),
        before,
        backend.options._timeout.total_seconds(),
    )


@part()
def sequence_numbers(rank: Rank) -> Any:
    group: Any = dist.new_group(list(range(rank.size)))
    dist.all_reduce(torch.ones(1, device=rank.device), group=group)
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1, device=rank.device), group=group)
    return group._get_sequence_number_for_group() - before


@part(sizes=(FOUR,), kinds=(RIG,))
def new_groups(rank: Rank) -> Any:
    """Groups of which some ranks are no members, with options and without."""
    out: list[Any] = []
    for members in ([0, 1], [1, 2, 3], [rank.size - 1]):
        group: Any = dist.new_group(members, timeout=timedelta(seconds=77))
        if rank.rank in members:
            tensor = rank.input(6)
            dist.all_reduce(tensor, group=group)
            out.append((tensor, inner(rank, group).options._timeout.total_seconds()))
            rank.synchronize()
            dist.destroy_process_group(group)
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # type: ignore[attr-defined]
    options.config.min_ctas = 3
    group = dist.new_group(list(range(rank.size)), pg_options=options, group_desc="wide")
    tensor = rank.input(6)
    dist.all_reduce(tensor, group=group)
    kept = inner(rank, group).options
    out += [tensor, kept.is_high_priority_stream, kept.config.min_ctas, group.group_desc]
    return out, sorted(kept.global_ranks_in_group)


@part(sizes=(FOUR,), eager=True, kinds=(RIG,))
def splits(rank: Rank) -> Any:
    """By colours, and with ranks that are in no part."""
    out: list[Any] = []
    for colours in ([[0, 1], [2, 3]], [[1, 3]], [[3, 2, 1, 0]]):
        rank.synchronize()
        group: Any = dist.split_group(split_ranks=colours, timeout=timedelta(seconds=66))
        if group is dist.GroupMember.NON_GROUP_MEMBER or group is None:
            out.append("no member")
            continue
        tensor = rank.input(6)
        dist.all_reduce(tensor, group=group)
        timeout = inner(rank, group).options._timeout.total_seconds()
        out.append((tensor, dist.get_rank(group), timeout))
    return out


@part(sizes=(FOUR,), kinds=(RIG,))
def attributes(rank: Rank) -> Any:
    """What torch and libraries reach through the backend object."""
    made = inner(rank, dist.group.WORLD)
    dist.all_reduce(ones(rank))
    return {
        "allocates": made.supports_tensor_alloc(rank.device),
        "coalesces": made.supports_coalescing,
        "splits": made.supports_splitting,
        "timeout": made.options._timeout.total_seconds(),
        "unknown": hasattr(made, "no_such_thing"),
        "rank": (made.rank(), made.size()),
    }


@part()
def flight_recorder(rank: Rank) -> Any:
    # One entry an operation: neither lost nor recorded once more by the backend around it.
    if not hasattr(_distributed_c10d, "_dump_fr_trace_json"):
        return "absent"
    _distributed_c10d._reset_fr_trace()
    group: Any = dist.new_group(list(range(rank.size)))
    tensor = rank.input(8)
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, 0, group=group)
    dist.all_reduce(tensor)
    rank.synchronize()
    entries = json.loads(_distributed_c10d._dump_fr_trace_json()).get("entries", [])
    kept = ("profiling_name", "collective_seq_id", "p2p_seq_id", "input_sizes", "output_sizes")
    return [tuple(entry.get(key) for key in kept) for entry in entries]
