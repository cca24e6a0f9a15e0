"""Communication and computation of one rank over its iterations."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crux_torch.measure.profile import MAX_BURSTS, ProfileBurst
from crux_torch.measure.records import Flag, Records

Ints = NDArray[np.int64]

#: Quiet shorter than this share of the period does not part two bursts.
BURST_GAP = 0.02


@dataclass(frozen=True, slots=True)
class Timeline:
    """An iteration: means over the iterations of a window.

    Attributes:
        comm_s: seconds with a collective in flight; ``comm_median_s`` is the median iteration's.
        exposed_s: seconds in which computation waits for communication.
        bursts: where in the compute the bursts start, their shares of the bytes, and the shortest
            time that each took in an iteration in which it waited for nobody.
    """

    iterations: int
    comm_s: float
    comm_median_s: float
    exposed_s: float
    bursts: tuple[ProfileBurst, ...]


@dataclass(frozen=True, slots=True)
class Reaches:
    """Time at which computation came to each collective, and its waiting there.

    Attributes:
        ready_ns: when all that precedes it on this rank was done: its issue or, on a device, when
            the stream that it was issued on came to it.
        synchronous: True if that stream, or the caller, waits from there to its end.
    """

    ready_ns: Ints
    synchronous: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Stretches:
    """Maximal stretches of time with a collective in flight.

    Attributes:
        begin_ns, end_ns: the stretches, ascending.
        wait_ns: from there to the end of each, computation waits.
        first: index of each one's first interval, in ascending order of begin.
        queue_ns: where the queue begins that each is part of: collectives to which computation came
            before the one in front had ended.
    """

    begin_ns: Ints
    end_ns: Ints
    wait_ns: Ints
    first: Ints
    queue_ns: Ints


def intervals(records: Records) -> tuple[Ints, Ints]:
    """(Begin, end) of each record's flight: by the device's clock where it is known."""
    timed = records["device_ns"] >= 0
    begin = np.where(timed, records["end_ns"] - records["device_ns"], records["start_ns"])
    # A record without an end counts with its bytes alone.
    ended = records["end_ns"] >= 0
    unknown = _unknown_end_ns(records)
    end = np.where(ended, records["end_ns"], unknown)
    begin = np.where(ended, begin, unknown)
    return begin.astype(np.int64), end.astype(np.int64)


def reaches(records: Records) -> Reaches:
    """Times at which computation came to each record's collective."""
    known = (records["start_ns"] >= 0) & (records["end_ns"] >= 0)
    ready = np.where(known, records["start_ns"], _unknown_end_ns(records))
    return Reaches(ready.astype(np.int64), (records["flags"] & Flag.SYNCHRONOUS) != 0)


def _unknown_end_ns(records: Records) -> Ints:
    """Time at which each record counts if its end is not known: that of its issue.

    On a device, which may be far behind: the time it came to it or, if that is not known either,
    the time at which everything issued before it was done.
    """
    issue = records["issue_ns"].astype(np.int64)
    clocked = (records["flags"] & Flag.DEVICE_CLOCK) != 0
    order = np.argsort(issue, kind="stable")
    done = np.where(clocked & (records["end_ns"] >= 0), records["end_ns"], issue)
    behind = np.empty_like(issue)
    behind[order] = np.maximum.accumulate(done[order])
    on_device = np.where(clocked, records["start_ns"], behind)
    return np.where(records["device"] != 0, on_device, issue).astype(np.int64)


def stretches(begin_ns: Ints, end_ns: Ints, ready_ns: Ints) -> Stretches:
    """The union of intervals that are sorted by their begin.

    Records do not tell when a job waits for an asynchronous collective, so a rule stands in for it:
    within a queue, computation goes on until it comes to the last collective, and waits from there
    to the queue's end. docs/understand/measuring.md says how far that is right.
    """
    if not len(begin_ns):
        return Stretches(*(np.zeros(0, dtype=np.int64) for _ in range(5)))
    reach = np.maximum.accumulate(end_ns)
    opens = np.concatenate(([True], begin_ns[1:] >= reach[:-1]))
    first = np.flatnonzero(opens)
    last = np.concatenate((first[1:], [len(begin_ns)])) - 1
    begin, end = begin_ns[first], reach[last]
    heads = np.concatenate(([True], ready_ns[first[1:]] >= end[:-1]))
    queue = np.cumsum(heads) - 1
    wait = np.maximum.reduceat(np.maximum.reduceat(ready_ns, first), np.flatnonzero(heads))[queue]
    return Stretches(begin, end, np.clip(wait, begin, end), first, begin[heads][queue])


def exposed(spans: Stretches, end_ns: Ints, reached: Reaches) -> tuple[Ints, Ints]:
    """Disjoint ascending intervals in which computation waits while a collective is in flight.

    These are the ends of the queues, and within them synchronous calls, from where computation came
    to them, whatever else is in flight.
    """
    begin, end = spans.wait_ns, spans.end_ns
    if not reached.synchronous.any():
        return begin, end
    sizes = np.diff(np.append(spans.first, len(end_ns)))
    came = np.maximum(reached.ready_ns, np.repeat(spans.queue_ns, sizes))
    own = reached.synchronous & (end_ns > came)
    begin, end = np.concatenate((begin, came[own])), np.concatenate((end, end_ns[own]))
    cuts = np.unique(np.concatenate((begin, end, spans.begin_ns, spans.end_ns)))[:-1]

    def open_at_cuts(begin: Ints, end: Ints) -> NDArray[np.bool_]:
        begun, ended = (np.searchsorted(np.sort(ns), cuts, "right") for ns in (begin, end))
        return np.asarray(begun > ended)

    pieces = np.flatnonzero(open_at_cuts(begin, end) & open_at_cuts(spans.begin_ns, spans.end_ns))
    ends = np.append(cuts[1:], spans.end_ns[-1])
    return cuts[pieces], ends[pieces]


def bounds_from_operations(begin_ns: Ints, end_ns: Ints, operations: int) -> Ints:
    """Iteration bounds without marks: after every ``operations`` collectives.

    The iteration is taken to begin where the longest quiet of the pattern does: when the last
    transfer of the iteration before has ended.
    """
    reach = np.maximum.accumulate(end_ns)
    quiet = begin_ns[1:] - reach[:-1]
    phases = [float(np.median(quiet[phase::operations])) for phase in range(operations)]
    return reach[int(np.argmax(phases)) :: operations].astype(np.int64)


def bounds_from_period(begin_ns: Ints, end_ns: Ints, period_s: float) -> Ints:
    """Iteration bounds from the period alone: a grid from the longest quiet on."""
    if len(begin_ns) < 2:
        return np.zeros(0, dtype=np.int64)
    reach = np.maximum.accumulate(end_ns)
    anchor = int(reach[int(np.argmax(begin_ns[1:] - reach[:-1]))])
    period_ns = period_s * 1e9
    before = int((anchor - begin_ns[0]) // period_ns)
    after = int((reach[-1] - anchor) // period_ns)
    return anchor + np.round(np.arange(-before, after + 1) * period_ns).astype(np.int64)


def describe(
    begin_ns: Ints,
    end_ns: Ints,
    bytes: Ints,
    bounds_ns: Ints,
    reached: Reaches,
    transfers: NDArray[np.bool_] | None = None,
) -> Timeline | None:
    """The timeline of the iterations between ``bounds_ns``; None without a whole one.

    Args:
        begin_ns, end_ns, bytes, reached: of each collective, ascending in ``begin_ns``.
        bounds_ns: ascending ends of iterations, one more than there are iterations.
        transfers: for each collective, True if it waits for nobody while it is in flight; None:
            that is not known of any.
    """
    if len(bounds_ns) < 2:
        return None
    spans = stretches(begin_ns, end_ns, reached.ready_ns)
    waits = exposed(spans, end_ns, reached)
    comm = _within(spans.begin_ns, spans.end_ns, bounds_ns)
    return Timeline(
        iterations=len(bounds_ns) - 1,
        comm_s=float(comm.mean()) / 1e9,
        comm_median_s=float(np.median(comm)) / 1e9,
        exposed_s=float(_within(*waits, bounds_ns).mean()) / 1e9,
        bursts=_bursts(
            spans,
            waits,
            bytes,
            bounds_ns,
            np.zeros(len(bytes), bool) if transfers is None else transfers,
        ),
    )


def _within(begin_ns: Ints, end_ns: Ints, bounds_ns: Ints) -> NDArray[np.float64]:
    """Length of disjoint ascending intervals inside each iteration."""
    return np.diff(_covered(begin_ns, end_ns, bounds_ns))


def _covered(begin_ns: Ints, end_ns: Ints, until_ns: Ints) -> NDArray[np.float64]:
    """Length of disjoint ascending intervals before each of some times."""
    edges = np.stack((begin_ns, end_ns), axis=1).ravel().astype(float)
    covered = np.stack((np.zeros(len(begin_ns)), (end_ns - begin_ns).astype(float)), axis=1)
    if not len(edges):
        return np.zeros(len(until_ns))
    base = np.concatenate(([0.0], np.cumsum(covered[:, 1])[:-1]))
    total = (covered + base[:, None]).ravel()
    lengths: NDArray[np.float64] = np.interp(until_ns.astype(float), edges, total)
    return lengths


def _bursts(
    spans: Stretches,
    waits: tuple[Ints, Ints],
    bytes: Ints,
    bounds_ns: Ints,
    transfers: NDArray[np.bool_],
) -> tuple[ProfileBurst, ...]:
    """The bursts of an iteration, means over the iterations with the usual number of them."""
    period_ns = float(bounds_ns[-1] - bounds_ns[0]) / (len(bounds_ns) - 1)
    if not len(spans.first):
        return (ProfileBurst(1.0, 1.0),)
    carried = np.add.reduceat(bytes.astype(float), spans.first)
    moving = np.logical_and.reduceat(transfers, spans.first)
    waited = _covered(*waits, spans.end_ns) - _covered(*waits, spans.begin_ns)
    found: list[list[tuple[float, float, float]]] = []
    for begin, end in itertools.pairwise(bounds_ns.tolist()):
        inside = np.flatnonzero((spans.begin_ns >= begin) & (spans.begin_ns < end))
        found.append(_bursts_in_one(spans, waited, carried, moving, inside, begin, period_ns))
    numbers = np.array([len(bursts) for bursts in found])
    numbers = numbers[numbers > 0]
    if not len(numbers):
        return (ProfileBurst(1.0, 1.0),)
    usual = int(np.bincount(numbers).argmax())
    kept = np.array([bursts for bursts in found if len(bursts) == usual])
    elapsed, shares = kept[:, :, :2].mean(axis=0).T
    shortest_ns = kept[:, :, 2].min(axis=0)
    least_s = np.where(np.isfinite(shortest_ns), shortest_ns, 0.0) / 1e9
    compute_ns = max(1.0, period_ns - _within(*waits, bounds_ns).mean())
    at = np.clip(elapsed / compute_ns, 0.0, 1.0)
    total = shares.sum()
    shares = np.minimum(shares / total if total > 0 else np.full(usual, 1.0 / usual), 1.0)
    return tuple(map(ProfileBurst, at.tolist(), shares.tolist(), least_s.tolist()))


def _bursts_in_one(
    spans: Stretches,
    waited: NDArray[np.float64],
    carried: NDArray[np.float64],
    moving: NDArray[np.bool_],
    inside: NDArray[np.int64],
    begin_ns: int,
    period_ns: float,
) -> list[tuple[float, float, float]]:
    """(compute done before it in ns, bytes, duration in ns) of each burst of one iteration.

    The duration is infinite unless all of its stretches were ``moving`` data.
    """
    if not len(inside):
        return []
    quiet = spans.begin_ns[inside[1:]] - spans.end_ns[inside[:-1]]
    gap = BURST_GAP * period_ns
    if len(quiet) >= MAX_BURSTS:
        gap = max(gap, float(np.sort(quiet)[-(MAX_BURSTS - 1)]))
    parts = np.split(inside, np.flatnonzero(quiet > gap) + 1)
    bursts, idle_ns = [], 0.0
    for part in parts:
        computed_ns = float(spans.begin_ns[part[0]] - begin_ns) - idle_ns
        lasted_ns = float(spans.end_ns[part[-1]] - spans.begin_ns[part[0]])
        lasted_ns = lasted_ns if moving[part].all() else math.inf
        bursts.append((computed_ns, float(carried[part].sum()), lasted_ns))
        idle_ns += float(waited[part].sum())
    return bursts
