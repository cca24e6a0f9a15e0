"""Training in real processes, with connections switched all the while: the same to the last bit."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from rig.job import ATTACHED, STOCK, Job
from rig.kind import gloo
from rig.outcome import VALUE, Outcome
from rig.part import PAIR

pytestmark = pytest.mark.slow

PART = "training_while_switching"
#: Seconds that one run may take on a loaded machine.
LIMIT_S = 600.0


def run(mode: str, size: int, folder: Path, **given: Any) -> list[Outcome]:
    folder.mkdir()
    given = {"switches": 0, "steps": 0, "seconds": LIMIT_S, "store": folder / "requests"} | given
    arguments = {name: str(value) for name, value in given.items()}
    job = Job(gloo(), mode, size, (PART,), limit_s=LIMIT_S, budget_s=LIMIT_S, arguments=arguments)
    return job.run(folder / "job")[PART]


def values(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    for outcome in outcomes:
        assert outcome.kind == VALUE, outcome.value
    return [outcome.value for outcome in outcomes]


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("model", "size", "switches"), [("ddp", 2, 200), ("ddp", 4, 40), ("fsdp2", 2, 60)]
)
def test_training_is_the_same_with_and_without_switches(
    model: str, size: int, switches: int, tmp_path: Path
) -> None:
    switched = values(run(ATTACHED, size, tmp_path / "a", switches=switches, model=model))
    steps = switched[0]["steps"]
    stock = values(run(STOCK, size, tmp_path / "b", steps=steps, model=model))
    for with_switches, without in zip(switched, stock, strict=True):
        assert with_switches["losses"] == without["losses"]
        assert with_switches["weights"] == without["weights"]
        assert with_switches["errors"] == []
        assert with_switches["switched"] == with_switches["requested"] == switches
        leaks_nothing(with_switches["resources"], with_switches["settled"])


def leaks_nothing(seen: list[dict[str, int]], settled: dict[str, int]) -> None:
    """Compares the second half with the first: what grows goes on growing, and does not go back."""
    half = len(seen) // 2
    early, late = seen[half // 2 : half], seen[-(half - half // 2) :]
    for what in ("fds", "threads"):
        # Connections of one switch may be open while the next is counted.
        at_first = statistics.median(s[what] for s in early)
        at_last = min(statistics.median(s[what] for s in late), settled[what])
        assert at_last <= at_first + 4, (what, seen, settled)
    grown = statistics.median(s["rss_bytes"] for s in late) - statistics.median(
        s["rss_bytes"] for s in early
    )
    # Sampled switches apart; the allocator's noise is below this, an inner backend's leak is not.
    assert grown / len(late) < 256 << 10, f"{grown / len(late):.0f} bytes a switch"


def test_a_rank_that_dies_in_a_switch_ends_the_others_as_without(tmp_path: Path) -> None:
    survivor, dead = run(ATTACHED, PAIR, tmp_path / "job", switches=100_000, dies_at=30)
    assert "code -9" in dead.value
    assert survivor.kind != VALUE
    assert re.search("(Runtime|DistBackend|DistNetwork)Error", survivor.value), survivor.value
