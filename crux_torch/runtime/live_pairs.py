"""Live queue pairs onto planned paths, without new connections, where their device can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from crux_torch.apply.queue_pairs import Change
from crux_torch.apply.transport import Connection

#: ``IBV_QPS_RTS``: connected, and may send.
READY_TO_SEND = 3


class Changes(Protocol):
    """The part of :class:`crux_torch.apply.queue_pairs.QueuePairs` that this needs."""

    def change(self, id: int, /, *, udp_port: int) -> Change: ...


def move(
    pairs: Changes, connections: Sequence[Connection], ports: Mapping[str, tuple[int, ...]]
) -> bool:
    """Give each live queue pair a source port that leads over the path to its peer.

    The n-th to one peer takes the n-th port, as when they connect. Its own port stays where that is
    one of them.

    Args:
        pairs: changes one by the best means that it has, or says that there is none.
        connections: of this process.
        ports: for each planned peer the source ports that lead over the path to it.

    Returns:
        whether there are queue pairs with a planned path, and each takes it now.
    """
    live = [c for c in connections if c.kind == "qp" and c.state == READY_TO_SEND]
    planned = [pair for pair in live if pair.peer in ports]
    turn: Counter[str] = Counter()
    moved = bool(planned)
    for pair in planned:
        good = ports[pair.peer]
        if pair.local_port in good:
            continue
        if not good:
            moved = False
            continue
        port = good[turn[pair.peer] % len(good)]
        turn[pair.peer] += 1
        moved &= pairs.change(pair.id, udp_port=port).applied
    return moved
