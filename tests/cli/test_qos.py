"""Arguments of ``crux qos check``, and its results as the doctor reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from control_fakes import hosted_store, record
from loopback import free_port

from crux_torch.agreement.registry import Registry
from crux_torch.cli import qos
from crux_torch.cli.doctor.network import marked_packets
from crux_torch.cli.main import main
from crux_torch.cli.qos import PairError, check_pair, pairs_of_leaves
from crux_torch.cli.qos_results import FILE, PEERS, recall, remember
from crux_torch.host.qos import InterfaceQos
from crux_torch.network.loaders import load_topology
from crux_torch.network.probe.qos_probe import QosReport
from crux_torch.network.probe.qos_verdicts import LevelVerdict, Queue
from crux_torch.store.endpoint import open_store

CLUSTER = """
version: 1
hosts: {a0: , a1: , b0: , c0: , bare: }
switches: {leaf-a: tor, leaf-b: tor, leaf-c: tor, spine: aggregation}
links:
  - {between: [bare, leaf-a], capacity_Bps: 1e9}
  - {between: [a0, leaf-a], capacity_Bps: 1e9}
  - {between: [a1, leaf-a], capacity_Bps: 1e9}
  - {between: [b0, leaf-b], capacity_Bps: 1e9}
  - {between: [c0, leaf-c], capacity_Bps: 1e9}
  - {between: [leaf-a, spine], capacity_Bps: 1e9}
  - {between: [leaf-b, spine], capacity_Bps: 1e9}
  - {between: [leaf-c, spine], capacity_Bps: 1e9}
addresses: {a0: [10.0.0.1], a1: [10.0.0.2], b0: [10.0.1.1], c0: [10.0.2.1]}
"""
QOS = """
qos:
  tcp: [{dscp: 0}, {dscp: 10}]
  rdma: [{dscp: 26, priority: 3, lossless: true}, {dscp: 28, priority: 4, lossless: true}]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER + QOS)
    return file


def refusal(*arguments: str) -> str:
    """Returns the command's message of refusal."""
    env = {"CRUX_DSCP_MAP": "", "CRUX_RDMA_DSCP_MAP": "", "CRUX_TOPOLOGY": "", "RANK": ""}
    done = CliRunner().invoke(main, ["qos", "check", *arguments], env=env)
    assert done.exit_code in (1, 2)
    return " ".join(done.output.split())


@pytest.mark.parametrize("text", ["0", "-1M", "1T", "401G", "M", "1 G", "1e9", "nan", "inf"])
def test_load_is_a_bounded_rate(text: str) -> None:
    said = refusal("127.0.0.1", "--map", "0:0", "--load", text)
    assert "expected bits per second up to 400G" in said


@pytest.mark.parametrize("text", ["", "0", "0:64", "64:0", "0:0,0:1", "a:1", "0:0,", "-1:3"])
def test_a_map_has_each_level_once(text: str) -> None:
    assert "expected LEVEL:DSCP" in refusal("127.0.0.1", "--map", text)


def test_what_is_missing_is_named(cluster: Path) -> None:
    assert "expected either HOST or, for all pairs of leaves, --on" in refusal("--map", "0:0")
    assert "no DSCP values for TCP: give --map" in refusal("127.0.0.1")
    assert "--on needs --topology" in refusal("--map", "0:0", "--on", "ssh {host}")
    said = refusal("127.0.0.1", "--topology", str(cluster), "--against", "5")
    assert "--against: expected one of [0, 1]" in said
    said = refusal("127.0.0.1", "--map", "0:0", "--port", str(free_port()))
    assert "run `crux qos listen` there" in said


def test_no_load_in_a_lossless_class(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["127.0.0.1", "--load", "1M", "--port", str(free_port())]
    said = refusal(*options, "--topology", str(cluster), "--rdma")
    assert "DSCP 26 is lossless (PFC)" in said
    # A value that the topology does not have, on an interface that protects it.
    monkeypatch.setattr(qos, "interfaces", lambda: ("eth0",))
    lossless = InterfaceQos("eth0", priority_of={40: 5}, pfc=(False,) * 5 + (True,) + (False,) * 2)
    monkeypatch.setattr(qos, "read", lambda _name: lossless)
    assert "DSCP 40 is lossless (PFC)" in refusal(*options, "--map", "0:40,1:48")
    assert "run `crux qos listen` there" in refusal(*options, "--map", "0:48,1:40")


@pytest.fixture
def store() -> Iterator[str]:
    """A store with a job on b0, and one whose name would move the cursor."""
    with hosted_store() as endpoint:
        client = open_store(endpoint, timeout_s=60.0)
        registry = Registry(client, "default")
        for name, hosts in (("gpt", ("a0", "b0")), ("\x1b[2J", ("b0",)), ("far", ("c0",))):
            registry.publish_job(record(name, hosts=hosts), 60.0)
        yield endpoint
        client.close()


def test_load_beside_jobs_is_said(
    cluster: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRUX_STORE", store)
    options = ["10.0.1.1", "--topology", str(cluster), "--load", "1M"]
    monkeypatch.setattr(qos, "check", refuse)
    said = refusal(*options)
    assert "note: jobs here or on 10.0.1.1: '\\x1b[2J', 'gpt'; load delays their level 0" in said
    assert "far" not in said
    assert "note" not in refusal(*options[:-2])


def refuse(*_: object, **__: object) -> None:
    raise PairError("not in this test")


def test_a_host_of_each_leaf_meets_those_of_the_others(cluster: Path) -> None:
    assert pairs_of_leaves(load_topology(cluster)) == (
        ("a0", "b0"), ("a0", "c0"), ("b0", "a0"), ("b0", "c0"), ("c0", "a0"), ("c0", "b0"),
    )  # fmt: skip


def test_hosts_with_several_leaves_stand_for_one_each(cluster: Path) -> None:
    second = "".join(
        f"  - {{between: [{host}, leaf-b], capacity_Bps: 1e9}}\n" for host in ("a0", "a1")
    )
    cluster.write_text(CLUSTER.replace("addresses:", f"{second}addresses:"))
    hosts = {host for pair in pairs_of_leaves(load_topology(cluster)) for host in pair}
    assert hosts == {"a0", "b0", "c0"}


def test_no_two_leaves_with_addresses(cluster: Path) -> None:
    cluster.write_text(CLUSTER.partition("addresses:")[0] + "addresses: {a0: [10.0.0.1]}\n")
    with pytest.raises(PairError, match="no two leaves"):
        pairs_of_leaves(load_topology(cluster))


def test_a_name_can_not_become_an_option_of_the_command(cluster: Path) -> None:
    cluster.write_text(CLUSTER.replace("b0", "-oProxyCommand=x"))
    topology = load_topology(cluster)
    with pytest.raises(PairError, match="would be an option"):
        check_pair(topology, ("a0", "-oProxyCommand=x"), "ssh {host}", ["--port", "1"], 1.0)


def test_a_command_that_says_nothing_of_use(cluster: Path) -> None:
    topology = load_topology(cluster)
    for on, said in (("false", "b0: no listener"), ("echo", "a0: no result"), ("/no", "b0: ")):
        with pytest.raises(PairError, match=said):
            check_pair(topology, ("a0", "b0"), on, ["--port", "29414"], 1.0)


def report(destination: str, queue: Queue = "before", load_bps: float = 1e9) -> QosReport:
    levels = (
        LevelVerdict(level=0, dscp=0, mark="kept", queue="loaded" if load_bps else "not tried"),
        LevelVerdict(level=1, dscp=10, mark="kept", queue=queue),
        LevelVerdict(level=2, dscp=18, mark="kept", queue=queue),
    )
    return QosReport(
        source="10.0.0.1",
        destination=destination,
        at=1000.0,
        reference=0,
        load_bps=load_bps,
        levels=levels,
    )


def test_the_last_result_about_each_host_is_kept(tmp_path: Path) -> None:
    assert recall(tmp_path) == ()
    for n in range(PEERS + 3):
        remember(report(f"10.0.0.{n}"), tmp_path)
    remember(replaced := report("10.0.0.66", "same"), tmp_path)
    kept = recall(tmp_path)
    assert len(kept) == PEERS
    assert kept[0] == replaced
    assert sum(one.destination == "10.0.0.66" for one in kept) == 1


@pytest.mark.parametrize("held", [b"", b"{", b"[" * 100_000, b'[{"version":1}]', b"\xff\x00"])
def test_what_is_no_result_is_none(tmp_path: Path, held: bytes) -> None:
    (tmp_path / FILE).write_bytes(held)
    assert recall(tmp_path) == ()
    remember(report("10.0.0.9"), tmp_path)
    assert len(recall(tmp_path)) == 1


def test_the_doctor_says_what_was_found() -> None:
    good, same = report("10.0.0.2"), report("10.0.0.3", "same")
    untried = report("10.0.0.4", "not tried", load_bps=0.0)
    checks = list(marked_packets([good, same, untried], 1180.0))
    assert [(one.part, one.state) for one in checks] == [
        ("queues to 10.0.0.2", "ok"),
        ("queues to 10.0.0.3", "missing"),
        ("queues to 10.0.0.4", "missing"),
    ]
    assert checks[0].finding == "levels 1, 2: served before level 0 (3 min ago)"
    assert checks[1].finding == "levels 1, 2: same queue as level 0 (3 min ago)"
    assert "--load" in checks[2].remedy
    assert list(marked_packets([], 0.0)) == []
