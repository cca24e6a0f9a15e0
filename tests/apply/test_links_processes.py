"""Two jobs under cruxrun that cross one named link: the lower one gives way to the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dscp_maps import MARKED_ENV
from loopback import free_port
from training_job import Job

from crux_torch.own_folders import usable_folder

pytestmark = pytest.mark.slow

CLUSTER = f"links-{os.getpid()}"
BOUND_S = 240.0
ENV = {
    **MARKED_ENV,
    "CRUX_CLUSTER": CLUSTER,
    "CRUX_LINKS": "loop",
    "CRUX_PROFILE_S": "2",
    "CRUX_TUNING": "start_s=0.1,tick_s=0.05,profile_iterations=4,link_wait_ms=5000",
    # The default policy gives two levels only where it expects a gain.
    "CRUX_POLICY": "crux-paper",
}


def statuses(job: Job) -> list[dict[str, Any]]:
    """The newest status of each rank whose agent has told one."""
    return [status for status in map(job.status, (0, 1)) if "links" in status]


def links(job: Job) -> list[dict[str, Any]]:
    return [rank["links"] for rank in statuses(job)]


def waited(job: Job) -> int:
    return sum(rank["waits"]["operations"] for rank in links(job))


def level(job: Job) -> int:
    return links(job)[0]["level"]


def planned(job: Job) -> bool:
    """Whether every rank has a level from a plan and looks at the link."""
    ranks = statuses(job)
    return len(ranks) == 2 and all(
        rank["links"]["active"]
        and rank["plan"] is not None
        and not rank["order"]["measuring"]
        and rank["links"]["level"] == rank["plan"]["level"]
        for rank in ranks
    )


def tables() -> list[Path]:
    """The files of this test's links."""
    return list(usable_folder().glob(f"{CLUSTER}~*"))


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    """A job that communicates all the time, and one that rests in between."""
    store = f"tcp://127.0.0.1:{free_port()}"
    running = [
        Job(
            "cruxrun",
            tmp_path / name,
            "--status",
            "--steps=1000000",
            f"--width={width}",
            f"--sleep-s={pause_s}",
            **ENV,
            CRUX_STORE=store,
        )
        for name, width, pause_s in (("busy", 1024, 0.002), ("calm", 512, 0.02))
    ]
    yield running
    for job in running:
        job.kill_everything()
    for file in tables():
        file.unlink()


def until(condition: Callable[[], bool], jobs: list[Job], what: str) -> None:
    end_s = time.monotonic() + BOUND_S
    while not condition():
        told = "\n".join(job.errors.read_text()[-2000:] for job in jobs)
        assert all(job.launcher.poll() is None for job in jobs), told
        assert time.monotonic() < end_s, f"waited for {what}:\n{told}\n{list(map(links, jobs))}"
        time.sleep(0.1)


@pytest.mark.full
def test_the_lower_of_two_jobs_gives_way(jobs: list[Job]) -> None:
    until(lambda: all(map(planned, jobs)) and level(jobs[0]) != level(jobs[1]), jobs, "two levels")
    low, high = sorted(jobs, key=level)
    for rank in (*links(low), *links(high)):
        link = rank["links"]["loop"]
        assert link["shared"]
        assert [holder["same_job"] for holder in link["holders"]].count(True) == 2
        assert len(link["holders"]) == 4
        assert rank["refused"] == {}
    before, steps = (waited(low), waited(high)), low.steps()
    until(lambda: waited(low) >= before[0] + 10, jobs, "operations that give way")
    assert low.steps() > steps, "it trains on"
    if level(low) < level(high) and all(map(planned, jobs)):
        assert waited(high) == before[1], "the higher one never waits"
    assert all(rank["waits"]["longest_s"] < 6.0 for rank in links(low))

    high.kill_everything()
    until(lambda: not any(rank["active"] for rank in links(low)), [low], "nobody in the way")
    steps = low.steps()
    until(lambda: low.steps() > steps, [low], "more steps")
    assert len(tables()) == 1
    low.end()
    assert tables() == []
