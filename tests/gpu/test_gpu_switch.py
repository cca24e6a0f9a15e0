"""Training goes on, to the last bit, while the connections below it are made anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rig.job import ATTACHED, STOCK, Job
from rig.kind import LEGACY, OLD_TORCH, Kind
from rig.outcome import VALUE
from rig.part import ALONE, PAIR
from rig.report import Report

#: Switches, by kind and ranks, and the seconds that there are for them: how long making NCCL's
#: communicators takes is for the device to say.
SWITCHES = {("cuda", 1): 200, ("cuda", 2): 40, ("rig", 1): 40, ("rig", 2): 100}
SECONDS = {("cuda", 1): 6, ("cuda", 2): 12, ("rig", 1): 120, ("rig", 2): 120}
#: Without so many the test says nothing.
LEAST = 3
#: One variable for as many as that, however long they take.
MORE = "CRUX_GPU_SWITCHES"


#: glibc overwrites what is freed, so that nobody reads it unnoticed.
OVERWRITE = {"MALLOC_PERTURB_": "165"}


def _values(job: Job, folder: Path) -> list[Any]:
    (outcomes,) = job.run(folder).values()
    for outcome in outcomes:
        assert outcome.kind == VALUE, outcome.value
    return [outcome.value for outcome in outcomes]


def _run(kind: Kind, mode: str, size: int, folder: Path, **arguments: float) -> list[Any]:
    folder.mkdir()
    given = {"switches": 0, "steps": 0, "store": folder / "requests"} | arguments
    limit_s = max(600.0, 2.0 * given["switches"])
    job = Job(
        kind,
        mode,
        size,
        ("training_while_switching",),
        # On the rig, both of torch's classes for NCCL, and communicators that are split.
        eager=not kind.is_gpu and size == PAIR and not OLD_TORCH,
        env=LEGACY if size == ALONE and not kind.is_gpu else {},
        limit_s=limit_s,
        budget_s=limit_s + 60.0,
        arguments={name: str(value) for name, value in given.items()},
    )
    return _values(job, folder / "job")


def test_a_handle_can_be_waited_for_after_its_connections_are_gone(
    size: int, kind: Kind, tmp_path: Path
) -> None:
    part = ("handle_that_outlives_a_switch",)
    for mine, before in _values(Job(kind, ATTACHED, size, part, env=OVERWRITE), tmp_path / "job"):
        assert mine == before


def test_losses_are_the_same_with_switches(
    size: int, kind: Kind, report: Report, tmp_path: Path
) -> None:
    more = os.environ.get(MORE)
    wanted = int(more) if more else SWITCHES[kind.name, size]
    seconds = float("inf") if more else SECONDS[kind.name, size]
    switched = _run(kind, ATTACHED, size, tmp_path / "switched", switches=wanted, seconds=seconds)
    steps = switched[0]["steps"]
    figures = ("requested", "switched", "steps")
    report.figure(
        f"switches, {size} ranks",
        {"wanted": wanted, "s": seconds} | {name: switched[0][name] for name in figures},
    )
    for rank in switched:
        assert rank["errors"] == []
        assert rank["switched"] == rank["requested"]
        assert rank["requested"] >= min(LEAST, wanted)
    stock = _run(kind, STOCK, size, tmp_path / "stock", steps=steps)
    for mine, theirs in zip(switched, stock, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["weights"] == theirs["weights"]
