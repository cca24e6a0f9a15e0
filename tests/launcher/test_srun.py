"""Jobs that Slurm starts: two real ones under ``srun python``, on nodes that Crux chose."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from control_fakes import until
from dscp_maps import MARKED_ENV
from loopback import free_port
from onlooker import Cluster
from places import ROOT
from slurm_cluster import NODES, SlurmCluster, needs_slurm
from training_job import BOUND_S, SCRIPT, JobFolder

from crux_torch.cli.main import main

pytestmark = [pytest.mark.full, needs_slurm]
#: Each node below a leaf of its own.
MAP = """version: 1
hosts: {node0: , node1: }
switches: {leaf0: tor, leaf1: tor, spine: aggregation}
links:
- {between: [node0, leaf0], capacity_Bps: 1e9}
- {between: [node1, leaf1], capacity_Bps: 1e9}
- {between: [leaf0, spine], capacity_Bps: 1e9}
- {between: [leaf1, spine], capacity_Bps: 1e9}
"""
#: Steps whose losses are compared.
STEPS = 60


def crux(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("map") / "cluster.yaml"
    file.write_text(MAP)
    return file


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, network: Path) -> Iterator[SlurmCluster]:
    topology = crux("topology", "export", "--format", "slurm", str(network))
    # Not pytest's folder: only root may look into that, and munged wants better.
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), topology) as cluster:
        yield cluster


def test_slurm_takes_the_exported_topology(slurm: SlurmCluster) -> None:
    shown = slurm.ask("scontrol", "show", "topology")
    switches = {
        found["name"]: (found["level"], found["nodes"])
        for found in re.finditer(
            r"SwitchName=(?P<name>\S+) Level=(?P<level>\d) .*?Nodes=(?P<nodes>\S+)", shown
        )
    }
    assert switches == {
        "leaf0": ("0", "node0"),
        "leaf1": ("0", "node1"),
        "spine": ("1", "node[0-1]"),
    }


def test_srun_lands_where_dispatch_says(slurm: SlurmCluster, tmp_path: Path) -> None:
    tables = []
    for name, GBps in zip(NODES, (5.0, 20.0), strict=True):
        (tmp_path / f"{name}.csv").write_text(f"0 1,{GBps}\n")
        tables += ["--table", str(tmp_path / f"{name}.csv")]
    nodes = crux("dispatch", "--gpus", "2", *tables, "--uplink", "1", "--nodelist").strip()
    assert nodes == "node1"
    assert slurm.ask("srun", f"--nodelist={nodes}", "hostname") == "node1\n"
    both = crux("dispatch", "--gpus", "4", *tables, "--uplink", "1", "--nodelist").strip()
    landed = slurm.ask("srun", "-N2", f"--nodelist={both}", "hostname")
    assert sorted(landed.split()) == list(NODES)


# Stock Gloo now and then loses a race for a port, or aborts at teardown.
@pytest.mark.flaky(reruns=1)
def test_two_jobs_of_srun_share_a_plan(slurm: SlurmCluster, network: Path, tmp_path: Path) -> None:
    """One gets Crux by its TaskProlog, the other by ``CRUX_ATTACH`` alone; losses are stock's."""
    store = f"tcp://127.0.0.1:{free_port()}"
    told = {"CRUX_STORE": store, "CRUX_POLICY": "crux-paper", "CRUX_PROFILE_S": "1", **MARKED_ENV}
    lines = tmp_path / "lines"
    flags = [f"--crux-{k[5:].lower().replace('_', '-')}={v}" for k, v in told.items()]
    flags += ["--crux-topology", str(network), "--crux-host", "node0"]
    given = crux("env", "--format", "slurm", *flags)
    lines.write_text(given)
    prolog = tmp_path / "prolog"
    prolog.write_text(f'#!/bin/sh\ncat {lines}\necho "export CRUX_HOST=$SLURMD_NODENAME"\n')
    prolog.chmod(0o755)
    ways: dict[str, tuple[list[str], dict[str, str]]] = {
        "stock": ([], {}),
        "prolog": ([f"--task-prolog={prolog}"], {}),
        "attach": ([], {**told, "CRUX_ATTACH": "yes", "CRUX_TOPOLOGY": str(network)}),
    }
    running: dict[str, subprocess.Popen[bytes]] = {}
    folders = {name: tmp_path / f"{name}-ranks" for name in ways}
    cluster = Cluster(store)

    def start(name: str, steps: int) -> None:
        folders[name].mkdir()
        options, env = ways[name]
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        running[name] = slurm.srun(
            *("-N2", "-n2", f"--job-name={name}", *options),
            command=(SCRIPT, str(folders[name]), "--status", f"--steps={steps}"),
            errors=tmp_path / f"{name}.log",
            **env,
        )

    def job_of(name: str) -> JobFolder | None:
        ids = slurm.ask("squeue", "--noheader", "--format=%i", f"--name={name}").split()
        stem = f"slurm-{ids[0]}-" if ids else None
        found = [job for job in cluster.jobs() if stem and job.startswith(stem)]
        return JobFolder(found[0], folders[name]) if found else None

    def ended(name: str) -> str:
        assert running[name].wait(BOUND_S) == 0, (tmp_path / f"{name}.log").read_text()
        losses = JobFolder(name, folders[name]).losses()[:STEPS]
        assert len(losses) == STEPS
        return "\n".join(losses)

    try:
        for name in ways:
            start(name, STEPS if name == "stock" else 100_000)
        expected = ended("stock")

        def follow() -> bool:
            jobs = [job_of(name) for name in ("prolog", "attach")]
            plan = cluster.plan()
            known = [job for job in jobs if job is not None]
            return (
                plan is not None
                and len(known) == 2
                and all(job.follows(plan) and job.steps() >= STEPS for job in known)
            )

        until(follow, BOUND_S, "both jobs to follow a plan")
        shown = json.loads(crux("status", "--store", store, "--json"))
        names = {job["job"] for job in shown["jobs"]}
        for name in ("prolog", "attach"):
            job = job_of(name)
            assert job is not None
            assert job.name in names
            assert job.status()["hosts"]["ranks"] == {"node0": [0], "node1": [1]}
            (folders[name] / "stop").touch()
        for name in ("prolog", "attach"):
            assert ended(name) == expected
    finally:
        cluster.close()
        slurm.ask("scancel", "--user=root")
        for process in running.values():
            process.kill()
            process.wait()
