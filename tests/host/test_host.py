"""This host as seen through made-up sysfs trees and a made-up NVML."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from crux_torch.host import interfaces
from crux_torch.host.interfaces import Nic, interface_of, own_addresses, read_nics
from crux_torch.host.machine import machine_id, network_id, read_cpu, this_host
from crux_torch.host.nvml import PEAKS, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H800 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "fp8", 1670.5e12),
        ("NVIDIA H200", None, 1979e12),
        ("NVIDIA H200 NVL", None, 1670.5e12),
        ("NVIDIA GH200 480GB", "fp64", 67e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA GB200", None, 10000e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("Tesla V100S-PCIE-32GB", "fp16", 130e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362.05e12),
        ("NVIDIA L40", "bf16", 181.05e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", None, None),
        ("Tesla K80", None, None),
    ],
)
def test_peak_flops(name: str, dtype: str | None, flops: float | None) -> None:
    assert peak_flops(name, dtype) == flops


def test_every_peak_has_its_source_and_grows_with_fewer_bits() -> None:
    for entry in PEAKS:
        assert entry.source
        known = [entry.flops[d] for d in ("fp32", "tf32", "fp16", "fp8", "fp4") if d in entry.flops]
        assert known == sorted(known)


INTEL = """processor\t: {n}
model name\t: Intel(R) Xeon(R) Platinum 8369B CPU @ 2.90GHz
cpu MHz\t\t: {mhz}
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu sse2 avx avx2 fma avx512f
"""


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_cpu_counts_cores_and_not_threads_and_takes_the_highest_clock(tmp_path: Path) -> None:
    blocks = [INTEL.format(n=n, mhz=800 + n, socket=n // 4, core=n % 2) for n in range(8)]
    write(tmp_path / "cpuinfo", "\n".join(blocks))
    cpu = read_cpu(tmp_path / "cpuinfo", tmp_path)
    assert cpu is not None
    assert cpu.cores == 4
    assert cpu.frequency_Hz == 2.9e9, "the clock in the name is higher than the clocks now"
    assert cpu.peak_flops == 4 * 2.9e9 * 64
    write(tmp_path / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3500000\n")
    cpu = read_cpu(tmp_path / "cpuinfo", tmp_path)
    assert cpu is not None
    assert cpu.frequency_Hz == 3.5e9, "the limit in sysfs is higher still"


def test_arm_without_a_clock_has_no_peak(tmp_path: Path) -> None:
    write(tmp_path / "cpuinfo", "processor\t: 0\nFeatures\t: fp asimd\n\nprocessor\t: 1\n")
    cpu = read_cpu(tmp_path / "cpuinfo", tmp_path)
    assert cpu is not None
    assert (cpu.cores, cpu.flops_per_cycle, cpu.frequency_Hz, cpu.peak_flops) == (2, 32, None, None)


@pytest.mark.parametrize("text", [None, "", "garbage\n\nmore: garbage\n"])
def test_no_cpuinfo_is_no_cpu(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        write(tmp_path / "cpuinfo", text)
    assert read_cpu(tmp_path / "cpuinfo", tmp_path) is None


def test_nics(tmp_path: Path) -> None:
    net, devices = tmp_path / "class" / "net", tmp_path / "devices"
    write(net / "lo" / "type", "772\n")
    write(net / "lo" / "speed", "10000\n")
    pci = devices / "pci0000:00" / "0000:3b:00.0"
    write(pci / "numa_node", "1\n")
    write(net / "eth0" / "type", "1\n")
    write(net / "eth0" / "speed", "200000\n")
    (net / "eth0" / "device").symlink_to(pci)
    write(net / "eth1" / "type", "1\n")
    write(net / "eth1" / "speed", "-1\n")
    (net / "veth").mkdir()
    rdma = tmp_path / "class" / "infiniband"
    write(rdma / "mlx5_0" / "ports" / "1" / "rate", "200 Gb/sec (4X HDR)\n")
    (rdma / "mlx5_0" / "device").symlink_to(pci)
    (pci / "net" / "eth0").mkdir(parents=True)
    ib = devices / "pci0000:00" / "0000:5e:00.0"
    write(ib / "numa_node", "-1\n")
    write(rdma / "mlx5_1" / "ports" / "1" / "rate", "400 Gb/sec (4X NDR)\n")
    (rdma / "mlx5_1" / "device").symlink_to(ib)

    nics = {nic.name: nic for nic in read_nics(tmp_path)}
    assert set(nics) == {"eth0", "eth1", "veth", "mlx5_1/1"}
    assert nics["eth0"] == Nic("eth0", 25e9, "mlx5_0", "0000:3b:00.0", 1)
    assert nics["eth1"] == Nic("eth1", None)
    assert nics["mlx5_1/1"] == Nic("mlx5_1/1", 50e9, "mlx5_1", "0000:5e:00.0", None)


def test_no_sysfs_is_no_nics(tmp_path: Path) -> None:
    assert read_nics(tmp_path / "nothing") == ()


def test_this_host_can_be_read() -> None:
    host = this_host()
    assert host.name
    assert all(nic.name != "lo" for nic in host.nics)


def test_the_kernel_tells_the_addresses_that_ip_shows() -> None:
    try:
        shown = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no iproute2")
    listed = re.findall(r" inet6? (\S+?)/", shown.stdout)
    assert set(own_addresses()) == set(listed) != set()
    assert machine_id()
    assert network_id()


@pytest.mark.parametrize("raw", [b"", b"\0" * 16, b"\xff" * 7, b"\x14\0\0\0\x14\0" + b"\0" * 14])
def test_an_answer_that_makes_no_sense_is_no_address(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernel:
        def __enter__(self) -> Kernel:
            return self

        def __exit__(self, *_: object) -> None: ...
        def settimeout(self, _: float) -> None: ...
        def send(self, _: bytes) -> None: ...
        def recv(self, _: int, said: list[bytes] = []) -> bytes:  # noqa: B006
            said.append(raw)
            if len(said) > 1:
                raise TimeoutError
            return raw

    monkeypatch.setattr(interfaces.socket, "socket", lambda *_: Kernel())
    assert own_addresses() == ()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_leads_to_its_interface(address: str) -> None:
    if address not in own_addresses():
        pytest.skip(f"no {address}")
    assert interface_of(address) == "lo"
    assert interface_of("192.0.2.1") is None
