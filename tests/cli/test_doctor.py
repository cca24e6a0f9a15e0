"""Each of the doctor's findings, on machines that lack it and on ones that have it."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from dscp_maps import MARKED
from findings import sound

from crux_torch.apply import transport as transport_face
from crux_torch.apply import verbs_shim
from crux_torch.apply.transport import Transport, TransportError
from crux_torch.apply.verbs_shim import VerbsShimError
from crux_torch.cli.doctor import network, process
from crux_torch.host.interfaces import Gid, Limits, RdmaDevice, RdmaPort
from crux_torch.settings import PortRange, Settings


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ModuleNotFoundError("No module named 'crux_torch._C'"), "missing"),
        (ImportError("undefined symbol: _ZN4c10d"), "broken"),
    ],
)
def test_an_extension_for_another_torch_is_broken_and_an_absent_one_missing(
    error: ImportError, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        raise error

    monkeypatch.setattr(process, "import_module", load)
    check = process.extension()
    assert (check.state, str(error) in check.finding) == (state, True)


def proc(folder: Path, status: str, spaces: str = "0") -> Path:
    """A /proc with the capabilities of this process and the limit of user namespaces."""
    (folder / "self").mkdir()
    (folder / "self/status").write_text(status)
    (folder / "sys/user").mkdir(parents=True)
    (folder / "sys/user/max_user_namespaces").write_text(spaces)
    return folder


@pytest.mark.parametrize(
    ("capabilities", "spaces", "state"),
    [("1000", "0", "ok"), ("0000", "100", "ok"), ("0000", "0", "missing")],
)
def test_namespaces_need_a_capability_or_user_namespaces(
    capabilities: str, spaces: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    told = proc(tmp_path, f"Name:\tx\nCapEff:\t{capabilities}\n", spaces)
    assert sound(process.namespaces(told)).state == state


@pytest.mark.parametrize(
    ("capabilities", "state", "finding"),
    [
        ("CapEff:\t2000\n", "ok", "can be verified"),
        ("CapEff:\t0000\n", "missing", "no CAP_NET_RAW"),
        ("CapEff:\t1000\n", "missing", "no CAP_NET_RAW"),
        ("", "missing", "unknown"),
        ("CapEff:\n", "missing", "unknown"),
        ("CapEff:\tmany\n", "missing", "unknown"),
    ],
)
def test_paths_of_live_connections_need_net_raw(
    capabilities: str, state: str, finding: str, tmp_path: Path
) -> None:
    check = sound(process.live_paths(proc(tmp_path, capabilities)))
    assert (check.state, check.finding.startswith(finding)) == (state, True)


def test_without_proc_capabilities_are_unknown(tmp_path: Path) -> None:
    for part in (process.live_paths, process.namespaces):
        assert sound(part(tmp_path)).finding.startswith("unknown")


def sysctl(folder: Path, ephemeral: str, reserved: str = "") -> Path:
    (folder / "ip_local_port_range").write_text(ephemeral)
    (folder / "ip_local_reserved_ports").write_text(reserved)
    return folder


def test_source_ports(tmp_path: Path) -> None:
    settings = Settings(ports=PortRange(20000, 20999))
    assert sound(process.source_ports(settings, sysctl(tmp_path, "32768\t60999\n"))).state == "ok"
    shared = sound(process.source_ports(settings, sysctl(tmp_path, "20500\t60999\n")))
    assert shared.state == "missing"
    assert "20500-20999" in shared.finding
    reserved = sysctl(tmp_path, "20500\t60999\n", "8080,20000-20999\n")
    assert sound(process.source_ports(settings, reserved)).state == "ok"
    assert sound(process.source_ports(settings, tmp_path / "absent")).state == "ok"
    off = sound(process.source_ports(Settings(paths=False), tmp_path))
    assert (off.state, off.remedy) == ("missing", "unset CRUX_PATHS")


def test_a_range_that_somebody_holds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        held = sound(process.source_ports(Settings(ports=PortRange(port, port)), tmp_path))
    assert held.state == "missing"
    assert "none can be bound" in held.finding


class Refusing(socket.socket):
    """A socket of a kernel without the options."""

    def setsockopt(self, *_: Any) -> None:
        raise OSError(92, "Protocol not available")


@pytest.mark.parametrize(
    ("probe", "parts"),
    [
        (lambda: [process.pacing()], 1),
        (lambda: [process.probing()], 1),
        (lambda: list(process.classes(Settings(**MARKED))), 2),
    ],
)
def test_a_kernel_without_the_options(
    probe: Any, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", Refusing)
    checks = probe()
    assert [check.state for check in checks] == ["missing"] * parts
    assert all("Protocol not available" in sound(check).finding for check in checks)


def test_loopback_answers_on_the_error_queue() -> None:
    assert sound(process.probing()).state == "ok"


def test_errors_that_never_come_back_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listens:
        listens.bind(("127.0.0.1", 0))
        monkeypatch.setattr(process, "_closed_port", lambda: listens.getsockname()[1])
        monkeypatch.setattr(process, "ANSWER_WAIT_S", 0.05)
        check = sound(process.probing())
    assert (check.state, check.finding) == ("missing", "no ICMP error came back over loopback")


@pytest.mark.parametrize(("there", "state"), [(False, "missing"), (True, "broken")])
def test_a_library_that_is_absent_or_of_another_version(
    there: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Any:
        raise TransportError("has ABI 0")

    library = tmp_path / "libcrux_transport.so"
    if there:
        library.touch()
    monkeypatch.setattr(transport_face, "LIBRARY", library)
    monkeypatch.setattr(Transport, "load", load)
    check = sound(process.library())
    assert (check.state, "has ABI 0" in check.finding) == (state, True)


def test_preload_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not transport_face.LIBRARY.exists():
        pytest.skip("libcrux_transport.so is not built")
    assert sound(process.preload({}, Settings())).state == "ok"
    assert sound(process.preload({"CRUX_DISABLE": "1"}, Settings())).state == "missing"
    off = sound(process.preload({}, Settings(transport=False)))
    assert (off.state, off.remedy) == ("missing", "unset CRUX_TRANSPORT")
    library = tmp_path / "libcrux_transport.so"
    monkeypatch.setattr(transport_face, "LIBRARY", library)
    assert "is not there" in sound(process.preload({}, Settings())).finding
    library.write_text("no library")
    assert sound(process.preload({}, Settings())).state == "missing"


def absent(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


class Library:
    def mlx5dv_modify_qp_udp_sport(self) -> None: ...


def device(name: str, driver: str, kind: str, layer: str = "Ethernet", up: bool = True) -> Any:
    port = RdmaPort(1, layer, up, gids=(Gid(3, "::ffff:10.0.0.1", kind),))
    return RdmaDevice(name, driver, ports=(port,), limits=Limits(1024, (1e3, 1e9)))


def test_verbs() -> None:
    assert sound(network.verbs(lambda name: object())).state == "ok"
    assert "cannot open" in sound(network.verbs(absent)).finding


def test_a_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "libibverbs.so.1"
    monkeypatch.setattr(verbs_shim, "find_real", lambda env: None)
    assert list(network.shim({})) == []
    monkeypatch.setattr(verbs_shim, "find_real", lambda env: real)
    monkeypatch.setattr(verbs_shim, "prepare", lambda real, existing: tmp_path / "made")
    assert next(network.shim({})).finding == f"{tmp_path}/made for {real}"

    def refuse(real: Path, existing: Any) -> Path:
        raise VerbsShimError("no folder takes it")

    monkeypatch.setattr(verbs_shim, "prepare", refuse)
    assert next(network.shim({})).finding == "no folder takes it"


def test_no_device_is_missing_and_none_is_needed() -> None:
    assert next(network.devices(())).finding == "none"


def test_devices_and_what_their_packets_can_choose() -> None:
    present = (
        device("mlx5_0", "mlx5_core", "RoCE v2"),
        device("mlx5_1", "mlx5_core", "IB/RoCE v1"),
        device("mlx5_2", "mlx5_core", "", "InfiniBand"),
        device("mlx5_3", "mlx5_core", "RoCE v2", up=False),
    )
    checks = {check.part: check for check in network.devices(present, lambda name: Library())}
    assert checks["mlx5_0"].finding == "RoCE v2 on 10.0.0.1"
    assert checks["mlx5_1"].finding == "no RoCE v2 address"
    assert checks["mlx5_2"].finding.startswith("InfiniBand")
    assert checks["mlx5_3"].finding == "no active port"
    assert [checks[f"mlx5_{n}"].state for n in range(4)] == ["ok", *["missing"] * 3]
    assert "mlx5_0" in checks["pyverbs"].finding
    assert checks["live UDP source port"].state == "ok"
    unopened = (RdmaDevice("mlx5_0", "mlx5_core"),)
    checks = {check.part: check for check in network.devices(unopened, absent)}
    assert checks["pyverbs"].state == checks["live UDP source port"].state == "missing"


@pytest.mark.parametrize(
    ("driver", "load", "says"),
    [
        ("mlx5_core", lambda name: Library(), "firmware"),
        ("mlx5_core", lambda name: object(), "lacks"),
        ("mlx5_core", absent, "cannot open"),
        ("", lambda name: Library(), "no mlx5 device"),
    ],
)
def test_live_source_ports_of_queue_pairs(driver: str, load: Any, says: str) -> None:
    check = sound(network.live_ports((device("a", driver, "RoCE v2"),), load))
    assert says in check.finding
