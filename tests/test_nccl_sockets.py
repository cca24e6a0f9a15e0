"""NCCL's TCP connections are found and marked, with a library that makes them as NCCL does.

Two real processes on loopback; the library is named libnccl.so.2, loaded with dlopen, and reaches
``connect`` through its dynamic imports, as the real one does (also checked here).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import nccl_socket_worker as worker
import nccl_wheel
import pytest

from crux_torch.apply import nccl_sockets
from crux_torch.apply.paths import routed
from crux_torch.apply.transport import LIBRARY, Connection
from crux_torch.c10d.sockets import TcpSocket
from crux_torch.fabric.route import HostRoute
from lab import netns
from lab.fabric import Fabric, FabricSpec

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent / "fake_libnccl" / "net_socket.cc"
JOB = Path(__file__).parent / "nccl_job.py"
TIMEOUT_S = 300.0
DATA = 2 * (worker.THREADS * worker.PER_THREAD + 1)
BOOTSTRAP = 2


@pytest.fixture(scope="module")
def fake_libnccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("lib") / "libnccl.so.2"
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(made)], check=True)
    return made


def run_ranks(folder: Path, library: Path, **env: str) -> list[dict[str, Any]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(rank), str(folder), str(library)],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    errors = "\n".join(errors for _, errors in told)
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the transport library is not built")
def test_connections_of_the_first_operation_are_found_marked_and_forgotten(
    tmp_path: Path, fake_libnccl: Path
) -> None:
    for result in run_ranks(tmp_path, fake_libnccl, LD_PRELOAD=str(LIBRARY)):
        assert result["sees"] is True
        assert result["before"] == []
        assert result["bootstrap"] == [True, BOOTSTRAP]
        assert result["data"] == [True, BOOTSTRAP + DATA]
        high = worker.LEVELS[6] << 2
        every = BOOTSTRAP + DATA
        assert result["marked"] == [every, 0, [high] * every]

        assert result["owners"] == ["libnccl.so.2"]
        made = [False, "at_connect", worker.ROUTE_DSCP, worker.RATE_BPS]
        accepted = [True, "untouched", 0, None]
        assert result["routed"] == [made] * (every // 2) + [accepted] * (every // 2)
        low = worker.LEVELS[2] << 2
        assert result["level"] == [2 * every, 0, [low] * 2 * every]
        assert result["paced"] == [2 * every, [str(worker.RATE_BPS)]]

        assert result["closed"] == [True, 0]
        assert set(result["strangers"]) == {0}
        assert set(result["reverted"]) == {0}
        assert result["left"] == []


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the transport library is not built")
def test_a_job_under_cruxrun_marks_what_nccl_opens_while_it_trains(
    tmp_path: Path, fake_libnccl: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "cruxrun", "--standalone", "--nproc-per-node=2", str(JOB)]
    settings = {"CRUX_STORE": store, "CRUX_PROFILE_S": "2", "CRUX_JOB": "sockets"}
    settings |= {"NCCL_CONF_FILE": str(tmp_path / "none")}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "NCCL_"))}
    done = subprocess.run(
        [*command, str(tmp_path), str(fake_libnccl)],
        env={**inherited, **settings, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["planned"], done.stderr
        assert told["marked"], done.stderr
        assert told["connections"] == BOOTSTRAP + DATA
        assert told["sockets"] > told["connections"], "Gloo's are marked, too"
        assert told["refused"] == 0
        assert (told["stranger"], told["reverted"]) == ([0], [0])


@pytest.mark.skipif(not netns.available()[0], reason=netns.available()[1])
@pytest.mark.skipif(not LIBRARY.is_file(), reason="the transport library is not built")
def test_connections_take_the_planned_spines(tmp_path: Path, fake_libnccl: Path) -> None:
    """Each direction over a spine of its own, confirmed by what the spines have carried."""
    there, back = 1, 0
    with Fabric(FabricSpec(spines=2, hosts_per_leaf=1, rate_mbit=1000)) as fabric:
        hosts = fabric.host(0, 0), fabric.host(1, 0)
        # The side of the spine that faces the sender answers.
        hops = [[2, f"10.100.{there}.2"]], [[2, f"10.100.{16 + back}.2"]]
        ranks = []
        for rank in range(2):
            routes = [[hosts[1 - rank].address, hops[rank], worker.ROUTE_DSCP]]
            arguments = [str(tmp_path), str(fake_libnccl), hosts[rank].address, json.dumps(routes)]
            command = [sys.executable, worker.__file__, str(rank), *arguments]
            inherited = {k: v for k, v in os.environ.items() if not k.startswith("CRUX_")}
            env = {**inherited, "LD_PRELOAD": str(LIBRARY)}
            ranks.append(
                fabric.popen(hosts[rank], command, env=env, stdout=subprocess.PIPE, text=True)
            )
        told = [json.loads(rank.communicate(timeout=TIMEOUT_S)[0]) for rank in ranks]
        carried = {c.link: sum(c.bytes.values()) for c in fabric.counters()}
    for rank, connections in enumerate(told):
        made = [c for c in connections if not c["accepted"]]
        assert len(made) == (BOOTSTRAP + DATA) // 2
        assert {c["how"] for c in made} == {"at_connect"}
        assert {c["via"] for c in made} == {hops[rank][0][1]}
        assert {c["dscp"] for c in made} == {worker.ROUTE_DSCP}
        assert len({c["local_port"] for c in made}) == len(made)
    sent = [[carried[f"leaf{leaf}->spine{spine}"] for spine in (0, 1)] for leaf in (0, 1)]
    assert sent[0][there] >= worker.BYTES > 4 * sent[0][1 - there]
    assert sent[1][back] >= worker.BYTES > 4 * sent[1][1 - back]


def test_without_the_library_first_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        sees_sockets = False

    monkeypatch.setattr(nccl_sockets.Transport, "load", lambda: Late())
    assert nccl_sockets.made_by_nccl() == frozenset()


def connection(number: int, owner: str, kind: str = "tcp", *, accepted: bool = False) -> Connection:
    values: dict[str, Any] = dict.fromkeys(Connection.__dataclass_fields__, 0)
    text = dict.fromkeys(("device", "local", "peer", "via"), "")
    told = {"id": number, "owner": owner, "kind": kind, "how": "untouched", "accepted": accepted}
    return Connection(**{**values, **text, **told})


def test_nccl_its_plugins_and_a_torch_that_contains_it_are_told_by_name() -> None:
    names = ("libnccl.so.2", "libnccl-net-ofi.so", "libtorch_cuda.so", "libtorch_cpu.so", "python")
    known = [connection(n, name) for n, name in enumerate(names)]
    assert nccl_sockets.of_nccl(known) == {0, 1, 2}
    assert nccl_sockets.of_nccl([connection(9, "libnccl.so.2", "qp")]) == frozenset()


def test_what_nccl_accepted_takes_the_other_ends_path() -> None:
    route = HostRoute("here", "there", ("10.0.0.9",), ((2, ("10.1.1.1",)),))
    sockets = [TcpSocket(n, n, 2, ("10.0.0.1", 40000 + n), ("10.0.0.9", 5)) for n in (1, 2)]
    known = [connection(1, "libnccl.so.2"), connection(2, "libnccl.so.2", accepted=True)]
    assert [one.side for one in routed(sockets, [], known, [route])] == ["connected", "accepted"]


@pytest.mark.skipif(nccl_wheel.library() is None, reason="torch brought no libnccl")
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_the_real_nccl_imports_what_the_fake_one_does() -> None:
    path = nccl_wheel.library()
    assert path is not None
    assert path.name == "libnccl.so.2"
    listed = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True)
    imported = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}
    assert {"connect", "accept", "socket", "setsockopt", "bind"} <= imported
