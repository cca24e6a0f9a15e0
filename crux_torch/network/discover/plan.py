"""Plans a discovery: which host probes which, and when, under a bound of probes a router.

First the hosts below one leaf switch are found: at most one router is between them. Each host asks
one host of each leaf until it finds its own. Then, for each ordered pair of leaves, a few hosts of
the first search all paths to a host of the second. So probes grow with hosts x leaves.

Hosts with several NICs have as many planes: the NICs of one plane probe each other only.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal

from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair, SeenPath
from crux_torch.network.discover.room import HASTE, SECOND_S, Room
from crux_torch.network.discover.tasks import (
    MAX_PEERS,
    DiscoverError,
    Outcome,
    Peer,
    Search,
    Searched,
    Sound,
    Sounded,
    Task,
)
from crux_torch.network.host_match import distinct_addresses

#: Hosts of one leaf that search the paths to another leaf.
WITNESSES = 2
#: A host that probes more slowly than this makes a search last minutes.
LEAST_RATE_per_s = 5.0

Phase = Literal["leaves", "paths", "done"]


@dataclass(frozen=True, slots=True)
class PlanRules:
    """Parameters of a discovery.

    Attributes:
        confidence: of each search, that no path of an equal share is missing.
        rate_per_s: probes a second that one host sends at most.
        router_rate_per_s: probes a second that expire at one router at most.
        time_limit_s: of one search.
        ipv6: probe the IPv6 addresses of NICs that have both kinds.
        ports_per_path: source ports to find of each path of a search.
    """

    confidence: float = 0.99
    rate_per_s: float = 100.0
    router_rate_per_s: float = 200.0
    time_limit_s: float = 60.0
    ipv6: bool = False
    ports_per_path: int = 1


@dataclass(slots=True)
class _Plane:
    """NICs that may reach each other, one a host, and what is known of their leaves.

    Attributes:
        ends: address of each host.
        leaders: one address of each leaf, in the order in which they were found.
        leader_of: leader of the leaf of each address that is placed.
        unasked: addresses that have not sounded anybody, and lead no leaf.
        untold: for each leader, addresses below its leaf that it has not sounded itself.
        searches: pairs of addresses whose paths are to be found; None until all are placed.
    """

    ends: dict[str, Peer]
    unasked: set[Peer]
    leaders: list[Peer] = field(default_factory=list)
    leader_of: dict[Peer, Peer] = field(default_factory=dict)
    untold: dict[Peer, list[Peer]] = field(default_factory=dict)
    searches: list[tuple[Peer, Peer]] | None = None


class Plan:
    """The tasks of a discovery that are done, under way and to come.

    Args:
        hosts: all that take part.
        clock: seconds. Without one like that of the hosts, the bound of a router does not hold.

    Attributes:
        sent: probes so far.

    Raises:
        DiscoverError: there are not two hosts with addresses to probe.
    """

    def __init__(
        self,
        hosts: Sequence[SeenHost],
        rules: PlanRules,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.hosts, self.rules = tuple(hosts), rules
        self.sent = 0
        self._notes: list[str] = []
        found = planes(hosts, rules.ipv6)
        self._planes = [_Plane({end.host: end for end in ends}, set(ends)) for ends in found]
        if not self._planes:
            raise DiscoverError(
                f"{len(hosts)} hosts, and no two of them have an address of the same kind to probe "
                "between: see `ip address` on them; --ipv6 takes IPv6 where a NIC has both"
            )
        self._plane_of = {e: plane for plane in self._planes for e in plane.ends.values()}
        self._sounded: dict[tuple[Peer, Peer], Sounded] = {}
        self._first_hop: dict[Peer, str] = {}
        #: Hosts whose first hop an address is.
        self._hosts_at: dict[str | None, set[str]] = defaultdict(set)
        self._searched: dict[tuple[Peer, Peer], Searched] = {}
        self._to_search: dict[tuple[Peer, Peer], None] = {}
        self._active: dict[str, Task] = {}
        #: Tasks that may have sent something in the last second, and their ends.
        self._ended: list[tuple[float, Task]] = []
        self._left = [host.name for host in hosts]
        #: Largest share of the paths from a leaf that one router between the leaves has.
        self._busiest: dict[Peer, float] = {}

    @property
    def phase(self) -> Phase:
        """``leaves``: looking for the hosts of each leaf; then ``paths``, then ``done``."""
        if any(plane.searches is None for plane in self._planes):
            return "leaves"
        return "paths" if self._active or self._to_search else "done"

    @property
    def placed(self) -> tuple[int, int]:
        """Addresses whose leaf is known, and all."""
        return (
            sum(len(plane.leader_of) for plane in self._planes),
            sum(len(plane.ends) for plane in self._planes),
        )

    @property
    def leaves(self) -> int:
        """Leaf switches that were found."""
        return sum(len(plane.leaders) for plane in self._planes)

    @property
    def searches(self) -> tuple[int, int]:
        """Searches that are done, and all that are known to be needed."""
        pairs = [pair for plane in self._planes for pair in plane.searches or ()]
        return sum(pair in self._searched for pair in pairs), len(pairs)

    def start(self) -> list[tuple[str, Task]]:
        """Returns the tasks that may begin now, with the host of each; they count as under way."""
        began: list[tuple[str, Task]] = []
        room, rate_per_s = self._room(), self._rate_per_s()
        for host, task in self._waiting(rate_per_s):
            if room.is_full(rate_per_s):
                break
            if host not in self._active and room.take(task):
                self._active[host] = task
                began.append((host, task))
        # The last host may have been the one that the end of the first phase waited for.
        if not self._active and self._complete():
            return self.start()
        return began

    def take(self, outcome: Outcome) -> None:
        """Take note of what a task, of this run or one before, found."""
        source, peer = outcome.source, outcome.peer
        plane = self._plane_of.get(source)
        if plane is None or any(plane.ends.get(end.host) != end for end in (source, peer)):
            return
        self.sent += outcome.sent
        if isinstance(outcome, Sounded):
            self._sounded[source, peer] = outcome
            plane.unasked.discard(source)
            if source not in self._first_hop and outcome.hops and outcome.hops[0]:
                self._first_hop[source] = outcome.hops[0]
                self._hosts_at[outcome.hops[0]].add(source.host)
            if peer not in plane.leader_of:
                self._lead(plane, peer)
            if source not in plane.leader_of and outcome.near:
                self._follow(plane, source, plane.leader_of[peer])
            if peer in plane.untold.get(source, ()):
                plane.untold[source].remove(peer)
            return
        self._searched[source, peer] = outcome
        self._to_search.pop((source, peer), None)
        leader = plane.leader_of.get(source, source)
        if outcome.pair is not None:
            share = busiest_share(outcome.pair)
            self._busiest[leader] = max(share, self._busiest.get(leader, 0.0))

    def finish(self, host: str) -> None:
        """Take note that the task of ``host`` has ended; one that found nothing counts as gone."""
        task = self._end(host)
        if isinstance(task, Sound) and (task.source, task.peers[0]) not in self._sounded:
            self.lose(host)
        if isinstance(task, Search) and (task.source, task.peer) not in self._searched:
            self.lose(host)

    def lose(self, host: str) -> None:
        """Take note that ``host`` is gone: it gets no task, and nobody probes it any more."""
        if host not in self._left:
            return
        self._left.remove(host)
        self._end(host)
        gone = [pair for pair in self._to_search if host in (pair[0].host, pair[1].host)]
        for pair in gone:
            del self._to_search[pair]
        self._notes.append(f"host {host} left before the end: paths from and to it may be missing")
        for plane in self._planes:
            end = plane.ends.get(host)
            if end is None:
                continue
            plane.unasked.discard(end)
            if end not in plane.leader_of:
                del plane.ends[host]
            plane.untold.pop(end, None)
            for members in plane.untold.values():
                members[:] = [member for member in members if member != end]

    def _end(self, host: str) -> Task | None:
        task = self._active.pop(host, None)
        if task is not None:
            self._ended.append((self._clock(), task))
        return task

    def pairs(self) -> tuple[SeenPair, ...]:
        """Returns every pair that was seen, with the ports of its paths."""
        pairs = [_as_pair(each) for each in self._sounded.values()]
        pairs += [each.pair for each in self._searched.values()]
        return tuple(pair for pair in pairs if pair is not None)

    def fragment(self) -> Fragment:
        """Returns everything that was seen, but for the ports."""
        return Fragment.of(self.hosts, self.pairs())

    def problems(self) -> list[str]:
        """Returns what was not found out, in words."""
        found = list(self._notes)
        heard = {end for pair, s in self._sounded.items() if s.routers is not None for end in pair}
        found += [
            f"{end.address} of host {end.host} reaches no other host"
            for plane in self._planes
            for end in plane.ends.values()
            if end not in heard
        ]
        for searched in self._searched.values():
            where = f"{searched.source.host} to {searched.peer.host}"
            if searched.pair is None:
                found.append(f"no path is known from {where}: {searched.problem}")
            elif searched.pair.confidence < self.rules.confidence:
                found.append(
                    f"the search from {where} ended with confidence {searched.pair.confidence:.3f}"
                )
        return found

    def _lead(self, plane: _Plane, end: Peer) -> None:
        plane.leaders.append(end)
        plane.leader_of[end] = end
        plane.unasked.discard(end)

    def _follow(self, plane: _Plane, end: Peer, leader: Peer) -> None:
        plane.leader_of[end] = leader
        if leader.host in self._left and (leader, end) not in self._sounded:
            plane.untold.setdefault(leader, []).append(end)

    def _untried(self, plane: _Plane, end: Peer) -> list[Peer]:
        """Leaders that ``end`` has to sound: all that may be below the same leaf."""
        return [
            leader
            for leader in plane.leaders
            if (end, leader) not in self._sounded
            and leader.host in self._left
            and not self._have_other_gateways(end, leader)
        ]

    def _have_other_gateways(self, a: Peer, b: Peer) -> bool:
        """True if the first hops differ, and each is that of several hosts: of a whole leaf."""
        mine, other = self._first_hop.get(a), self._first_hop.get(b)
        return mine != other and all(len(self._hosts_at[hop]) > 1 for hop in (mine, other))

    def _complete(self) -> bool:
        """Plan the searches of each plane whose leaves are all known; True if any is new."""
        new = False
        for plane in self._planes:
            placed = len(plane.leader_of) == len(plane.ends) and not any(plane.untold.values())
            if placed and plane.searches is None:
                plane.searches = self._pairs(plane)
                left = [pair for pair in plane.searches if pair not in self._searched]
                self._to_search.update(dict.fromkeys(left))
                new |= bool(left)
        return new

    def _pairs(self, plane: _Plane) -> list[tuple[Peer, Peer]]:
        """Pairs to search: each leaf to each other leaf, and something of each leaf early."""
        below: dict[Peer, list[Peer]] = {leader: [] for leader in plane.leaders}
        for end in plane.ends.values():
            below[plane.leader_of[end]].append(end)
        groups = list(below.values())
        count = len(groups)
        pairs: dict[tuple[Peer, Peer], None] = {}
        for witness in range(WITNESSES):
            for offset in range(1, count):
                # Every host takes part in some search, as far as there are enough.
                turn = (offset - 1) * WITNESSES + witness
                for i, sources in enumerate(groups):
                    peers = groups[(i + offset) % count]
                    pairs[sources[turn % len(sources)], peers[turn % len(peers)]] = None
        return [pair for pair in pairs if not self._is_unreachable(pair)]

    def _is_unreachable(self, pair: tuple[Peer, Peer]) -> bool:
        if not all(end.host in self._left for end in pair):
            return True
        told = [self._sounded[p] for p in (pair, pair[::-1]) if p in self._sounded]
        return bool(told) and all(each.routers is None for each in told)

    def _waiting(self, rate_per_s: float) -> Iterator[tuple[str, Task]]:
        """Tasks that hosts could begin now, the most urgent first; several of one host."""
        for host in self._left:
            for plane in self._planes:
                end = plane.ends.get(host)
                if end is None or plane.searches is not None or host in self._active:
                    continue
                if (task := self._sounding(plane, end, rate_per_s)) is not None:
                    yield host, task
        rules = self.rules
        for source, peer in tuple(self._to_search):
            yield (
                source.host,
                Search(
                    source,
                    peer,
                    rate_per_s,
                    rules.confidence,
                    rules.time_limit_s,
                    rules.ports_per_path,
                ),
            )

    def _sounding(self, plane: _Plane, end: Peer, rate_per_s: float) -> Sound | None:
        if end not in plane.leader_of:
            if plane.unasked and end not in plane.unasked:
                # Once all first hops are known, most soundings are not needed.
                return None
            if untried := self._untried(plane, end):
                return Sound(end, tuple(untried[:MAX_PEERS]), rate_per_s)
            self._lead(plane, end)
        if untold := plane.untold.get(end):
            return Sound(end, tuple(untold[:MAX_PEERS]), rate_per_s, False)
        return None

    def _rate_per_s(self) -> float:
        """The pace of one host, such that all of them may probe at the same time."""
        rules = self.rules
        share = rules.router_rate_per_s / max(1, len(self._left))
        # One task alone must have room: see :func:`.room.most_in_a_second`.
        alone = max(0.5, (rules.router_rate_per_s - 1) / HASTE)
        return min(max(share, LEAST_RATE_per_s), rules.rate_per_s, alone)

    def _room(self) -> Room:
        now = self._clock()
        self._ended = [(at, task) for at, task in self._ended if now - at <= SECOND_S]
        room = Room(self.rules.router_rate_per_s, self._leader, self._busiest)
        for task in (*self._active.values(), *(task for _, task in self._ended)):
            room.fill(task)
        return room

    def _leader(self, end: Peer) -> Peer:
        return self._plane_of[end].leader_of.get(end, end)


def planes(hosts: Iterable[SeenHost], ipv6: bool = False) -> list[list[Peer]]:
    """Returns the addresses to probe between, for each plane of the network.

    The NICs of the same name are a plane; where names differ, those at the same place in the
    hosts' order. Each NIC counts with one address, IPv4 if it has one (or IPv6, if ``ipv6``).
    Addresses that several hosts have (of bridges for containers) are left out.
    """
    given = [(host, _ordered(host)) for host in hosts]
    owners = Counter(
        a
        for host, _ in given
        for a in {a for nic in host.nics for a in distinct_addresses(nic.addresses)}
    )
    usable: dict[str, list[tuple[str, str]]] = {}
    for host, nics in given:
        for nic in nics:
            addresses = [a for a in distinct_addresses(nic.addresses) if owners[a] == 1]
            addresses.sort(key=lambda a: (ip_address(a).version == 6) != ipv6)
            if addresses:
                usable.setdefault(host.name, []).append((nic.name, addresses[0]))
    names = [tuple(name for name, _ in nics) for nics in usable.values()]
    by_name = len({name for each in names for name in each}) == max(map(len, names), default=0)
    found: dict[tuple[object, int], list[Peer]] = defaultdict(list)
    for owner, addressed in usable.items():
        for place, (name, address) in enumerate(addressed):
            kind = ip_address(address).version
            found[name if by_name else place, kind].append(Peer(owner, address))
    return [ends for ends in found.values() if len(ends) > 1]


def _ordered(host: SeenHost) -> list[SeenNic]:
    def key(nic: SeenNic) -> list[tuple[int, str]]:
        parts = re.findall(r"[0-9]+|[^0-9]+", nic.name)
        return [(int(p), "") if p.isdecimal() else (-1, p) for p in parts]

    return sorted(host.nics, key=key)


def busiest_share(pair: SeenPair) -> float:
    """Returns the largest share of the ports that one router between the leaves gets.

    It is 1 where a hop is silent, since one router may be all that stays silent.
    """
    ports = sum(len(path.ports) for path in pair.paths)
    shares: Counter[tuple[int, str | None]] = Counter()
    for path in pair.paths:
        for ttl, address in enumerate(path.hops[1:-1]):
            shares[ttl, address] += len(path.ports)
    return max(shares.values(), default=0) / ports if ports else 1.0


def _as_pair(sounded: Sounded) -> SeenPair | None:
    """The path of a sounding, if it is sure to be one: over a single router, or none."""
    if not sounded.near:
        return None
    source, peer = sounded.source, sounded.peer
    path = SeenPath(sounded.hops)
    return SeenPair(source.host, source.address, peer.host, peer.address, (path,))
