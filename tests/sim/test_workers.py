"""Runs in processes and on clusters give the results of a run here."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from control_fakes import until
from dask_cluster import BOUND_S, DaskCluster
from loopback import free_port
from places import ROOT

from crux_torch.cli.sim import sim
from crux_torch.sim import workers
from crux_torch.sim.replay import ReplayOptions, Run, run_rows
from crux_torch.sim.traces import Workload
from crux_torch.sim.workers import WorkersError, mapped

#: Columns that say how long a row took, and in how much memory.
COSTS = {"plan_wall_s", "wall_s", "cpu_s", "max_rss_MiB"}
TRACE = """name,model,gpus,submit_s,duration_s
a,bert,16,0,60
b,transformer-nlp,48,5,100
c,transformer-nlp,32,10,300
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    file = tmp_path_factory.mktemp("trace") / "few.csv"
    file.write_text(TRACE)
    return [
        Run(Workload(str(file)), "testbed", scheduler, ReplayOptions(placement=placement))
        for scheduler in ("ecmp", "crux-paper")
        for placement in ("none", "hived")
    ]


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    with DaskCluster(tmp_path_factory.mktemp("dask")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may answer late."""
    monkeypatch.setattr(workers, "LIMIT_S", BOUND_S)


@pytest.fixture(scope="module")
def played_here(runs: list[Run]) -> list[dict[str, Any]]:
    return results(runs, 1)


def results(runs: list[Run], where: workers.Workers) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in COSTS}
        for row in run_rows(runs, where)
    ]


def who(number: int) -> tuple[int, int]:
    return number, os.getpid()


def refuse(number: int) -> None:
    raise WorkersError(f"refused {number}")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_processes_give_the_rows_of_this_one(
    runs: list[Run], played_here: list[dict[str, Any]]
) -> None:
    assert results(runs, 2) == played_here


@pytest.mark.slow
def test_two_workers_of_dask_give_the_rows_of_this_process(
    runs: list[Run], dask: DaskCluster, played_here: list[dict[str, Any]]
) -> None:
    assert results(runs, dask.address) == played_here


@pytest.mark.slow
def test_tasks_run_on_both_workers_and_keep_their_order(dask: DaskCluster) -> None:
    found = list(mapped(who, [(number,) for number in range(40)], dask.address))
    assert [number for number, _ in found] == list(range(40))
    assert {pid for _, pid in found} == dask.pids


@pytest.mark.slow
@pytest.mark.parametrize("here", [True, False], ids=["processes", "dask"])
def test_an_error_of_a_task_is_raised_here(here: bool, request: pytest.FixtureRequest) -> None:
    where = 2 if here else request.getfixturevalue("dask").address
    with pytest.raises(WorkersError, match=r"^refused 3$"):
        list(mapped(refuse, [(3,)], where))


@pytest.mark.slow
def test_a_task_that_kills_every_worker_of_dask_is_an_error(tmp_path: Path) -> None:
    with (
        DaskCluster(tmp_path, workers=1) as cluster,
        pytest.raises(WorkersError, match=r"no worker of .* ran a task"),
    ):
        list(mapped(die, [()], cluster.address))


@pytest.mark.slow
def test_workers_of_several_threads_are_refused(tmp_path: Path) -> None:
    with DaskCluster(tmp_path, workers=1, threads=2) as cluster:
        several = rf"{cluster.address}: a worker has several threads: .*--nthreads 1"
        with pytest.raises(WorkersError, match=several):
            list(mapped(who, [(1,)], cluster.address))


def test_another_release_on_a_worker_is_refused() -> None:
    with pytest.raises(WorkersError, match=r"a worker has crux_torch .*, this process 0\.0\.1"):
        workers._call("0.0.1", who, (1,))


@pytest.mark.slow
def test_where_no_scheduler_listens_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed")
    monkeypatch.setattr(workers, "LIMIT_S", 1.0)
    at = f"dask://127.0.0.1:{free_port()}"
    few = ["--jobs", "4", "--days", "1", "--schedulers", "ecmp"]
    done = CliRunner().invoke(sim, ["trace", *few, "--workers", at])
    assert done.exit_code == 1
    assert f"Error: {at}: no Dask scheduler answers: " in done.output


@pytest.mark.parametrize("given", ["0", "-1", "many", "dask://nowhere", "tcp://127.0.0.1:8786"])
def test_what_is_neither_a_number_nor_an_address_is_refused(given: str) -> None:
    done = CliRunner().invoke(sim, ["trace", "--workers", given])
    assert done.exit_code == 2
    assert f"'{given}' is unknown; expected a number of processes, dask://" in done.output


def test_a_cluster_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, package in (("dask", "distributed"), ("ray", "ray")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(WorkersError, match=f"needs {package}: pip install {package}"):
            list(mapped(who, [(1,)], f"{kind}://127.0.0.1:1"))


def test_the_memory_of_a_row_is_not_that_of_what_ran_before(runs: list[Run]) -> None:
    row = next(run_rows(runs[:1]))
    much = bytearray(1 << 30)
    del much
    assert next(run_rows(runs[:1]))["max_rss_MiB"] < row["max_rss_MiB"] + 256


@pytest.mark.slow
def test_a_program_that_is_ended_leaves_a_cluster_with_nothing_to_do(dask: DaskCluster) -> None:
    """Tasks that wait there are forgotten; the one that runs ends by itself."""
    distributed = pytest.importorskip("distributed")
    many = ["--topology", "clos", "--schedulers", "ecmp,crux-paper,ideal,varys", "--jobs", "40"]
    command = [sys.executable, "-m", "crux_torch.cli", "sim", "trace", *many]
    command += ["--workers", dask.address]
    with (
        distributed.Client(dask.scheduler, timeout=BOUND_S, set_as_default=False) as seen,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as program,
    ):
        try:
            until(lambda: any(seen.processing().values()), what="tasks on the cluster")
            program.send_signal(signal.SIGTERM)
            _, said = program.communicate(timeout=300)
        finally:
            program.kill()
        assert program.returncode == 128 + signal.SIGTERM
        assert "Traceback" not in said
        until(lambda: not any(seen.processing().values()), what="the cluster to have nothing to do")


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: make recipes"
)
def test_ray_gives_the_rows_of_this_process(
    runs: list[Run], played_here: list[dict[str, Any]]
) -> None:
    port = free_port()
    ray = Path(sys.executable).with_name("ray")
    head = ["start", "--head", "--block", "--num-cpus", "2", "--include-dashboard", "false"]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([ray, *head, "--port", str(port)], env=env) as cluster:
        try:
            at = f"ray://127.0.0.1:{port}"

            def answers() -> bool:
                try:
                    return next(mapped(who, [(1,)], at))[0] == 1
                except WorkersError:
                    return False

            until(answers, what="the Ray cluster")
            assert results(runs, at) == played_here
        finally:
            cluster.terminate()
