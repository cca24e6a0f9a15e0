"""What ``crux doctor`` says of DSCP maps, on hosts configured in one way and another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from dscp_maps import CLASS_SELECTORS, MARKED
from findings import sound
from networks import NETWORK

from crux_torch.cli.doctor import network
from crux_torch.cli.doctor.finding import Check
from crux_torch.host.interfaces import RdmaDevice, RdmaPort
from crux_torch.host.qos import InterfaceQos, interfaces, read
from crux_torch.network.qos import Qos, QosClass
from crux_torch.settings import Settings

NIC = "ens1f0np0"
DEVICES = (RdmaDevice("mlx5_0", "mlx5_core", ports=(RdmaPort(1, "Ethernet", True, None, NIC),)),)
#: As mlnx_qos of mlnx-tools prints it, here for a host whose priorities 3 and 4 are lossless.
MLNX_QOS = """DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
\tprio:1 dscp:15,14,13,12,11,10,09,08,
\tprio:2 dscp:23,22,21,20,19,18,17,16,
\tprio:3 dscp:31,30,29,28,27,26,25,24,
\tprio:4 dscp:39,38,37,36,35,34,33,32,
\tprio:5 dscp:47,46,45,44,43,42,41,40,
\tprio:6 dscp:55,54,53,52,51,50,49,48,
\tprio:7 dscp:63,62,61,60,59,58,57,56,
default priority:
Receive buffer size (bytes): 130944,130944,0,0,0,0,0,0,max_buffer_size=262016
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   1   0   0   0   
\tbuffer      0   0   0   1   1   0   0   0   
tc: 0 ratelimit: unlimited, tsa: strict
\t priority:  0
tc: 1 ratelimit: unlimited, tsa: strict
\t priority:  1
\t priority:  2
tc: 3 ratelimit: unlimited, tsa: ets, bw: 50%
\t priority:  3
tc: 4 ratelimit: unlimited, tsa: ets, bw: 50%
\t priority:  4
tc: 5 ratelimit: unlimited, tsa: vendor
\t priority:  5
"""  # noqa: W291
#: As dcb of iproute2 prints a device with ``-j``.
LOSSLESS = [priority in (3, 4) for priority in range(8)]
DCB = {
    "app": {"dscp_prio": [[d, d >> 3] for d in range(64)]},
    "pfc": {"pfc_cap": 8, "macsec_bypass": False, "delay": 0, "prio_pfc": LOSSLESS},
    "buffer": {
        "prio_buffer": [int(on) for on in LOSSLESS],
        "buffer_size": [130944, 130944, 0, 0, 0, 0, 0, 0],
        "total_size": 262016,
    },
    "ets": {
        "willing": False,
        "ets_cap": 8,
        "tc_tsa": ["ets" if on else "strict" for on in LOSSLESS],
        "prio_tc": list(range(8)),
    },
}


def run_of(mlnx: str | None = None, dcb: Mapping[str, object] | None = None, tc: object = None):  # type: ignore[no-untyped-def]
    """Commands of a host on which those that are None are not installed."""

    def run(command: Sequence[str]) -> str | None:
        if command[0] == "mlnx_qos":
            assert command[1:] == ("-i", NIC)
            return mlnx
        if command[0] == "tc":
            return None if tc is None else json.dumps(tc)
        assert command[:2] == ("dcb", "-j"), command
        return json.dumps(dcb[command[2]]) if dcb is not None else None

    return run


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    net = tmp_path / "class/net"
    for name, state in ((NIC, "up"), ("ens1f1np1", "down")):
        (net / name / "device").mkdir(parents=True)
        (net / name / "operstate").write_text(f"{state}\n")
    (net / "lo").mkdir()
    cnp = net / NIC / "ecn/roce_np"
    cnp.mkdir(parents=True)
    (cnp / "cnp_dscp").write_text("48\n")
    return tmp_path


@pytest.fixture
def host(sysfs: Path) -> InterfaceQos:
    return read(NIC, run_of(MLNX_QOS), sysfs)


def test_what_mlnx_qos_and_dcb_print_is_read(sysfs: Path, host: InterfaceQos) -> None:
    assert interfaces(sysfs) == (NIC,)
    assert (host.trust, host.cnp_dscp) == ("dscp", 48)
    assert host.priority_of == {dscp: dscp >> 3 for dscp in range(64)}
    assert host.pfc == (False, False, False, True, True, False, False, False)
    assert host.buffer_of == (0, 0, 0, 1, 1, 0, 0, 0)
    assert host.buffer_bytes[:3] == (130944, 130944, 0)
    strict = dict.fromkeys((0, 1, 2), "strict")
    assert host.algorithms == {**strict, 3: "ets", 4: "ets", 5: "vendor"}
    of_dcb = read(NIC, run_of(dcb=DCB), sysfs)
    same = ("trust", "priority_of", "pfc", "buffer_of", "cnp_dscp")
    assert [getattr(of_dcb, name) for name in same] == [getattr(host, name) for name in same]
    assert of_dcb.algorithms == {**dict.fromkeys(range(8), "strict"), 3: "ets", 4: "ets"}


def test_the_kernel_s_own_driver_tells_the_value_of_cnp_elsewhere(tmp_path: Path) -> None:
    function = tmp_path / "devices/0000:3b:00.0"
    function.mkdir(parents=True)
    (tmp_path / "class/net" / NIC).mkdir(parents=True)
    (tmp_path / "class/net" / NIC / "device").symlink_to(function)
    told = tmp_path / "kernel/debug/mlx5/0000:3b:00.0/cc_params/np_cnp_dscp"
    told.parent.mkdir(parents=True)
    told.write_text("56\n")
    assert read(NIC, run_of(), tmp_path).cnp_dscp == 56


@pytest.mark.parametrize(
    "dcb", [None, {part: [] for part in DCB}, {part: {"x": 1} for part in DCB}]
)
def test_a_host_that_tells_nothing_contradicts_nothing(
    dcb: dict[str, object] | None, tmp_path: Path
) -> None:
    silent = read(NIC, run_of(dcb=dcb), tmp_path)
    assert silent == InterfaceQos(NIC)
    assert found([silent]) == []
    assert read(NIC, run_of("no such device", tc={}), tmp_path) == InterfaceQos(NIC)


def found(
    hosts: Sequence[InterfaceQos], said: Qos | None = None, **maps: tuple[int, ...]
) -> list[Check]:
    maps = maps or {"tcp": CLASS_SELECTORS}
    settings = Settings(
        levels=max(map(len, maps.values())),
        dscp_map=maps.get("tcp", ()),
        rdma_dscp_map=maps.get("rdma", ()),
    )
    return list(map(sound, network.of_interfaces(settings, said, hosts, DEVICES)))


def broken(*told: object, **maps: tuple[int, ...]) -> str:
    """The only finding, which must be one that ends ``crux doctor`` with 1."""
    checks = found(*told, **maps)  # type: ignore[arg-type]
    assert [check.state for check in checks] == ["broken"], checks
    return checks[0].finding


def test_a_map_that_contradicts_the_host_is_refused_with_the_reason(host: InterfaceQos) -> None:
    assert "trusts the VLAN" in broken([replace(host, trust="pcp")], tcp=(0, 8))
    assert "48 is that of congestion notifications" in broken([host], tcp=(0, 48))
    assert "50" not in broken([replace(host, cnp_dscp=8)], rdma=(8, 16))
    assert "24 has priority 3, which is lossless (PFC): not for TCP" in broken([host], tcp=(0, 24))
    mixed = broken([host], rdma=(26, 42))
    assert "26 has priority 3, which is lossless (PFC), and DSCP 42 has priority 5" in mixed
    states = [check.state for check in found([host])]
    assert states == ["broken", "broken"], "the class selectors take CNP's value and lossless ones"


def test_a_map_that_the_qos_describes_otherwise_than_the_host_is_refused(
    host: InterfaceQos,
) -> None:
    def rdma(*classes: QosClass) -> Qos:
        return Qos(rdma=classes)

    lossless = {"lossless": True}
    good = rdma(QosClass(26, 3, **lossless), QosClass(34, 4, **lossless))
    states = {check.state for check in found([host], good, rdma=(26, 34))}
    assert "broken" not in states
    other = rdma(QosClass(26, 5, **lossless), QosClass(34, 4, **lossless))
    reason = broken([host], other, rdma=(26, 34))
    assert reason == "DSCP 26 has priority 3; the topology's qos says 5"
    lossy = rdma(QosClass(26, 3), QosClass(34))
    (first, _) = found([host], lossy, rdma=(26, 34))
    assert "lossless (PFC); the topology's qos says lossy" in first.finding
    wished = rdma(QosClass(10, 1, **lossless))
    assert "lossy (no PFC); the topology's qos says lossless" in broken([host], wished, rdma=(10,))


def test_what_takes_the_map_s_effect_away_is_said(host: InterfaceQos) -> None:
    said = {check.finding: check.state for check in found([host], tcp=(0, 8, 10))}
    assert said["DSCP 8, 10 share priority 1"] == "missing"
    shared = [check.finding for check in found([host], rdma=(26, 34))]
    assert "ets shares the link out to priorities 3, 4: a higher level does not go first" in shared
    assert any("26 has priority 3, 34 has priority 4 (lossless)" in one for one in shared)
    tight = replace(host, buffer_of=(0,) * 8)
    assert any("buffer 0 is shared with lossy" in c.finding for c in found([tight], rdma=(26, 34)))
    none = replace(host, buffer_of=(0, 0, 0, 2, 2, 0, 0, 0))
    assert any("buffer 2 has no room" in c.finding for c in found([none], rdma=(26, 34)))
    beside = [check.finding for check in found([host], tcp=(0, 50))]
    assert "congestion notifications (DSCP 48 has priority 6) share a level's priority" in beside
    mqprio = run_of(tc=[{"kind": "mqprio", "root": True, "options": {"tc": 4}}])
    sorted_by_socket = found([read(NIC, mqprio, Path("/absent"))], tcp=(0, 8))
    assert "mqprio of 4 traffic classes" in sorted_by_socket[0].finding


def test_queue_pairs_maps_are_compared_with_roce_interfaces_alone(host: InterfaceQos) -> None:
    other = replace(host, name="eth9", trust="pcp")
    assert all(NIC in check.part for check in found([host, other], rdma=(26, 34)))


def test_values_that_networks_commonly_take_are_named() -> None:
    _, _, checks = network.maps(Settings(**MARKED))
    (check,) = checks
    assert check.state == "missing"
    for told in ("24 is commonly", "48 is CS6", "CNP", "56 is CS7", "RFC 4594"):
        assert told in check.finding
    _, _, (free,) = network.maps(Settings(levels=2, dscp_map=(0, 10)))
    assert (free.state, free.finding) == ("ok", "0, 10")
    _, _, (reserved,) = network.maps(Settings(**MARKED, reserved_levels=(3, 6, 7)))
    assert (reserved.state, reserved.finding) == ("ok", "0, 8, 16, 32, 40")
    _, _, (none,) = network.maps(Settings())
    assert (none.state, none.finding) == ("missing", "none given")


def test_a_map_beside_another_one_in_the_topology_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(f"{NETWORK}qos: {{tcp: [{{dscp: 0}}, {{dscp: 10}}]}}\n")
    found, said, (check,) = network.maps(Settings(topology=str(file)))
    assert (found.dscp_map, found.levels, check.finding) == ((0, 10), 2, "0, 10")
    assert said is not None
    _, _, (check,) = network.maps(Settings(**MARKED, topology=str(file)))
    assert (check.state, check.remedy) == ("broken", "unset CRUX_DSCP_MAP")
    file.write_text("version: 9")
    _, _, (check,) = network.maps(Settings(topology=str(file)))
    assert check.finding == "none given", "the check of the topology says the rest"
