"""RDMA devices in made-up sysfs trees, in malformed ones, and through a made-up pyverbs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from crux_torch.host import interfaces
from crux_torch.host.interfaces import (
    Gid,
    Limits,
    RdmaDevice,
    RdmaPort,
    rdma_devices,
    read_devices,
    verbs_limits,
)

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000\n"


def write(file: Path, text: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)


def gid(port: Path, index: int, address: str, kind: str = "", interface: str = "") -> None:
    write(port / "gids" / str(index), address)
    if kind:
        write(port / "gid_attrs" / "types" / str(index), f"{kind}\n")
    if interface:
        write(port / "gid_attrs" / "ndevs" / str(index), f"{interface}\n")


@pytest.fixture
def connectx(tmp_path: Path) -> Path:
    """A tree as mlx5 makes it: RoCE on PCI, a table of GIDs that is mostly empty."""
    pci = tmp_path / "devices" / "pci0000:3a" / "0000:3b:00.0"
    write(pci / "numa_node", "1\n")
    driver = tmp_path / "bus" / "pci" / "drivers" / "mlx5_core"
    driver.mkdir(parents=True)
    (pci / "driver").symlink_to(driver)
    (pci / "net" / "ens1f0np0").mkdir(parents=True)
    device = tmp_path / "class" / "infiniband" / "mlx5_0"
    device.mkdir(parents=True)
    (device / "device").symlink_to(pci)
    port = device / "ports" / "1"
    write(port / "state", "4: ACTIVE\n")
    write(port / "link_layer", "Ethernet\n")
    write(port / "rate", "400 Gb/sec (4X NDR)\n")
    gid(port, 10, "0000:0000:0000:0000:0000:ffff:0a00:0001\n", "RoCE v2", "ens1f0np0")
    gid(port, 2, "0000:0000:0000:0000:0000:ffff:0a00:0001\n", "IB/RoCE v1", "ens1f0np0")
    gid(port, 0, "fe80:0000:0000:0000:0e42:a1ff:fe00:0001\n", "IB/RoCE v1", "ens1f0np0")
    gid(port, 3, ZERO)
    gid(port, 4, "fe80:0000:0000:0000:0000:0000:0000:0000\n")
    return tmp_path


def test_a_roce_device(connectx: Path) -> None:
    (device,) = read_devices(connectx)
    (port,) = device.ports
    assert (device.name, device.driver) == ("mlx5_0", "mlx5_core")
    assert (device.pci_address, device.numa_node) == ("0000:3b:00.0", 1)
    assert device.is_mlx5
    assert (port.number, port.link_layer, port.active) == (1, "Ethernet", True)
    assert (port.rate_Bps, port.interface) == (50e9, "ens1f0np0")
    assert [entry.index for entry in port.gids] == [0, 2, 10]
    assert port.routable == (Gid(10, "::ffff:10.0.0.1", "RoCE v2", "ens1f0np0"),)
    assert port.routable[0].ip == "10.0.0.1"
    assert port.gids[0].ip == "fe80::e42:a1ff:fe00:1"


def test_soft_roce_has_no_pci_and_names_its_interface_as_its_parent(tmp_path: Path) -> None:
    device = tmp_path / "class" / "infiniband" / "rxe0"
    write(device / "parent", "eth0\n")
    write(device / "ports" / "1" / "state", "1: DOWN\n")
    (found,) = read_devices(tmp_path)
    assert found == RdmaDevice("rxe0", ports=(RdmaPort(1, interface="eth0"),))
    assert not found.is_mlx5


def test_ports_of_one_device_take_its_interfaces_in_turn(tmp_path: Path) -> None:
    device = tmp_path / "class" / "infiniband" / "hca"
    for interface in ("eth1", "eth0"):
        (device / "device" / "net" / interface).mkdir(parents=True)
    for number in ("10", "2", "0", "x", "²"):
        write(device / "ports" / number / "rate", "100 Gb/sec (4X EDR)\n")
    (found,) = read_devices(tmp_path)
    assert [(p.number, p.interface) for p in found.ports] == [(2, "eth0"), (10, "eth1")]


def test_a_host_without_devices(tmp_path: Path) -> None:
    assert read_devices(tmp_path) == rdma_devices(tmp_path) == ()


@pytest.mark.parametrize(
    "rate", ["", "fast", "-1 Gb/sec", "nan Gb/sec", "inf Gb/sec", "0 Gb/sec (4X SDR)", "1e300 Gb"]
)
def test_a_rate_that_is_none(tmp_path: Path, rate: str) -> None:
    write(tmp_path / "class" / "infiniband" / "a" / "ports" / "1" / "rate", rate)
    assert read_devices(tmp_path)[0].ports[0].rate_Bps is None


FILES = st.sampled_from(
    [
        "parent",
        "device/numa_node",
        "device/net",
        "ports",
        "ports/1/state",
        "ports/1/rate",
        "ports/1/link_layer",
        "ports/1/gids",
        "ports/1/gids/0",
        "ports/1/gids/99999999",
        "ports/1/gid_attrs/types/0",
        "ports/1/gid_attrs/ndevs/0",
    ]
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(FILES, st.binary(max_size=64) | st.sampled_from([b"4: ", b"fe80::1\n"])))
def test_malformed_trees_are_read_without_an_error(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        device = Path(name) / "class" / "infiniband" / "a"
        device.mkdir(parents=True)
        for path, content in files.items():
            file = device / path
            if not file.exists() and not any(parent.is_file() for parent in file.parents):
                write(file, content)
        (found,) = read_devices(Path(name))
        for port in found.ports:
            assert port.rate_Bps is None or 0 < port.rate_Bps < float("inf")
            assert all(entry.ip for entry in port.gids)


def test_links_in_a_circle_are_no_device(tmp_path: Path) -> None:
    device = tmp_path / "class" / "infiniband" / "a"
    device.mkdir(parents=True)
    (device / "device").symlink_to(device / "device")
    assert read_devices(tmp_path) == (RdmaDevice("a"),)


class Context:
    """A device that can be opened, or not: as pyverbs behaves."""

    def __init__(self, name: str) -> None:
        if name == "locked":
            raise RuntimeError("Failed to open device")
        self.kbps = 8_000_000 if name == "mlx5_0" else 0

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query_device(self) -> Any:
        return SimpleNamespace(max_qp=131072)

    def query_device_ex(self) -> Any:
        pacing = SimpleNamespace(
            qp_rate_limit_min=8, qp_rate_limit_max=self.kbps, supported_qpts=0b100
        )
        return SimpleNamespace(packet_pacing_caps=pacing)


def pyverbs(enums: str = "pyverbs.enums", rc: int = 2) -> Any:
    names = [SimpleNamespace(name=n.encode()) for n in ("mlx5_0", "rxe0", "locked")]
    modules = {
        "pyverbs.device": SimpleNamespace(get_device_list=lambda: names, Context=Context),
        enums: SimpleNamespace(IBV_QPT_RC=rc),
    }

    def load(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(name)
        return modules[name]

    return load


@pytest.mark.parametrize("enums", ["pyverbs.enums", "pyverbs.libibverbs_enums"])
def test_limits_by_pyverbs_of_any_release(enums: str) -> None:
    assert verbs_limits(pyverbs(enums)) == {
        "mlx5_0": Limits(131072, (1e3, 1e9)),
        "rxe0": Limits(131072),
    }


def test_a_rate_for_other_kinds_of_queue_pairs_is_none_for_rc() -> None:
    assert verbs_limits(pyverbs(rc=3))["mlx5_0"].rate_limit_Bps is None


def test_pyverbs_that_fits_no_library_is_no_pyverbs() -> None:
    def load(name: str) -> Any:
        raise ImportError("libibverbs.so.1: version `IBVERBS_PRIVATE_44' not found")

    assert verbs_limits(load) == {}


def test_limits_are_joined_by_name(connectx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        interfaces, "verbs_limits", lambda: {"mlx5_0": Limits(5), "gone": Limits(7)}
    )
    (device,) = rdma_devices(connectx)
    assert device.limits == Limits(5)


def test_the_real_pyverbs_answers_or_is_absent() -> None:
    """Debian's belongs to the system's Python; without a device it raises, and that is none."""
    system = shutil.which("python3", path="/usr/bin")
    if system is None or subprocess.run([system, "-c", "import pyverbs.device"]).returncode:
        pytest.skip("no pyverbs in the system's Python (apt-get install python3-pyverbs)")
    code = (
        "from crux_torch.host.interfaces import rdma_devices, verbs_limits\n"
        "devices = rdma_devices()\n"
        "assert set(verbs_limits()) <= {d.name for d in devices}\n"
        "print('answered')"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    done = subprocess.run([system, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "answered\n", done.stderr
