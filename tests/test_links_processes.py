"""Two jobs under cruxrun that cross one stand-in link: the lower one gives way to the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port

pytestmark = pytest.mark.slow

FOLDER = Path("/dev/shm")
ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("links_worker.py")
RANKS = 2
BOUND_S = 90.0
Jobs = Callable[[str, int, float], "Job"]


class Job:
    """One cruxrun and what its ranks tell."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process

    def status(self) -> list[dict[str, Any]]:
        """The newest status of each rank that has told one."""
        files = sorted(self.folder.glob("*.status"))
        return [json.loads(file.read_text()) for file in files]

    def links(self) -> list[dict[str, Any]]:
        return [rank["links"] for rank in self.status()]

    def waited(self) -> int:
        return sum(links["waits"]["operations"] for links in self.links())

    def steps(self) -> int:
        return min(rank["steps"] for rank in self.status())

    def planned(self) -> bool:
        """Whether every rank has a level from a plan and looks at the link."""
        ranks = self.status()
        return len(ranks) == RANKS and all(
            rank["links"]["active"]
            and rank["plan"] is not None
            and not rank["order"]["measuring"]
            and rank["links"]["level"] == rank["plan"]["level"]
            for rank in ranks
        )

    @property
    def level(self) -> int:
        return self.links()[0]["level"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Jobs]:
    port = free_port()
    running: list[Job] = []

    def launch(name: str, width: int, pause_s: float) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "PET_"))}
        paths = [str(ROOT), str(ROOT / "launcher"), inherited.pop("PYTHONPATH", "")]
        env = {
            **inherited,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "CRUX_STORE": f"tcp://127.0.0.1:{port}",
            "CRUX_CLUSTER": f"links-{os.getpid()}",
            "CRUX_LINKS": "loop",
            "CRUX_LINK_WAIT_MS": "5000",
            "CRUX_PROFILE_S": "2",
            "CRUX_PROFILE_ITERATIONS": "4",
            "CRUX_TICK_S": "0.05",
        }
        command = [sys.executable, "-m", "cruxrun", "--crux-job", name, "--nproc-per-node", "2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(WORKER)]
        log = (folder / "log").open("w")
        process = subprocess.Popen(
            [*command, str(folder), str(width), str(pause_s)],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        log.close()
        running.append(Job(folder, process))
        return running[-1]

    yield launch
    for job in running:
        kill(job)
    for file in tables():
        file.unlink()


def tables() -> list[Path]:
    """The files of this test's links."""
    return list(FOLDER.glob(f"crux~*~links-{os.getpid()}~*"))


def kill(job: Job) -> None:
    """The launcher and all its ranks, which have sessions of their own."""
    pids = [rank["pid"] for rank in job.status()] if job.process.poll() is None else []
    for pid in (job.process.pid, *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.process.wait(BOUND_S)


def until(condition: Callable[[], bool], jobs: list[Job], what: str) -> None:
    end_s = time.monotonic() + BOUND_S
    while not condition():
        told = "\n".join((job.folder / "log").read_text()[-2000:] for job in jobs)
        assert all(job.process.poll() is None for job in jobs), told
        assert time.monotonic() < end_s, f"waited for {what}:\n{told}\n{[j.links() for j in jobs]}"
        time.sleep(0.1)


@pytest.mark.full
def test_the_lower_of_two_jobs_gives_way(start: Jobs) -> None:
    jobs = [start("busy", 512, 0.002), start("calm", 256, 0.02)]
    until(lambda: all(job.planned() for job in jobs), jobs, "a plan")
    low, high = sorted(jobs, key=lambda job: job.level)
    assert low.level < high.level
    for links in (*low.links(), *high.links()):
        link = links["links"]["loop"]
        assert link["shared"]
        assert len(link["holders"]) == 2 * RANKS
        assert sum(holder["same_job"] for holder in link["holders"]) == RANKS
        assert links["refused"] == {}
    waited, steps = (low.waited(), high.waited()), low.steps()
    until(lambda: low.waited() >= waited[0] + 10, jobs, "operations that give way")
    assert low.steps() > steps, "it trains on"
    if low.level < high.level and all(job.planned() for job in jobs):
        assert high.waited() == waited[1], "the higher one never waits"
    assert all(links["waits"]["longest_s"] < 6.0 for links in low.links())

    kill(high)
    until(lambda: not any(links["active"] for links in low.links()), [low], "nobody in the way")
    steps = low.steps()
    until(lambda: low.steps() > steps, [low], "more steps")
    assert len(tables()) == 1
    (low.folder / "stop").touch()
    assert low.process.wait(BOUND_S) == 0, (low.folder / "log").read_text()
    assert tables() == []
