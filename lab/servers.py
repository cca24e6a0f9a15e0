"""Parameter servers: workers push gradients to them, and pull the parameters that they update.

A bucket of parameters belongs to one server. It goes back to all workers as soon as each of them
has pushed its gradients, so that both directions of the network are busy at once (mlcc, Figure 3a).
Both ends are optimizers: the step of each is its part of an iteration's exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

#: Least bytes of a bucket but the last one, as DDP's in lab.train.
BUCKET_BYTES = 1 << 20


def buckets(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The parameters in their order, cut where a bucket is full."""
    found: list[list[Parameter]] = [[]]
    for parameter in parameters:
        if sum(p.nbytes for p in found[-1]) >= BUCKET_BYTES:
            found.append([])
        found[-1].append(parameter)
    return found


class Remote(torch.optim.Optimizer):
    """A worker's end. Its step pushes all gradients, and returns with the new parameters in place.

    Args:
        servers: their ranks; they own the buckets in turn.
    """

    def __init__(self, parameters: Sequence[Parameter], servers: Sequence[int]) -> None:
        super().__init__(parameters, {})
        self._buckets = buckets(parameters)
        self._servers = servers

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Exchange one iteration's gradients for its parameters."""
        pushed, pulled = [], []
        for tag, bucket in enumerate(self._buckets):
            server = self._servers[tag % len(self._servers)]
            gradients = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
            fresh = torch.empty_like(gradients)
            pulled.append((dist.irecv(fresh, server, tag=tag), fresh, bucket))
            # The buffer lives until it is sent.
            pushed.append((dist.isend(gradients, server, tag=tag), gradients))
        for work, fresh, bucket in pulled:
            work.wait()
            _spread(fresh, [p.data for p in bucket])
        for sent, _ in pushed:
            sent.wait()


class Server(torch.optim.Optimizer):
    """A server's end. Its step receives, averages, updates and sends its buckets, one by one.

    Args:
        parameters: of the whole model, with the values that the workers begin with.
        workers: their ranks. Gradients are added in this order, so that runs are equal.
        place: of this server in the order of all ``servers``.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        workers: Sequence[int],
        place: int,
        servers: int,
        **sgd: float,
    ) -> None:
        super().__init__(parameters, {})
        self._workers = workers
        owned = list(enumerate(buckets(parameters)))[place::servers]
        self._owned = [(tag, bucket, torch.optim.SGD(bucket, **sgd)) for tag, bucket in owned]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Serve one iteration."""
        arriving = []
        for tag, bucket, _ in self._owned:
            size = sum(p.numel() for p in bucket)
            room = [torch.empty(size) for _ in self._workers]
            pairs = zip(room, self._workers, strict=True)
            works = [dist.irecv(into, worker, tag=tag) for into, worker in pairs]
            arriving.append((works, room))
        sent = []
        for (tag, bucket, sgd), (works, room) in zip(self._owned, arriving, strict=True):
            for work in works:
                work.wait()
            for parameter in bucket:
                parameter.grad = torch.empty_like(parameter)
            mean = torch.stack(room).sum(0) / len(room)
            _spread(mean, [p.grad for p in bucket if p.grad is not None])
            sgd.step()
            updated = torch.cat([p.flatten() for p in bucket])
            sent += [(dist.isend(updated, worker, tag=tag), updated) for worker in self._workers]
        for work, _ in sent:
            work.wait()


def _spread(flat: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Copy the parts of a bucket to where they belong."""
    parts = flat.split([each.numel() for each in into])
    for part, each in zip(parts, into, strict=True):
        each.copy_(part.view_as(each))
