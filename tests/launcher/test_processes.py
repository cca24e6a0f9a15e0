"""``cruxrun`` and ``torchrun`` side by side, as real processes on loopback."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from control_fakes import free_port, until
from fake_install import install_entry_point
from places import SUPPORT
from training_job import BOUND_S, ROOT, alive, environment

from crux_torch import __version__

pytestmark = pytest.mark.slow

WORKER = str(SUPPORT.joinpath("cruxrun_worker.py"))
CRUXRUN = [sys.executable, "-m", "cruxrun"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
#: A topology of two hosts.
TOPOLOGY = """version: 1
hosts: {h0-0: , h1-0: }
switches: {tor: tor}
links: [{between: [h0-0, tor], capacity_Bps: 1e9}, {between: [h1-0, tor], capacity_Bps: 1e9}]
"""
#: One rank: waits until the leader has heard where all ranks run.
MEETS = """
import json, time, crux_torch, torch, torch.distributed as dist
dist.init_process_group("crux")
known, end = torch.zeros(1), time.monotonic() + 120
while not known.item() and time.monotonic() < end:
    hosts = crux_torch.status().get("hosts") or {"ranks": {}}
    known[0] = len(hosts["ranks"]) == 2 and bool(hosts["problems"])
    dist.broadcast(known, 0)
    time.sleep(0.05)
if dist.get_rank() == 0:
    print(json.dumps([hosts, crux_torch.status()["leader"]["left_out"]]))
dist.destroy_process_group()
"""
LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[crux \S+\] (INFO|WARNING) "


@pytest.fixture
def start(tmp_path):
    """Starts launchers in their own sessions, with no store, and ends what is left of them."""
    running = []

    def launch(*command, **env):
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
        told = {**environment(), "CRUX_STORE": "none", **env}
        words = [str(word) for word in command]
        running.append(subprocess.Popen(words, env=told, start_new_session=True, **how))
        return running[-1]

    yield launch
    for process in running:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=BOUND_S)
    return process.returncode, out, err


def ran(folder):
    """What every worker wrote, by rank and attempt."""
    return {f.stem: json.loads(f.read_text()) for f in sorted(folder.glob("*.json"))}


def folders(tmp_path, *names):
    made = [tmp_path / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_workers_get_torchruns_environment_and_crux(start, tmp_path):
    stock, ours, off = folders(tmp_path, "stock", "ours", "off")
    nproc = {"PET_NPROC_PER_NODE": "2"}
    common = ["--standalone", "--max-restarts=1", "--role=trainer", WORKER]
    processes = [
        start(*TORCHRUN, *common, stock, "--flag", "-m", **nproc),
        start(*CRUXRUN, "--crux-levels=4", *common, ours, "--flag", "-m", **nproc),
        start(*CRUXRUN, "--crux-disable", *common, off, "--flag", "-m", **nproc),
    ]
    for process in processes:
        code, _, err = finish(process)
        assert code == 0, err

    # These hold random ids, ports and folders, different in any two runs of torchrun too.
    random = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    expected, got, disabled = ran(stock), ran(ours), ran(off)
    assert expected.keys() == got.keys() == disabled.keys() == {"0.0", "1.0"}
    for worker in expected:
        envs = [
            {k: v for k, v in runs[worker]["env"].items() if k not in random}
            for runs in (expected, got, disabled)
        ]
        names = ("ATTACH", "JOB", "JOB_OF", "LAUNCHED", "LEVELS", "SUMMARY")
        added = {f"CRUX_{name}": envs[1].pop(f"CRUX_{name}") for name in names}
        assert envs[2].pop("CRUX_DISABLE") == "1"
        assert envs[0] == envs[1] == envs[2]
        assert (added["CRUX_ATTACH"], added["CRUX_LEVELS"]) == ("1", "4")
        assert random <= expected[worker]["env"].keys() & got[worker]["env"].keys()
        assert got[worker]["argv"] == expected[worker]["argv"] == ["--flag", "-m"]
    assert len({worker["env"]["CRUX_JOB"] for worker in got.values()}) == 1


@pytest.mark.parametrize("end", ["raise", "killed"])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_failure_is_reported_as_by_torchrun(end, start, tmp_path):
    results = []
    for name, launcher in (("stock", TORCHRUN), ("ours", CRUXRUN)):
        (folder,) = folders(tmp_path, name)
        error_file = tmp_path / f"{name}.error"
        command = [*launcher, "--standalone", "--nproc-per-node=2", WORKER, folder, end]
        process = start(*command, TORCHELASTIC_ERROR_FILE=str(error_file))
        results.append((process, error_file))
    reports = []
    for process, error_file in results:
        code, _, err = finish(process)
        assert "Root Cause (first observed failure):" in err
        summary = [
            re.sub(r"(?i)\(?\bpid:? *\d+\)?", "", line).strip()
            for line in err.split("Root Cause")[1].splitlines()
            if line.strip().startswith(("rank", "exitcode", "ValueError", "Signal", "traceback"))
        ]
        written = json.loads(error_file.read_text()) if error_file.exists() else None
        if written:
            written = written["message"]["message"]
        reports.append((code, summary, written))
    assert reports[0] == reports[1]
    code, summary, written = reports[1]
    assert code == 1
    assert any(line.startswith("rank") and "1" in line for line in summary)
    assert written == "ValueError: wrong on purpose" if end == "raise" else written is None


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_module_and_a_program_that_is_not_python(start, tmp_path):
    module, program = folders(tmp_path, "module", "program")
    path = os.pathsep.join([str(ROOT), str(ROOT / "launcher"), str(SUPPORT)])
    alone = [*CRUXRUN, "--standalone"]
    as_module = start(*alone, "-m", "cruxrun_worker", module, "a", PYTHONPATH=path)
    as_program = start(*alone, "--no-python", sys.executable, WORKER, program, "b")
    for process, folder, argument in ((as_module, module, "a"), (as_program, program, "b")):
        code, _, err = finish(process)
        assert code == 0, err
        assert ran(folder)["0.0"]["argv"] == [argument]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_run_path_attaches_in_the_interpreter_that_runs_the_script(method, start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, crux_torch; print(crux_torch.attached, os.environ['RANK'])")
    fake = tmp_path / "fake" / "crux_torch"
    fake.mkdir(parents=True)
    real = ROOT / "crux_torch"
    (fake / "__init__.py").write_text(
        f"__path__.append({str(real)!r})\nattached = 0\n"
        "def attach():\n    global attached\n    attached += 1\n"
    )
    install_entry_point(tmp_path / "fake")
    path = os.pathsep.join([str(tmp_path / "fake"), str(ROOT / "launcher")])
    process = start(
        *CRUXRUN, "--standalone", "--run-path", f"--start-method={method}", script, PYTHONPATH=path
    )
    code, out, err = finish(process)
    assert code == 0, err
    assert out.split() == ["1", "0"]


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_elastic_restart_keeps_the_job_and_counts(start, tmp_path):
    (folder,) = folders(tmp_path, "out")
    endpoint = "--rdzv-endpoint=localhost:0"
    elastic = ["--nnodes=1:2", "--max-restarts=2", "--rdzv-backend=c10d", endpoint]
    quick = ["--rdzv-conf=last_call_timeout=1", "--monitor-interval=0.1"]
    code, _, err = finish(start(*CRUXRUN, *elastic, *quick, WORKER, folder, "fail-once"))
    assert code == 0, err
    workers = ran(folder)
    assert workers.keys() == {"0.0", "0.1"}
    assert workers["0.0"]["env"]["CRUX_JOB"] == workers["0.1"]["env"]["CRUX_JOB"]


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_two_nodes_are_one_job(start, tmp_path):
    (folder,) = folders(tmp_path, "out")
    port = free_port()
    common = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    nodes = [
        start(*CRUXRUN, *common, "--rdzv-id=7", WORKER, folder, TEST_NODE=node) for node in "ab"
    ]
    for node in nodes:
        code, _, err = finish(node)
        assert code == 0, err
    workers = ran(folder).values()
    assert {w["env"]["RANK"] for w in workers} == {"0", "1"}
    assert len({w["env"]["CRUX_JOB"] for w in workers}) == 1


def test_version(start):
    code, out, err = finish(start(*CRUXRUN, "--version"))
    assert (code, err) == (0, "")
    assert out.startswith(f"cruxrun {__version__} (torch {torch.__version__.split('+')[0]}")


def test_ctrl_c_in_the_first_seconds_ends_with_130_and_without_a_traceback(start, tmp_path):
    importing = start(*CRUXRUN, "--standalone", WORKER, tmp_path)

    def imports():
        maps = Path(f"/proc/{importing.pid}/maps")
        return importing.poll() is not None or "libtorch" in maps.read_text()

    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    waiting = start(*CRUXRUN, "--nnodes=2", "--rdzv-backend=c10d", endpoint, WORKER, tmp_path)
    until(imports, what="the import of torch")
    importing.send_signal(signal.SIGINT)
    assert finish(importing) == (130, "", "")
    line = waiting.stderr.readline()
    assert f"[cruxrun {Path(WORKER).stem}-" in line
    waiting.send_signal(signal.SIGINT)
    code, out, err = finish(waiting)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_what_shows_when_ranks_meet_is_one_warning_of_the_leader(tmp_path):
    """Without cruxrun: rank 1 has a name that the topology lacks; both have a misspelt variable."""
    topology = tmp_path / "cluster.yaml"
    topology.write_text(TOPOLOGY)
    told = {
        **environment(),
        "CRUX_STORE": "none",
        "CRUX_TOPOLOGY": str(topology),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CRUX_LEVEL": "4",
    }
    ranks = []
    for rank, host in enumerate(("h0-0", "h1_0")):
        env = {
            **told,
            "RANK": str(rank),
            "LOCAL_RANK": "0" if rank == 0 else "1",
            "CRUX_HOST": host,
        }
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen([sys.executable, "-c", MEETS], env=env, **how))
    try:
        said = [rank.communicate(timeout=BOUND_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    out, err = said[0]
    hosts, left_out = json.loads(out)
    assert [said.split(",")[0] for said in left_out] == [
        "nothing is prioritised",
        "no paths are chosen",
    ]
    assert hosts["ranks"] == {"h0-0": [0], "h1_0": [1]}
    (problem,) = hosts["problems"]
    assert "no host 'h1_0', the name that CRUX_HOST gives to the machine of rank 1" in problem
    assert "Set CRUX_HOST to the name in the topology (its nearest names are 'h1-0'" in problem
    ours = [line for line in err.splitlines() if "[crux " in line]
    assert all(re.match(LINE, line) for line in ours)
    assert [re.match(LINE, line)[1] for line in ours] == ["WARNING", "INFO", "WARNING"], err
    assert "CRUX_LEVEL (did you mean CRUX_LEVELS?) is no setting" in ours[0]
    assert "store none, topology " in ours[1]
    assert problem in ours[2]
    assert "[crux " not in said[1][1]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_signal_leaves_nothing_behind(sent, start, tmp_path):
    (folder,) = folders(tmp_path, "out")
    process = start(*CRUXRUN, "--standalone", "--nproc-per-node=2", WORKER, folder, "sleep")
    until(lambda: len(ran(folder)) == 2 or process.poll() is not None, what="the workers")
    pids = [worker["pid"] for worker in ran(folder).values()]
    assert len(pids) == 2, finish(process)
    process.send_signal(sent)
    code, _, _ = finish(process)
    assert code == (130 if sent == signal.SIGINT else 1)
    assert not any(map(alive, pids))


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_the_store_runs_while_the_job_does_and_ends_a_while_later(start, tmp_path):
    (folder,) = folders(tmp_path, "out")
    port = free_port()

    def listens():
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    assert not listens()
    store = {"CRUX_STORE": f"tcp://127.0.0.1:{port}"}
    process = start(*CRUXRUN, "--standalone", WORKER, folder, "sleep", **store)
    until(lambda: ran(folder) and listens(), what="the store")
    process.send_signal(signal.SIGTERM)
    finish(process)
    until(lambda: not listens(), what="the end of a store that nobody uses")
