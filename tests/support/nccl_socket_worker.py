"""One of some ranks whose connections the installed libnccl makes; prints what became of them.

``python nccl_socket_worker.py RANK SIZE FOLDER [ADDRESS ROUTES]``, with the transport library in
``LD_PRELOAD``. The ranks meet by files in FOLDER. With ROUTES, as JSON, two of them only connect
NCCL's network code and move data over it; without, they go through the life of communicators on
loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crux_torch.apply.dscp import TrafficClass
from crux_torch.apply.nccl import made_by_nccl
from crux_torch.apply.transport import Route, Transport
from crux_torch.backend.tcp_sockets import Ownership, SocketTable
from lab.nccl import communicator, library
from lab.nccl.communicator import Communicator
from lab.nccl.library import Library, NcclError
from lab.nccl.net import Net, finished

MEET_S = 60.0
MISSING_S = 1.0
THREADS, PER_THREAD = 2, 3
BYTES = 6 << 20
LEVELS = (0, 8, 16, 24, 32, 40, 48, 56)
RATE_BPS = 500_000_000
ROUTE_DSCP = 46


class Meeting:
    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder

    def exchange(self, name: str, value: object) -> list[Any]:
        """Tell the other ranks ``value``; what all have told, by rank."""
        mine = self.folder / f"{name}.{self.rank}"
        part = self.folder / f"{name}.{self.rank}.part"
        part.write_text(json.dumps(value))
        part.rename(mine)
        everyone = [self.folder / f"{name}.{rank}" for rank in range(self.size)]
        until = time.monotonic() + MEET_S
        while missing := [file.name for file in everyone if not file.exists()]:
            if time.monotonic() > until:
                raise TimeoutError(f"these ranks did not come: {missing}")
            time.sleep(0.002)
        return [json.loads(file.read_text()) for file in everyone]


def joined(nccl: Library, meeting: Meeting, name: str) -> Communicator:
    """A communicator of all ranks, its rings connected."""
    told = communicator.identity(nccl).hex() if meeting.rank == 0 else ""
    identity = bytes.fromhex(meeting.exchange(name, told)[0])
    return Communicator(nccl, identity, meeting.size, meeting.rank)


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


def main(meeting: Meeting) -> dict[str, Any]:
    rank = meeting.rank
    transport = Transport.load()
    # Not by way of torch, which can't be loaded beside another release of NCCL.
    ownership = Ownership(nccl_sockets=made_by_nccl)
    traffic_class = TrafficClass(ownership)
    nccl = Library(library.installed())
    communicator.prepare(nccl, rank, "lo")
    result: dict[str, Any] = {"version": nccl.version, "sees": transport.sees_sockets}

    def owned() -> list[int]:
        return sorted(s.inode for s in ownership.owned())

    def connected(others: list[socket.socket]) -> dict[int, int]:
        """Descriptors by inode of this process's connections, without the program's own."""
        theirs = {os.fstat(other.fileno()).st_ino for other in others}
        return {i: s.fd for i, s in SocketTable().scan().items() if s.peer and i not in theirs}

    with strangers() as others:
        traffic_class.apply_level(6, LEVELS)
        result["before"] = owned()
        first = joined(nccl, meeting, "first")
        of_first = connected(others)
        result["owned"] = owned() == sorted(of_first)
        known = [c for c in transport.connections() if c.id in of_first]
        result["owners"] = sorted({c.owner for c in known})
        report = traffic_class.refresh()
        result["marked"] = report.applied == len(of_first), report.refused
        result["high"] = sorted(set(classes([*of_first.values()])))
        meeting.exchange("marked", None)

        # Another comes: its connections have the class of the route from their first packet.
        transport.set_routes([Route("127.0.0.1", dscp=ROUTE_DSCP, rate_Bps=RATE_BPS)])
        second = first.split(rank // 2, rank)
        both = connected(others)
        new = [c for c in transport.connections() if c.id in both.keys() - of_first.keys()]
        result["routed"] = [
            sorted({(c.how, c.dscp, c.rate_Bps) for c in new if c.accepted == side})
            for side in (False, True)
        ]
        meeting.exchange("routed", None)
        transport.set_routes([])
        report = traffic_class.apply_level(2, LEVELS)
        result["low"] = report.applied == len(both), sorted(set(classes([*both.values()])))
        report = traffic_class.apply_rates(dict.fromkeys(both, RATE_BPS))
        result["paced"] = sorted({str(m.rate_Bps) for m in report.marks})
        traffic_class.apply_rates({})

        meeting.exchange("closing", None)
        second.destroy()
        with strangers() as reusing:
            report = traffic_class.refresh()
            left = connected([*others, *reusing])
            result["closed"] = owned() == sorted(left), len(left) < len(both), report.refused
            result["strangers"] = classes([s.fileno() for s in (*others, *reusing)])
        traffic_class.revert()
        result["reverted"] = classes([*left.values()])
        meeting.exchange("end", None)
        # One tears down as a job does, the other as a job that has failed.
        first.destroy() if rank == 0 else first.abort()

        begun_s = time.monotonic()
        try:
            Communicator(nccl, communicator.identity(nccl), 2, 0, limit_s=MISSING_S)
        except NcclError:
            result["missing_s"] = time.monotonic() - begun_s
        result["left"] = owned()
    return result


def steered(meeting: Meeting, own: str, routes: list[Any]) -> dict[str, Any]:
    """The connections of NCCL's network code where there are routes already."""
    transport = Transport.load()
    transport.set_routes([Route(to, tuple(map(tuple, hops)), dscp) for to, hops, dscp in routes])
    threads = {"NCCL_SOCKET_NTHREADS": THREADS, "NCCL_NSOCKS_PERTHREAD": PER_THREAD}
    os.environ.update({name: str(count) for name, count in threads.items()})
    os.environ["NCCL_SOCKET_IFNAME"] = "^lo"
    net = Net(Library(library.installed()), "ncclNetSocket")
    handle, listener = net.listen(0)
    theirs = bytes.fromhex(meeting.exchange("handle", handle.hex())[1 - meeting.rank])
    sender, receiver = finished(net.connector(0, theirs), net.acceptor(listener))
    sent = os.urandom(BYTES)
    _, received = finished(net.send(sender, sent), net.receive(receiver, BYTES))
    told = [
        {name: getattr(c, name) for name in ("how", "accepted", "via", "local_port", "dscp")}
        for c in transport.connections()
        if c.peer != own
    ]
    # Seldom are two random parts the same.
    whole = meeting.exchange("sent", sent[:64].hex())[1 - meeting.rank] == received[:64].hex()
    meeting.exchange("end", None)
    net.close(sender, receiver, listener)
    return {"whole": whole and len(received) == BYTES, "connections": told}


if __name__ == "__main__":
    number, count, shared, *fabric = sys.argv[1:]
    ranks = Meeting(int(number), int(count), Path(shared))
    print(json.dumps(steered(ranks, fabric[0], json.loads(fabric[1])) if fabric else main(ranks)))
