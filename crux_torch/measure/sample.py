"""The measurement of one rank, which it sends to the leading rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from crux_torch.errors import CruxError
from crux_torch.measure import timeline
from crux_torch.measure.device import DeviceUse
from crux_torch.measure.iterations import Ints, Period, estimate_period, heavy, iteration_ends
from crux_torch.measure.profile import MAX_BURSTS, Name, NonNegative, ProfileBurst
from crux_torch.measure.records import OP_NUMBER, OPS, STATUSES, GroupInfo, Records
from crux_torch.measure.traffic import SILENT_OPS

MAX_SAMPLE_BYTES = 4 << 20
MAX_TRANSFERS = 1024
MAX_GROUPS = 1024
MAX_ROWS = 4096
MAX_RANKS = 1 << 16
#: Iterations without which nothing is reported.
MIN_ITERATIONS = 3

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
#: Nanoseconds since the sample's origin.
Time = Annotated[int, msgspec.Meta(ge=-(1 << 60), le=1 << 60)]
Times = Annotated[tuple[Time, ...], msgspec.Meta(max_length=MAX_TRANSFERS)]


class SampleError(CruxError, ValueError):
    """A sample that can't be used."""


class GroupRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process group; ``span`` is (first, stop, step) if the ranks are a range."""

    name: Name
    my_rank: Rank
    span: tuple[int, int, int] | None = None
    listed: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks by group rank."""
        if self.span is None:
            return self.listed
        ranks = range(*self.span)
        if len(ranks) > MAX_RANKS or (len(ranks) and min(ranks[0], ranks[-1]) < 0):
            raise SampleError(f"group {self.name!r} has no such ranks: {self.span}")
        return tuple(ranks)


class TrafficRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The collectives of one rank that agree in group, operation and peer.

    Attributes:
        group: index into the sample's groups.
        op: a name of ``record.OPS``.
        peer: group rank of the root or other end, -1 where there is none.
        bytes: sum of the payloads over all iterations of the sample.
    """

    group: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
    op: Name
    peer: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 24)]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Transfers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest collectives, column by column, in the order of issue.

    Attributes:
        group, sequence: identify a collective on all ranks of the group. Group is -1 for sends,
            which two ranks number differently.
        begin, end: when it was in flight here, nanoseconds since the sample's origin.
        ready: when computation came to it; see :class:`timeline.Reaches`.
        synchronous: 1 where computation waited for it at once.
        bytes: its payload.
        bounds: ends of the iterations that these collectives fill.
    """

    group: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TRANSFERS)] = ()
    sequence: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TRANSFERS)] = ()
    begin: Times = ()
    end: Times = ()
    ready: Times = ()
    synchronous: Annotated[tuple[Literal[0, 1], ...], msgspec.Meta(max_length=MAX_TRANSFERS)] = ()
    bytes: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TRANSFERS)] = ()
    bounds: Times = ()


class RankSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's measurement: versioned, bounded JSON.

    Attributes:
        iterations: whole iterations within it; all figures are means over these.
        period_s, period_source: see :class:`~crux_torch.measure.iterations.Period`.
        exposed_s, comm_s, bursts: see :class:`timeline.Timeline`.
        flops: FLOPs of an iteration on this rank; None while none were counted.
        flops_given: True if the script gave them; otherwise they were counted.
        device: None on a CPU.
        groups, traffic: collectives of the rank, the payloads summed over the iterations.
        transfers: the newest collectives, by which the leader parts transfer from waiting.
        lost: records that the recorder or the window dropped during the measurement.
    """

    version: Literal[1] = 1
    rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    host: Name
    iterations: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    period_s: NonNegative
    period_source: Literal["fourier", "marks", "both"]
    exposed_s: NonNegative
    comm_s: NonNegative
    bursts: Annotated[tuple[ProfileBurst, ...], msgspec.Meta(min_length=1, max_length=MAX_BURSTS)]
    flops: NonNegative | None = None
    flops_given: bool = msgspec.field(default=False, name="flops_told")
    uncounted_ops: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    device: DeviceUse | None = None
    groups: Annotated[tuple[GroupRow, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    traffic: Annotated[tuple[TrafficRow, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()
    transfers: Transfers = Transfers()
    lost: Annotated[int, msgspec.Meta(ge=0)] = 0

    def to_json(self) -> bytes:
        """The sample as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> RankSample:
        """The sample in ``raw``.

        Raises:
            SampleError: it is too large, of another version, or not such a sample.
        """
        if len(raw) > MAX_SAMPLE_BYTES:
            raise SampleError(f"a sample of {len(raw)} bytes exceeds {MAX_SAMPLE_BYTES}")
        try:
            sample = msgspec.json.decode(raw, type=cls)
        except msgspec.DecodeError as error:
            raise SampleError(f"not a sample: {error}") from None
        *columns, _bounds = msgspec.structs.astuple(sample.transfers)
        if len({len(column) for column in columns}) > 1:
            raise SampleError("the columns of the transfers differ in length")
        named = (*sample.transfers.group, *(row.group for row in sample.traffic))
        if any(group >= len(sample.groups) for group in named):
            raise SampleError("a row names a group that the sample does not list")
        return sample


def summarize(
    records: Records,
    groups: Sequence[GroupInfo],
    *,
    rank: int,
    world_size: int,
    host: str,
    marks_ns: ArrayLike | None = None,
    flops: float | None = None,
    flops_given: bool = False,
    uncounted_ops: Sequence[str] = (),
    device: DeviceUse | None = None,
    lost: int = 0,
) -> RankSample | None:
    """The sample of a window of records.

    Args:
        records: of this rank, in any order; those that failed or are incomplete are left out.
        marks_ns: iteration marks of the host, ascending; those outside the window do no harm.
        rank, world_size, host, flops, flops_given, uncounted_ops, device, lost: see
            :class:`RankSample`.

    Returns:
        None with fewer than ``MIN_ITERATIONS`` whole iterations.
    """
    records = records[records["status"] == STATUSES.index("ok")]
    if not len(records):
        return None
    begin, end = timeline.intervals(records)
    order = np.argsort(begin, kind="stable")
    records, begin, end = records[order], begin[order], end[order]
    reached = timeline.reaches(records)
    size = records["bytes"].astype(np.int64)
    keys = _columns(records, "op", "bytes", "group", "peer")
    kinds = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    marked = iteration_ends(marks_ns, records)
    period = estimate_period(begin, end, size, kinds, marked.ends_ns)
    if period is None:
        return None
    bounds = _bounds(begin, end, size, kinds, marked.ends_ns, period)
    line = timeline.describe(begin, end, size, bounds, reached)
    if line is None or line.iterations < MIN_ITERATIONS:
        return None
    if period.source == "fourier":
        inside = (begin >= bounds[0]) & (begin < bounds[-1])
    else:
        issued = records["issue_ns"]
        inside = (issued >= marked.marks_ns[0]) & (issued < marked.marks_ns[-1])
    rows, table = _traffic(records[inside], groups)
    return RankSample(
        rank=rank,
        world_size=world_size,
        host=host,
        iterations=line.iterations,
        period_s=period.period_s,
        period_source=period.source,
        exposed_s=min(line.exposed_s, period.period_s),
        comm_s=line.comm_s,
        bursts=line.bursts,
        flops=flops,
        flops_given=flops_given,
        uncounted_ops=tuple(uncounted_ops)[:64],
        device=device,
        groups=table,
        traffic=rows,
        transfers=_transfers(records, begin, end, reached, bounds, table, groups),
        lost=lost,
    )


def _columns(records: Records, *names: str) -> Ints:
    return np.stack([records[name].astype(np.int64) for name in names], axis=1)


def _bounds(
    begin: Ints, end: Ints, size: Ints, kinds: Ints, marked_ns: Ints, period: Period
) -> Ints:
    """Ends of the whole iterations within the window: the marked ones if the period is theirs."""
    if period.source != "fourier":
        return marked_ns
    operations = period.operations
    main = heavy(size.astype(float))
    kinds = kinds[main]
    if operations is not None and (kinds[operations:] == kinds[:-operations]).all():
        return timeline.bounds_from_operations(begin[main], end[main], operations)
    return timeline.bounds_from_period(begin, end, period.period_s)


def _traffic(
    inside: Records, groups: Sequence[GroupInfo]
) -> tuple[tuple[TrafficRow, ...], tuple[GroupRow, ...]]:
    """Payload by group, operation and peer, of the operations of whole iterations."""
    keys = _columns(inside, "group", "op", "peer")
    unique, which = np.unique(keys, axis=0, return_inverse=True)
    totals = np.zeros(len(unique), dtype=np.int64)
    np.add.at(totals, which.reshape(-1), inside["bytes"].astype(np.int64))
    table: dict[int, int] = {}
    listed: list[GroupRow] = []
    rows: list[TrafficRow] = []
    for (group, op, peer), total in zip(unique.tolist(), totals.tolist(), strict=True):
        name = OPS[op] if op < len(OPS) else OPS[0]
        info = groups[group] if group < len(groups) else None
        if info is None or name in SILENT_OPS or len(rows) >= MAX_ROWS:
            continue
        if group not in table and len(listed) < MAX_GROUPS:
            table[group] = len(listed)
            listed.append(_group_row(info))
        if group in table:
            rows.append(TrafficRow(table[group], name, peer, total))
    return tuple(rows), tuple(listed)


def _group_row(info: GroupInfo) -> GroupRow:
    ranks = info.ranks
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if ranks and step:
        span = (ranks[0], ranks[-1] + (1 if step > 0 else -1), step)
        if ranks == tuple(range(*span)):
            return GroupRow(info.name, info.my_rank, span)
    return GroupRow(info.name, info.my_rank, None, ranks)


def _transfers(
    records: Records,
    begin: Ints,
    end: Ints,
    reached: timeline.Reaches,
    bounds: Ints,
    table: Sequence[GroupRow],
    groups: Sequence[GroupInfo],
) -> Transfers:
    """The newest whole iterations that fit into ``MAX_TRANSFERS`` rows."""
    names = {row.name: index for index, row in enumerate(table)}
    moves = ~np.isin(records["op"], [OP_NUMBER[op] for op in SILENT_OPS])
    issued = begin[moves]
    counts = len(issued) - np.searchsorted(issued, bounds, "left")
    counts = counts - counts[-1]
    first = int(np.argmax(counts <= MAX_TRANSFERS))
    if first >= len(bounds) - 1:
        return Transfers()
    chosen = np.flatnonzero(moves & (begin >= bounds[first]) & (begin < bounds[-1]))
    origin = int(bounds[first])
    group = []
    for index in chosen:
        number = int(records["group"][index])
        shared = number < len(groups) and records["op"][index] != OP_NUMBER["send"]
        group.append(names.get(groups[number].name, -1) if shared else -1)
    return Transfers(
        group=tuple(group),
        sequence=tuple(records["sequence"][chosen].tolist()),
        begin=tuple((begin[chosen] - origin).tolist()),
        end=tuple((end[chosen] - origin).tolist()),
        ready=tuple((reached.ready_ns[chosen] - origin).tolist()),
        synchronous=tuple(reached.synchronous[chosen].astype(int).tolist()),
        bytes=tuple(records["bytes"][chosen].tolist()),
        bounds=tuple((bounds[first:] - origin).tolist()[:MAX_TRANSFERS]),
    )
