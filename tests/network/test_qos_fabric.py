"""``crux qos check`` on a fabric whose queues are right, wrong, missing, or whose marks change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from fabric_programs import add_ipv6
from loopback import has_ipv6

from crux_torch.network.probe.qos_probe import QosReport
from lab import netns
from lab.fabric import Fabric, FabricSpec, Host

_OK, _REASON = netns.available()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not _OK, reason=_REASON),
    pytest.mark.xdist_group("qos-fabric"),
]
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="it takes nft: nftables")

RATE_MBIT = 20
LOAD = ["--load", "40M", "--seconds", "6", "--rate", "600"]
CRUX = str(Path(sys.executable).parent / "crux")
MAP = "0:0,1:8,2:16"
LIMIT_S = 120.0
#: By level, its place in the order of service.
RIGHT = (7, 6, 5, 4, 3, 2, 1, 0)


class Checked:
    """A fabric of two leaves with a host each, and the commands of ``crux`` on its hosts."""

    def __init__(self, fabric: Fabric, folder: Path) -> None:
        self.fabric, self.here, self.there = fabric, fabric.host(0, 0), fabric.host(1, 0)
        self.topology = folder / "cluster.yaml"
        self.topology.write_text(fabric.topology_yaml())
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CRUX_")}
        path = os.pathsep.join((str(Path(CRUX).parent), os.environ["PATH"]))
        self.env = {**kept, "XDG_RUNTIME_DIR": str(runtime), "PATH": path, "COLUMNS": "100"}

    def crux(
        self,
        host: Host,
        *arguments: str,
        first: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", "netns", "exec", host.namespace, *first, CRUX, *arguments],
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def listen(self) -> None:
        """Serve one check on the far host."""
        argv = [CRUX, "qos", "listen", "--sessions", "1", "--seconds", f"{LIMIT_S}"]
        started = self.fabric.popen(
            self.there, argv, env=self.env, stdout=subprocess.PIPE, text=True
        )
        assert started.stdout is not None
        assert started.stdout.readline() == "listening on port 29414: TCP and UDP\n"

    def check(self, *options: str, first: tuple[str, ...] = (), address: str = "") -> QosReport:
        self.listen()
        address = address or self.there.address
        arguments = ["qos", "check", address, "--topology", str(self.topology)]
        done = self.crux(self.here, *arguments, *options, "--json", first=first)
        assert done.returncode in (0, 1), done.stderr
        found = msgspec.json.decode(done.stdout, type=QosReport)
        assert done.returncode == (0 if found.is_right else 1)
        return found

    def check_loaded(self, *options: str) -> QosReport:
        """The first report with an answer: a machine that is busy may not get the load out."""
        found = self.check(*options, *LOAD)
        for _ in range(4):
            if not {"no queue", "unclear", "choked"}.intersection(
                one.queue for one in found.levels
            ):
                break
            found = self.check(*options, *LOAD)
        return found

    def set_queues(self, order: Sequence[int]) -> None:
        """Give each level its place in the order of service, 0 first; empty: all share one."""
        for namespace, devices in self.fabric._switch_ports().items():
            lines = []
            for device in devices:
                lines.append(f"filter del dev {device} parent 1:")
                lines += (
                    f"filter add dev {device} parent 1: protocol ip prio 1 u32 match ip "
                    f"dsfield {level << 5:#04x} 0xe0 flowid 1:1{place}"
                    for level, place in enumerate(order)
                )
            netns.run_batch("tc", "\n".join(lines) + "\n", namespace)

    def set_rules(
        self, switch: str, prerouting: str = "", postrouting: str = "", family: str = "ip"
    ) -> None:
        """Rules of nft for what a switch forwards; none by default."""
        table = f"{family} marks"
        rules = "".join(
            f"chain {hook} {{ type filter hook {hook} priority mangle;\n{said}\n}}\n"
            for hook, said in (("prerouting", prerouting), ("postrouting", postrouting))
        )
        subprocess.run(
            ["ip", "netns", "exec", f"{self.fabric.prefix}{switch}", "nft", "-f", "-"],
            input=f"table {table}\ndelete table {table}\ntable {table} {{\n{rules}}}\n",
            text=True,
            check=True,
        )


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    spec = FabricSpec(spines=2, hosts_per_leaf=1, rate_mbit=RATE_MBIT, queue_bytes=100_000)
    with Fabric(spec) as fabric:
        # HTB lets each class have a rate of its own before it looks at the order, which is enough
        # for probes: take it away, so that the order is strict.
        for namespace, devices in fabric._switch_ports().items():
            lines = [
                f"class change dev {device} parent 1:1 classid 1:1{order} htb rate 1kbit "
                f"ceil {RATE_MBIT}mbit prio {order} burst 1600 cburst 20000 quantum 3028"
                for device in devices
                for order in range(8)
            ]
            netns.run_batch("tc", "\n".join(lines) + "\n", namespace)
        yield Checked(fabric, tmp_path_factory.mktemp("qos"))


@pytest.mark.parametrize(
    ("order", "verdicts"),
    [
        pytest.param(RIGHT, ["before", "before"], id="right"),
        pytest.param(RIGHT[::-1], ["after", "after"], id="wrong: upside down"),
        pytest.param((7, 6, 7), ["before", "same"], id="wrong: two levels in one queue"),
        pytest.param((), ["same", "same"], id="missing"),
    ],
)
def test_the_verdict_on_each_set_up_of_queues(
    checked: Checked, order: Sequence[int], verdicts: list[str]
) -> None:
    checked.set_queues(order)
    try:
        found = checked.check_loaded("--map", MAP)
    finally:
        checked.set_queues(RIGHT)
    assert [one.mark for one in found.levels] == ["kept"] * 3
    assert [one.queue for one in found.levels] == ["loaded", *verdicts]
    assert 0.0 < found.sent_bps <= found.load_bps == 40e6
    assert found.is_right == (verdicts == ["before", "before"])


def test_load_that_fills_no_queue_shows_none(checked: Checked) -> None:
    found = checked.check("--map", MAP, "--load", "5M", "--seconds", "6")
    assert [one.queue for one in found.levels] == ["no queue"] * 3
    assert not found.is_right


def test_a_middle_level_is_compared_with_those_on_both_sides(checked: Checked) -> None:
    found = checked.check_loaded("--map", MAP, "--against", "1")
    assert [one.queue for one in found.levels] == ["after", "loaded", "before"]
    assert found.is_right


@pytest.fixture
def remarked(checked: Checked) -> Iterator[Checked]:
    checked.set_rules("leaf0", prerouting="ip dscp 8 ip dscp set 0")
    for spine in ("spine0", "spine1"):
        checked.set_rules(spine, prerouting="ip dscp 16 ip dscp set 1\nip dscp 32 drop")
    checked.set_rules("leaf1", postrouting="ip dscp 24 ip dscp set 40")
    yield checked
    for switch in ("leaf0", "spine0", "spine1", "leaf1"):
        checked.set_rules(switch)


@needs_nft
def test_marks_that_change_and_where(remarked: Checked) -> None:
    found = remarked.check_loaded("--map", "0:0,1:8,2:16,3:24,4:32")
    marks = ["kept", "remarked", "remarked", "remarked", "dropped"]
    assert [one.mark for one in found.levels] == marks
    at_host, at_spine, at_end, dropped = (one.between for one in found.levels[1:])
    assert at_host == ("h0-0", "leaf0")
    assert at_spine in [("leaf0", "spine0"), ("leaf0", "spine1")]
    assert at_end == ("leaf1", "h1-0")
    assert dropped == at_spine
    assert [set(one.seen) for one in found.levels] == [{0}, {0}, {1}, {40}, set()]
    # The narrow link is the leaf's: there the first has its new mark, and the others the old one.
    assert [one.queue for one in found.levels[:4]] == ["loaded", "same", "before", "before"]
    assert found.notes == ()


@needs_nft
def test_without_the_right_to_read_quotes_the_place_stays_unknown(remarked: Checked) -> None:
    first = ("setpriv", "--bounding-set=-net_raw")
    found = remarked.check("--map", MAP, "--seconds", "2", first=first)
    assert [one.mark for one in found.levels] == ["kept", "remarked", "remarked"]
    assert {one.between for one in found.levels} == {None}
    (note,) = found.notes
    assert "it needs CAP_NET_RAW" in note


def test_the_doctor_shows_the_last_result(checked: Checked) -> None:
    assert checked.check_loaded("--map", MAP).is_right
    said = json.loads(checked.crux(checked.here, "doctor", "--json").stdout)
    (queues,) = [one for one in said if one["part"] == f"queues to {checked.there.address}"]
    assert queues["state"] == "ok"
    assert queues["finding"].startswith("levels 1, 2: served before level 0 (")


def test_all_pairs_of_leaves(checked: Checked) -> None:
    on = f"ip netns exec {checked.fabric.prefix}{{host}}"
    arguments = ["qos", "check", "--topology", str(checked.topology), "--on", on, "--map", MAP]
    done = checked.crux(checked.here, *arguments, "--seconds", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["from"], row["to"]) for row in rows] == [("h0-0", "h1-0"), ("h1-0", "h0-0")]
    for row in rows:
        found = msgspec.convert(row["report"], QosReport, strict=False)
        assert [(one.mark, one.queue) for one in found.levels] == [("kept", "not tried")] * 3


def test_a_command_that_fails_on_a_host_is_named(checked: Checked) -> None:
    on = f"ip netns exec {checked.fabric.prefix}-nowhere-{{host}}"
    arguments = ["qos", "check", "--topology", str(checked.topology), "--on", on, "--map", MAP]
    done = checked.crux(checked.here, *arguments)
    assert done.returncode == 1
    assert "h0-0 to h1-0: h1-0: no listener: Cannot open network namespace" in done.stdout


def test_under_a_launcher_rank_0_listens(checked: Checked) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": checked.there.address}
    arguments = ["qos", "check", "--map", MAP, "--seconds", "2"]
    argv = [CRUX, *arguments]
    rank_0 = checked.fabric.popen(
        checked.there, argv, env={**checked.env, **env, "RANK": "0"}, stdout=subprocess.PIPE
    )
    rank_1 = checked.crux(checked.here, *arguments, env={**env, "RANK": "1"})
    assert rank_1.returncode == 0, rank_1.stderr
    assert rank_1.stdout.count("arrives") == 3
    assert rank_0.wait(LIMIT_S) == 0


@needs_nft
@pytest.mark.skipif(not has_ipv6(), reason="it takes IPv6")
def test_marks_of_ipv6(checked: Checked) -> None:
    add_ipv6(checked.fabric)
    for spine in ("spine0", "spine1"):
        checked.set_rules(spine, prerouting="ip6 dscp 16 ip6 dscp set 0", family="ip6")
    found = checked.check("--map", MAP, "--seconds", "2", address="fd00:1::2")
    assert [one.mark for one in found.levels] == ["kept", "kept", "remarked"]
    assert found.levels[2].between in [("fd00::1", "fd00:100::2"), ("fd00::1", "fd00:101::2")]
