"""Switches of NCCL's communicators that meet faults, on the rig: training as on the stock backend.

Each fault of :mod:`rig.faults` meets a switch on one of two ranks, and the switch after it, without
a fault, has to succeed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cuda_rig
import pytest
from rig import faults
from rig.job import ATTACHED, STOCK, Job
from rig.kind import LEGACY, OLD_TORCH
from rig.kind import rig as the_rig
from rig.outcome import DIED, ERROR, VALUE, Outcome
from rig.part import PAIR

_ok, _why_not = cuda_rig.available()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _ok, reason=_why_not),
    pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 has ProcessGroupNCCL alone"),
]
#: torch's classes, by the variables that choose them.
NCCL2: dict[str, str] = {}
FLAVOURS = {"nccl2": NCCL2, "legacy": LEGACY}

#: Switches with a fault that the long run draws, and its seed.
RUNS = int(os.environ.get("CRUX_FAULT_RUNS", "45"))
SEED = int(os.environ.get("CRUX_FAULT_SEED", "8"))
FEW = 4
#: Faults of one job with ProcessGroupNCCL, each kind once, and such jobs.
ROUND = len(faults.KEEPS) + len(faults.SWITCHES)
ROUNDS = int(os.environ.get("CRUX_FAULT_ROUNDS", "1"))
#: A switch waits for other ranks' start, for what they made, and for the counts.
BOUND_S = 2.5 * faults.PATIENCE_S + 10.0
#: A communicator is aborted after its part of the patience; beside that, a busy machine.
MAKING_S = faults.PATIENCE_S / 4
GIVEN_UP_S = MAKING_S + 20.0
#: Operations wait for a switch no longer; beside that, a busy machine.
HELD_MS = 1e3 * faults.PATIENCE_S + 5e3
#: The watchdog would first wait for every rank to write down what it did last. Where it aborts,
#: Python's fault handler reads the stacks of threads that still run, which can crash in its turn.
NO_DUMP = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
    "PYTHONFAULTHANDLER": "",
}


def trained(
    flavour: str, mode: str, folder: Path, limit_s: float, **arguments: Any
) -> list[Outcome]:
    cuda_rig.build()
    folder.mkdir()
    given = {"switches": 0, "steps": 0, "seconds": limit_s, "store": folder / "requests"}
    job = Job(
        the_rig(),
        mode,
        PAIR,
        ("training_while_switching",),
        eager=True,
        env=NO_DUMP | FLAVOURS[flavour],
        limit_s=limit_s,
        budget_s=limit_s + 60.0,
        arguments={name: str(value) for name, value in (given | arguments).items()},
    )
    (outcomes,) = job.run(folder / "job").values()
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    for outcome in outcomes:
        assert outcome.kind == VALUE, outcome.value
    return [outcome.value for outcome in outcomes]


def check(met: dict[str, Any], flavour: str) -> None:
    """One switch as one rank saw it."""
    assert met["switched"] == (met["fault"] not in faults.KEEPS), met
    assert bool(met["error"]) == (not met["switched"]), met
    assert met["seconds"] < BOUND_S, met
    assert met["held_ms"] < HELD_MS, met
    assert all(seconds < GIVEN_UP_S for seconds in met["given_up_s"]), met
    # ProcessGroupNCCL can't be aborted while it makes a communicator: its thread is left behind.
    assert met["given_up_s"] or met["fault"] != faults.HANGS or flavour == "legacy", met


def limit_s_of(runs: int) -> float:
    """Seconds that a job with so many faults may take on a loaded machine."""
    return 300.0 + 6.0 * runs


LONG = (
    pytest.mark.full,
    pytest.mark.timeout(3 * limit_s_of(RUNS)),
    pytest.mark.xdist_group("switch faults"),
)


@pytest.mark.parametrize("runs", [FEW, pytest.param(RUNS, marks=LONG)])
def test_faults_in_switches_change_no_loss(runs: int, tmp_path: Path) -> None:
    train_with_faults(runs, "nccl2", SEED, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(ROUNDS * 3 * limit_s_of(ROUND))
@pytest.mark.xdist_group("switch faults of the legacy class")
def test_faults_in_switches_of_the_legacy_class_change_no_loss(tmp_path: Path) -> None:
    """In a job for each round of kinds: what hung inits leave behind would fill the memory."""
    for n in range(ROUNDS):
        folder = tmp_path / str(n)
        folder.mkdir()
        train_with_faults(ROUND, "legacy", SEED + n, folder)


def train_with_faults(runs: int, flavour: str, seed: int, tmp_path: Path) -> None:
    """Train with so many faulty switches, and as stock does."""
    limit_s = limit_s_of(runs)
    switched = values(
        trained(flavour, ATTACHED, tmp_path / "switched", limit_s, switches=2 * runs, seed=seed)
    )
    for rank, found in enumerate(switched):
        assert len(found["faults"]) == 2 * runs
        for number, met in enumerate(found["faults"], 1):
            try:
                check(met, flavour)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, switch {number}, rank {rank}") from error
    stock = values(trained(flavour, STOCK, tmp_path / "stock", limit_s, steps=switched[0]["steps"]))
    for mine, theirs in zip(switched, stock, strict=True):
        assert mine["losses"] == theirs["losses"], f"seed {seed}"
        assert mine["weights"] == theirs["weights"], f"seed {seed}"


@pytest.fixture(scope="module", params=FLAVOURS)
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """One of torch's classes, and how a rank of stock NCCL ends there when the other one dies."""
    flavour = str(request.param)
    folder = tmp_path_factory.mktemp("killed") / "stock"
    survivor, dead = trained(flavour, STOCK, folder, 120.0, steps=1000, dies_at=30)
    assert "code -9" in dead.value
    assert survivor.kind == DIED, survivor
    code = str(survivor.value).partition(": ")[0].rpartition(" ")[2]
    assert code != "-9", "nothing but the test ended it"
    return flavour, code


@pytest.mark.full
@pytest.mark.parametrize("phase", faults.PHASES)
def test_a_rank_that_dies_in_a_switch_ends_the_other_as_without(
    phase: str, killed: tuple[str, str], tmp_path: Path
) -> None:
    flavour, code = killed
    survivor, dead = trained(
        flavour, ATTACHED, tmp_path / "job", 120.0, switches=1000, dies_in=phase
    )
    assert "code -9" in dead.value
    # NCCL may tell the script of it before torch's watchdog ends the process.
    told = survivor.kind == ERROR and "remote process exited" in survivor.value
    assert told or (survivor.kind == DIED and f"code {code}:" in survivor.value), survivor
