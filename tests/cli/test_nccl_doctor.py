"""``crux doctor`` about NCCL and the choice of ECN bits; sysfs is a folder of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from crux_torch.apply import nccl
from crux_torch.apply.dscp import ECT0, Ecn, choose_ecn
from crux_torch.cli.doctor import nccl as of_nccl
from crux_torch.cli.doctor import network as doctor
from crux_torch.cli.doctor.finding import Check
from crux_torch.host.interfaces import RdmaDevice, RdmaPort
from crux_torch.settings import Settings


def only(checks: Iterable[Check]) -> Check:
    (check,) = checks
    return check


def device(link_layer: str = "Ethernet", *, active: bool = True) -> RdmaDevice:
    return RdmaDevice("mlx5_0", "mlx5_core", ports=(RdmaPort(1, link_layer, active, None, "eth0"),))


class Host:
    """The files that say how a RoCE port is configured."""

    def __init__(self, folder: Path) -> None:
        self.sysfs, self.configfs = folder / "sys", folder / "rdma_cm"

    def write(self, file: Path, text: str) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def force(self, text: str) -> Path:
        return self.write(self.sysfs / "class/infiniband/mlx5_0/tc/1/traffic_class", text)

    def default(self, text: str) -> None:
        self.write(self.configfs / "mlx5_0/ports/1/default_roce_tos", text)

    def react(self, *enabled: str) -> None:
        for priority, text in enumerate(enabled):
            file = self.sysfs / f"class/net/eth0/ecn/roce_rp/enable/{priority}"
            self.write(file, f"{text}\n")

    def chosen(self, *devices: RdmaDevice, setting: str = "auto") -> Ecn:
        return choose_ecn(setting, devices or (device(),), self.sysfs, self.configfs)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


NEWEST = (2, 30, 7)


def defeats(env: dict[str, str], version: nccl.Version = NEWEST, found: str = "") -> list[Check]:
    env = {"NCCL_CONF_FILE": "/none", **env}
    return list(of_nccl.defeats(env, lambda: version, lambda name: found or None))


def classes(
    env: dict[str, str], version: nccl.Version = NEWEST, found: str = "", **settings: bool
) -> list[Check]:
    env = {"NCCL_CONF_FILE": "/none", **env}
    library = found if found.startswith("libnccl-env") else ""
    settled = Settings(**settings)  # type: ignore[arg-type]
    return list(of_nccl.traffic_class(env, settled, lambda: version, lambda _: library or None))


@pytest.mark.parametrize("name", list(nccl.BYPASSES))
def test_what_is_out_of_reach_is_said(name: str) -> None:
    assert only(defeats({name: "1"})).part == name
    for unset in ({}, {name: "0"}, {name: ""}):
        assert defeats(unset) == []
    assert nccl.unreached({}, ["nccl.core", "torch"]) == {
        "nccl.core": nccl.BYPASSING_MODULES["nccl.core"]
    }


def test_what_defeats_a_plan_is_said() -> None:
    for name in of_nccl.DEFEATS:
        assert only(defeats({name: "1"})).finding == f"{name}=1"
        assert [defeats({name: unset}) for unset in ("0", "-1", "-2", "")] == [[]] * 4
    plugin = only(defeats({"NCCL_NET_PLUGIN": "ofi"}))
    assert (plugin.finding, plugin.remedy) == ("NCCL_NET_PLUGIN=ofi", "unset NCCL_NET_PLUGIN")
    assert defeats({"NCCL_NET_PLUGIN": "none"}, found="libnccl-net.so") == []
    loaded = only(defeats({}, found="libnccl-net.so"))
    assert loaded.finding == "NCCL loads libnccl-net.so"
    assert loaded.remedy == "set NCCL_NET_PLUGIN=none, unless you want it"


def test_a_variable_that_this_release_does_not_know_is_not_told() -> None:
    assert defeats({"NCCL_IB_OOO_RQ": "1", "NCCL_GIN_IB_TC": "8"}, (2, 29, 7)) == []
    assert only(defeats({"NCCL_IB_OOO_RQ": "1", "NCCL_GIN_IB_TC": "8"}, (2, 30, 4))).part == (
        "NCCL_IB_OOO_RQ"
    )
    both = {"NCCL_ENV_PLUGIN": "site", "NCCL_IB_FIFO_TC": "8"}
    assert [check.finding for check in classes(both)[:-1]] == [
        *("NCCL_IB_FIFO_TC=8", "NCCL_ENV_PLUGIN=site")
    ]
    assert [check.finding for check in classes(both, (2, 28, 3))[:-1]] == ["NCCL_IB_FIFO_TC=8"]
    old = classes(both, (2, 21, 5))[:-1]
    assert [check.finding for check in old] == ["NCCL 2.21.5 is older than 2.26.2"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((2, 21, 5), ("NCCL_IB_TC, 0", "NCCL_IB_TC, 0", "")),
        ((2, 25, 1), ("NCCL_IB_TC, 0", "NCCL_IB_FIFO_TC, NCCL_IB_TC, 0", "")),
        (
            (2, 27, 7),
            ("NCCL_IB_TC, trafficClass, 0", "NCCL_IB_FIFO_TC, NCCL_IB_TC, trafficClass, 0", ""),
        ),
        ((2, 28, 9), (*("NCCL_IB_TC, trafficClass, 0",), None, "NCCL_IB_TC, 0")),
        ((2, 30, 4), (None, None, "NCCL_IB_TC, ginTrafficClass, trafficClass, 0")),
        ((2, 30, 7), (None, None, "NCCL_GIN_IB_TC, NCCL_IB_TC, ginTrafficClass, trafficClass, 0")),
    ],
)
def test_the_order_of_each_release(version: nccl.Version, expected: tuple[str | None, ...]) -> None:
    told = of_nccl.class_order(version)
    assert [e in (None, t) for e, t in zip(expected, told, strict=True)] == [True] * 3
    assert told[0] in classes({}, version)[-1].finding


def test_a_host_that_says_nothing_leaves_the_bits_as_nccl_does(host: Host) -> None:
    assert host.chosen().bits == 0
    host.react("0", "0")
    assert host.chosen().bits == 0


def test_what_the_operator_configured_is_said(host: Host) -> None:
    host.react("0", "0", "0", "1")
    assert host.chosen().bits == ECT0
    assert "DCQCN" in host.chosen().why
    host.default("105\n")
    assert host.chosen().bits == 1
    host.force("Global tclass=106\n")
    assert host.chosen().bits == ECT0
    assert host.chosen().why.endswith("is 106")


@pytest.mark.parametrize("text", ["", "107", "Global tclass=", "256", "x", "104"])
def test_a_file_that_says_no_such_thing_is_passed_over(text: str, host: Host) -> None:
    host.force(text)
    host.react("1")
    assert host.chosen().bits == ECT0
    assert "DCQCN" in host.chosen().why


def test_a_port_that_is_down_counts_for_nothing(host: Host) -> None:
    host.react("1")
    assert host.chosen(device(active=False)).bits == 0


@pytest.mark.parametrize(("setting", "bits"), [("auto", 2), ("0", 0), ("1", 1), ("2", 2)])
def test_the_setting_wins_but_infiniband_has_no_such_bits(
    setting: str, bits: int, host: Host
) -> None:
    host.force("106")
    assert host.chosen(setting=setting).bits == bits
    assert host.chosen(device(), device("InfiniBand"), setting=setting).bits == 0


def test_infiniband_gets_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pairs:
        are_seen = True
        label = staticmethod(lambda label, owner, dscp: None)

    monkeypatch.setattr(nccl, "QueuePairs", Pairs)
    for layer, labelled in (("Ethernet", True), ("InfiniBand", False)):
        nccl._has_infiniband.cache_clear()
        monkeypatch.setattr(nccl, "read_devices", lambda layer=layer: (device(layer),))
        assert (nccl._load() is not None) == labelled
    nccl._has_infiniband.cache_clear()


def test_who_gives_nccls_class(tmp_path: Path) -> None:
    fine, order = classes({})
    assert (fine.state, order.part) == ("ok", "NCCL's precedence")
    beaten, _ = classes({"NCCL_IB_TC": "106"})
    assert (beaten.finding, beaten.remedy) == ("NCCL_IB_TC=106", "unset NCCL_IB_TC")
    assert only(classes({}, nccl_class=False)).state == "missing"
    conf = tmp_path / "conf"
    conf.write_text("NCCL_IB_SL=3\nNCCL_ENV_PLUGIN=site\n")
    by_file, by_plugin, _ = classes({"NCCL_CONF_FILE": str(conf)})
    assert by_file.finding == f"NCCL_IB_SL=3 in {conf}"
    assert by_file.remedy == f"unset NCCL_IB_SL in {conf}"
    assert by_plugin.finding == f"NCCL_ENV_PLUGIN=site in {conf}"
    found, _ = classes({}, found="libnccl-env.so")
    assert found.finding == "NCCL loads libnccl-env.so"
    assert len(classes({"NCCL_ENV_PLUGIN": "none"}, found="libnccl-env.so")) == 2


def test_a_class_that_the_driver_forces_is_told(host: Host) -> None:
    def found() -> list[Check]:
        return list(doctor.forced_classes((device(),), host.sysfs))

    assert found() == []
    file = host.force("0")
    assert found() == []
    host.force("Global tclass=106")
    check = only(found())
    assert check.finding == f"{file} is 106"
    assert check.remedy == f"echo 0 > {file}"


def test_ecn_is_told_and_so_is_an_operator_who_said_otherwise(host: Host, tmp_path: Path) -> None:
    env = {"NCCL_CONF_FILE": str(tmp_path / "none")}

    def found(**more: str) -> list[Check]:
        return list(
            doctor.ecn_bits({**env, **more}, Settings(), (device(),), host.sysfs, host.configfs)
        )

    assert only(found()).finding.startswith("not ECN capable")
    told = only(found(NCCL_IB_TC="106"))
    assert (told.state, told.remedy) == ("missing", "set CRUX_ROCE_ECN=2")
    host.react("1")
    assert only(found(NCCL_IB_TC="106")).state == "ok"
    assert list(doctor.ecn_bits(env, Settings(), (), host.sysfs, host.configfs)) == []


def test_nccl() -> None:
    release, choice = of_nccl.nccl_choices({"NCCL_IB_HCA": "=mlx5_0"}, lambda: (2, 30, 7))
    assert (release.state, release.finding) == ("ok", "2.30.7")
    assert (choice.state, choice.finding) == ("missing", "NCCL_IB_HCA==mlx5_0")
    assert list(of_nccl.nccl_choices({}, lambda: None)) == []


def test_what_nccls_own_file_decides_for_it(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_SOCKET_IFNAME==eth0\nNCCL_IB_HCA=mlx5_0\n")
    env = {"NCCL_CONF_FILE": str(file), "NCCL_IB_HCA": ""}
    _, choice = of_nccl.nccl_choices(env, lambda: (2, 30, 7))
    assert choice.finding == f"NCCL_SOCKET_IFNAME==eth0 in {file}"
