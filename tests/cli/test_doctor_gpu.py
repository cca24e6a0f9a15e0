"""The doctor's findings on GPUs, over layouts in the manner of real machines and a made-up NVML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pcie_layouts as layouts
import pytest
from findings import by_part

from crux_torch.cli.doctor import gpu
from crux_torch.cli.doctor.finding import Check
from crux_torch.host.interfaces import Nic
from crux_torch.host.nvml import GpuPair, NvLink, NvmlReport
from crux_torch.host.pcie import Distance, PcieTree, redirecting_ports
from crux_torch.settings import Settings

SWITCH = NvLink("0000:07:00.0", "switch", 18, 450e9)


def report_of(tree: PcieTree, **changes: Any) -> NvmlReport:
    gpus = layouts.gpus_at(tree, **({"nvlinks": (SWITCH,), "mig": False, "gpm": True} | changes))
    pairs = tuple(
        GpuPair(a.index, b.index, tree.distance(a.pci_address, b.pci_address), "ok")
        for i, a in enumerate(gpus)
        for b in gpus[i + 1 :]
    )
    return NvmlReport("580.65.06", gpus, pairs)


def nics_at(addresses: Iterable[str]) -> tuple[Nic, ...]:
    return tuple(Nic(f"mlx5_{a}", 50e9, None, a) for a in addresses)


def findings(
    tree: PcieTree, report: NvmlReport, nics: Iterable[str] = (), acs: Any = lambda *_: ()
) -> dict[str, Check]:
    present = nics_at(nics or tree.of_kind("nic"))
    return by_part(gpu.gpus(Settings(), report, tree, present, acs))


@pytest.fixture
def h100(tmp_path: Path) -> PcieTree:
    return layouts.read(tmp_path, layouts.hgx_h100())


def test_nothing_is_amiss_with_eight_h100s(h100: PcieTree) -> None:
    found = findings(h100, report_of(h100))
    assert {check.state for check in found.values()} == {"ok"}
    assert found["NVIDIA driver"].finding == "580.65.06: 8 x NVIDIA H100 80GB HBM3"
    assert list(found) == [
        "NVIDIA driver",
        "PCIe tree",
        "PCIe ACS",
        "GPU's peak rate",
        "GPM counters",
        "NVLink",
        "peer access",
        "GPU topology",
        "NICs beside GPUs",
    ]


def test_without_a_driver(h100: PcieTree) -> None:
    found = findings(h100, NvmlReport(error="Driver Not Loaded"))
    assert (found["NVIDIA driver"].state, found["NVIDIA driver"].finding) == (
        "missing",
        "Driver Not Loaded",
    )
    assert "GPM counters" not in found


def test_what_gpus_lack(h100: PcieTree) -> None:
    report = report_of(h100, nvlinks=(), gpm=False, mig=True, peak_flops=None)
    refused = tuple(replace(p, peer_access="not supported") for p in report.pairs)
    found = findings(h100, replace(report, pairs=refused))
    lacking = ("GPU's peak rate", "MIG", "GPM counters", "NVLink", "peer access")
    assert [found[part].state for part in lacking] == ["missing"] * len(lacking)
    assert "28 of 28 pairs" in found["peer access"].finding
    known = list(gpu.rates(report, Settings(device_flops=1e15)))
    assert known[0].state == "ok"


def test_nvml_and_sysfs_may_differ(h100: PcieTree) -> None:
    report = report_of(h100)
    first = replace(report.pairs[0], distance=Distance.PIX)
    found = findings(h100, replace(report, pairs=(first, *report.pairs[1:])))
    assert "(0-1: PIX and NODE)" in found["GPU topology"].finding
    near = replace(report.pairs[0], distance=Distance.PHB)
    found = findings(h100, replace(report, pairs=(near, *report.pairs[1:])))
    assert found["GPU topology"].state == "ok", "PHB and NODE are one class to NCCL"


def test_a_gpu_whose_nic_is_elsewhere(h100: PcieTree) -> None:
    nic = h100.of_kind("nic")[0]
    found = findings(h100, report_of(h100), [nic])
    check = found["NICs beside GPUs"]
    assert check.state == "missing"
    assert f"GPU 7 is SYS from mlx5_{nic}" in check.finding
    assert "GPU 0" not in check.finding


def test_links_that_run_below_what_they_can(tmp_path: Path) -> None:
    entries = layouts.hgx_h100()
    gpu_entry = next(e for e in entries if e.class_code == layouts.GPU)
    nic_entry = next(e for e in entries if e.class_code == layouts.NIC)
    changed = {
        # A GPU slows its link down while it idles; a NIC that is slow was trained badly.
        gpu_entry: replace(gpu_entry, speed="2.5 GT/s PCIe", max_speed=layouts.GEN5),
        nic_entry: replace(nic_entry, speed=layouts.GEN4, max_speed=layouts.GEN5),
    }
    tree = layouts.read(tmp_path, [changed.get(e, e) for e in entries])
    found = findings(tree, report_of(tree))
    assert found["PCIe link"].finding == (
        f"link to {nic_entry.address} runs at 16 GT/s x16; both ends support 32 GT/s x16"
    )


def test_a_virtual_machine(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.azure_vm())
    found = findings(tree, report_of(tree))
    assert found["PCIe tree"].state == "missing"
    assert "NICs beside GPUs" not in found


@pytest.mark.parametrize(
    ("acs", "state"), [(None, "missing"), (("0000:11:00.0",), "missing"), ((), "ok")]
)
def test_acs(h100: PcieTree, acs: tuple[str, ...] | None, state: str) -> None:
    assert findings(h100, report_of(h100), acs=lambda *_: acs)["PCIe ACS"].state == state


def config(*capabilities: tuple[int, int], control: int = 0, size: int = 4096) -> bytes:
    """A configuration space with extended capabilities of these numbers at these offsets."""
    space = bytearray(4096)
    for i, (number, at) in enumerate(capabilities):
        following = capabilities[i + 1][1] if i + 1 < len(capabilities) else 0
        space[at : at + 4] = (following << 20 | 1 << 16 | number).to_bytes(4, "little")
        if number == 0x000D:
            space[at + 6 : at + 8] = control.to_bytes(2, "little")
    return bytes(space[:size])


@pytest.mark.parametrize(
    ("space", "redirects"),
    [
        (config((0x0001, 0x100), (0x000D, 0x220), control=0x1D), True),
        (config((0x0001, 0x100), (0x000D, 0x220), control=0x04), True),
        (config((0x0001, 0x100), (0x000D, 0x220), control=0x11), False),
        (config((0x0001, 0x100)), False),
        (config(), False),
        (config((0x0001, 0x100), (0x0002, 0x100)), False),
        (config((0x0001, 0x100), size=256), None),
        (config(size=64), None),
    ],
    ids=["all bits", "requests", "others", "absent", "empty", "a loop", "PCI", "no privilege"],
)
def test_acs_is_read_from_the_configuration(
    space: bytes, redirects: bool | None, tmp_path: Path
) -> None:
    entries = layouts.dgx_a100()
    layouts.write(tmp_path, entries)
    for entry in entries:
        (tmp_path / "devices" / entry.place / "config").write_bytes(config())
    tree = PcieTree.read(tmp_path)
    end = tree.of_kind("gpu")[0]
    bridge = tree.devices[end].bridges[2]
    (tmp_path / "bus/pci/devices" / bridge / "config").write_bytes(space)
    expected = None if redirects is None else (bridge,) if redirects else ()
    assert redirecting_ports(tree, [end], tmp_path) == expected


def test_a_configuration_that_is_absent_is_not_known(tmp_path: Path) -> None:
    tree = layouts.read(tmp_path, layouts.dgx_a100())
    assert redirecting_ports(tree, tree.of_kind("gpu"), tmp_path) is None


def test_this_machine_can_be_examined() -> None:
    checks = list(gpu.gpus(Settings()))
    assert [check.part for check in checks][:2] == ["NVIDIA driver", "PCIe tree"]
