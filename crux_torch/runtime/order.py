"""What the leader and the ranks of a job tell each other, as JSON through the job's own store.

The leader gives orders. Ranks answer measurements, and report which paths their connections take.
Each number says one thing:

* ``incarnation`` names one life of the job: from its first process group to its last.
* ``number`` counts orders. It grows over all lives that share a store.
* ``measurement`` counts measurements in one life.
* ``generation`` counts over all lives how often the ranks were to make their connections anew.
* ``epoch`` is the plan's own, and counts plans of the cluster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from crux_torch.control.job_channel import JobChannel
from crux_torch.control.records import MAX_GRID_S, MAX_MOVED_S, PathCounts, PlanEntry
from crux_torch.fabric.flow_links import HostFlowLinks
from crux_torch.fabric.route import HostRoute
from crux_torch.measure.job_profile import MAX_FLOWS, JobProfile, Name
from crux_torch.measure.sample import RankSample
from crux_torch.settings import Marks

SCHEMA_VERSION = 2
#: Seconds between two rounds of the leader over its ranks' reports.
GATHER_S = 5.0


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When iterations may begin: at ``lead_s + n grid_s`` after an iteration that has ended.

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
        return self._value(self.marks.tcp if self.marks is not None else ())

    @property
    def qp_dscp(self) -> int | None:
        """The DSCP value of queue pairs; None: they are not marked."""
        return self._value(self.marks.rdma if self.marks is not None else ())

    def _value(self, values: Sequence[int]) -> int | None:
        level = self.level
        return values[level] if level is not None and level < len(values) else None

    def to_json(self) -> bytes:
        """The order as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> Order:
        """The order in ``raw``.

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
    """A rank's answer to a measurement: its heading, then the sample, or nothing if it has none.

    The incarnation tells it from an answer that an earlier life of the job left in the store.
    """
    body = b"" if sample is None else sample.to_json()
    return heading(incarnation, measurement) + b"\n" + body


def heading(incarnation: str, measurement: int) -> bytes:
    """What the answers to one measurement begin with."""
    return f"{incarnation} {measurement}".encode()


class PathReports:
    """One rank's end: how many connections take the planned path, from each rank to its leader."""

    def __init__(self, channel: JobChannel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._sent: bytes | None = None
        self._gather_at_s = float("-inf")
        self._gathered: PathCounts | None = None

    def send(self, counts: PathCounts | None) -> None:
        """Tell the leader what this rank sees; None if no path is planned for it."""
        raw = msgspec.json.encode(counts)
        if raw == self._sent or (self._sent is None and counts is None):
            return
        if self._channel.put_paths(raw):
            self._sent = raw

    def gather(self, planned: bool) -> PathCounts | None:
        """The sum over all ranks that reported; None if no path is ``planned``.

        A report that can't be read counts for nothing.
        """
        if not planned:
            return None
        now = self._clock()
        if now >= self._gather_at_s:
            self._gather_at_s = now + GATHER_S
            reports = [PathCounts()]
            for raw in self._channel.paths():
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    reports.append(msgspec.json.decode(raw, type=PathCounts | None) or PathCounts())
            each = zip(*map(msgspec.structs.astuple, reports), strict=True)
            self._gathered = PathCounts(*map(sum, each))
        return self._gathered
