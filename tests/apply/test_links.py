"""Which links a process crosses, and its gate in step with groups, level and neighbours."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pcie_layouts as layouts
import pytest
from places import ROOT, SUPPORT

from crux_torch.apply import semaphores
from crux_torch.apply.semaphores import (
    HostSemaphores,
    NamedLinks,
    PcieLinks,
    local_gpus,
    make_semaphores,
    nvlinked_with,
)
from crux_torch.cli.doctor import gpu as doctor
from crux_torch.cli.doctor.finding import Check
from crux_torch.host import activity
from crux_torch.host.activity import CudaDevice, OwnDevice
from crux_torch.host.interfaces import Nic
from crux_torch.host.nvml import Gpu, NvLink
from crux_torch.host.pcie import PcieTree
from crux_torch.measure.records import GroupInfo
from crux_torch.settings import Settings

HOLDER = SUPPORT.joinpath("links_holder.py")
WORLD = GroupInfo("world", (0, 1), 0)


def gpu(index: int, address: str = "", nvlinks: tuple[NvLink, ...] = ()) -> Gpu:
    address = address or f"0000:{index:02x}:00.0"
    return Gpu(index, "NVIDIA H100", f"GPU-{index}", 80 << 30, address, None, nvlinks)


# Routes


def test_named_links_are_crossed_by_every_group_with_another_rank() -> None:
    routes = NamedLinks(("b", "a"))
    assert routes(WORLD) == ("b", "a")
    assert routes(GroupInfo("not named yet", (), 0)) == ("b", "a")
    assert routes(GroupInfo("alone", (3,), 0)) == ()


@pytest.fixture
def dgx(tmp_path: Path) -> PcieTree:
    return PcieTree.read(layouts.write(tmp_path, layouts.dgx_a100()))


def routes_on(
    tree: PcieTree, local: dict[int, int], own: int, nvlinked: frozenset[str] = frozenset()
) -> PcieLinks:
    """Of the GPU number ``own``; ``local`` has the GPU's number of each rank on the host."""
    gpus, nics = tree.of_kind("gpu"), tree.of_kind("nic")
    placed = {rank: gpus[number] for rank, number in local.items()}
    return PcieLinks(tree, gpus[own], nics[0], placed, nvlinked)


def names(tree: PcieTree, a: str, b: str) -> set[str]:
    return {link.name for link in tree.path(a, b)}


def test_a_group_over_hosts_crosses_what_lies_before_its_nic(dgx: PcieTree) -> None:
    gpus, nics = dgx.of_kind("gpu"), dgx.of_kind("nic")
    routes = routes_on(dgx, {0: 0, 1: 1}, 0, frozenset(gpus))
    assert routes.obstacle is None
    spanning = GroupInfo("world", (0, 1, 2, 3), 0)
    assert set(routes(spanning)) == names(dgx, gpus[0], nics[0])
    assert routes(spanning) == tuple(sorted(routes(spanning)))
    assert routes(GroupInfo("here", (0, 1), 0)) == (), "NVLink joins them"
    assert routes(GroupInfo("alone", (0,), 0)) == ()
    assert routes(GroupInfo("not named yet", (), 0)) == ()


def test_without_nvlink_a_rank_crosses_the_way_to_its_neighbours(dgx: PcieTree) -> None:
    gpus = dgx.of_kind("gpu")
    routes = routes_on(dgx, {4: 0, 5: 1, 6: 2, 7: 7}, 0)
    ring = GroupInfo("here", (4, 5, 6, 7), 0)
    assert set(routes(ring)) == names(dgx, gpus[0], gpus[1]) | names(dgx, gpus[0], gpus[7])
    partly = PcieLinks(dgx, gpus[0], None, routes.local, frozenset({gpus[7]}))
    assert set(partly(ring)) == names(dgx, gpus[0], gpus[1])


def test_over_sockets_traffic_takes_the_way_through_the_hosts_memory(tmp_path: Path) -> None:
    tree = PcieTree.read(layouts.write(tmp_path, layouts.hgx_h100()))
    gpu, nic = tree.of_kind("gpu")[0], tree.of_kind("nic")[0]
    spanning = GroupInfo("world", (0, 8), 0)
    routes = PcieLinks(tree, gpu, nic, {0: gpu}, frozenset(), direct=False)
    both = {link.name for end in (gpu, nic) for link in tree.links_above(end)}
    assert set(routes(spanning)) == both > names(tree, gpu, nic)


@pytest.mark.parametrize(
    ("rdma_device", "env", "direct"),
    [
        ("mlx5_0", {}, True),
        (None, {}, False),
        ("mlx5_0", {"NCCL_NET": "Socket"}, False),
        ("mlx5_0", {"NCCL_IB_DISABLE": "1"}, False),
        ("mlx5_0", {"NCCL_IB_DISABLE": "0"}, True),
        ("mlx5_0", {"NCCL_NET_GDR_LEVEL": "LOC"}, False),
        ("mlx5_0", {"NCCL_NET_GDR_LEVEL": "0"}, False),
        ("mlx5_0", {"NCCL_NET_GDR_LEVEL": "SYS"}, True),
    ],
)
def test_whether_the_nic_reads_the_gpus_memory(
    rdma_device: str | None, env: dict[str, str], direct: bool
) -> None:
    assert semaphores.reads_gpu(Nic("n", 50e9, rdma_device), env) is direct


def test_two_jobs_share_a_link_where_the_paper_draws_it(dgx: PcieTree) -> None:
    """Figure 3b: GPUs of different jobs below one PCIe switch, on their way to the NICs."""
    gpus = dgx.of_kind("gpu")
    spanning = GroupInfo("world", (0, 8), 0)
    one = set(routes_on(dgx, {0: 0}, 0, frozenset(gpus))(spanning))
    below_the_same = set(routes_on(dgx, {0: 1}, 1, frozenset(gpus))(spanning))
    assert one & below_the_same
    own_link = {link.name for link in dgx.links_above(gpus[0])[:1]}
    assert own_link <= one
    assert not own_link & below_the_same


def test_a_virtual_machine_that_hides_its_switches_is_an_obstacle(tmp_path: Path) -> None:
    tree = PcieTree.read(layouts.write(tmp_path, layouts.azure_vm()))
    routes = PcieLinks(tree, "0001:00:00.0", None, {}, frozenset())
    assert routes.obstacle is not None


def test_gpus_at_one_nvswitch_reach_each_other() -> None:
    switched = NvLink("", "switch", 18, 450e9)
    gpus = [gpu(0, nvlinks=(switched,)), gpu(1, nvlinks=(switched,)), gpu(2)]
    bridged = gpu(3, nvlinks=(NvLink(gpus[2].pci_address, "gpu", 4, 100e9),))
    assert nvlinked_with(gpus[0], [*gpus, bridged]) == {gpus[1].pci_address}
    assert nvlinked_with(gpus[2], gpus) == frozenset()
    assert nvlinked_with(bridged, gpus) == {gpus[2].pci_address}


# Where this process is


def test_ranks_on_this_host_as_torchrun_numbers_them() -> None:
    env = {"RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    gpus = (gpu(0), gpu(1), gpu(2))
    assert local_gpus(gpus[1], gpus, env) == {8: gpus[0].pci_address, 9: gpus[1].pci_address}
    assert local_gpus(gpus[1], (gpus[1],), env) == {8: None, 9: gpus[1].pci_address}
    assert local_gpus(gpus[1], gpus, {}) == {}


def test_the_device_is_the_training_threads_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[CudaDevice | None] = [None]
    monkeypatch.setattr(activity, "current_device", lambda: chosen[0])
    device = OwnDevice()
    assert device.device(1, {}) == CudaDevice(0, "", "")
    assert device.device(8, {"LOCAL_RANK": "3"}) == CudaDevice(3, "", "")
    assert device.device(2, {"LOCAL_RANK": "3"}) is None
    assert device.device(8, {}) is None
    chosen[0] = CudaDevice(5, "GPU-5", "NVIDIA H100")
    elsewhere = threading.Thread(target=device.look)
    elsewhere.start()
    elsewhere.join()
    assert device.device(8, {}) is None
    device.look()
    assert device.device(8, {}) == chosen[0]


def test_a_rank_on_a_gpu_finds_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    tree = PcieTree.read(layouts.write(tmp_path, layouts.hgx_h100()))
    addresses, nics = tree.of_kind("gpu"), tree.of_kind("nic")
    gpus = tuple(gpu(i, address) for i, address in enumerate(addresses))
    env = {"RANK": "11", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    initialized = [False]
    up_Bps: list[float | None] = [50e9] * len(nics)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(activity, "current_device", lambda: None)
    monkeypatch.setattr(semaphores, "bounded", lambda call: call())
    monkeypatch.setattr(semaphores, "read_gpus", lambda: gpus)
    monkeypatch.setattr(
        semaphores,
        "read_nics",
        lambda: tuple(Nic(f"ib{i}", up_Bps[i], f"mlx5_{i}", nic) for i, nic in enumerate(nics)),
    )
    monkeypatch.setattr(semaphores.PcieTree, "read", lambda: tree)
    device = OwnDevice()
    assert semaphores.pcie_links(device, env) is None
    initialized[0] = True
    assert semaphores.pcie_links(device, {}) is None
    routes = semaphores.pcie_links(device, env)
    assert isinstance(routes, PcieLinks)
    assert (routes.gpu, routes.nic) == (addresses[3], nics[3])
    assert routes.local == dict(enumerate(addresses, 8))
    spanning = GroupInfo("data parallel", (3, 11, 19), 1)
    assert set(routes(spanning)) == names(tree, addresses[3], nics[3])
    neighbours = GroupInfo("tensor parallel", (10, 11), 1)
    assert set(routes(neighbours)) == names(tree, addresses[3], addresses[2])
    up_Bps[3] = None
    beside_a_nic_that_is_down = semaphores.pcie_links(device, env)
    assert isinstance(beside_a_nic_that_is_down, PcieLinks)
    assert beside_a_nic_that_is_down.nic not in (None, nics[3])


@pytest.mark.parametrize(
    ("links", "why_not"),
    [("none", "switched off"), ("auto", "not known yet"), ("a,b", "no other job")],
)
def test_the_setting_decides(links: str, why_not: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = FakeGate()
    monkeypatch.setattr(semaphores, "_process_gate", lambda: gate)
    made = make_semaphores(Settings(links=tuple(links.split(",")), link_wait_ms=250), OwnDevice())
    assert "no order" in made.status()["why_not"]
    made.follow("job", 3)
    made.tick([WORLD])
    assert why_not in made.status()["why_not"]
    assert made.status()["wait_ms"] == 250
    assert list(made.status()["links"]) == (["a", "b"] if links == "a,b" else [])
    assert gate.joined == (["a", "b"] if links == "a,b" else [])


# The gate in step


class FakeGate:
    """Stands in for the C++ gate, and keeps what HostSemaphores asked of it."""

    def __init__(self) -> None:
        self.joined: list[str] = []
        self.neighbours: set[str] = set()
        self.refuse: set[str] = set()
        self.cut: set[int] = set()
        self.crossed: dict[int, list[int]] = {}
        self.level: int | None = None
        self.priority = 0.0
        self.installed = False
        self.retired = 0
        self.waits = (2, 1, 3_000_000_000, 2_000_000_000)
        self.device_refusal = ""

    def set_wait_s(self, seconds: float) -> None:
        assert seconds > 0

    def join(self, folder: str, cluster: str, link: str, job: str) -> int:
        assert folder
        assert job
        if link in self.refuse:
            raise RuntimeError(f"{link}: belongs to user 4242, not to this one")
        self.joined.append(link)
        return len(self.joined) - 1

    def shared(self, link: int) -> bool:
        return self.joined[link] in self.neighbours

    def lost(self, link: int) -> bool:
        return link in self.cut

    def cross(self, group: int, links: list[int]) -> None:
        self.crossed[group] = links

    def set_level(self, level: int, priority: float) -> None:
        self.level, self.priority = level, priority

    def install(self, on: bool) -> None:
        self.installed = on

    def retire(self) -> None:
        self.retired += 1
        self.crossed = {}

    def holders(self, link: int) -> list[Any]:
        facts = {"pid": 7, "level": -1, "operations": 2, "changed_ns": 0, "same_job": link == 0}
        return [SimpleNamespace(**facts)]


@pytest.fixture
def gate() -> FakeGate:
    return FakeGate()


@pytest.fixture
def links(gate: FakeGate, tmp_path: Path) -> HostSemaphores:
    routes = NamedLinks(("x", "y"))
    return HostSemaphores(lambda: gate, lambda: routes, "c", 0.5, folder=lambda: tmp_path)


def test_nothing_is_taken_before_the_first_order(gate: FakeGate, links: HostSemaphores) -> None:
    links.tick([WORLD])
    assert gate.joined == []
    links.follow("job", None)
    links.tick([])
    assert gate.joined == []
    links.tick([WORLD])
    assert gate.joined == ["x", "y"]
    assert gate.level == -1


def test_operations_look_only_where_another_job_is(gate: FakeGate, links: HostSemaphores) -> None:
    links.follow("job", 3)
    links.tick([WORLD])
    assert (gate.level, gate.installed, gate.crossed) == (3, False, {})
    gate.neighbours = {"y"}
    links.tick([WORLD, GroupInfo("alone", (0,), 0)])
    assert (gate.installed, gate.crossed) == (True, {0: [1]})
    assert links.status()["active"]
    x, y = (links.status()["links"][name] for name in ("x", "y"))
    assert (x["shared"], y["shared"]) == (False, True)
    assert x["holders"][0].pop("since_s") > 0
    assert x["holders"] == [{"pid": 7, "level": None, "operations": 2, "same_job": True}]
    waits = {"operations": 2, "ran_out": 1, "total_s": 3.0, "longest_s": 2.0}
    assert links.status()["waits"] == waits
    assert links.status()["device_refuses"] is None
    gate.device_refusal = "it fails"
    assert links.status()["device_refuses"] == "it fails"
    links.follow("job", 6, 1.5)
    assert (gate.level, gate.priority) == (6, 1.5)
    gate.neighbours = set()
    links.tick([WORLD])
    assert (gate.installed, gate.crossed) == (False, {0: []})


def test_a_file_that_was_cut_is_joined_anew(
    gate: FakeGate, links: HostSemaphores, caplog: pytest.LogCaptureFixture
) -> None:
    gate.neighbours = {"x", "y"}
    links.follow("job", 3)
    links.tick([WORLD])
    assert gate.crossed == {0: [0, 1]}
    gate.cut = {0}
    links.tick([WORLD])
    assert gate.joined == ["x", "y", "x"]
    assert gate.crossed == {0: [2, 1]}
    assert caplog.text.count("link x was cut short") == 1


def test_a_link_that_refuses_is_said_and_tried_again(
    gate: FakeGate, links: HostSemaphores, caplog: pytest.LogCaptureFixture
) -> None:
    gate.refuse = {"x"}
    gate.neighbours = {"x", "y"}
    links.follow("job", 3)
    links.tick([WORLD])
    links.tick([WORLD])
    assert gate.crossed == {0: [0]}
    assert gate.joined == ["y"]
    assert "4242" in links.status()["refused"]["x"]
    assert len([r for r in caplog.records if "4242" in r.getMessage()]) == 1
    gate.refuse = set()
    links.tick([WORLD])
    assert gate.crossed == {0: [1, 0]}
    assert links.status()["refused"] == {}


def test_without_the_extension_nothing_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> Any:
        raise ImportError("No module named 'crux_torch._C'")

    routes = NamedLinks(("x",))
    links = HostSemaphores(absent, lambda: routes, "c", 0.5, folder=lambda: tmp_path)
    links.follow("job", 3)
    links.tick([WORLD])
    links.revert()
    assert not links.status()["active"]
    assert "No module named" in caplog.text


def test_all_is_given_back(gate: FakeGate, links: HostSemaphores) -> None:
    gate.neighbours = {"x"}
    links.follow("job", 3)
    links.tick([WORLD])
    links.follow("the job anew", 3)
    assert (gate.retired, gate.installed) == (1, False)
    links.tick([WORLD])
    assert gate.joined == ["x", "y", "x", "y"]
    links.revert()
    assert gate.retired == 2
    links.tick([WORLD])
    assert len(gate.joined) == 4


def test_what_is_not_known_is_asked_for_now_and_then(gate: FakeGate, tmp_path: Path) -> None:
    asked: list[float] = []
    now = [0.0]

    def routes() -> None:
        asked.append(now[0])

    links = HostSemaphores(
        lambda: gate, routes, "c", 0.5, folder=lambda: tmp_path, clock=lambda: now[0]
    )
    links.follow("job", 3)
    for _ in range(12):
        links.tick([WORLD])
        now[0] += 1.0
    assert asked == [0.0, 5.0, 10.0]


# The real gate


def test_the_doctor_tries_to_take_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hgx = PcieTree.read(layouts.write(tmp_path / "sys", layouts.hgx_h100()))

    def found(setting: str) -> Check:
        check = doctor.semaphores(Settings(links=(setting,), cluster="c"))
        assert (check.cost == "") == (check.state == "ok")
        return check

    monkeypatch.setattr(doctor, "usable_folder", lambda _: tmp_path)
    monkeypatch.setattr(doctor.PcieTree, "read", lambda: hgx)
    assert found("auto").finding == f"{len(hgx.links())} PCIe links above GPUs and NICs"
    assert "named links a,b" in found("a,b").finding
    assert "switched off" in found("none").finding
    hgx.devices.clear()
    assert "no PCI devices" in found("auto").finding
    (tmp_path / "c~doctor").mkdir()
    assert "Is a directory" in found("a").finding


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from crux_torch import _C

    gate = _C.link_gate()
    file = tmp_path / "c~x"
    file.touch()
    file.chmod(0o644)
    with pytest.raises(RuntimeError, match="its mode isn't 0600"):
        gate.join(str(tmp_path), "c", "x", "job")
    with pytest.raises(IndexError):
        gate.cross(0, [1 << 20])
    with pytest.raises(ValueError, match="too many"):
        gate.cross(1 << 20, [])


@pytest.mark.full
def test_no_deadlock_and_no_lost_place_through_random_deaths(tmp_path: Path) -> None:
    """Twenty seconds of what benchmarks/links.py does for ten minutes."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    out = tmp_path / "links.json"
    script = ROOT / "benchmarks/links.py"
    run = subprocess.run(
        [sys.executable, str(script), "--soak-only", "--minutes", str(20 / 60), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["processes"], row["deadlocks"], row["places_lost"]) == (24, 0, 0)
    assert row["kills"] > 50
    assert row["calms"] > 1
    assert row["operations"] > 1000
