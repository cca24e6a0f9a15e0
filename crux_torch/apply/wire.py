"""This process's connections, read and paced alike: sockets, and RDMA queue pairs.

A queue pair gets its class and its UDP source port when it connects (docs/understand/transport.md).
On mlx5 devices the port and the rate of a live one can be changed. Everything else takes a handover
to new connections.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from crux_torch.apply.dscp import TrafficClass
from crux_torch.apply.transport import (
    HOWS,
    LEAVE_RATE,
    Connection,
    How,
    Kind,
    QueuePairOutcome,
    Transport,
)
from crux_torch.backend.tcp_sockets import Ownership
from crux_torch.errors import CruxError
from crux_torch.host.interfaces import SYSFS, RdmaDevice, number, rdma_devices, text

#: ``IBV_QPS_RTS``: connected, and may send.
READY_TO_SEND = 3
#: Period of refreshing the owners of sockets.
OWNERS_PERIOD_S = 1.0
#: InfiniBand counts data in words.
WORD_BYTES = 4
NO_LIMIT = 0

#: A connection: sockets and queue pairs are numbered apart.
Key = tuple[Kind, int]


def all_can_move(
    env: Mapping[str, str], devices: Callable[[], Sequence[RdmaDevice]] = rdma_devices
) -> bool:
    """Returns True if NCCL's live connections can take another path without a handover.

    That is so if NCCL will use queue pairs that the transport library sees, on mlx5 devices alone.

    Args:
        env: of this process, which may give NCCL another network.
        devices: lists those of this host.
    """
    if env.get("NCCL_IB_DISABLE") == "1" or env.get("NCCL_NET", "IB") != "IB":
        return False
    try:
        found = devices()
        return bool(found) and all(d.is_mlx5 for d in found) and QueuePairs().are_seen
    except (CruxError, OSError):
        return False


@dataclass(frozen=True, slots=True)
class Change:
    """The result of a change.

    Attributes:
        how: see :class:`Connection`; ``needs_switch``: only a new connection can have the setting.
        error: errno, 0 if the change was made.
        reason: obstacle in words; empty if the change was made.
    """

    how: How
    error: int
    reason: str

    @property
    def applied(self) -> bool:
        """True if the new setting is in force, False if the old one is."""
        return self.error == 0


class QueuePairs:
    """The queue pairs of this process.

    Thread safety: any thread may call every method.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport.load()

    @property
    def are_seen(self) -> bool:
        """True if queue pairs of this process go through the verbs shim."""
        return self._transport.sees_queue_pairs

    def list(self) -> list[Connection]:
        """Returns the queue pairs that exist, in the order in which they were created."""
        return [one for one in self._transport.connections() if one.kind == "qp"]

    def label(self, traffic_class: int, owner: str, dscp: int | None = None) -> None:
        """Assign queue pairs that connect with ``traffic_class`` from now on to ``owner``.

        Args:
            traffic_class: 1 to 255; the ``trafficClass`` of a NCCL communicator.
            dscp: 0 to 63; they send with it and with the label's two ECN bits. None: they send
                with the label itself.

        Raises:
            TransportError: a value is out of range.
        """
        dscp = -1 if dscp is None else dscp
        self._transport.checked("label", traffic_class, owner.encode(), dscp)

    def change(
        self, id: int, *, udp_port: int | None = None, rate_Bps: int | None = None
    ) -> Change:
        """Change a live queue pair by its device's own call, which only mlx5 has.

        Args:
            udp_port: 49152 to 65535; None leaves it.
            rate_Bps: bytes per second at most, 0 for no limit; None leaves it.
        """
        outcome = QueuePairOutcome()
        rate_Bps = LEAVE_RATE if rate_Bps is None else rate_Bps
        change = self._transport.library.crux_transport_change_queue_pair
        error = change(id, udp_port or 0, rate_Bps, outcome)
        reason = outcome.reason.decode() or (os.strerror(error) if error else "")
        return Change(HOWS[outcome.how], error, reason)

    def move(self, ports: Mapping[str, tuple[int, ...]]) -> bool:
        """Give each live queue pair a source port that leads over the planned path to its peer.

        The n-th queue pair to a peer takes the n-th port, as when it connects. A queue pair that
        has one of the ports keeps it. Returns True if there are any, and all have such a port now.

        Args:
            ports: for each peer with a planned path the source ports that lead over it.
        """
        planned = [c for c in self.list() if c.state == READY_TO_SEND and c.peer in ports]
        moved = bool(planned)
        changed: Counter[str] = Counter()
        for pair in (pair for pair in planned if pair.local_port not in ports[pair.peer]):
            good = ports[pair.peer]
            port = good[changed[pair.peer] % len(good)] if good else None
            changed[pair.peer] += 1
            moved &= port is not None and self.change(pair.id, udp_port=port).applied
        return moved


class Wire:
    """The inner backends' connections.

    Thread safety: one thread calls :meth:`connections`; any may call :meth:`limit`.

    Args:
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
    ) -> None:
        self._ownership, self._traffic_class = ownership, traffic_class
        self._load, self._sysfs = transport, sysfs
        self._owned: frozenset[int] = frozenset()
        self._owned_at_s = float("-inf")
        self._limited: set[int] = set()
        #: Devices with queue pairs that a post was seen of.
        self._counted: set[str] = set()

    def connections(self) -> list[Connection]:
        """Returns the open connections.

        A queue pair's sent bytes are those posted to it, or on a device where no post was seen, its
        share of the device's first port. Its received bytes are always its share of the port.

        Raises:
            OSError: the library is missing, or this process's descriptors can't be listed.
        """
        now_s = time.monotonic()
        if now_s - self._owned_at_s >= OWNERS_PERIOD_S:
            self._owned = frozenset(sock.inode for sock in self._ownership.owned())
            self._owned_at_s = now_s
        everything = self._load().connections()
        pairs = [c for c in everything if c.kind == "qp" and c.state == READY_TO_SEND]
        moved = {device: self._port_bytes(device) for device in {c.device for c in pairs}}
        self._counted |= {c.device for c in pairs if c.bytes_sent}
        to_peer = Counter((c.device, c.peer) for c in pairs)
        found = [c for c in everything if c.kind == "tcp" and c.id in self._owned]
        for one in pairs:
            # A port's queue pairs to a peer share the bytes that it has moved evenly.
            sent, received = (n // to_peer[one.device, one.peer] for n in moved[one.device])
            if one.device in self._counted:
                sent = one.bytes_sent
            found.append(replace(one, bytes_sent=sent, bytes_received=received))
        return found

    def limit(self, rates_Bps: Mapping[Key, int]) -> str:
        """Limit these connections, in bytes per second, and no others.

        Returns the reason why queue pairs stay without a limit; empty if all have theirs.
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
