"""The TCP connections of the installed NCCL are found and marked, without a GPU.

Two processes on loopback make communicators whose rings are connected at once (lab/nccl); in a
fabric of namespaces NCCL's network code moves data.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nccl_socket_worker as worker
import pytest
from dscp_maps import MARKED_ENV
from places import SUPPORT
from training_job import environment

from crux_torch.apply import nccl
from crux_torch.apply.paths import routed
from crux_torch.apply.transport import LIBRARY, Connection
from crux_torch.backend.tcp_sockets import TcpSocket
from crux_torch.network.routes import HostRoute
from lab import netns
from lab.fabric import Fabric, FabricSpec
from lab.nccl import library
from lab.nccl.library import LIBRARY_ENV, NcclUnavailableError

pytestmark = pytest.mark.slow

JOB = SUPPORT / "nccl_job.py"
TIMEOUT_S = 300.0
#: Of one direction: those that carry data, and one for sizes.
DATA = worker.THREADS * worker.PER_THREAD + 1
#: What the ranks of the tests' own jobs inherit.
INHERITED = {k: v for k, v in environment().items() if not k.startswith("NCCL_")}


@pytest.fixture(scope="module")
def libnccl() -> Path:
    if not LIBRARY.is_file():
        pytest.skip("the transport library is not built")
    try:
        return library.installed()
    except NcclUnavailableError as error:
        pytest.skip(str(error))


def run_ranks(folder: Path, libnccl: Path, count: int) -> list[dict[str, Any]]:
    env = {**INHERITED, LIBRARY_ENV: str(libnccl), "LD_PRELOAD": str(LIBRARY)}
    ranks = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(rank), str(count), str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        told = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    errors = "\n".join(errors for _, errors in told)
    assert [rank.returncode for rank in ranks] == [0] * count, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def assert_found_marked_and_forgotten(result: dict[str, Any]) -> None:
    assert result["sees"] is True
    assert result["before"] == []
    assert result["owned"] is True
    assert result["owners"] == ["libnccl.so.2"]
    assert result["marked"] == [True, 0]
    assert result["high"] == [worker.LEVELS[6] << 2]

    opened = ["at_connect", worker.ROUTE_DSCP, worker.RATE_BPS]
    assert result["routed"] == [[opened], [["untouched", 0, None]]]
    assert result["low"] == [True, [worker.LEVELS[2] << 2]]
    assert result["paced"] == [str(worker.RATE_BPS)]

    assert result["closed"] == [True, True, 0]
    assert set(result["strangers"]) == {0}
    assert set(result["reverted"]) == {0}
    # A peer that does not come costs no more than the limit: NCCL makes communicators unblocked.
    assert worker.MISSING_S <= result["missing_s"] < worker.MISSING_S + TIMEOUT_S / 10
    assert result["left"] == []


def test_connections_of_a_communicator_are_found_marked_and_forgotten(
    tmp_path: Path, libnccl: Path
) -> None:
    for result in run_ranks(tmp_path, libnccl, 2):
        assert_found_marked_and_forgotten(result)


@pytest.mark.full
@pytest.mark.parametrize("version", ["2.28.9", "2.30.7", "2.32.3"])
def test_of_four_ranks_and_of_other_releases_too(tmp_path: Path, version: str) -> None:
    if not LIBRARY.is_file():
        pytest.skip("the transport library is not built")
    try:
        other = library.released(version)
    except NcclUnavailableError as error:
        pytest.skip(str(error))
    for result in run_ranks(tmp_path, other, 4):
        assert result["version"] == version
        assert_found_marked_and_forgotten(result)


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_job_under_cruxrun_marks_what_nccl_opens_while_it_trains(
    tmp_path: Path, libnccl: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "cruxrun", "--standalone", "--nproc-per-node=2", str(JOB)]
    settings = {**MARKED_ENV, "CRUX_STORE": store, "CRUX_PROFILE_S": "2", "CRUX_JOB": "sockets"}
    settings |= {"NCCL_CONF_FILE": str(tmp_path / "none"), LIBRARY_ENV: str(libnccl)}
    done = subprocess.run(
        [*command, str(tmp_path)],
        env={**INHERITED, **settings},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["planned"], done.stderr
        assert told["marked"], done.stderr
        assert told["connections"] > 0
        assert told["sockets"] > told["connections"], "Gloo's are marked, too"
        assert told["refused"] == 0
        assert (told["stranger"], told["reverted"]) == ([0], [0])


@pytest.mark.skipif(not netns.available()[0], reason=netns.available()[1])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_connections_take_the_planned_spines(tmp_path: Path, libnccl: Path) -> None:
    """Each direction over a spine of its own, confirmed by what the spines have carried."""
    there, back = 1, 0
    with Fabric(FabricSpec(spines=2, hosts_per_leaf=1, rate_mbit=1000)) as fabric:
        hosts = fabric.host(0, 0), fabric.host(1, 0)
        # The side of the spine that faces the sender answers.
        hops = [[2, f"10.100.{there}.2"]], [[2, f"10.100.{16 + back}.2"]]
        ranks = []
        for rank in range(2):
            routes = [[hosts[1 - rank].address, hops[rank], worker.ROUTE_DSCP]]
            arguments = ["2", str(tmp_path), hosts[rank].address, json.dumps(routes)]
            command = [sys.executable, worker.__file__, str(rank), *arguments]
            env = {**INHERITED, LIBRARY_ENV: str(libnccl), "LD_PRELOAD": str(LIBRARY)}
            ranks.append(
                fabric.popen(hosts[rank], command, env=env, stdout=subprocess.PIPE, text=True)
            )
        told = [json.loads(rank.communicate(timeout=TIMEOUT_S)[0]) for rank in ranks]
        carried = {c.link: sum(c.bytes.values()) for c in fabric.counters()}
    for rank, result in enumerate(told):
        assert result["whole"]
        made = [c for c in result["connections"] if not c["accepted"]]
        assert len(made) == DATA == len(result["connections"]) - len(made)
        assert {c["how"] for c in made} == {"at_connect"}
        assert {c["via"] for c in made} == {hops[rank][0][1]}
        assert {c["dscp"] for c in made} == {worker.ROUTE_DSCP}
        assert len({c["local_port"] for c in made}) == len(made)
    sent = [[carried[f"leaf{leaf}->spine{spine}"] for spine in (0, 1)] for leaf in (0, 1)]
    assert sent[0][there] >= worker.BYTES > 4 * sent[0][1 - there]
    assert sent[1][back] >= worker.BYTES > 4 * sent[1][1 - back]


def connection(number: int, owner: str, kind: str = "tcp", *, accepted: bool = False) -> Connection:
    values: dict[str, Any] = dict.fromkeys(Connection.__dataclass_fields__, 0)
    text = dict.fromkeys(("device", "local", "peer", "via"), "")
    told = {"id": number, "owner": owner, "kind": kind, "how": "untouched", "accepted": accepted}
    return Connection(**{**values, **text, **told})


@pytest.mark.parametrize(("sees_sockets", "inodes"), [(True, {0, 1, 2}), (False, set())])
def test_nccl_its_plugins_and_a_torch_that_contains_it_are_told_by_name(
    sees_sockets: bool, inodes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("libnccl.so.2", "libnccl-net-ofi.so", "libtorch_cuda.so", "libtorch_cpu.so", "python")
    known = [connection(n, name) for n, name in enumerate(names)]
    known.append(connection(9, "libnccl.so.2", "qp"))
    library = SimpleNamespace(sees_sockets=sees_sockets, connections=lambda: known)
    monkeypatch.setattr(nccl.Transport, "load", lambda: library)
    assert nccl.made_by_nccl() == inodes


def test_what_nccl_accepted_takes_the_other_ends_path() -> None:
    route = HostRoute("here", "there", ("10.0.0.9",), ((2, ("10.1.1.1",)),))
    sockets = [TcpSocket(n, n, 2, ("10.0.0.1", 40000 + n), ("10.0.0.9", 5)) for n in (1, 2)]
    known = [connection(1, "libnccl.so.2"), connection(2, "libnccl.so.2", accepted=True)]
    assert [one.side for one in routed(sockets, [], known, [route])] == ["connected", "accepted"]
