"""Trains in every rank of a test, with every kind of communication, while connections are switched.

Arguments: rank, size, port of the store, model (``ddp`` or ``fsdp2``), switches, steps, output.
With switches, training goes on until so many have happened; the steps are then what it took.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

import crux_torch
from crux_torch.apply import switch
from crux_torch.apply.switch import GROUPS

MIB = 1 << 20


def resources() -> dict[str, int]:
    statm = Path("/proc/self/statm").read_text().split()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_bytes": int(statm[1]) * os.sysconf("SC_PAGESIZE"),
    }


class Requests(threading.Thread):
    """Asks for one switch after another, as the job's leader does: rank 0 says when."""

    def __init__(self, rank: int, host: str, port: int, wanted: int) -> None:
        super().__init__(daemon=True)
        self.rank, self.wanted = rank, wanted
        self.store = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
        self.finished = threading.Event()
        self.seen: list[dict[str, int]] = []
        self.made: dict[int, set[int]] = {}
        self.errors: set[str] = set()
        self.held_ms: list[float] = []

    def run(self) -> None:
        generation = 0
        while generation < self.wanted:
            if self.rank == 0:
                generation += 1
                self.store.set("generation", str(generation))
            else:
                while not self.store.check(["generation"]):
                    time.sleep(0.002)
                newest = int(self.store.get("generation"))
                if newest == generation:
                    time.sleep(0.002)
                    continue
                generation = newest
            GROUPS.request(generation)
            while not GROUPS.wait(1.0):
                pass
            self.store.add(f"ended/{generation}", 1)
            self.note(generation)
            while self.rank == 0 and self.store.add(f"ended/{generation}", 0) < self.size:
                time.sleep(0.002)
        self.finished.set()

    size = 0

    def note(self, generation: int) -> None:
        self.seen.append(resources())
        for status in GROUPS.status():
            if status.error:
                self.errors.add(status.error)
            if status.generation == generation and status.switched_at is not None:
                self.made.setdefault(status.group, set()).add(generation)
            if status.held:
                self.held_ms.append(status.held_ms)


class Neighbours:
    """Point-to-point messages of many kinds; adds up what arrives."""

    def __init__(self, rank: int, size: int, group: Any, members: list[int]) -> None:
        self.rank, self.size, self.group, self.members = rank, size, group, members
        self.sum = 0.0
        self.sent: list[Any] = []

    def step(self, step: int) -> None:
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        got = torch.zeros(16)
        works: list[Any] = [
            dist.isend(torch.full((16,), float(self.rank + step)), right, tag=5),
            dist.irecv(got, left, tag=5),
        ]
        for work in works:
            work.wait()
        batched = torch.zeros(8)
        operations = [
            dist.P2POp(dist.isend, torch.full((8,), float(step)), right),
            dist.P2POp(dist.irecv, batched, left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self.sum += float(got.sum()) + float(batched.sum())
        self.unequal(step)
        if self.group is not None:
            self.within(step)

    def unequal(self, step: int) -> None:
        """Rank 0 sends to the last rank one to three messages, which are received a step later."""
        last = self.size - 1
        if self.rank == 0:
            for message in range(1 + step % 3):
                self.sent.append(dist.isend(torch.tensor([float(step + message)]), last, tag=7))
        if self.rank == last and step > 0:
            for _ in range(1 + (step - 1) % 3):
                tensor = torch.zeros(1)
                dist.recv(tensor, 0, tag=7)
                self.sum += float(tensor)
        while len(self.sent) > 12:
            self.sent.pop(0).wait()

    def within(self, step: int) -> None:
        first, second = self.members
        tensor = torch.full((4,), float(step))
        if self.rank == first:
            dist.send(tensor, second, group=self.group, tag=step % 3)
        else:
            dist.recv(tensor, first, group=self.group, tag=step % 3)
            self.sum += float(tensor.sum())


def model(kind: str) -> nn.Module:
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8)
    )
    if kind == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.01)
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)  # type: ignore[return-value]


def train(rank: int, size: int, kind: str, steps: int, requests: Requests | None) -> Any:
    pairs: list[Any] = [dist.new_group([2 * i, 2 * i + 1]) for i in range(size // 2)]
    pair = pairs[rank // 2] if rank // 2 < len(pairs) else None
    members = [2 * (rank // 2), 2 * (rank // 2) + 1]
    rarely: Any = dist.new_group(list(range(size)))
    neighbours = Neighbours(rank, size, pair, members)
    net = model(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses: list[str] = []
    go_on = torch.ones(1)
    step = 0
    while True:
        if requests is not None and rank == 0:
            go_on.fill_(not requests.finished.is_set())
        elif requests is None:
            go_on.fill_(step < steps)
        dist.broadcast(go_on, 0)
        if not go_on:
            break
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 32, generator=generator)
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        neighbours.step(step)
        if pair is not None:
            tensor = loss.detach().clone()
            dist.all_reduce(tensor, group=pair)
            losses.append(tensor.item().hex())
        if step % 10 == 3:
            dist.barrier()
            flat = torch.zeros(size)
            dist.all_gather_into_tensor(flat, torch.tensor([float(step * rank)]))
            neighbours.sum += float(flat.sum())
        if step % 40 == 7:
            dist.monitored_barrier(timeout=timedelta(seconds=60))
            dist.all_reduce(torch.ones(1), group=rarely)
        step += 1
    if rank == size - 1 and step > 0:
        for _ in range(1 + (step - 1) % 3):
            tensor = torch.zeros(1)
            dist.recv(tensor, 0, tag=7)
            neighbours.sum += float(tensor)
    for work in neighbours.sent:
        work.wait()
    total = torch.tensor(sum(float(p.detach().double().sum()) for p in local(net)))
    return {"losses": losses, "sum": neighbours.sum.hex(), "weights": float(total).hex()}


def local(net: nn.Module) -> list[torch.Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]


def main() -> None:
    rank, size, port = (int(a) for a in sys.argv[1:4])
    kind, switches, steps, out = sys.argv[4], int(sys.argv[5]), int(sys.argv[6]), sys.argv[7]
    torch.set_num_threads(1)
    # More often than a job would, so that operations meet every moment of a switch.
    switch.LOOKAHEAD_S = 0.01
    crux_torch.attach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, size, rank == 0, timedelta(seconds=60)
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    requests = None
    if switches:
        requests = Requests(rank, "127.0.0.1", port, switches)
        requests.size = size
        requests.start()
    result = train(rank, size, kind, steps, requests)
    if requests is not None:
        requests.join(60)
        result |= {
            "resources": requests.seen,
            "switched": {str(group): len(made) for group, made in requests.made.items()},
            "errors": sorted(requests.errors),
            "held_ms": requests.held_ms,
            "steps": sum(1 for _ in result["losses"]) // (2 if rank // 2 < size // 2 else 1),
        }
    Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
