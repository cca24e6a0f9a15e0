"""Training while the connections below it are switched."""

from __future__ import annotations

import gc
import os
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rig.beside import Neighbours, SideStream
from rig.faults import Faults, die_in
from rig.kind import GLOO
from rig.part import Rank, part
from rig.training import model

#: Collectives ahead of which a switch is announced, s: shorter than in a job, so that operations
#: meet every moment of a switch.
LOOKAHEAD_S = 0.01


def resources() -> dict[str, int]:
    """What this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_bytes": pages * os.sysconf("SC_PAGESIZE"),
    }


def settled(seen: list[dict[str, int]], patience_s: float = 60.0) -> dict[str, int]:
    """Returns what this process holds, once it is about what it was in the first half of ``seen``.

    On a busy machine old connections are closed late; it waits for ``patience_s`` at most.
    """
    half = len(seen) // 2
    most = {
        what: statistics.median(s[what] for s in seen[half // 2 : half] or seen or [resources()])
        for what in ("fds", "threads")
    }
    until = time.monotonic() + patience_s
    while True:
        gc.collect()
        now = resources()
        if all(now[what] <= many + 4 for what, many in most.items()):
            return now
        if time.monotonic() > until:
            return now
        time.sleep(0.1)


class Requests(threading.Thread):
    """Asks for one switch after the other once every rank has ended the one before.

    Args:
        store: that all ranks share.
        rank, size: of this process in its job.
        wanted: switches.
        seconds: after which no other is asked for.
        faults: that meet every other switch.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        wanted: int,
        seconds: float,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(name="requests", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self._wanted, self._seconds = wanted, seconds
        self._faults = faults
        self.finished = threading.Event()
        self.requested = 0
        self.switched: set[int] = set()
        self.errors: list[str] = []
        #: After each switch.
        self.resources: list[dict[str, int]] = []

    def run(self) -> None:
        from crux_torch.backend.handover import GROUPS

        begin = time.monotonic()
        for generation in range(1, self._wanted + 1):
            if self._rank == 0:
                late = time.monotonic() > begin + self._seconds
                self._store.set(f"another/{generation}", "no" if late else "yes")
            if self._store.get(f"another/{generation}") != b"yes":
                break
            self.requested = generation
            if self._faults is not None:
                self._faults.begin(generation)
            GROUPS.request(generation)
            while not GROUPS.wait(1.0):
                pass
            if self._faults is not None:
                self._faults.end(generation, GROUPS.status())
            self.resources.append(resources())
            statuses = GROUPS.status()
            self.errors += [status.error for status in statuses if status.error]
            if all(s.generation == generation and s.switched_at is not None for s in statuses):
                self.switched.add(generation)
            key = f"ended/{generation}"
            self._store.add(key, 1)
            while self._store.add(key, 0) < self._size:
                time.sleep(0.002)
        self.finished.set()


def _network(rank: Rank) -> nn.Module:
    net = model(rank)
    if rank.arguments.get("model") != "fsdp2":
        return DistributedDataParallel(net, bucket_cap_mb=0.01)
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)  # type: ignore[return-value]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@part(measures=True)
def training_while_switching(rank: Rank) -> Any:
    """Arguments: ``switches``, until which it trains, but no longer than ``seconds``; or ``steps``
    where there are none. ``model``, if it is ``fsdp2``. ``dies_at``, the step at which rank 1 dies,
    or ``dies_in``, the moment of a switch. ``seed``, if faults drawn by it meet the switches.
    """
    switches, steps = int(rank.arguments["switches"]), int(rank.arguments["steps"])
    dies_at = int(rank.arguments.get("dies_at", -1)) if rank.rank == 1 else -1
    requests = faults = None
    if switches:
        from crux_torch.backend.handover import attempt

        attempt.LOOKAHEAD_S = LOOKAHEAD_S
        store = dist.FileStore(rank.arguments["store"], rank.size)
        seconds = float(rank.arguments["seconds"])
        if "seed" in rank.arguments:
            faults = Faults(rank, int(rank.arguments["seed"]))
        requests = Requests(store, rank.rank, rank.size, switches, seconds, faults)
        if rank.rank == 1 and "dies_in" in rank.arguments:
            die_in(rank.arguments["dies_in"])
    net = _network(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    beside = Neighbours(rank) if rank.kind.name == GLOO else SideStream(rank)
    go_on = torch.ones(1, device=rank.device)
    losses: list[str] = []
    if requests is not None:
        requests.start()
    while True:
        wanted = not requests.finished.is_set() if requests else len(losses) < 2 * steps
        go_on.fill_(wanted)
        dist.broadcast(go_on, 0)
        if not go_on.item():
            break
        step = len(losses) // 2
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = net(rank.input(8 * 16, seed=step % 97).view(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        losses.append(beside.step(step, loss.detach()).hex())
        if faults is not None:
            faults.step()
    beside.end()
    found = {
        "losses": losses,
        "weights": [_local(p.detach()).clone() for p in net.parameters()],
        "steps": len(losses) // 2,
    }
    if requests is not None:
        requests.join(60.0)
        found |= {
            "requested": requests.requested,
            "switched": len(requests.switched),
            "errors": sorted(set(requests.errors)),
            "resources": requests.resources,
            "settled": settled(requests.resources),
            "faults": faults.met if faults is not None else [],
        }
    return found


@part(measures=True)
def handle_that_outlives_a_switch(rank: Rank) -> Any:
    """Two sums that must be equal: one's handle is waited for after its connections were freed."""
    from crux_torch.backend.handover import GROUPS

    mine, before = rank.input(1 << 10), rank.input(1 << 10)
    dist.all_reduce(before)
    work = dist.all_reduce(mine, async_op=True)
    for generation in (1, 2):
        GROUPS.request(generation)
        ended = torch.zeros(1, device=rank.device)
        while not ended.item():
            ended.fill_(GROUPS.wait(0.02))
            dist.all_reduce(ended, dist.ReduceOp.MIN)
        assert all(status.generation == generation for status in GROUPS.status()), GROUPS.status()
    work.wait()
    return [mine.cpu(), before.cpu()]
