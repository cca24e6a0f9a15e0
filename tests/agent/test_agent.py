"""The live loop in real processes: two ranks on loopback, and a shared store in this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_fakes import hosted_store, until
from dscp_maps import CLASS_SELECTORS, MARKED_ENV
from loopback import free_port
from places import SUPPORT
from training_job import BOUND_S, environment, less_news

from crux_torch.agreement.registry import Registry
from crux_torch.store.endpoint import open_store

pytestmark = pytest.mark.slow

WORKER = str(SUPPORT.joinpath("runtime_worker.py"))
#: A 32-48-8 perceptron with ReLU: forward, the weights' gradients, and the hidden layer's.
FLOPS_A_SAMPLE = 2 * (32 * 48 + 48 * 8) * 2 + 2 * 48 * 8
QUICK = {
    "CRUX_LEASE_S": "2",
    "CRUX_PROFILE_S": "4",
    "CRUX_TUNING": "start_s=0.1,tick_s=0.05,profile_iterations=8,plan_valid_s=4",
    **MARKED_ENV,
}


class Ranks:
    """The processes of one job."""

    def __init__(self, folder: Path, world: int, rounds: int, *args: str, **env: str) -> None:
        folder.mkdir()
        self.folder, self.world = folder, world
        ports = [str(free_port()) for _ in range(rounds)]
        job = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), "CRUX_JOB": folder.name}
        self.processes = [
            subprocess.Popen(
                [sys.executable, WORKER, str(folder), *args, "--ports", *ports],
                env={**environment(), **QUICK, **job, "RANK": str(rank), **env},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(world)
        ]
        self.errors: list[str] = []

    def status(self, rank: int) -> dict[str, Any]:
        for process in self.processes:
            assert process.poll() in (None, 0), process.communicate()[1]
        with contextlib.suppress(FileNotFoundError):
            read: dict[str, Any] = json.loads((self.folder / f"{rank}.status").read_text())
            return read
        return {}

    def every(self, condition: Callable[[dict[str, Any]], Any]) -> bool:
        """Whether the latest status of each rank is as wanted."""
        told = [self.status(rank) for rank in range(self.world)]
        return all(told) and all(condition(status) for status in told)

    def stop(self, round_: int = 0) -> None:
        (self.folder / f"stop.{round_}").touch()

    def end(self) -> list[dict[str, Any]]:
        """What each rank told at its end."""
        for process in self.processes:
            _, error = process.communicate(timeout=BOUND_S)
            self.errors.append(less_news(error))
            assert process.returncode == 0, error
        return [json.loads((self.folder / f"{rank}.end").read_text()) for rank in range(self.world)]


@pytest.fixture
def store() -> Iterator[str]:
    with hosted_store() as endpoint:
        yield endpoint


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    jobs: list[Ranks] = []

    def launch(name: str, *args: str, world: int = 2, rounds: int = 1, **env: str) -> Ranks:
        jobs.append(Ranks(tmp_path / name, world, rounds, *args, **env))
        return jobs[-1]

    yield launch
    for process in (p for job in jobs for p in job.processes):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def planned(status: dict[str, Any]) -> bool:
    order, applied = status.get("order"), status.get("applied")
    settled = bool(status.get("plan") and order and not order["measuring"])
    return settled and applied["level"] == status["plan"]["level"] and applied["marked"] > 0


def job_keys(endpoint: str) -> list[str]:
    store = open_store(endpoint)
    try:
        return [record.job for record in Registry(store, "default").look().jobs]
    finally:
        store.close()


def check_profile(profile: dict[str, Any], during: dict[str, Any], batch: int) -> None:
    # Ring all-reduce of two: each sends the other as many bytes as the tensor has.
    moved = during["gradient_bytes"] + during["flag_bytes"]
    assert {(f["src"], f["dst"]): f["bytes"] for f in profile["flows"]} == {
        ("host0", "host1"): moved,
        ("host1", "host0"): moved,
    }
    assert (profile["flops"], profile["flops_source"]) == (2 * batch * FLOPS_A_SAMPLE, "counted")
    assert profile["gpus"] == 2
    assert profile["iterations"] >= 3
    assert 0.03 <= profile["period_s"] < 1.0
    assert 0 < profile["t_s"] < profile["period_s"]
    assert profile["t_source"] == "measured"
    assert 0 < profile["exposed_s"] <= profile["period_s"]
    assert profile["compute_s"] == pytest.approx(profile["period_s"] - profile["exposed_s"])
    assert profile["measured_alone"]
    assert profile["uncounted_ops"] == []


def check_reverted(after: dict[str, Any]) -> None:
    assert after["threads"] in ([], ["crux-store"])  # its last connection may be about to end
    assert after["hooks"] == 0
    assert after["module_hooks"] == 0
    assert set(after["connections"].values()) <= {0}
    assert not after["status"]["active"]


@pytest.mark.parametrize("how", [("--backend=gloo", "--attach"), ("--backend=crux",)])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_every_rank_gets_profile_plan_and_class_and_gives_all_back(how, start, store):
    job = start("job", *how, CRUX_STORE=store)
    until(lambda: job.every(planned), BOUND_S, "a plan on every rank")
    assert job_keys(store) == ["job"]
    job.stop()
    ends = job.end()
    assert job_keys(store) == []
    assert job.errors == ["", ""]
    leader = ends[0]["rounds"][0]["during"]["status"]["leader"]
    assert (leader["state"], leader["phase"], leader["store"]) == ("planned", "running", "ok")
    profiles = []
    for rank, end in enumerate(ends):
        assert end["before"]["status"]["active"] is False
        assert end["before"]["hooks"] == 0
        during, after = end["rounds"][0]["during"], end["rounds"][0]["after"]
        status = during["status"]
        assert during["in_time"]
        assert status["active"]
        assert (status["rank"], status["world_size"], status["host"]) == (rank, 2, f"host{rank}")
        assert status["errors"] == {}
        assert status["recorder"]["dropped"] == 0
        profiles.append(status["profile"])
        check_profile(status["profile"], during, batch=16)
        assert status["plan"]["intensity"] == pytest.approx(during["intensity"])

        applied = status["applied"]
        dscp = CLASS_SELECTORS[status["plan"]["level"]]
        assert (applied["dscp"], applied["refused"], applied["error"]) == (dscp, 0, None)
        assert dscp > 0
        told = {f"{s['local'][1]}-{s['peer'][1]}" for s in applied["sockets"]}
        marked = {ports for ports, value in during["connections"].items() if value == dscp}
        assert told == marked
        assert len(told) == applied["marked"] > 0
        others = set(during["connections"]) - marked
        assert {during["connections"][ports] for ports in others} <= {0}
        check_reverted(after)
    assert profiles[0] == profiles[1]


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_of_two_jobs_the_one_with_the_higher_intensity_goes_first(start, store):
    # As many bytes, 64 times the FLOPs.
    env = {"CRUX_STORE": store, "CRUX_POLICY": "crux-paper"}
    heavy = start("heavy", "--batch=512", **env)
    light = start("light", "--batch=8", **env)

    levels: dict[str, set[int]] = {}

    def both_planned() -> bool:
        """Every rank of both follows the same plan; keeps what each was given by it."""
        told = {job.folder.name: [job.status(rank) for rank in (0, 1)] for job in (heavy, light)}
        every = [status for statuses in told.values() for status in statuses]
        if not all(every) or not all(map(planned, every)):
            return False
        for name, statuses in told.items():
            levels[name] = {status["applied"]["level"] for status in statuses}
        return len({status["order"]["plan_epoch"] for status in every}) == 1

    until(both_planned, BOUND_S, "one plan for both")
    for job in (heavy, light):
        job.stop()
    ends = {job.folder.name: job.end() for job in (heavy, light)}
    during = {name: [e["rounds"][0]["during"] for e in ranks] for name, ranks in ends.items()}
    intensity = {name: ds[0]["intensity"] for name, ds in during.items()}
    assert all(len(level) == 1 for level in levels.values())
    assert intensity["heavy"] > intensity["light"]
    assert levels["heavy"].pop() > levels["light"].pop()
    alone = [ds[0]["status"]["profile"]["measured_alone"] for ds in during.values()]
    assert alone == [True, True]


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_second_world_of_a_process_is_measured_anew(start, store):
    job = start("job", rounds=2, CRUX_STORE=store)
    incarnations = []
    for round_ in range(2):
        until(
            lambda round_=round_: job.every(
                lambda s: s["round"] == round_ and s["profile"] and planned(s)
            ),
            BOUND_S,
            f"a plan in round {round_}",
        )
        incarnations.append({job.status(rank)["order"]["incarnation"] for rank in (0, 1)})
        job.stop(round_)
    assert all(len(i) == 1 for i in incarnations)
    assert incarnations[0] != incarnations[1]
    for end in job.end():
        for round_ in end["rounds"]:
            check_profile(round_["during"]["status"]["profile"], round_["during"], batch=16)
            check_reverted(round_["after"])
    assert job.errors == ["", ""]


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_disabled_it_does_nothing(start, store):
    job = start("job", "--attach", "--backend=gloo", CRUX_STORE=store, CRUX_DISABLE="1")
    until(lambda: job.every(lambda s: s["why_not"]), BOUND_S, "the job to train")
    job.stop()
    for end in job.end():
        during = end["rounds"][0]["during"]
        assert during["threads"] == []
        assert during["hooks"] == 0
        assert set(during["connections"].values()) <= {0}
        assert not during["status"]["active"]
        assert not during["status"]["attached"]
        check_reverted(end["rounds"][0]["after"])
    assert job.errors == ["", ""]
    assert job_keys(store) == []


@pytest.mark.parametrize("how", [("--backend=gloo", "--attach"), ("--backend=crux",)])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_two_groups_on_hosts_of_their_own_are_two_parts_of_the_job(how, start, store):
    job = start("job", "--pairs", *how, world=4, CRUX_STORE=store)
    until(lambda: job.every(lambda s: s["profile"]), BOUND_S, "a profile on every rank")
    job.stop()
    (during, *_) = [end["rounds"][0]["during"] for end in job.end()]
    flows = during["status"]["profile"]["flows"]
    least = during["gradient_bytes"]
    part = {f"{f['src'][-1]}{f['dst'][-1]}": f.get("part", 0) for f in flows if f["bytes"] >= least}
    assert part.keys() == {"01", "10", "23", "32"}
    assert part["01"] == part["10"] != part["23"] == part["32"]
    # The flag that all ranks look at goes round another ring.
    assert {f.get("part", 0) for f in flows if f["bytes"] < least} == {2}


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_without_a_store_the_job_is_measured_and_keeps_its_class(start):
    away = f"tcp://127.0.0.1:{free_port()}"
    one = start("one", world=1, CRUX_STORE="none")
    jobs = {"one": one, "away": start("away", CRUX_STORE=away)}
    for job in jobs.values():
        until(lambda job=job: job.every(lambda s: s["profile"]), BOUND_S, "a profile on every rank")
        job.stop()
    for job in jobs.values():
        for end in job.end():
            during = end["rounds"][0]["during"]
            status = during["status"]
            assert (status["plan"], status["applied"]["level"]) == (None, None)
            assert not status["profile"]["measured_alone"]
            assert len(status["profile"]["flows"]) == (0 if job is one else 2)
            assert status["profile"]["flops"] == job.world * 16 * FLOPS_A_SAMPLE
            assert set(during["connections"].values()) <= {0}
            check_reverted(end["rounds"][0]["after"])
    # Nothing is wrong where no store is wanted; else the leader says once that it is away.
    said = {name: [len(error.splitlines()) for error in job.errors] for name, job in jobs.items()}
    assert said == {"one": [0], "away": [1, 0]}


WORLDS = """
import os, threading
import torch.distributed as dist
import crux_torch
from crux_torch.agent import AGENT

crux_torch.attach()
seen = []
def look():
    thread = AGENT.background
    seen.append(thread if thread not in seen else None)
store = dist.HashStore()
for number, backend in enumerate(("cpu:gloo,cuda:gloo", "gloo", "cpu:gloo,cuda:gloo")):
    own = dist.PrefixStore(str(number), store)
    dist.init_process_group(backend, store=own, rank=0, world_size=1)
    look()
    dist.new_group([0])
    look()
    assert crux_torch.status()["active"], crux_torch.status()["why_not"]
    assert [t.name for t in threading.enumerate()].count("crux") == 1
    dist.destroy_process_group()
new = ["new" if thread else "same" for thread in seen]
assert new == ["new", "same"] * 3, new
"""


def test_one_thread_serves_all_backends_and_groups_of_a_world():
    done = subprocess.run(
        [sys.executable, "-c", WORLDS],
        env={**environment(), "CRUX_STORE": "none"},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert (done.returncode, less_news(done.stderr)) == (0, "")
