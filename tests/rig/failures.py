"""Ranks that come late or not at all: timeouts, aborts, and NCCL's own watchdog."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rig.part import DEVICES, PAIR, Rank, part

#: What a group waits for a late rank, and how much later than that the rank is, s.
TIMEOUT_S, LATE_S = 5, 13
#: Within which an abort must come back, s.
ABORT_S = 30.0


def _settled(rank: Rank) -> torch.Tensor:
    """Connections exist: what follows waits for a rank, not for them."""
    tensor = torch.ones(1 << 10, device=rank.device)
    dist.all_reduce(tensor)
    rank.synchronize()
    return tensor


@part(sizes=(PAIR,), kinds=DEVICES, fatal=True, refused_on=DEVICES)
def a_late_rank_times_out(rank: Rank) -> Any:
    """With blocking waits the error reaches the script; the job sets the variable for it.

    A synchronous operation has no handle in ProcessGroupNCCL, and nobody who would wait.
    """
    group = dist.new_group(list(range(rank.size)), timeout=timedelta(seconds=TIMEOUT_S))
    tensor = torch.ones(1 << 10, device=rank.device)
    dist.all_reduce(tensor, group=group)
    rank.synchronize()
    if rank.rank == 1:
        time.sleep(LATE_S)
        return None
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    rank.synchronize()
    raise AssertionError("an all-reduce of one rank came to an end")


@part(sizes=(PAIR,), kinds=DEVICES, fatal=True)
def the_watchdog_ends_a_process_that_hangs(rank: Rank) -> Any:
    """Without blocking waits NCCL's watchdog ends the process; so there is no outcome on rank 0."""
    group = dist.new_group(list(range(rank.size)), timeout=timedelta(seconds=TIMEOUT_S))
    tensor = torch.ones(1 << 10, device=rank.device)
    dist.all_reduce(tensor, group=group)
    rank.synchronize()
    if rank.rank == 0:
        dist.all_reduce(tensor, group=group)
        rank.synchronize()
    time.sleep(80.0)
    raise AssertionError("the watchdog let a hung process live")


@part(sizes=(PAIR,), kinds=DEVICES, fatal=True)
def an_abort_comes_back(rank: Rank) -> Any:
    from torch.distributed.distributed_c10d import _abort_process_group

    tensor = _settled(rank)
    if rank.rank == 0:
        dist.all_reduce(tensor, async_op=True)
    time.sleep(1.0)
    begin = time.monotonic()
    _abort_process_group()
    taken = time.monotonic() - begin
    assert taken < ABORT_S, taken
    assert not dist.is_initialized()
    # The device is fit for use afterwards.
    return torch.full((4,), 2.0, device=rank.device).sum()


@part(kinds=DEVICES, refused_on=DEVICES)
def a_tensor_of_another_device_is_refused(rank: Rank) -> Any:
    dist.all_reduce(torch.ones(4))


@part(measures=True)
def ends_its_process(rank: Rank) -> Any:
    """For the tests of the suite itself."""
    os._exit(3)
