"""What ``crux doctor`` says of NCCL, and how ECN bits are chosen; sysfs is a folder of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from crux_torch.apply import ecn, nccl, nccl_labels
from crux_torch.apply.ecn import ECT0, Ecn
from crux_torch.doctor import nccl as doctor
from crux_torch.doctor.check import Check
from crux_torch.host.rdma import RdmaDevice, RdmaPort
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
        return ecn.choose(setting, devices or (device(),), self.sysfs, self.configfs)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("name", list(nccl.BYPASSES))
def test_what_is_out_of_reach_is_said(name: str) -> None:
    assert only(doctor.unreached({name: "1"})).part == name
    for unset in ({}, {name: "0"}, {name: ""}):
        assert list(doctor.unreached(unset)) == []
    assert nccl.unreached({}, ["nccl.core", "torch"]) == {
        "nccl.core": nccl.BYPASSING_MODULES["nccl.core"]
    }


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

    monkeypatch.setattr(nccl_labels, "QueuePairs", Pairs)
    for layer, labelled in (("Ethernet", True), ("InfiniBand", False)):
        nccl_labels._has_infiniband.cache_clear()
        monkeypatch.setattr(nccl_labels, "read_devices", lambda layer=layer: (device(layer),))
        assert (nccl_labels._load() is not None) == labelled
    nccl_labels._has_infiniband.cache_clear()


def test_who_gives_nccls_class(tmp_path: Path) -> None:
    none = {"NCCL_CONF_FILE": str(tmp_path / "none")}
    assert only(doctor.traffic_class(none, Settings())).state == "ok"
    beaten = only(doctor.traffic_class({**none, "NCCL_IB_TC": "106"}, Settings()))
    assert (beaten.finding, beaten.remedy) == ("NCCL_IB_TC=106", "unset NCCL_IB_TC")
    assert only(doctor.traffic_class(none, Settings(nccl_class=False))).state == "missing"
    conf = tmp_path / "conf"
    conf.write_text("NCCL_IB_SL=3\nNCCL_ENV_PLUGIN=site\n")
    by_file, by_plugin = doctor.traffic_class({"NCCL_CONF_FILE": str(conf)}, Settings())
    assert by_file.finding == f"NCCL_IB_SL=3 in {conf}"
    assert by_file.remedy == f"unset NCCL_IB_SL in {conf}"
    assert by_plugin.finding == "NCCL_ENV_PLUGIN=site"


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
