"""Ranks search the paths between their job's hosts, and the leader makes a fragment of them.

The leader says which rank searches what: each two addresses between which the job moves bytes are
searched by one rank, gently, while training goes on (docs/understand/agreement.md).
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Annotated

import msgspec

from crux_torch.agent.orders import joined
from crux_torch.agreement.job_channel import MAX_FOUND_BYTES, JobChannel
from crux_torch.agreement.records import MAX_RECORD_BYTES
from crux_torch.logs import WarnOnce
from crux_torch.measure.profile import JobProfile
from crux_torch.network.discover.fragment import (
    MAX_PATHS,
    Fragment,
    MAX_RATE_Bps,
    SeenHost,
    SeenPair,
)
from crux_torch.network.discover.seen_paths import links_in
from crux_torch.network.discover.survey import searched
from crux_torch.network.discover.tasks import Peer, Search, Searched

_log = logging.getLogger(__name__)

#: Probes a second of one host at most, and of all hosts of a job together; no host sends fewer
#: than the least.
HOST_RATE_per_s, JOB_RATE_per_s, LEAST_RATE_per_s = 5.0, 200.0, 0.5
#: Confidence of a search that no path of an equal share is missing, and its longest time.
CONFIDENCE, SEARCH_S = 0.999, 300.0
#: The same of a search that is made again for the third time or later.
MOST_CONFIDENCE = 0.999999
#: Searches of one job, and of one rank.
MAX_SEARCHES, MAX_OF_RANK = 4096, 512
#: Seconds between two looks of ranks for searches, and of the leader for what they have found.
LOOK_S, GATHER_S = 5.0, 2.0
#: Seconds between two fragments while searches go on.
PUBLISH_S = 60.0
#: Seconds from the end of a search, after which it is made again because something contradicts it;
#: and the longest pause before the next: the pause doubles.
AGAIN_S, MAX_AGAIN_S = 20.0, 1280.0

Turn = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Addresses = tuple[str, str]
Hops = tuple[str | None, ...]


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A search that one rank is to make; another ``turn`` asks for it anew."""

    turn: Turn
    search: Search


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The result of a search; no pair if it failed."""

    turn: Turn
    source: Peer
    peer: Peer
    pair: SeenPair | None


class Findings(msgspec.Struct, frozen=True):
    """All that one rank has found, and its host."""

    host: SeenHost
    found: Annotated[tuple[Found, ...], msgspec.Meta(max_length=MAX_OF_RANK)]


_wanted = msgspec.json.Decoder(Annotated[tuple[Wanted, ...], msgspec.Meta(max_length=MAX_OF_RANK)])
_findings = msgspec.json.Decoder(Findings)


def _read_host(name: str) -> tuple[SeenHost, tuple[str, ...]]:
    # Only ranks that search need what this imports.
    from crux_torch.host.seen import read_seen_host

    return read_seen_host(name)


class RankSearches:
    """Makes the searches that the leader wants of this rank, one after the other.

    Thread safety: one background thread owns it; a thread of its own searches.

    Args:
        host: where this process runs, as its job calls it.
        search, read_host: finds the paths to a peer, and describes this host.
    """

    def __init__(
        self,
        channel: JobChannel,
        host: str,
        *,
        search: Callable[[Search], Searched] = searched,
        read_host: Callable[[str], tuple[SeenHost, tuple[str, ...]]] = _read_host,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel, self._host = channel, host
        self._search, self._read_host = search, read_host
        self._clock = clock
        self._look_at_s = clock() + LOOK_S
        self._seen_host: SeenHost | None = None
        self._wanted: tuple[Wanted, ...] = ()
        self._done: dict[tuple[Peer, Peer], Found] = {}
        self._thread: threading.Thread | None = None
        self._sent: bytes | None = None
        self._ended = threading.Event()

    def tick(self) -> None:
        """Looks for searches, begins them, and tells what they found; returns at once."""
        if self._clock() < self._look_at_s:
            return
        self._look_at_s = self._clock() + LOOK_S
        raw = self._channel.searches()
        if raw is not None:
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                self._wanted = _wanted.decode(raw)
        searching = self._thread is not None and self._thread.is_alive()
        if not searching and any(self._is_due(wanted) for wanted in self._wanted):
            self._thread = threading.Thread(target=self._run, name="crux-discovery", daemon=True)
            self._thread.start()
        self._tell()

    def end(self) -> None:
        """Begins no more searches."""
        self._ended.set()

    def _tell(self) -> None:
        host, found = self._seen_host, tuple(self._done.values())
        if host is None or not found:
            return
        raw = msgspec.json.encode(Findings(host, found[:MAX_OF_RANK]))
        if len(raw) <= MAX_FOUND_BYTES and raw != self._sent and self._channel.put_found(raw):
            self._sent = raw

    def _is_due(self, wanted: Wanted) -> bool:
        done = self._done.get((wanted.search.source, wanted.search.peer))
        return done is None or done.turn != wanted.turn

    def _run(self) -> None:
        try:
            if self._seen_host is None:
                self._seen_host, _ = self._read_host(self._host)
            while not self._ended.is_set():
                due = next((wanted for wanted in self._wanted if self._is_due(wanted)), None)
                if due is None:
                    return
                search = due.search
                result = self._search(search)
                found = Found(due.turn, search.source, search.peer, result.pair)
                self._done = self._done | {(search.source, search.peer): found}
                if result.pair is None:
                    _log.info("no paths to %s: %s", search.peer.address, result.problem)
        except Exception as error:
            _log.info("the paths between the job's hosts are not searched: %s", error)
            _log.debug("details", exc_info=True)


class JobDiscovery:
    """The leader's half: says who searches what, and joins what they have found.

    A search is made again when live connections are seen on another path than it found, and when
    another job no longer sees a link that it found.

    Thread safety: the leading rank's background thread owns it.
    """

    def __init__(self, channel: JobChannel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._warn = WarnOnce(_log)
        # An earlier life of the job may have left results of other turns in its store.
        self._first_turn = 1 + secrets.randbelow(1 << 30)
        #: By the two addresses: the rank that searches, its search, and when the last one ended.
        self._rank: dict[Addresses, int] = {}
        self._wanted: dict[Addresses, Wanted] = {}
        self._ended_at_s: dict[Addresses, float] = {}
        self._told: dict[int, bytes] = {}
        self._found: dict[Addresses, Found] = {}
        self._hosts: dict[str, SeenHost] = {}
        #: Searches in a row that found nothing new, and what was known when one was asked again:
        #: the paths of connections, and the links that others had lost.
        self._vain: dict[Addresses, int] = {}
        self._doubts: dict[Addresses, frozenset[Hops]] = {}
        self._checked: dict[Addresses, frozenset[tuple[str, ...]]] = {}
        self._gather_at_s = self._publish_at_s = float("-inf")
        self._fragment: bytes | None = None

    def step(
        self,
        pairs: Mapping[int, Iterable[SeenPair]],
        profile: JobProfile | None,
        host_at: Mapping[str, str],
        *,
        steered: Set[tuple[str, str]] = frozenset(),
        astray: bool = False,
        lost: Set[tuple[str, ...]] = frozenset(),
    ) -> bytes | None:
        """Does what is due; returns the job's fragment, or None before there is one.

        Args:
            pairs: addresses that each rank has connections between, and paths that these were seen
                to take. In place of the name of the far host an address.
            profile: of the job; nothing is searched before there is one.
            host_at: the job's hosts by their addresses.
            steered: hosts and the addresses to which a plan gives them the path. What was seen on
                the way is from before.
            astray: True if connections are not on the paths that a plan gives them.
            lost: links that other jobs see no longer, as :func:`links_in` gives them.
        """
        now = self._clock()
        if profile is None or now < self._gather_at_s:
            return self._fragment
        self._gather_at_s = now + GATHER_S
        every = (pair for seen in pairs.values() for pair in seen)
        live = {(pair.src_address, pair.dst_address): pair for pair in joined(every, host_at)}
        self._assign(pairs, profile, host_at, now)
        self._gather(host_at, now)
        # First: a plan with what was found may end what contradicts it.
        searching = any(self._is_open(addresses) for addresses in self._wanted)
        if self._found and (not searching or now >= self._publish_at_s):
            self._publish_at_s = now + PUBLISH_S
            fresh = {
                addresses: pair
                for addresses, pair in live.items()
                if (pair.src, pair.dst_address) not in steered
                or self._doubts.get(addresses) != _hops(pair)
            }
            self._fragment = self._made(fresh, profile) or self._fragment
        self._doubt(live, astray, lost, now)
        self._tell()
        return self._fragment

    @property
    def status(self) -> dict[str, int]:
        """Searches that are wanted, ended, and without a path."""
        ended = [a for a in self._wanted if not self._is_open(a)]
        failed = sum(self._found[a].pair is None for a in ended)
        return {"searches": len(self._wanted), "ended": len(ended), "failed": failed}

    def _is_open(self, addresses: Addresses) -> bool:
        found = self._found.get(addresses)
        return found is None or found.turn != self._wanted[addresses].turn

    def _assign(
        self,
        pairs: Mapping[int, Iterable[SeenPair]],
        profile: JobProfile,
        host_at: Mapping[str, str],
        now: float,
    ) -> None:
        """Give each two addresses of hosts that exchange bytes to the first rank that has them."""
        exchange = {(flow.src, flow.dst) for flow in profile.flows if flow.bytes > 0}
        exchange |= {(dst, src) for src, dst in exchange}
        hosts = {src for src, dst in exchange if src != dst}
        rate_per_s = min(HOST_RATE_per_s, JOB_RATE_per_s / max(1, len(hosts)))
        for rank, seen in sorted(pairs.items()):
            for pair in seen:
                addresses = pair.src_address, pair.dst_address
                dst = host_at.get(pair.dst_address)
                known = addresses in self._wanted or host_at.get(pair.src_address) != pair.src
                if known or dst is None or dst == pair.src or (pair.src, dst) not in exchange:
                    continue
                if len(self._wanted) >= MAX_SEARCHES:
                    return
                search = Search(
                    Peer(pair.src, pair.src_address),
                    Peer(dst, pair.dst_address),
                    max(rate_per_s, LEAST_RATE_per_s),
                    CONFIDENCE,
                    SEARCH_S,
                )
                self._rank[addresses], self._wanted[addresses] = (
                    rank,
                    Wanted(self._first_turn, search),
                )

    def _gather(self, host_at: Mapping[str, str], now: float) -> None:
        waited_for = {self._rank[a] for a in self._wanted if self._is_open(a)}
        for raw in self._channel.found(sorted(waited_for)).values():
            with contextlib.suppress(msgspec.MsgspecError, ValueError):
                findings = _findings.decode(raw)
                if findings.host.name in host_at.values():
                    self._hosts[findings.host.name] = findings.host
                for found in findings.found:
                    addresses = found.source.address, found.peer.address
                    wanted = self._wanted.get(addresses)
                    if wanted is None or found.turn != wanted.turn or not self._is_open(addresses):
                        continue
                    before = self._found.get(addresses)
                    same = before is not None and _alike(before.pair, found.pair)
                    self._vain[addresses] = self._vain.get(addresses, 0) + 1 if same else 0
                    self._found[addresses] = found
                    self._ended_at_s[addresses] = now

    def _doubt(
        self,
        live: Mapping[Addresses, SeenPair],
        astray: bool,
        lost: Set[tuple[str, ...]],
        now: float,
    ) -> None:
        """Repeat searches that found nothing, or whose paths others contradict."""
        doubted = set()
        for addresses, found in self._found.items():
            checked = self._checked[addresses] = self._checked.get(addresses, frozenset()) & lost
            if (
                astray
                or found.pair is None
                # A network that changes again and again looks as if it sprayed packets.
                or found.pair.sprays
                or not lost & links_in(found.pair) <= checked
                # The next search would not explain again what the last one did not.
                or (
                    addresses in live
                    and not agree(live[addresses], found.pair)
                    and self._doubts.get(addresses) != _hops(live[addresses])
                )
            ):
                doubted.add(addresses)
        for addresses in doubted:
            wanted = self._wanted[addresses]
            pause_s = min(MAX_AGAIN_S, AGAIN_S * 2.0 ** min(self._vain.get(addresses, 0), 30))
            if not self._is_open(addresses) and now >= self._ended_at_s[addresses] + pause_s:
                self._wanted[addresses] = Wanted(wanted.turn + 1, surer(wanted.search))
                self._checked[addresses] = frozenset(lost)
                if addresses in live:
                    self._doubts[addresses] = _hops(live[addresses])

    def _tell(self) -> None:
        of_rank: dict[int, list[Wanted]] = {}
        for addresses, wanted in sorted(self._wanted.items()):
            of_rank.setdefault(self._rank[addresses], []).append(wanted)
        for rank, wanted_of in of_rank.items():
            raw = msgspec.json.encode(wanted_of[:MAX_OF_RANK])
            if self._told.get(rank) != raw and self._channel.put_searches(rank, raw):
                self._told[rank] = raw

    def _made(self, live: Mapping[Addresses, SeenPair], profile: JobProfile) -> bytes | None:
        pairs = [
            with_live(found.pair, live.get(addresses))
            for addresses, found in sorted(self._found.items())
            if found.pair is not None
        ]
        used = {pair.src_address for pair in pairs}
        hosts = [with_rates(host, used, profile) for _, host in sorted(self._hosts.items())]
        if not pairs:
            return None
        raw = msgspec.json.encode(Fragment.of(hosts, pairs))
        while len(raw) > MAX_RECORD_BYTES and pairs:
            self._warn("size", "not all paths of this job's hosts fit into the store")
            pairs = pairs[: len(pairs) * MAX_RECORD_BYTES // len(raw)]
            raw = msgspec.json.encode(Fragment.of(hosts, pairs))
        return raw if pairs else None


def with_live(found: SeenPair, live: SeenPair | None) -> SeenPair:
    """Returns the pair with the paths added that live connections take and the search missed."""
    if live is None or found.sprays:
        return found
    known = {path.hops for path in found.paths}
    missed = tuple(
        path
        for path in live.paths
        if path.hops and None not in path.hops and path.hops not in known
    )
    return msgspec.structs.replace(found, paths=(*found.paths, *missed)[:MAX_PATHS])


def surer(search: Search) -> Search:
    """Returns a longer search: an equal one would try the same ports in the same order."""
    confidence = min(MOST_CONFIDENCE, 1.0 - (1.0 - search.confidence) / 100.0)
    return msgspec.structs.replace(search, confidence=confidence)


def with_rates(host: SeenHost, used: Set[str], profile: JobProfile) -> SeenHost:
    """Returns the host with the mean rate at which it sent over each interface in transfers.

    Args:
        used: addresses that the job sends from; interfaces with one share the bytes alike.
        profile: bytes of an iteration, and seconds of transfer in it.
    """
    nics = [nic for nic in host.nics if not used.isdisjoint(nic.addresses)]
    sent = sum(f.bytes for f in profile.flows if f.src == host.name != f.dst)
    if not nics or sent <= 0 or profile.t_measured_s <= 0:
        return host
    # Rounded down, so that a job that is measured again does not change everybody's network.
    reached_Bps = _two_digits(min(sent / profile.t_measured_s / len(nics), MAX_RATE_Bps))
    return msgspec.structs.replace(
        host,
        nics=tuple(
            msgspec.structs.replace(nic, reached_Bps=reached_Bps) if nic in nics else nic
            for nic in host.nics
        ),
    )


def _two_digits(value: float) -> float:
    if value < 1.0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.floor(value / unit) * unit


def _hops(pair: SeenPair | None) -> frozenset[Hops]:
    return frozenset(path.hops for path in pair.paths) if pair is not None else frozenset()


def _alike(one: SeenPair | None, other: SeenPair | None) -> bool:
    """True if two searches found the same: the paths, or packets that are sprayed."""
    if one is None or other is None or one.sprays != other.sprays:
        return one is other
    return one.sprays or _hops(one) == _hops(other)


def agree(live: SeenPair, found: SeenPair) -> bool:
    """True if the search found each path that live connections take."""
    return all(any(_same(path.hops, other.hops) for other in found.paths) for path in live.paths)


def _same(one: tuple[str | None, ...], other: tuple[str | None, ...]) -> bool:
    """True if no hop that answered both times differs; a silent end may be longer."""
    return all(a is None or b is None or a == b for a, b in zip(one, other, strict=False))
