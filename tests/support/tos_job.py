"""A job that reads the class of every socket of its ranks, from before its first group to its end.

``cruxrun … tos_job.py FOLDER`` trains until both ranks have followed a plan for a while, and writes
``FOLDER/RANK.json``: the TOS values that the kernel had on sockets, and what Crux told.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kill_job import write_atomically
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LIMIT_S = 240.0
#: Seconds between two readings, and for which a plan is followed.
READ_S = 0.005
FOLLOWED_S = 1.0
_CLASS = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
}


class Reader(threading.Thread):
    """Reads all sockets of this process again and again: classes, and the ports that they hold."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[int] = set()
        self.ports: set[int] = set()
        self.readings = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(READ_S):
            self.read()

    def read(self) -> None:
        for name in os.listdir("/proc/self/fd"):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                # A duplicate, so that the number cannot become another file's meanwhile.
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.family in _CLASS:
                        self.seen.add(sock.getsockopt(*_CLASS[sock.family]))
                        self.ports.add(sock.getsockname()[1])
            except OSError:
                continue  # closed meanwhile
        self.readings += 1


def main(folder: Path) -> None:
    import crux_torch

    reader = Reader()
    reader.start()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    status: dict[str, Any] = {}
    measured_on: set[int | None] = set()
    until, followed_s = time.monotonic() + LIMIT_S, None
    while True:
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
        status = crux_torch.status()
        order, now = status["order"], time.monotonic()
        if order and order["measuring"]:
            measured_on.add(order["level"])
        if followed_s is None and order and order["entry"] and not order["measuring"]:
            followed_s = now
        enough = followed_s is not None and now - followed_s >= FOLLOWED_S
        told = torch.tensor([float(enough), float(now > until)])
        dist.all_reduce(told)
        if told[0] == 2 or told[1] > 0:
            break
    dist.destroy_process_group()
    reader.done.set()
    reader.join()
    reader.read()
    found = {"tos": sorted(reader.seen), "ports": sorted(reader.ports)}
    found |= {"readings": reader.readings, "measured_on": list(measured_on), "status": status}
    write_atomically(folder / f"{rank}.json", json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
