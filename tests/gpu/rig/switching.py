"""Training while the connections below it are switched, on several streams."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rig.part import PAIR, Rank, part
from rig.training import model, weights

#: Collectives ahead of which a switch is announced, s: shorter than in a job, so that operations
#: meet every moment of a switch.
LOOKAHEAD_S = 0.01


class Requests(threading.Thread):
    """Asks for one switch after the other once every rank has ended the one before.

    Args:
        store: that all ranks share.
        rank, size: of this process in its job.
        wanted: switches.
        seconds: after which no other is asked for.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, wanted: int, seconds: float
    ) -> None:
        super().__init__(name="requests", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self._wanted, self._seconds = wanted, seconds
        self.finished = threading.Event()
        self.requested = 0
        self.switched: set[int] = set()
        self.errors: list[str] = []

    def run(self) -> None:
        from crux_torch.apply.switch import GROUPS

        begin = time.monotonic()
        for generation in range(1, self._wanted + 1):
            if self._rank == 0:
                late = time.monotonic() > begin + self._seconds
                self._store.set(f"another/{generation}", "no" if late else "yes")
            if self._store.get(f"another/{generation}") != b"yes":
                break
            self.requested = generation
            GROUPS.request(generation)
            while not GROUPS.wait(1.0):
                pass
            statuses = GROUPS.status()
            self.errors += [status.error for status in statuses if status.error]
            if all(s.generation == generation and s.switched_at is not None for s in statuses):
                self.switched.add(generation)
            key = f"ended/{generation}"
            self._store.add(key, 1)
            while self._store.add(key, 0) < self._size:
                time.sleep(0.002)
        self.finished.set()


@part(measures=True)
def training_while_switching(rank: Rank) -> Any:
    """Arguments: ``switches``, until which it trains, but no longer than ``seconds``; or ``steps``
    where there are none."""
    switches, steps = int(rank.arguments["switches"]), int(rank.arguments["steps"])
    requests = None
    if switches:
        from crux_torch.apply import switch

        switch.LOOKAHEAD_S = LOOKAHEAD_S
        store = dist.FileStore(rank.arguments["store"], rank.size)
        seconds = float(rank.arguments["seconds"])
        requests = Requests(store, rank.rank, rank.size, switches, seconds)
    net = DistributedDataParallel(model(rank), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    side = torch.Stream(rank.device)
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
        optimizer.zero_grad()
        loss = net(rank.input(8 * 16, seed=step % 97).view(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        losses.append(_beside(rank, loss.detach(), side).hex())
    found = {"losses": losses, "weights": weights(net), "steps": len(losses) // 2}
    if requests is not None:
        requests.join(60.0)
        found |= {
            "requested": requests.requested,
            "switched": len(requests.switched),
            "errors": sorted(set(requests.errors)),
        }
    return found


def _beside(rank: Rank, loss: torch.Tensor, side: torch.Stream) -> float:
    """Collectives and messages on a stream of their own, on what the main stream has computed."""
    main = torch.accelerator.current_stream()
    side.wait_stream(main)
    with side:
        mine = loss.clone().repeat(64)
        work = dist.all_reduce(mine, async_op=True)
        gathered = torch.empty(64 * rank.size, device=rank.device)
        dist.all_gather_into_tensor(gathered, loss.repeat(64))
        work.wait()
        out = mine.sum() + gathered.sum()
        if rank.size == PAIR:
            got, other = torch.empty_like(mine), 1 - rank.rank
            operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, got, other)]
            for each in dist.batch_isend_irecv(operations):
                each.wait()
            out = out + got.sum()
    main.wait_stream(side)
    return float(out.item())
