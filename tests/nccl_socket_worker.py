"""One of two ranks whose connections a fake libnccl makes; prints what became of them.

``python nccl_socket_worker.py RANK FOLDER LIBRARY [ADDRESS ROUTES]``, with the transport library in
``LD_PRELOAD``. The ranks meet by files in FOLDER. With ROUTES, as JSON, they only make connections
and move data over them; without, they go through the life of two communicators on loopback.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crux_torch.apply.classes import TrafficClass
from crux_torch.apply.transport import Route, Transport
from crux_torch.c10d.ownership import Ownership
from crux_torch.c10d.sockets import SocketTable

MEET_S = 60.0
THREADS, PER_THREAD = 2, 3
BYTES = 6 << 20
LEVELS = (0, 8, 16, 24, 32, 40, 48, 56)
RATE_BPS = 500_000_000
ROUTE_DSCP = 46


class Meeting:
    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder

    def exchange(self, name: str, value: object) -> Any:
        """Tell the other rank ``value``, and what it told."""
        mine = self.folder / f"{name}.{self.rank}"
        part = self.folder / f"{name}.{self.rank}.part"
        part.write_text(json.dumps(value))
        part.rename(mine)
        theirs = self.folder / f"{name}.{1 - self.rank}"
        until = time.monotonic() + MEET_S
        while not theirs.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"rank {1 - self.rank} did not come to {name}")
            time.sleep(0.002)
        return json.loads(theirs.read_text())


class Communicator:
    """A communicator of the fake library, as a group has one: made late, connected later."""

    def __init__(
        self, library: ctypes.CDLL, meeting: Meeting, name: str, own: str = "127.0.0.1"
    ) -> None:
        self._library, self._meeting, self._name, self._own = library, meeting, name, own
        library.fake_nccl_new.restype = ctypes.c_void_p
        made = library.fake_nccl_new(own.encode(), THREADS, PER_THREAD)
        assert made is not None
        self._handle = ctypes.c_void_p(made)

    def initialize(self) -> None:
        port = self._library.fake_nccl_bootstrap_port(self._handle)
        self._reach("initialize", port)

    def first_operation(self) -> None:
        port = self._library.fake_nccl_data_port(self._handle)
        self._reach("connect", port)
        self.operation()

    def _reach(self, how: str, port: int) -> None:
        address, peer = self._meeting.exchange(f"{self._name}-{how}", (self._own, port))
        reach = getattr(self._library, f"fake_nccl_{how}")
        error = reach(self._handle, address.encode(), peer)
        assert error == 0, os.strerror(error)

    def operation(self) -> None:
        assert self._library.fake_nccl_transfer(self._handle, ctypes.c_size_t(BYTES)) == 0

    def descriptors(self) -> list[int]:
        found = (ctypes.c_int * 256)()
        return found[: self._library.fake_nccl_descriptors(self._handle, found, 256)]

    def destroy(self) -> None:
        self._library.fake_nccl_delete(self._handle)


@contextlib.contextmanager
def strangers() -> Iterator[list[socket.socket]]:
    """Connections of the program's own, with the option that NCCL gives its own."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(3):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setblocking(False)
            sockets += [client, stack.enter_context(listener.accept()[0])]
        yield sockets


def classes(descriptors: list[int]) -> list[int]:
    """The TOS of each."""
    found = []
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            found.append(sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS))
    return found


def inodes(descriptors: list[int]) -> list[int]:
    return sorted(os.fstat(descriptor).st_ino for descriptor in descriptors)


def main(rank: int, folder: Path, library: Path) -> dict[str, Any]:
    meeting = Meeting(rank, folder)
    transport = Transport.load()
    ownership, table = Ownership(), SocketTable()
    traffic_class = TrafficClass(ownership)
    nccl = ctypes.CDLL(str(library))
    result: dict[str, Any] = {"sees": transport.sees_sockets}

    def owned() -> list[int]:
        return sorted(s.inode for s in ownership.owned())

    with strangers() as others:
        traffic_class.apply_level(6, LEVELS)
        result["before"] = owned()
        first = Communicator(nccl, meeting, "first")
        first.initialize()
        result["bootstrap"] = (owned() == inodes(first.descriptors()), len(owned()))
        traffic_class.refresh()

        first.first_operation()
        result["data"] = (owned() == inodes(first.descriptors()), len(owned()))
        report = traffic_class.refresh()
        result["marked"] = (report.applied, report.refused, classes(first.descriptors()))

        # Another group comes: its connections have the class of the route from their first packet.
        transport.set_routes([Route("127.0.0.1", dscp=ROUTE_DSCP, rate_Bps=RATE_BPS)])
        second = Communicator(nccl, meeting, "second")
        second.initialize()
        second.first_operation()
        of_second = set(inodes(second.descriptors()))
        known = [c for c in transport.connections() if c.id in of_second]
        result["routed"] = sorted((c.accepted, c.how, c.dscp, c.rate_Bps) for c in known)
        result["owners"] = sorted({c.owner for c in known})
        meeting.exchange("routed", None)
        transport.set_routes([])
        report = traffic_class.apply_level(2, LEVELS)
        both = first.descriptors() + second.descriptors()
        result["level"] = (report.applied, report.refused, classes(both))
        report = traffic_class.apply_rate(RATE_BPS)
        result["paced"] = (report.applied, sorted({str(m.rate_Bps) for m in report.marks}))
        traffic_class.apply_rate(None)
        first.operation()
        second.operation()

        meeting.exchange("closing", None)
        first.destroy()
        with strangers() as reusing:
            report = traffic_class.refresh()
            result["closed"] = (owned() == inodes(second.descriptors()), report.refused)
            result["strangers"] = classes([s.fileno() for s in (*others, *reusing)])
        traffic_class.revert()
        result["reverted"] = classes(second.descriptors())
        result["sockets"] = len(table.scan()) > len(second.descriptors())
        meeting.exchange("end", None)
        second.destroy()
        result["left"] = owned()
    return result


def steered(
    rank: int, folder: Path, library: Path, own: str, routes: list[Any]
) -> list[dict[str, Any]]:
    """The connections of one communicator that is made where there are routes already."""
    meeting = Meeting(rank, folder)
    transport = Transport.load()
    transport.set_routes([Route(to, tuple(map(tuple, hops)), dscp) for to, hops, dscp in routes])
    communicator = Communicator(ctypes.CDLL(str(library)), meeting, "steered", own)
    communicator.initialize()
    communicator.first_operation()
    told = [
        {name: getattr(c, name) for name in ("how", "accepted", "via", "local_port", "dscp")}
        for c in transport.connections()
    ]
    meeting.exchange("end", None)
    communicator.destroy()
    return told


if __name__ == "__main__":
    number, shared, built, *fabric = sys.argv[1:]
    arguments = int(number), Path(shared), Path(built)
    if fabric:
        print(json.dumps(steered(*arguments, fabric[0], json.loads(fabric[1]))))
    else:
        print(json.dumps(main(*arguments)))
