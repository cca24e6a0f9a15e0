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
    acked = _acked()
    for _ in range(TIMES):
        dist.all_reduce(tensor)
    rank.synchronize()
    # The last acknowledgements are on their way.
    time.sleep(0.5)
    return {"payload": TIMES * tensor.numel() * 4, "acked_bytes": _acked() - acked}


def _acked() -> int:
    total = 0
    for each in sockets.connections(os.getpid()):
        with each:
            total += sockets.bytes_acked(each)
    return total


@part(sizes=(PAIR,), kinds=DEVICES, measures=True)
def class_of_sockets(rank: Rank) -> Any:
    """DSCP of the connection that carries most: before, at a level, and after it is taken back."""
    from crux_torch.apply.classes import TrafficClass
    from crux_torch.c10d import backend

    tensor = torch.ones(1 << 20, device=rank.device)
    dist.all_reduce(tensor)
    rank.synchronize()
    found = [_dscp()]
    classes = TrafficClass(backend.OWNED_SOCKETS)
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
