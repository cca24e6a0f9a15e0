"""Live: hosts whose links differ, measured by the command, and a job under each placement."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from control_fakes import until
from loopback import free_port
from training_job import environment

from crux_torch.cli.main import main
from crux_torch.dispatch.cluster import DispatchCluster, load, table_of
from crux_torch.dispatch.samples import across_hosts, read_samples
from lab import netns
from lab.fabric import Fabric, FabricSpec, Host
from lab.job import TORCHRUN, Job, JobSpec

_OK, _REASON = netns.available()
needs_netns = pytest.mark.skipif(not _OK, reason=_REASON)

#: Mbit/s of each host's link.
RATES = (15.0, 120.0, 30.0, 60.0)
STEPS = 12
#: The step time under the chosen hosts is at most this much above that of the best.
MARGIN = 1.03


def test_pairs_come_first_and_no_choice_twice() -> None:
    rng = np.random.default_rng(0)
    rows = across_hosts((8, 8, 8, 8), 40, rng)
    assert len({row.tobytes() for row in rows}) == 40
    assert {tuple(np.flatnonzero(row)) for row in rows[:6]} == set(combinations(range(4), 2))
    assert all(bin(m).count("1") == 1 for row in rows[:6] for m in row if m)
    assert ((rows > 0).sum(axis=1) > 1).all()
    assert len(across_hosts((1, 1, 1), 99, rng)) == 4, "there are no more"
    assert len(across_hosts((8,) * 64, 100, rng)) == 100


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "crux_torch.cli", "dispatch", *map(str, arguments)]


def across(rank: int, hosts: int, out: Path, meet: str, *more: object) -> list[str]:
    told = ["--out", out, "--hosts", hosts, "--host-rank", rank, "--rendezvous", meet]
    return command("measure-across", *told, "--devices", 1, "--rounds", 3, "--warm-up", 1, *more)


def both(out: Path, *names: str, number: int = 9) -> list[tuple[int, str]]:
    """Exit codes and output of two hosts on loopback, of one device each."""
    meet = f"127.0.0.1:{free_port()}"
    env = {**environment(), "GLOO_SOCKET_IFNAME": "lo"}
    options = ("--bytes", 100_000, "--number", number)
    running = [
        subprocess.Popen(
            across(rank, 2, out, meet, "--host", name, *options),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    found = []
    for process in running:
        text, _ = process.communicate(timeout=300)
        found.append((process.returncode, text))
    return found


@pytest.mark.slow
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_hosts_meet_and_measure_what_the_file_lacks(tmp_path: Path) -> None:
    out = tmp_path / "samples.csv"
    first = both(out, "a", "b")
    assert [code for code, _ in first] == [0, 0], first
    cluster = DispatchCluster([table_of(name, "0", {}) for name in "ab"], np.zeros(2))
    samples = read_samples(out, cluster)
    assert samples.choices.tolist() == [[1, 1]]
    assert samples.bandwidth_Bps[0] > 0
    before = out.read_text()
    again = both(out, "a", "b")
    assert "0 choices measured" in again[0][1]
    assert out.read_text() == before
    out.write_text("a:0 c:0;1\n")
    for code, text in both(out, "a", "b"):
        assert code == 1
        assert "samples.csv:1: expected" in text
    for code, text in both(out, "a", "a"):
        assert code == 1
        assert "two hosts are called 'a': name each with --host" in text


@needs_netns
@pytest.mark.full
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_the_chosen_hosts_give_the_best_step_time(tmp_path: Path) -> None:
    with Fabric(FabricSpec(leaves=len(RATES), spines=1, hosts_per_leaf=1)) as fabric:
        for leaf, rate_mbit in enumerate(RATES):
            fabric.set_rate(rate_mbit, leaf)
        arguments = measured(fabric, tmp_path)
        for k in (2, 3):
            asked = CliRunner().invoke(main, ["dispatch", *arguments, "--gpus", str(k), "--json"])
            assert asked.exit_code == 0, asked.output
            chosen = json.loads(asked.output)[0]
            step_s = {
                placement: step_time_s(fabric, placement, tmp_path / f"{k}")
                for placement in combinations(fabric.hosts, k)
            }
            best_s = min(step_s.values())
            mine = next(p for p in step_s if {host.name for host in p} == set(chosen["devices"]))
            for placement, took_s in step_s.items():
                names = ",".join(host.name for host in placement)
                print(
                    f"{names}: {took_s:.4f} s a step" + (" (chosen)" if placement == mine else "")
                )
            assert step_s[mine] <= MARGIN * best_s
            weakest = min(RATES[host.leaf] for host in mine) * 1e6 / 8
            assert 0.5 * weakest < chosen["bandwidth_Bps"] < 1.2 * weakest


def measured(fabric: Fabric, folder: Path) -> list[str]:
    """Options of `crux dispatch` after measuring: within each host, then across them."""
    out, meet = folder / "samples.csv", f"{fabric.hosts[0].address}:29400"
    processes, tables = [], []
    for rank, host in enumerate(fabric.hosts):
        env = {**environment(), "GLOO_SOCKET_IFNAME": host.interface}
        tables.append(folder / f"{host.name}.json")
        of_host = command("measure", "--out", tables[-1], "--devices", 1, "--host", host.name)
        subprocess.run(of_host, env=env, check=True, capture_output=True)
        assert load(tables[-1]).missing == 0
        options = ("--host", host.name, "--bytes", 600_000, "--number", 11)
        argv = across(rank, len(fabric.hosts), out, meet, *options)
        log = (folder / f"{host.name}.out").open("wb")
        processes.append(fabric.popen(host, argv, env=env, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    until(lambda: all(p.poll() is not None for p in processes), 600, "all choices are measured")
    outputs = [(folder / f"{host.name}.out").read_text() for host in fabric.hosts]
    assert [p.returncode for p in processes] == [0] * len(processes), outputs
    assert len(out.read_text().splitlines()) == 11, "6 pairs, 4 of three, and all"
    options = [part for table in tables for part in ("--table", str(table))]
    return [*options, "--samples", str(out)]


def step_time_s(fabric: Fabric, hosts: tuple[Host, ...], folder: Path) -> float:
    """Median of the steps of a job with a rank on each of ``hosts``, after the first few."""
    name = "-".join(host.name for host in hosts)
    spec = JobSpec(name, "mlp", ("--width", "256", "--steps", str(STEPS)), 29500)
    os.environ.pop("CRUX_STORE", None)
    job = Job(spec, folder, TORCHRUN, fabric, hosts, environment())
    try:
        until(lambda: len(job.steps()) >= STEPS, 600, f"{name} trains")
        return statistics.median(step.duration_s for step in job.steps()[3:])
    finally:
        job.wait(120)
        job.kill()
