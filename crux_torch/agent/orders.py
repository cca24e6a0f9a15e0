"""Messages between the leader and the ranks of a job: JSON through the job's own store.

The leader gives orders. Ranks answer measurements, report which paths their connections take, and
say where they run. Each number says one thing:

* ``incarnation`` names one life of the job: from its first process group to its last.
* ``number`` counts orders. It grows over all lives that share a store.
* ``measurement`` counts measurements in one life.
* ``generation`` counts over all lives how often the ranks were to make their connections anew.
* ``epoch`` is the plan's own, and counts plans of the cluster.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec

from crux_torch.agreement.job_channel import MAX_PATHS_BYTES, JobChannel
from crux_torch.agreement.problems import Place, problems
from crux_torch.agreement.records import (
    MAX_GRID_S,
    MAX_MOVED_S,
    MAX_SEEN_BYTES,
    MAX_SEEN_PAIRS,
    PathCounts,
    PlanEntry,
)
from crux_torch.apply.dscp import dscp_of_level
from crux_torch.measure.profile import MAX_FLOWS, JobProfile, Name
from crux_torch.measure.sample import RankSample
from crux_torch.network.discover.fragment import SeenPair, SeenPath
from crux_torch.network.host_match import distinct_addresses
from crux_torch.network.routes import HostFlowLinks, HostRoute
from crux_torch.network.topology import Topology
from crux_torch.settings import Marks

SCHEMA_VERSION = 2
#: Seconds between two rounds of the leader over its ranks' reports.
GATHER_S = 5.0
#: Seconds between two looks for ranks, until the leader judges without the missing, and gives up.
LOOK_S = 1.0
PATIENCE_S = 10.0
GIVE_UP_S = 120.0


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grid of times at which iterations may begin: ``lead_s + n grid_s`` after one has ended.

    All ranks end an iteration at about the same time, so none needs to know another host's clock.

    Attributes:
        mark: number of the iteration, counted from the job's first.
        lead_s, grid_s: seconds.
        moved_s: by how much later the grid is than in the plan, seconds.
    """

    mark: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    lead_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_GRID_S)]
    grid_s: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_GRID_S)]
    moved_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_MOVED_S)] = 0.0


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One order. Ranks follow the newest, until ``valid_s`` after they last heard a new one.

    Attributes:
        incarnation: of the job. A rank that hears of another one starts afresh.
        number: larger than that of every earlier order, renewals included.
        level: priority level of the job; None for the network's default.
        marks: the DSCP values of levels; None: connections are not marked, whatever the level.
        measurement: the one that runs or ran last; 0 before the first.
        measuring: whether it runs now.
        valid_s: seconds for which the order counts.
        plan_epoch: epoch of the plan that the level comes from; 0 without a plan.
        entry: the job's part of that plan.
        profile: the job's profile, once it was measured.
        routes: the paths that new connections are to take; empty: any.
        generation: of the job's connections; 0 for those that it began with.
        flows: those whose rates are booked, of all hosts of the job; empty: none.
        tables: endpoint of the load tables; empty: each host's own.
        pace: what iterations keep to; None: they begin when they are ready.
    """

    version: int = SCHEMA_VERSION
    incarnation: Name
    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    level: Annotated[int, msgspec.Meta(ge=0, le=63)] | None = None
    marks: Marks | None = None
    measurement: Annotated[int, msgspec.Meta(ge=0)] = 0
    measuring: bool = False
    valid_s: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)]
    plan_epoch: Annotated[int, msgspec.Meta(ge=0)] = 0
    entry: PlanEntry | None = None
    profile: JobProfile | None = None
    routes: Annotated[tuple[HostRoute, ...], msgspec.Meta(max_length=MAX_FLOWS)] = ()
    generation: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    flows: Annotated[tuple[HostFlowLinks, ...], msgspec.Meta(max_length=MAX_FLOWS)] = ()
    tables: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pace: Pace | None = None

    @property
    def dscp(self) -> int | None:
        """The DSCP value of TCP connections; None: they are not marked."""
        return dscp_of_level(self.level, self.marks.tcp if self.marks is not None else ())

    @property
    def qp_dscp(self) -> int | None:
        """The DSCP value of queue pairs; None: they are not marked."""
        return dscp_of_level(self.level, self.marks.rdma if self.marks is not None else ())

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> Order:
        """Returns the order in ``raw``.

        Raises:
            ValueError: it is not such an order, or of another version.
        """
        try:
            order = msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"not an order: {error}") from None
        if order.version != SCHEMA_VERSION:
            raise ValueError(f"an order of version {order.version}, not {SCHEMA_VERSION}")
        return order


def answer(incarnation: str, measurement: int, sample: RankSample | None) -> bytes:
    """Returns a rank's answer to a measurement: a heading, then the sample if there is one."""
    body = b"" if sample is None else sample.to_json()
    return heading(incarnation, measurement) + b"\n" + body


def heading(incarnation: str, measurement: int) -> bytes:
    """Returns the first line of the answers to one measurement.

    The incarnation tells it from an answer that an earlier life of the job left in the store.
    """
    return f"{incarnation} {measurement}".encode()


class PathReport(msgspec.Struct, frozen=True):
    """A rank's word about the paths of its connections.

    Attributes:
        counts: None if no path is planned for it.
        seen: see :attr:`~crux_torch.agent.path_watch.PathWatch.seen`.
    """

    counts: PathCounts | None = None
    seen: Annotated[tuple[SeenPair, ...], msgspec.Meta(max_length=MAX_SEEN_PAIRS)] = ()


class PathReports:
    """Reports of each rank to its leader on the paths of its connections.

    Thread safety: none; the background thread owns it, as it does :class:`RollCall`.
    """

    def __init__(self, channel: JobChannel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._sent: bytes | None = None
        self._gather_at_s = float("-inf")
        self._gathered = PathReport()
        #: What each rank sees; ``dst`` is an address.
        self.by_rank: dict[int, tuple[SeenPair, ...]] = {}

    def send(self, report: PathReport) -> None:
        """Sends this rank's report to the leader, if it says anything new."""
        if self._sent is None and report == PathReport():
            return
        raw = msgspec.json.encode(report)
        if len(raw) > MAX_PATHS_BYTES:
            raw = msgspec.json.encode(PathReport(report.counts))
        if raw != self._sent and self._channel.put_paths(raw):
            self._sent = raw

    def gather(self, planned: bool, host_at: Mapping[str, str]) -> PathReport:
        """Returns the sum over all ranks that reported.

        A report that can't be read counts for nothing, nor does a path to an address of no rank.

        Args:
            planned: False if no path is planned for the job; then nothing is counted.
            host_at: the job's hosts by their addresses.
        """
        now = self._clock()
        if now >= self._gather_at_s:
            self._gather_at_s = now + GATHER_S
            reports = {-1: PathReport(PathCounts())}
            for rank, raw in self._channel.paths().items():
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    reports[rank] = msgspec.json.decode(raw, type=PathReport)
            self.by_rank = {rank: report.seen for rank, report in reports.items() if report.seen}
            counts = (msgspec.structs.astuple(r.counts) for r in reports.values() if r.counts)
            each = zip(*counts, strict=True)
            seen = (pair for pairs in self.by_rank.values() for pair in pairs if pair.paths)
            self._gathered = PathReport(PathCounts(*map(sum, each)), joined(seen, host_at))
        return self._gathered if planned else PathReport(seen=self._gathered.seen)


def joined(pairs: Iterable[SeenPair], host_at: Mapping[str, str]) -> tuple[SeenPair, ...]:
    """Returns one entry for each two addresses of different hosts, as a job's record has them.

    Args:
        pairs: with an address in place of the name of the host at the far end.
        host_at: names of hosts by address; a pair with another address is left out.
    """
    count: dict[tuple[str, str, str, str], Counter[tuple[str | None, ...]]] = {}
    for pair in pairs:
        dst = host_at.get(pair.dst_address)
        if dst is None or host_at.get(pair.src_address) != pair.src or dst == pair.src:
            continue
        paths = count.setdefault((pair.src, pair.src_address, dst, pair.dst_address), Counter())
        for path in pair.paths:
            paths[path.hops] += path.connections
    found = [
        SeenPair(
            *ends,
            tuple(SeenPath(hops, connections=n) for hops, n in sorted(paths.items(), key=str)),
        )
        for ends, paths in sorted(count.items())
    ][:MAX_SEEN_PAIRS]
    size = len(msgspec.json.encode(found))
    return tuple(found if size <= MAX_SEEN_BYTES else found[: len(found) * MAX_SEEN_BYTES // size])


class RollCall:
    """Places of the ranks: each rank says where it runs; the leader compares, and warns.

    Args:
        place: where this rank runs.
        warn: is given the subject and the text of a warning.
    """

    def __init__(
        self,
        channel: JobChannel,
        world_size: int,
        place: Place,
        warn: Callable[[str, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel, self._warn, self._clock = channel, warn, clock
        self._missing = dict.fromkeys(range(world_size))
        self._unsent: bytes | None = msgspec.json.encode(place)
        self._places: dict[int, Place] = {}
        self._since_s = self._look_at_s = clock()
        self._judged: tuple[int, Topology | None] | None = None
        self.problems: tuple[str, ...] = ()
        self._named, self._host_at = 0, dict[str, str]()

    def send(self) -> None:
        """Sends where this rank runs, until that has succeeded once."""
        if self._unsent is not None and self._channel.put_host(self._unsent):
            self._unsent = None

    def gather(self, topology: Topology | None) -> None:
        """Reads who has come, and warns of what is wrong with their hosts; on the leader."""
        now = self._clock()
        waited_s = now - self._since_s
        if self._missing and now >= self._look_at_s and waited_s < GIVE_UP_S:
            self._look_at_s = now + LOOK_S
            for rank, raw in self._channel.hosts(tuple(self._missing)).items():
                self._missing.pop(rank, None)
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    self._places[rank] = msgspec.json.decode(raw, type=Place)
        state = len(self._places), topology
        if state == self._judged or (self._missing and waited_s < PATIENCE_S):
            return
        self._judged = state
        self.problems = problems(self._places, topology)
        if self.problems:
            text = "; ".join(self.problems)
            self._warn(f"hosts {text}", text)

    def status(self) -> dict[str, Any]:
        """Returns the ranks on each host, and what is wrong with the hosts' names."""
        ranks: dict[str, list[int]] = {}
        for rank, place in sorted(self._places.items()):
            ranks.setdefault(place.host, []).append(rank)
        return {"ranks": ranks, "problems": list(self.problems)}

    @property
    def host_at(self) -> Mapping[str, str]:
        """The job's hosts by their addresses, without addresses of several."""
        if len(self._places) != self._named:
            self._named = len(self._places)
            hosts: dict[str, set[str]] = {}
            for place in self._places.values():
                for address in distinct_addresses(place.addresses):
                    hosts.setdefault(address, set()).add(place.host)
            self._host_at = {a: host for a, (host, *others) in hosts.items() if not others}
        return self._host_at
