"""What ranks send each other beside their training: on a device's second stream, or by Gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rig.kind import is_legacy
from rig.part import PAIR, Rank


class SideStream:
    """Collectives and messages on a stream of their own, on what the main stream has computed."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._side = rank, torch.Stream(rank.device)

    def step(self, step: int, loss: torch.Tensor) -> float:
        size, main = self._rank.size, torch.accelerator.current_stream()
        self._side.wait_stream(main)
        with self._side:
            mine = loss.clone().repeat(64)
            work = dist.all_reduce(mine, async_op=True)
            gathered = torch.empty(64 * size, device=loss.device)
            dist.all_gather_into_tensor(gathered, loss.repeat(64))
            work.wait()
            out = mine.sum() + gathered.sum()
            # A group on ProcessGroupNCCL that has exchanged messages is not switched.
            if size == PAIR and not is_legacy():
                # Not batched: a group on a device that batches messages is not switched.
                got, other = torch.empty_like(mine), 1 - self._rank.rank
                calls = [lambda: dist.isend(mine, other), lambda: dist.irecv(got, other)]
                for call in calls[:: 1 - 2 * self._rank.rank]:
                    call().wait()
                out = out + got.sum()
        main.wait_stream(self._side)
        return float(out.item())

    def end(self) -> None:
        """Nothing is left to receive."""


class Neighbours:
    """Tagged and batched messages, messages that arrive a step later, groups of two ranks, and
    operations that come rarely; a step's result is the sum of what arrived."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._size = rank.rank, rank.size
        pairs: list[Any] = [dist.new_group([2 * i, 2 * i + 1]) for i in range(rank.size // 2)]
        self._pair = pairs[rank.rank // 2]
        self._rare: Any = dist.new_group(list(range(rank.size)))
        self._sent: list[Any] = []
        self._last = 0

    def step(self, step: int, loss: torch.Tensor) -> float:
        right, left = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        got, batched = torch.zeros(16), torch.zeros(8)
        works: list[Any] = [
            dist.isend(torch.full((16,), float(self._rank + step)), right, tag=5),
            dist.irecv(got, left, tag=5),
        ]
        works += dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((8,), float(step)), right),
                dist.P2POp(dist.irecv, batched, left),
            ]
        )
        for work in works:
            work.wait()
        arrived = float(got.sum() + batched.sum())
        if step > 0:
            arrived += self._receive_late(step - 1)
        if self._rank == 0:
            for message in range(1 + step % 3):
                value = torch.tensor([float(step + message)])
                self._sent.append(dist.isend(value, self._size - 1, tag=7))
        while len(self._sent) > 12:
            self._sent.pop(0).wait()
        self._last = step
        return arrived + self._within(step, loss) + self._rarely(step)

    def end(self) -> None:
        self._receive_late(self._last)
        for work in self._sent:
            work.wait()

    def _receive_late(self, step: int) -> float:
        """On the last rank: what rank 0 sent in ``step``, which is one to three messages."""
        arrived = 0.0
        for _ in range(1 + step % 3 if self._rank == self._size - 1 else 0):
            tensor = torch.zeros(1)
            dist.recv(tensor, 0, tag=7)
            arrived += float(tensor)
        return arrived

    def _within(self, step: int, loss: torch.Tensor) -> float:
        """Between the two ranks of a group."""
        tensor, other = torch.full((4,), float(step)), self._rank ^ 1
        if self._rank < other:
            dist.send(tensor, other, group=self._pair, tag=step % 3)
        else:
            dist.recv(tensor, other, group=self._pair, tag=step % 3)
        both = loss.clone()
        dist.all_reduce(both, group=self._pair)
        return float(tensor.sum() + both)

    def _rarely(self, step: int) -> float:
        if step % 40 == 7:
            dist.monitored_barrier(timeout=timedelta(seconds=300))
            dist.all_reduce(torch.ones(1), group=self._rare)
        if step % 10 != 3:
            return 0.0
        dist.barrier()
        flat = torch.zeros(self._size)
        dist.all_gather_into_tensor(flat, torch.tensor([float(step * self._rank)]))
        return float(flat.sum())
