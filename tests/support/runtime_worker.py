"""One rank of a small job: trains until FOLDER/stop.ROUND appears, and tells all that Crux did.

Writes ``FOLDER/RANK.status`` from time to time while it trains, and ``FOLDER/RANK.end`` at its end:
what its sockets, threads and hooks were before, while and after its process group existed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kill_job import write_atomically
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

import crux_torch
from lab import sockets


def write(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value))


def connections() -> dict[str, int]:
    """DSCP of each connected TCP socket of this process, by its two ports."""
    found = {}
    for sock in sockets.connections(os.getpid()):
        with sock:
            v6 = sock.family == socket.AF_INET6 and "." not in sock.getsockname()[0]
            ports = f"{sock.getsockname()[1]}-{sock.getpeername()[1]}"
            tclass = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
            found[ports] = sock.getsockopt(*tclass) >> 2 if v6 else sockets.dscp(sock)
    return found


def traces() -> dict[str, Any]:
    """What Crux may leave in a process."""
    hooks = len(optimizers._global_optimizer_pre_hooks)
    hooks += len(optimizers._global_optimizer_post_hooks)
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("crux")),
        "hooks": hooks,
        "connections": connections(),
        "status": crux_torch.status(),
    }


def until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def train(args: argparse.Namespace, rank: int, round_: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    group = None
    if args.pairs:
        pairs = [dist.new_group([r, r + 1]) for r in range(0, dist.get_world_size(), 2)]
        group = pairs[rank // 2]
    model = DistributedDataParallel(net, process_group=group)
    hooks_before = sum(len(m._forward_pre_hooks) for m in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    stop = args.folder / f"stop.{round_}"
    told_at_s, deadline_s = float("-inf"), time.monotonic() + args.limit_s
    while True:
        optimizer.zero_grad()
        model(torch.randn(args.batch, 32, generator=data)).square().mean().backward()
        optimizer.step()
        enough = torch.tensor([float(stop.exists() or time.monotonic() > deadline_s)])
        dist.all_reduce(enough)
        if enough.item():
            break
        time.sleep(args.sleep_s)
        if time.monotonic() - told_at_s > 0.2:
            told_at_s = time.monotonic()
            write(args.folder / f"{rank}.status", crux_torch.status() | {"round": round_})
    profile = crux_torch.profile()
    during = traces() | {
        "gradient_bytes": sum(p.numel() * p.element_size() for p in net.parameters()),
        "flag_bytes": enough.element_size(),
        "intensity": None if profile is None else profile.intensity,
        "in_time": stop.exists(),
    }
    # A rank may have ended its world before: what follows is about this one alone.
    world = dist.distributed_c10d._get_default_group()
    dist.barrier()
    dist.destroy_process_group()
    until(lambda: not crux_torch.status()["active"], 5.0)
    after = traces()
    after["module_hooks"] = sum(len(m._forward_pre_hooks) for m in model.modules()) - hooks_before
    del world, group
    return {"during": during, "after": after}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="crux")
    parser.add_argument("--attach", action="store_true")
    parser.add_argument("--pairs", action="store_true", help="two ranks have a model of their own")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sleep-s", type=float, default=0.03)
    parser.add_argument("--limit-s", type=float, default=45.0)
    parser.add_argument("--ports", nargs="+", help="a port for the store of each world")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    os.environ["CRUX_HOST"] = f"host{rank}"
    torch.set_num_threads(1)
    told: dict[str, Any] = {"before": traces(), "rounds": []}
    if args.attach:
        crux_torch.attach()
    for round_, port in enumerate(args.ports):
        os.environ["MASTER_PORT"] = port
        dist.init_process_group(args.backend, timeout=timedelta(seconds=60))
        told["rounds"].append(train(args, rank, round_))
    write(args.folder / f"{rank}.end", told)


if __name__ == "__main__":
    main()
