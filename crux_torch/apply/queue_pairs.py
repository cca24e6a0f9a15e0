"""The RDMA queue pairs of this process, and changing one that is in use.

A queue pair gets its class and its UDP source port when it connects (docs/transport.md). On mlx5
devices the port and the rate of a live one can be changed. Everything else takes a switch to new
connections.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crux_torch.apply.transport import (
    HOWS,
    LEAVE_RATE,
    Connection,
    How,
    QueuePairOutcome,
    Transport,
)
from crux_torch.errors import CruxError
from crux_torch.host.rdma import RdmaDevice, rdma_devices

#: ``IBV_QPS_RTS``: connected, and may send.
READY_TO_SEND = 3


def all_can_move(
    env: Mapping[str, str], devices: Callable[[], Sequence[RdmaDevice]] = rdma_devices
) -> bool:
    """Whether NCCL's live connections can take another path, as far as this host tells.

    That is so if NCCL will use queue pairs that this library sees, on mlx5 devices alone.

    Args:
        env: this process's, where NCCL may be told to use another network.
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
        how: how the queue pair has its settings now; ``needs_switch`` if only a new connection can
            have what was wanted.
        error: errno, 0 if the change was made.
        reason: why it was not made, in words; else empty.
    """

    how: How
    error: int
    reason: str

    @property
    def applied(self) -> bool:
        """Whether the new setting is in force. If not, the old one is."""
        return self.error == 0


class QueuePairs:
    """The queue pairs of this process; its methods may be called from any thread."""

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport.load()

    @property
    def are_seen(self) -> bool:
        """Whether queue pairs of this process go through the stand-in."""
        return self._transport.sees_queue_pairs

    def list(self) -> list[Connection]:
        """Those that exist, in the order in which they were created."""
        return [one for one in self._transport.connections() if one.kind == "qp"]

    def label(self, traffic_class: int, owner: str, dscp: int | None = None) -> None:
        """Queue pairs that connect with ``traffic_class`` from now on belong to ``owner``.

        Args:
            traffic_class: 1 to 255; the ``trafficClass`` that a NCCL communicator was given.
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
        """Changes a live queue pair by its device's own call, which only mlx5 has.

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
        has one of the ports keeps it. Returns whether there are any, and all have such a port now.

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
