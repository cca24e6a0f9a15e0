"""Recorded device durations against events around the same operations."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rig.job import ATTACHED, Job
from rig.kind import Kind
from rig.outcome import VALUE
from rig.part import ALONE
from rig.report import Report

#: How far the median ratio of recorded to true may be from 1. The rig keeps time with
#: threads of a machine that other tests use.
TOLERANCE = {"cuda": 0.02, "rig": 0.25}
#: Payloads in bytes, by kind and ranks: such that an operation takes milliseconds.
SIZES = {
    ("cuda", 1): (1 << 30, 4 << 30),
    ("cuda", 2): (4 << 20, 32 << 20),
    ("rig", 1): (64 << 20,),
    ("rig", 2): (4 << 20, 16 << 20),
}
#: The agent leaves the records in the ring for the test to read, and every operation is timed.
LEAVE_RECORDS = {"CRUX_TUNING": "tick_s=3600,timing=always"}


def _values(job: Job, folder: Path) -> list[Any]:
    found = []
    (outcomes,) = job.run(folder).values()
    for outcome in outcomes:
        assert outcome.kind == VALUE, outcome.value
        found.append(outcome.value)
    return found


def test_durations_are_those_of_events(
    size: int, kind: Kind, report: Report, tmp_path: Path
) -> None:
    sizes = SIZES[kind.name, size]
    job = Job(
        kind,
        ATTACHED,
        size,
        ("durations",),
        limit_s=300.0,
        arguments={"sizes": ",".join(map(str, sizes))},
        env=LEAVE_RECORDS,
    )
    ranks = _values(job, tmp_path / "job")
    rows = []
    for rank, truth in enumerate(ranks):
        for which, pairs in truth.items():
            how, _, nbytes = which.partition(" ")
            ratios = [recorded / true for recorded, true in pairs]
            low, median, high = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "rank": rank,
                    "issued": how,
                    "bytes": int(nbytes),
                    "true_ms": statistics.median(true for _, true in pairs) / 1e6,
                    "recorded_to_true": median,
                    "quartiles": [low, high],
                    "operations": len(pairs),
                }
            )
    report.figure(f"durations, {size} ranks", rows)
    for row in rows:
        assert abs(row["recorded_to_true"] - 1) <= TOLERANCE[kind.name], row


def test_operations_of_one_communicator_are_recorded_one_after_another(
    kind: Kind, report: Report, tmp_path: Path
) -> None:
    nbytes = SIZES[kind.name, ALONE][0]
    job = Job(
        kind,
        ATTACHED,
        ALONE,
        ("overlap",),
        limit_s=300.0,
        arguments={"nbytes": str(nbytes)},
        env=LEAVE_RECORDS,
    )
    (found,) = _values(job, tmp_path / "job")
    report.figure("a queue of operations", found)
    assert found["overlapping_ns"] <= 0.01 * found["true_ns"], found
    assert abs(found["busy_ns"] / found["true_ns"] - 1) <= 5 * TOLERANCE[kind.name], found
