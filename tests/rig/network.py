"""What NCCL's TCP connections carry: how many bytes, and in which class."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from lab import sockets
from rig.part import DEVICES, PAIR, Rank, part

TIMES = 4
DSCP_MAP = tuple(8 * level for level in range(8))
#: The level that is tried, and its DSCP value.
LEVEL, DSCP = 5, 40


@part(sizes=(PAIR,), kinds=DEVICES, measures=True)
def bytes_of_sockets(rank: Rank) -> Any:
    """Bytes that all-reduces of ``nbytes`` sent, by the kernel's count."""
    tensor = torch.ones(int(rank.arguments["nbytes"]) // 4, device=rank.device)
    dist.all_reduce(tensor)
    rank.synchronize()
    acked = _acked_in_the_end()
    dist.barrier()
    for _ in range(TIMES):
        dist.all_reduce(tensor)
    rank.synchronize()
    return {"payload": TIMES * tensor.numel() * 4, "acked_bytes": _acked_in_the_end() - acked}


def _acked_in_the_end() -> int:
    """Once no more comes for a second: NCCL's proxy sends after the operation's end."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 1.0:
        if (acked := _acked()) != last:
            last, since = acked, time.monotonic()
        time.sleep(0.05)
    return last


def _acked() -> int:
    total = 0
    for each in sockets.connections(os.getpid()):
        with each:
            total += sockets.bytes_acked(each)
    return total


@part(sizes=(PAIR,), kinds=DEVICES, measures=True)
def class_of_sockets(rank: Rank) -> Any:
    """DSCP of the connection that carries most: before, at a level, and after it is taken back."""
    from crux_torch.apply.dscp import TrafficClass
    from crux_torch.backend import register

    tensor = torch.ones(1 << 20, device=rank.device)
    dist.all_reduce(tensor)
    rank.synchronize()
    found = [_dscp()]
    classes = TrafficClass(register.OWNED_SOCKETS)
    report = classes.apply_level(LEVEL, DSCP_MAP)
    for level in (LEVEL, None):
        if level is None:
            classes.apply_level(None, DSCP_MAP)
        dist.all_reduce(tensor)
        rank.synchronize()
        found.append(_dscp())
    return {"dscp": found, "marked": len(report.marks), "error": report.error}


def _dscp() -> int:
    opened = sockets.connections(os.getpid())
    try:
        return sockets.dscp(max(opened, key=sockets.bytes_acked))
    finally:
        for each in opened:
            each.close()
