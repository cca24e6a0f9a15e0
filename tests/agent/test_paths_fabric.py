"""Two real jobs that a hash put on one spine, moved apart by their own leaders while they train."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import netns
from lab.paths import PathStudy, Study, fabric_of, most_on_one
from lab.twins import Workload

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.full, pytest.mark.skipif(not _OK, reason=_REASON)]

TINY = ("--accelerator-ms", "30", "--width", "96", "--batch", "4")
QUICK = {
    "CRUX_PROFILE_S": "4",
    "CRUX_LEASE_S": "3",
    "CRUX_TUNING": "tick_s=0.05,profile_iterations=8,plan_valid_s=6",
}
STUDY = Study(
    "test",
    (Workload("A", "mlp", TINY), Workload("B", "mlp", (*TINY, "--seed", "1"))),
    rate_mbit=200.0,
    settings=QUICK,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PathStudy]:
    folder: Path = tmp_path_factory.mktemp("paths")
    with fabric_of(STUDY) as fabric:
        study = PathStudy(STUDY, fabric, folder, lambda *_: None)
        try:
            study.start()
            study.collide()
            study.separate()
            study.compare(steps=10, rounds=1)
            study.count()
            deadline = time.monotonic() + 30
            while not all(_verified(job) for job in study.status["jobs"]):
                assert time.monotonic() < deadline, study.status["jobs"]
                time.sleep(0.1)
            study.finish()
            yield study
        finally:
            study.close()


def _verified(job: dict) -> bool:
    paths = job["paths"]
    return bool(paths and paths["as_planned"] == sum(paths.values()) >= 2)


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_the_jobs_collided_and_the_plan_parts_them(played: PathStudy) -> None:
    spines = played.seen.spines
    assert most_on_one(spines["together"]) == most_on_one(spines["before"]) == 2
    assert set(spines["crux"].values()) == {0, 1}
    plan = {
        entry["job"]: {router for _, _, hops in entry["paths"] for _, _, router in hops}
        for entry in played.seen.status["plan"]["entries"]
    }
    assert plan == {name: {f"spine{spine}"} for name, spine in spines["crux"].items()}


def test_the_spines_counters_say_the_same(played: PathStudy) -> None:
    for name, counted in played.seen.counted.items():
        mine = played.seen.spines["crux"][name]
        # The jobs' leaders talk over the network too, but little.
        assert counted[mine] > 0.9 * sum(counted.values()) > 0
    together, crux = (played.seen.bytes[case] for case in ("together", "crux"))
    assert max(together.values()) > 0.9 * sum(together.values())
    assert min(crux.values()) > 0.2 * sum(crux.values())


@pytest.mark.parametrize("name", ["A", "B"])
def test_losses_are_those_of_the_run_without_crux(played: PathStudy, name: str) -> None:
    equal, compared = played.seen.losses_equal(name)
    assert equal
    assert compared > 20


def test_every_connection_was_seen_on_its_planned_path(played: PathStudy) -> None:
    for job in played.seen.status["jobs"]:
        assert _verified(job)
