"""Training goes on, to the last bit, while the connections below it are made anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rig.job import ATTACHED, STOCK, Job
from rig.kind import Kind
from rig.outcome import VALUE
from rig.report import Report

#: Switches, by kind and ranks. A pair's communicators are made by ranks that share one GPU.
SWITCHES = {("cuda", 1): 200, ("cuda", 2): 20, ("fake", 1): 40, ("fake", 2): 100}
#: One variable for a longer run than a suite has time for.
MORE = "CRUX_GPU_SWITCHES"


def _run(kind: Kind, mode: str, size: int, folder: Path, switches: int, steps: int) -> list[Any]:
    folder.mkdir()
    arguments = {"switches": str(switches), "steps": str(steps), "store": str(folder / "requests")}
    job = Job(
        kind,
        mode,
        size,
        ("training_while_switching",),
        limit_s=max(120.0, 2.0 * switches),
        arguments=arguments,
    )
    (outcomes,) = job.run(folder / "job").values()
    for outcome in outcomes:
        assert outcome.kind == VALUE, outcome.value
    return [outcome.value for outcome in outcomes]


def test_losses_are_the_same_with_switches(
    size: int, kind: Kind, report: Report, tmp_path: Path
) -> None:
    switches = int(os.environ.get(MORE, SWITCHES[kind.name, size]))
    switched = _run(kind, ATTACHED, size, tmp_path / "switched", switches, 0)
    steps = switched[0]["steps"]
    report.figure(
        f"switches, {size} ranks",
        {"wanted": switches, "switched": switched[0]["switched"], "steps": steps},
    )
    for rank in switched:
        assert rank["errors"] == []
        assert rank["switched"] == switches
    stock = _run(kind, STOCK, size, tmp_path / "stock", 0, steps)
    for mine, theirs in zip(switched, stock, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["weights"] == theirs["weights"]
