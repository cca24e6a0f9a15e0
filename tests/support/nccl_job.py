"""A training script under ``cruxrun`` in whose processes NCCL opens connections late.

``cruxrun … nccl_job.py FOLDER`` writes ``FOLDER/RANK.json``: which classes NCCL's
connections and the program's own ones have, once the job has a level and at the end.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from places import SUPPORT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crux_torch
from crux_torch.apply.transport import Transport
from lab.nccl import communicator, library
from lab.nccl.library import Library

sys.path.insert(0, str(SUPPORT))
from nccl_socket_worker import Meeting, classes, joined

LIMIT_S = 300.0


def until_all(condition: Callable[[], bool], step: Callable[[], None], limit_s: float) -> bool:
    """Trains until ``condition`` holds on both ranks; whether that was in time."""
    until = time.monotonic() + limit_s
    while True:
        step()
        # Rank 1's clock may run out first: both decide by the same numbers.
        told = torch.tensor([float(condition()), float(time.monotonic() > until)])
        dist.all_reduce(told)
        if told[0] == 2 or told[1] > 0:
            return bool(told[0] == 2)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)

    def applied() -> Any:
        return crux_torch.status()["applied"]

    def planned() -> bool:
        status = crux_torch.status()
        order = status["order"]
        return bool(status["plan"] and order and not order["measuring"] and applied()["dscp"])

    told: dict[str, Any] = {"planned": until_all(planned, step, LIMIT_S)}
    nccl = Library(library.installed())
    communicator.prepare(nccl, rank, "lo")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        late = joined(nccl, Meeting(rank, 2, folder), "late")
        descriptors = [c.fd for c in Transport.load().connections() if c.owner == "libnccl.so.2"]

        def marked() -> bool:
            return set(classes(descriptors)) == {applied()["dscp"] << 2}

        told["marked"] = until_all(marked, step, LIMIT_S)
        told["connections"] = len(descriptors)
        told["sockets"] = applied()["marked"]
        told["refused"] = applied()["refused"]
        told["stranger"] = classes([stranger.fileno()])
        dist.barrier()
        dist.destroy_process_group()
        until = time.monotonic() + LIMIT_S
        while set(classes(descriptors)) != {0} and time.monotonic() < until:
            time.sleep(0.05)
        told["reverted"] = sorted(set(classes(descriptors)))
        late.abort()
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
