"""When the iterations that the host has marked end on the device, which may be far behind."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from crux_torch.measure.record import Flag, Records

Ints = NDArray[np.int64]

#: The host is in step with a device that comes to every operation within this share of an
#: iteration from its issue, and has none left at a mark.
IN_STEP = 0.05
#: Iterations in which a group is used, and more than half of those up to then: it is in steady use.
MIN_USES = 3
#: What ended so long before the last that is known has been reported: watchdogs look every second.
REPORT_NS = 2 * 10**9
LATEST = np.iinfo(np.int64).max


class IterationEnds(NamedTuple):
    """The ends of the iterations within a window, as the host and as the device see them."""

    marks_ns: Ints  #: When the host had issued an iteration: these part operations by their issue.
    ends_ns: Ints  #: When the device was done with it: these part the times of operations.


def iteration_ends(marks_ns: ArrayLike | None, records: Records) -> IterationEnds:
    """The ends of the iterations between which no record is missing.

    On a device an iteration ends with the last of its operations there (docs/recorder.md). Marks
    stand for themselves where the host is in step with the device, as it always is on a CPU, and
    where no device has told its times.

    Args:
        marks_ns: when the host came to the end of each iteration, ascending.
        records: in any order.

    Returns:
        As many marks as ends, both ascending, the ends strictly. Iterations without an operation
        share the time between those around them equally.
    """
    marks = np.asarray([] if marks_ns is None else marks_ns, dtype=np.int64)
    # Those that have a record before and one after: no record is missing between two.
    issued = records["issue_ns"].astype(np.int64)
    marks = marks[(marks >= issued.min(initial=LATEST)) & (marks <= issued.max(initial=0))]
    # Placed on a device's clock from begin to end.
    placed = (records["flags"] & Flag.DEVICE_CLOCK) != 0
    timed = records[placed & (records["device_ns"] >= 0) & (records["end_ns"] >= 0)]
    timed = timed[np.argsort(timed["issue_ns"], kind="stable")]
    marks = marks[marks <= _complete_until(marks, timed)]
    issued = timed["issue_ns"].astype(np.int64)
    before = np.searchsorted(issued, marks, "left")
    done = np.concatenate(([0], np.maximum.accumulate(timed["end_ns"].astype(np.int64))))[before]
    told = np.flatnonzero(np.diff(done, prepend=0) > 0)
    if len(told) < 2:
        return IterationEnds(marks, marks)
    # What lies outside the told has no operation on both sides to be placed by.
    within = np.arange(told[0], told[-1] + 1)
    ends = np.round(np.interp(within, told, done[told])).astype(np.int64)
    behind = (timed["start_ns"] - issued)[before[told[0]] : before[told[-1]]].max()
    if behind <= IN_STEP * float(np.median(np.diff(ends))) and (done[told] <= marks[told]).all():
        return IterationEnds(marks, marks)
    return IterationEnds(marks[within], ends)


def _complete_until(marks_ns: Ints, timed: Records) -> float:
    """The issue up to which no group's operations are missing, as far as groups are in steady use.

    A device's operations are recorded once they are known to have ended, each group's in order, but
    one group's behind another's.
    """
    until = float("inf")
    reported_ns = int(timed["end_ns"].max(initial=0)) - REPORT_NS
    for group in np.unique(timed["group"]):
        own = timed[timed["group"] == group]
        used = np.unique(np.searchsorted(marks_ns, own["issue_ns"], "right"))
        steady = len(used) >= MIN_USES and 2 * len(used) > used[-1]
        if steady and own["end_ns"].max() > reported_ns:
            until = min(until, float(own["issue_ns"][-1]))
    return until
