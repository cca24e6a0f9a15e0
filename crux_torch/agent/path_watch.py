"""One rank traces its own connections, and tells which paths the network gave them.

No plan steers these connections. Those that one does steer are looked at by
:class:`~crux_torch.agent.follower.Steering`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from crux_torch.apply.paths import Tracer
from crux_torch.apply.transport import Transport
from crux_torch.backend.tcp_sockets import Endpoint, Ownership
from crux_torch.errors import CruxError
from crux_torch.network.discover.fragment import MAX_HOPS, SeenPair, SeenPath
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.live_trace import trace_connection
from crux_torch.network.probe.packets import Transport as IpProtocol

_log = logging.getLogger(__name__)

#: Seconds between two looks at connections that did not change, and after a change; and between two
#: lists of them.
LOOK_S, SETTLE_S, LIST_S = 30.0, 1.0, 5.0
#: Connections that one look traces, and seconds after which it begins no trace.
MAX_TRACED = 64
LOOK_LIMIT_S = 20.0
#: Paths of one pair of addresses that are told, those of the most connections first.
MAX_TOLD = 4

Hops = tuple[str | None, ...]


class Traced(NamedTuple):
    """A connection to another host.

    Attributes:
        id: a socket's inode, a queue pair's number.
    """

    id: int
    local: Endpoint
    peer: Endpoint
    protocol: IpProtocol

    @property
    def addresses(self) -> tuple[str, str]:
        """Addresses of the two ends."""
        return self.local[0], self.peer[0]


class PathWatch:
    """Traces connections that are left to the network.

    A pair of addresses that a plan begins to steer keeps the paths that it had before: they are
    what the network does when it is left alone.

    Thread safety: one background thread owns it; a thread of its own traces.

    Args:
        host: where this process runs, as its job calls it.
        ownership: the inner backends' sockets.
        load: gives the transport, which knows queue pairs; may raise a CruxError.
        trace: asks the hops of a live connection.
    """

    def __init__(
        self,
        host: str,
        ownership: Ownership,
        *,
        load: Callable[[], Transport] = Transport.load,
        trace: Tracer = trace_connection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._ownership = ownership
        self._load = load
        self._trace = trace
        self._clock = clock
        self._ids: frozenset[int] = frozenset()
        self._look_at_s, self._list_at_s = float("inf"), float("-inf")
        self._looking: threading.Thread | None = None
        #: Hops of each connection, and paths by the addresses of their ends.
        self._hops: dict[int, Hops] = {}
        self._seen: dict[tuple[str, str], SeenPair] = {}
        self._why_not: dict[IpProtocol, str] = {}

    @property
    def seen(self) -> tuple[SeenPair, ...]:
        """The paths of each two addresses, none where nothing can be seen.

        ``dst`` is an address: the job's leader knows the hosts' names.
        """
        return tuple(pair for _, pair in sorted(self._seen.items()))

    @property
    def why_not(self) -> str:
        """Reason why some connections can't be traced; empty if all can."""
        return "; ".join(dict.fromkeys(self._why_not.values()))

    def tick(self, steered: Collection[str]) -> None:
        """Starts a look if one is due; returns at once.

        Args:
            steered: addresses to which a plan gives a path.
        """
        now = self._clock()
        looking = self._looking is not None and self._looking.is_alive()
        if looking or now < min(self._list_at_s, self._look_at_s):
            return
        self._list_at_s = now + LIST_S
        found = self._connections()
        ids = frozenset(connection.id for connection in found)
        if ids != self._ids:
            self._ids = ids
            self._look_at_s = min(self._look_at_s, now + SETTLE_S)
        if not found or now < self._look_at_s:
            return
        self._look_at_s = now + LOOK_S
        left = [c for c in found if c.peer[0] not in steered]
        self._looking = threading.Thread(
            target=self._look, args=(left,), name="crux-traces", daemon=True
        )
        self._looking.start()

    def _connections(self) -> list[Traced]:
        """Return the connections to other hosts: some of each pair of addresses come first."""
        found = [
            Traced(sock.inode, sock.local, sock.peer, "tcp")
            for sock in self._ownership.owned()
            if sock.peer is not None
        ]
        with contextlib.suppress(CruxError):
            transport = self._load()
            known = transport.connections() if transport.sees_queue_pairs else ()
            found += [
                Traced(c.id, (c.local, c.local_port), (c.peer, ROCE_V2_PORT), "udp")
                for c in known
                if c.kind == "qp" and c.local_port and c.peer
            ]
        before: Counter[tuple[str, str]] = Counter()
        ranked = []
        for connection in sorted(found):
            if _leaves_the_host(connection):
                before[connection.addresses] += 1
                ranked.append((before[connection.addresses], connection))
        return [connection for _, connection in sorted(ranked)][:MAX_TRACED]

    def _look(self, connections: Sequence[Traced]) -> None:
        try:
            hops = self._traced(connections)
        except Exception as error:
            _log.info("the paths of connections are not seen: %s", error)
            return
        self._hops = hops
        there = {connection.addresses for connection in connections}
        kept = {ends: pair for ends, pair in self._seen.items() if ends not in there}
        self._seen = kept | _pairs(self._host, connections, hops)

    def _traced(self, connections: Sequence[Traced]) -> dict[int, Hops]:
        until_s = time.monotonic() + LOOK_LIMIT_S
        ttls: dict[tuple[str, str], tuple[int, ...]] = {}
        found: dict[int, Hops] = {}
        for connection in connections:
            before = self._hops.get(connection.id, ())
            if connection.protocol in self._why_not or time.monotonic() >= until_s:
                found[connection.id] = before
                continue
            # The first of a pair counts the routers, which may have become more.
            local, peer, protocol = connection[1:]
            live = self._trace(local, peer, protocol, ttls=ttls.get(connection.addresses))
            if live.method == "none":
                found[connection.id] = before
                if "CAP_NET_RAW" in live.reason:
                    self._why_not[protocol] = live.reason
                    _log.info("the paths of %s connections are not seen: %s", protocol, live.reason)
                continue
            ttls.setdefault(connection.addresses, tuple(ttl for ttl, _ in live.hops))
            answers = dict(live.hops)
            length = min(max(answers, default=0), MAX_HOPS)
            found[connection.id] = _with_answers_before(
                tuple(answers.get(ttl) for ttl in range(1, length + 1)), before
            )
        return found


def _with_answers_before(now: Hops, before: Hops) -> Hops:
    """Fill hops that did not answer this time, if the others answered as before."""
    both = list(zip(now, before, strict=False))
    if len(now) > len(before) or any(a and b and a != b for a, b in both):
        return now
    return (*(a or b for a, b in both), *before[len(now) :])


def _pairs(
    host: str, connections: Sequence[Traced], hops: Mapping[int, Hops]
) -> dict[tuple[str, str], SeenPair]:
    """The paths of connections, by the addresses of their ends."""
    count: dict[tuple[str, str], Counter[Hops]] = {}
    for connection in connections:
        of_pair = count.setdefault(connection.addresses, Counter())
        if any(taken := hops.get(connection.id, ())):
            of_pair[taken] += 1
    return {
        (here, there): SeenPair(
            src=host,
            src_address=here,
            dst=there,
            dst_address=there,
            paths=tuple(
                SeenPath(taken, connections=n)
                for taken, n in sorted(paths.items(), key=lambda item: (-item[1], str(item[0])))
            )[:MAX_TOLD],
        )
        for (here, there), paths in count.items()
    }


def _leaves_the_host(connection: Traced) -> bool:
    here, there = connection.addresses
    try:
        return here != there and not ip_address(there).is_loopback
    except ValueError:
        return False
