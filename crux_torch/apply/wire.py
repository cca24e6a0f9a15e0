"""This process's connections as one thing to read and to pace: sockets, and queue pairs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from crux_torch.apply.classes import TrafficClass
from crux_torch.apply.queue_pairs import READY_TO_SEND, QueuePairs
from crux_torch.apply.transport import Connection, Kind, Transport
from crux_torch.c10d.ownership import Ownership
from crux_torch.host.sysfs import SYSFS, number, text

#: Seconds between two looks at which sockets are whose.
OWNERS_S = 1.0
#: InfiniBand counts data in words.
WORD_BYTES = 4
NO_LIMIT = 0

#: A connection: sockets and queue pairs are numbered apart.
Key = tuple[Kind, int]


class Wire:
    """The inner backends' connections. One thread reads; any may limit.

    Args:
        ownership: knows the inner backends' sockets.
        traffic_class: carries the limits of sockets.
        transport: gives the library; raises TransportError if there is none.
    """

    def __init__(
        self,
        ownership: Ownership,
        traffic_class: TrafficClass,
        transport: Callable[[], Transport] = Transport.load,
        *,
        sysfs: Path = SYSFS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ownership, self._traffic_class = ownership, traffic_class
        self._load, self._sysfs, self._clock = transport, sysfs, clock
        self._owned: frozenset[int] = frozenset()
        self._owned_at_s = float("-inf")
        self._limited: set[int] = set()
        #: Devices whose queue pairs were seen to be posted to.
        self._counted: set[str] = set()

    def connections(self) -> list[Connection]:
        """Those that are open. A queue pair has sent what was posted to it. On a device whose queue
        pairs no post was seen of, it counts what the device's first port has sent; what arrives is
        counted by the port alone.

        Raises:
            OSError: the library is missing, or this process's descriptors can't be listed.
        """
        now_s = self._clock()
        if now_s - self._owned_at_s >= OWNERS_S:
            self._owned = frozenset(sock.inode for sock in self._ownership.owned())
            self._owned_at_s = now_s
        everything = self._load().connections()
        pairs = [c for c in everything if c.kind == "qp" and c.state == READY_TO_SEND]
        moved = {device: self._port_bytes(device) for device in {c.device for c in pairs}}
        self._counted |= {c.device for c in pairs if c.bytes_sent}
        to_peer = Counter((c.device, c.peer) for c in pairs)
        found = [c for c in everything if c.kind == "tcp" and c.id in self._owned]
        for one in pairs:
            # What a port has moved falls on its queue pairs to a peer alike.
            sent, received = (n // to_peer[one.device, one.peer] for n in moved[one.device])
            if one.device in self._counted:
                sent = one.bytes_sent
            found.append(replace(one, bytes_sent=sent, bytes_received=received))
        return found

    def limit(self, rates_Bps: Mapping[Key, int]) -> str:
        """Limit these connections, in bytes per second, and no others.

        Returns why queue pairs stay without a limit, in words; empty if all have theirs.
        """
        self._traffic_class.apply_rates(
            {id: rate for (kind, id), rate in rates_Bps.items() if kind == "tcp"}
        )
        pairs = {id: rate for (kind, id), rate in rates_Bps.items() if kind == "qp"}
        if not (pairs or self._limited):
            return ""
        changer = QueuePairs(self._load())
        for id in self._limited - pairs.keys():
            changer.change(id, rate_Bps=NO_LIMIT)
        changes = {id: changer.change(id, rate_Bps=rate) for id, rate in pairs.items()}
        self._limited = {id for id, change in changes.items() if change.applied}
        refused = [change.reason for change in changes.values() if not change.applied]
        return f"{len(refused)} of {len(pairs)} queue pairs: {refused[0]}" if refused else ""

    def _port_bytes(self, device: str) -> tuple[int, int]:
        counters = self._sysfs / "class" / "infiniband" / device / "ports" / "1" / "counters"
        sent, received = (
            number(text(counters / f"port_{way}_data")) or 0.0 for way in ("xmit", "rcv")
        )
        return int(sent) * WORD_BYTES, int(received) * WORD_BYTES
