"""Finds the source ports that lead over each path to a peer, by probing
(docs/understand/paths.md)."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from crux_torch.logs import WarnOnce
from crux_torch.network.paths import ROCE_V2_PORT
from crux_torch.network.probe.discovery import Discovery, Ended
from crux_torch.network.probe.live_trace import Depth, resolve, sound, source_address
from crux_torch.network.probe.packets import ErrorQueue, Hops, ProbeError, Transport
from crux_torch.network.probe.rules import RequiredHop, Rules, passes
from crux_torch.network.routes import HostRoute
from crux_torch.network.topology import Topology

_log = logging.getLogger(__name__)

#: The default; a Clos of five stages has six hops.
MAX_TTL = 16
#: Source ports of RoCEv2: what rdma-core's ibv_flow_label_to_udp_sport() can give.
ROCE_PORTS = range(0xC000, 0x10000)
#: Ports to find for each path. Queue pairs to one peer share them in turn.
PORTS = 16
#: Seconds that the search may take for one path, and for all: other ranks may wait to switch.
SEARCH_S = 5.0
TOTAL_S = 15.0


class PathMap(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The paths between one source and one destination address, as probing found them.

    Attributes:
        hops: for each source port, in the order in which they were drawn, the answers.
        inferred: slow TTLs that were asked for some ports only. The answers for the other ports
            follow from those of the other TTLs.
        quiet: ports whose path crosses a router that stays silent, though others at its TTL
            answer; with :attr:`Rules.count_silent`.
        distance: the smallest TTL at which packets reached the destination; None if it did not
            answer, or if the TTLs were given.
        confidence: probability that no path with an equal share or more is missing, among the
            ports for which every hop answered.
        ended: reason to stop: ``confident``, ``found`` (enough ports over the required hops),
            ``time`` (the limit was reached) or ``ports`` (every port was probed).
        repeated: ports that were probed a second time, from a new socket.
        changed: those of them that took another path the second time. If any did, the source port
            does not decide the path, or the network changed until time was up, and this map
            predicts nothing.
        sent, answered: probes, and those of them that were answered.
    """

    version: int = 1
    source: str
    destination: str
    protocol: Transport
    port: int
    hops: dict[int, Hops]
    inferred: tuple[int, ...] = ()
    quiet: tuple[int, ...] = ()
    distance: int | None = None
    confidence: float = 0.0
    ended: Ended = "confident"
    repeated: int = 0
    changed: int = 0
    sent: int = 0
    answered: int = 0
    seconds: float = 0.0

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """TTLs that were asked and never answered."""
        asked = {ttl for hops in self.hops.values() for ttl, _ in hops}
        spoke = {ttl for hops in self.hops.values() for ttl, address in hops if address}
        return tuple(sorted(asked - spoke))

    @cached_property
    def paths(self) -> Mapping[Hops, tuple[int, ...]]:
        """The source ports of each path, for ports whose every hop answered (but silent ones).

        The path with the most ports first; equal ones in the order in which they were found.
        """
        return self._grouped(complete=True)

    @cached_property
    def partial(self) -> Mapping[Hops, tuple[int, ...]]:
        """The other ports: a hop that answered for some ports did not answer for these."""
        return self._grouped(complete=False)

    def _grouped(self, complete: bool) -> Mapping[Hops, tuple[int, ...]]:
        found: dict[Hops, list[int]] = {}
        for port, hops in self.hops.items():
            if all(address or ttl in self.silent for ttl, address in hops) == complete:
                found.setdefault(hops, []).append(port)
        ordered = sorted(found.items(), key=lambda item: -len(item[1]))
        return {hops: tuple(ports) for hops, ports in ordered}

    def ports_via(self, hops: Sequence[RequiredHop]) -> tuple[int, ...]:
        """Returns the source ports that pass all of ``hops``, in the order of the draw.

        A port is left out if one of these TTLs was not asked, or did not answer for it.
        """
        return tuple(port for port, found in self.hops.items() if passes(found, hops))

    def names(self, hops: Hops, topology: Topology | None = None) -> tuple[str, ...]:
        """Returns each hop's name in the topology, or its address."""
        node_at: Mapping[str, str] = topology.node_at if topology is not None else {}
        return tuple("*" if a is None else node_at.get(a, a) for _, a in hops)


def probe(
    destination: str,
    port: int,
    protocol: Transport = "tcp",
    *,
    source: str | None = None,
    ports: Iterable[int] | None = None,
    ttls: Sequence[int] | None = None,
    max_ttl: int = MAX_TTL,
    rules: Rules | None = None,
    seed: int | None = 0,
    watch: Callable[[Discovery], None] | None = None,
) -> PathMap:
    """Finds the paths to ``destination``, and source ports that lead over each.

    Args:
        port: destination port of the connections in question; RoCEv2's is 4791.
        source: address of this host that they leave from; default: by the routes.
        ports: source ports to draw from; by default this host's ephemeral ones for TCP and
            RoCEv2's for UDP.
        ttls: hops to ask about; by default all routers on the way, counted first. A TTL that
            reaches the peer makes a TCP probe connect to it; the connection is reset at once.
        max_ttl: hops to count at most.
        seed: of the order in which ports are drawn, so that a search can be repeated; None: as
            they come in ``ports``.
        watch: called with the search after each step.

    Raises:
        ProbeError: unknown name, no route, no answer from anyone, or not permitted.
        ValueError: arguments out of bounds.
    """
    if not 1 <= port <= 65535 or not 1 <= max_ttl <= 64:
        raise ValueError(f"port {port}, max_ttl {max_ttl}; expected 1 to 65535 and 1 to 64")
    if ttls is not None and (not ttls or not all(1 <= ttl <= 64 for ttl in ttls)):
        raise ValueError(f"ttls {ttls!r}; expected some of 1 to 64")
    rules = rules or Rules()
    to = resolve(destination)
    start = time.monotonic()
    until = start + rules.time_limit_s
    leaves = source_address(to) if source is None else resolve(source)
    choice = list(ports) if ports is not None else list(default_ports(protocol, port))
    if seed is not None:
        random.Random(seed).shuffle(choice)
    sent = answered = 0
    moved = True
    # What was seen before the network changed may be there no longer: search anew.
    while moved:
        depth = (
            Depth() if ttls is not None else sound(leaves, to, max_ttl, rules.answer_wait_s, until)
        )
        asked = sorted(set(ttls)) if ttls is not None else depth.ttls
        with ErrorQueue(leaves, to, protocol, port) as packets:
            search = Discovery(packets, time.monotonic, choice, asked, rules, watch)
            search.run(until)
            confidence, hops = search.confidence, search.hops
            repeated, changed, moved = search.recheck(until)
        sent += depth.sent + search.sent
        answered += depth.answered + search.answered
        moved &= time.monotonic() < until
    if asked and not any(address for answers in hops.values() for _, address in answers):
        raise ProbeError(
            errno.ETIMEDOUT,
            f"no router answered for {protocol} to {to} port {port} at the TTLs "
            f"{', '.join(map(str, asked))} ({sent} probes): they don't report expired "
            "packets, or a firewall drops these probes or the answers (ICMP time exceeded)",
        )
    return PathMap(
        source=leaves,
        destination=to,
        protocol=protocol,
        port=port,
        hops=hops,
        inferred=search.inferred,
        quiet=search.quiet,
        distance=depth.distance,
        confidence=confidence,
        ended=search.ended,
        repeated=repeated,
        changed=changed,
        sent=sent,
        answered=answered,
        seconds=time.monotonic() - start,
    )


def default_ports(protocol: Transport, port: int) -> range:
    """Returns the source ports of connections to ``port``: ephemeral ones, or RoCEv2's."""
    if protocol == "udp" and port == ROCE_V2_PORT:
        return ROCE_PORTS
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    return range(low, high + 1)


def search(destination: str, route: HostRoute) -> PathMap:
    """Probes until ``PORTS`` source ports are known to take ``route``, or time is up.

    Raises:
        OSError: nobody answered, or probing is not permitted.
    """
    rules = Rules(via=route.hops, via_ports=PORTS, time_limit_s=SEARCH_S)
    return probe(destination, ROCE_V2_PORT, "udp", ttls=[ttl for ttl, _ in route.hops], rules=rules)


class PortSearch:
    """Finds RoCEv2 source ports over planned paths, and keeps them as long as the plan."""

    def __init__(
        self,
        search: Callable[[str, HostRoute], PathMap] = search,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._search = search
        self._clock = clock
        self._warn = WarnOnce(_log)
        self._found: dict[tuple[str, HostRoute], tuple[int, ...]] = {}

    def found(self, routes: Iterable[HostRoute]) -> Mapping[str, tuple[int, ...]]:
        """Returns the known ports for each destination."""
        return {to: self._found[to, r] for to, r in _searches(routes) if (to, r) in self._found}

    def is_done(self, routes: Iterable[HostRoute]) -> bool:
        """True if ``run`` would have nothing to do."""
        return all(each in self._found for each in _searches(routes))

    def run(self, routes: Iterable[HostRoute]) -> None:
        """Search for the ports that are not known; begin no search after ``TOTAL_S``.

        If none is found for a path, or ports do not decide the path, its queue pairs go where the
        network sends them.
        """
        until_s = self._clock() + TOTAL_S
        planned = list(_searches(routes))
        self._found = {each: ports for each, ports in self._found.items() if each in planned}
        for to, route in planned:
            if (to, route) in self._found:
                continue
            ports: tuple[int, ...] = ()
            try:
                if self._clock() >= until_s:
                    raise TimeoutError(f"no time was left, {TOTAL_S:g} s went into other paths")
                path_map = self._search(to, route)
                ports = path_map.ports_via(route.hops)[:PORTS]
                problem = "" if ports else "no source port leads over it"
                if path_map.changed:
                    ports = ()
                    problem = (
                        f"{path_map.changed} of {path_map.repeated} source ports took another path "
                        "when they were probed again, so the network sprays packets or has changed"
                    )
            except OSError as error:
                problem = str(error)
            if problem:
                self._warn(to, f"the planned path to {to} is not taken by queue pairs: {problem}")
            self._found[to, route] = ports


def _searches(routes: Iterable[HostRoute]) -> Iterable[tuple[str, HostRoute]]:
    return ((to, route) for route in routes for to in route.destinations)
