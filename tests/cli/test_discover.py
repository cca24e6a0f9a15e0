"""``crux topology discover`` over a simulated network: its processes, errors, state and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crux_torch.cli.discover.launch import launched
from crux_torch.network.discover.tasks import DiscoverError
from crux_torch.network.loaders import load_topology

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parents[1] / "support" / "survey_worker.py"
pytestmark = pytest.mark.slow


class Command:
    """The command in a folder, with simulated hosts."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "cluster.yaml"
        self.state = folder / "cluster.yaml.partial"
        self.report = folder / "report.json"

    def argv(self, hosts: str, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "crux_torch.cli", "topology", "discover", "--hosts", hosts),
            *("--ssh", "env HOST={}", "--remote", f"{sys.executable} {WORKER}"),
            *("--out", str(self.out), *more),
        ]

    def env(self, **more: str) -> dict[str, str]:
        kept = {key: v for key, v in os.environ.items() if not key.startswith(("CRUX_", "RANK"))}
        return kept | {"PYTHONPATH": str(ROOT), "SURVEY_LEAVES": "0,0,1,1"} | more

    def __call__(self, hosts: str, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(hosts, *more),
            env=self.env(**env),
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


ALL = "h0,h1,h2,h3"


def test_the_file_is_a_topology_and_says_what_it_knows(command: Command) -> None:
    done = command(ALL, "--json", str(command.report), SURVEY_GREETING="Welcome to h0!")
    assert done.returncode == 0, done.stderr
    topology = load_topology(command.out)
    assert topology.hosts == ("h0", "h1", "h2", "h3")
    assert len(topology.candidate_paths("h0", "h3")) == 2
    assert len(topology.candidate_paths("h0", "h1")) == 1
    text = command.out.read_text()
    assert text.startswith("# Found by `crux topology discover`.\n# 4 hosts, 4 switches, ")
    assert "all hosts: it is simulated" in text
    assert "Assumed: " in text
    report = json.loads(command.report.read_text())
    assert report["hosts"] == ["h0", "h1", "h2", "h3"]
    assert report["certain"]
    assert report["probes"] > 0
    assert not command.state.exists()
    assert f"cruxrun --crux-topology {command.out}" in done.stdout
    assert "hosts: 4 of 4 are there" in done.stderr


def test_hosts_come_from_a_file(command: Command, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("h0\n# a comment\nh2  # another\n\n")
    argv = command.argv("-", "--hosts-file", str(hosts))
    del argv[argv.index("--hosts") : argv.index("--hosts") + 2]
    done = subprocess.run(argv, env=command.env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_topology(command.out).hosts == ("h0", "h2")


@pytest.mark.parametrize(
    ("hosts", "env", "said"),
    [
        ("h0", {}, "a network has two hosts or more"),
        ("h0,h1,h0", {}, "host 'h0' is named twice"),
        ("h0,-oProxyCommand=x", {}, "'-oProxyCommand=x' is no name of a host"),
        ("h0,h1", {"SURVEY_MACHINE": "m"}, "'h0' and 'h1' are the same host"),
        ("h0,h1", {"SURVEY_RELEASE": "0.0.1"}, "has release 0.0.1 of crux_torch"),
        ("h0,h1,h9", {}, "can't run on h9 (h9: "),
    ],
)
def test_errors_say_what_to_do(
    command: Command, hosts: str, env: dict[str, str], said: str
) -> None:
    done = command(hosts, **env)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not command.out.exists()


def test_a_host_that_does_not_answer_is_named(command: Command) -> None:
    argv = [
        word.replace("env HOST={}", "sleep 60 {}") for word in command.argv("h0,h1", "--wait", "1")
    ]
    argv[argv.index("--ssh") + 1] = "sh -c 'exec sleep 60' {}"
    done = subprocess.run(argv, env=command.env(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no answer from h0, h1: log in there by hand" in done.stderr


def test_a_host_that_leaves_is_left_out_and_named(command: Command) -> None:
    done = command(ALL, SURVEY_DIE="h3:1")
    assert done.returncode == 0, done.stderr
    assert "host h3 left before the end" in command.out.read_text()


def test_what_was_interrupted_goes_on(command: Command) -> None:
    leaves = {"SURVEY_LEAVES": "0,1,2,3"}
    slow = command.env(SURVEY_SLOW_S="1", **leaves)
    running = subprocess.Popen(
        command.argv(ALL), env=slow, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    while not (command.state.exists() and command.state.read_text().count("searched") >= 1):
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "--resume goes on" in errors
    known = command.state.read_text().splitlines()
    # A line that was cut is done again.
    command.state.write_text("\n".join(known) + '\n{"outcome":')
    done = command(ALL, "--resume", "--json", str(command.report), **leaves)
    assert done.returncode == 0, done.stderr
    fragment = json.loads(command.report.read_text())["fragment"]
    searched = [pair for pair in fragment["pairs"] if len(pair["paths"]) > 1]
    assert len(searched) == 12
    assert not command.state.exists()
    again = command(ALL, "--resume", **leaves)
    assert again.returncode == 1
    assert "nothing to resume" in again.stderr


def test_a_state_of_other_hosts_is_refused(command: Command) -> None:
    command.state.write_text('{"version":1,"hosts":[{"name":"x","nics":[]}],"ipv6":false}\n')
    done = command(ALL, "--resume")
    assert done.returncode == 1
    assert "is of other hosts or addresses" in done.stderr
    command.state.write_text("{\n")
    assert "is no state of a discovery" in command(ALL, "--resume").stderr


def test_without_hosts_it_says_how_to_name_them() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    argv = [sys.executable, "-m", "crux_torch.cli", "topology", "discover"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "say which hosts: --hosts" in done.stderr


@pytest.mark.parametrize(
    ("env", "meet", "rank", "size", "where"),
    [
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5"},
            "",
            *(3, 4, ("a", "5")),
        ),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[07-09],x"},
         "", 1, 2, ("n07", "29450")),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "h:77", 0, 2, ("h", "77")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, "h", 0, 2, ("h", "29450")),
    ],
)  # fmt: skip
def test_ranks_of_launchers(
    env: dict[str, str], meet: str, rank: int, size: int, where: tuple[str, str]
) -> None:
    job = launched(env, meet)
    assert job is not None
    assert (job.rank, job.size) == (rank, size)
    assert (job.env["MASTER_ADDR"], job.env["MASTER_PORT"]) == where
    assert (job.env["RANK"], job.env["WORLD_SIZE"]) == (str(rank), str(size))


def test_launchers_that_say_too_little_or_nonsense() -> None:
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    with pytest.raises(DiscoverError, match="--meet HOST"):
        launched({"PMI_RANK": "0", "PMI_SIZE": "2"})
    with pytest.raises(DiscoverError, match="expected a rank below"):
        launched({"PMI_RANK": "2", "PMI_SIZE": "2", "MASTER_ADDR": "a"})
    with pytest.raises(DiscoverError, match="no port to meet at"):
        launched({"PMI_RANK": "0", "PMI_SIZE": "2"}, "h:70000")
