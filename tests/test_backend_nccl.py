"""What a script does with NCCL gives the same on Crux, whichever way it got its backend.

NCCL is the fake one of ``fake_gpu``, on its fake accelerator. What needs no device at all (options,
classes, the names of creators) is torch's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
import torch.distributed as dist

WORKLOAD = Path(__file__).with_name("nccl_workload.py")
OLD_TORCH = torch.__version__.startswith("2.11")
#: Seconds that a run may take on a loaded machine.
LIMIT_S = 240
#: The order of a switch's two communicators: docs/switching.md.
ALLOWED_IN_SWITCH = "work_synchronize"

ALL_PARTS = [
    "collectives",
    "asynchronous",
    "point_to_point",
    "coalesced",
    "objects",
    "ddp",
    "fsdp2",
    "tensor_parallel_in_fsdp2",
    "device_mesh",
    "functional",
    "compiled",
    "new_groups",
    "splits",
    "checked",
    "sequence_numbers",
]
#: torch 2.11 splits, gives sequence numbers and objects' devices to backends of CUDA only.
NOT_FOR_OTHER_DEVICES_IN_OLD_TORCH = {"splits", "sequence_numbers", "objects"}


@pytest.fixture(scope="module", autouse=True)
def fakes() -> None:
    ok, reason = fake_gpu.available()
    if not ok:
        pytest.skip(reason)
    # Built once here, so that the ranks need not wait for each other.
    done = subprocess.run(
        [sys.executable, "-c", "import fake_gpu; fake_gpu.load()"],
        cwd=WORKLOAD.parent,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "CRUX_STORE": "none"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def run(size: int, folder: Path, wanted: dict[str, list[str]], **env: str) -> list[dict[str, Any]]:
    """The workload in ``size`` processes: each rank's report of each world."""
    errors = [(folder / f"{rank}.err").open("w+") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKLOAD), str(rank), str(size), str(folder), json.dumps(wanted)],
            stdout=errors[rank],
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "CRUX_STORE": "none",
                "OMP_NUM_THREADS": "1",
                "NCCL_WORKLOAD_LIMIT_S": str(LIMIT_S - 20),
                **env,
            },
        )
        for rank in range(size)
    ]
    try:
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for error in errors:
            error.close()
    said = [(folder / f"{rank}.err").read_text()[-3000:] for rank in range(size)]
    assert not any(codes), "\n".join(said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def same_as_stock(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        for title, got in report.items():
            mode, world = title.split(" ", 1)
            stock = report[f"stock {world}"]
            if mode == "stock":
                refused = {n: v for n, (kind, v) in got["results"].items() if kind == "error"}
                assert not refused
                assert not got["delegates"]
                continue
            assert got["delegates"], f"rank {rank}, {title}"
            assert got["stock_groups"] == [], f"rank {rank}, {title}"
            differing = {
                n: (got["results"][n], theirs)
                for n, theirs in stock["results"].items()
                if got["results"][n] != theirs
            }
            assert not differing, f"rank {rank}, {title}: {str(differing)[:2000]}"
            if mode == "attached":
                assert (got["name"], got["backend"]) == (stock["name"], stock["backend"])
            # What a record says is test_device_timing's to say.
            assert got["recorded"] == got["records"] > 1, f"rank {rank}, {title}"


@pytest.mark.parametrize("flavour", ["nccl2", "legacy"])
def test_same_results_as_the_stock_backend(flavour: str, tmp_path: Path) -> None:
    """On four ranks; once with communicators made at their first use, once bound to a device."""
    parts = [p for p in ALL_PARTS if not (OLD_TORCH and p in NOT_FOR_OTHER_DEVICES_IN_OLD_TORCH)]
    bound = ["collectives", "checked", "fsdp2"]
    if not OLD_TORCH:
        # Before, creators were not told what to split from, though others took part in a split.
        bound += ["new_groups", "splits"]
    # A communicator that is to be split must be there.
    # And DTensor, in one process, does not see that a world's groups are another's now.
    unbound = [p for p in parts if p != "splits"]
    wanted = {f"{flavour}:unbound": unbound, f"{flavour}:bound": bound}
    same_as_stock(run(4, tmp_path, wanted))


def test_same_results_while_communicators_are_replaced(tmp_path: Path) -> None:
    worlds = ["nccl2:unbound", "legacy:unbound"]
    wanted = {one: ["switched"] for one in worlds + ["nccl2:bound"] * (not OLD_TORCH)}
    reports = run(2, tmp_path, wanted)
    same_as_stock(reports)
    for report in reports:
        for title, got in report.items():
            unexpected = [v for v in got["violations"] if v[0] != ALLOWED_IN_SWITCH]
            assert not unexpected, title


def test_same_results_while_collectives_are_checked(tmp_path: Path) -> None:
    parts = ["collectives", "asynchronous", "coalesced", "ddp"]
    wanted = {"nccl2:unbound": [p for p in parts if not (OLD_TORCH and p == "coalesced")]}
    same_as_stock(run(2, tmp_path, wanted, TORCH_DISTRIBUTED_DEBUG="DETAIL"))


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=WORKLOAD.parent,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CRUX_STORE": "none", **env},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")


@needs_nccl
def test_attached_classes_are_still_the_stock_ones_to_a_script() -> None:
    python("""
import copy, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch._C._distributed_c10d import Backend
stock = dict(nccl=c10d.ProcessGroupNCCL, gloo=c10d.ProcessGroupGloo)
import crux_torch
crux_torch.attach()
assert c10d.ProcessGroupNCCL is dist.ProcessGroupNCCL is not stock["nccl"]
assert issubclass(dist.ProcessGroupNCCL, Backend)
assert issubclass(stock["nccl"], dist.ProcessGroupNCCL)
assert dist.ProcessGroupNCCL.__module__ == stock["nccl"].__module__
assert dist.ProcessGroupNCCL.Options is stock["nccl"].Options
assert dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO == stock["nccl"].NCCL_CTA_POLICY_ZERO
assert dist.ProcessGroupNCCL.get_build_nccl_version() == stock["nccl"].get_build_nccl_version()
options = dist.ProcessGroupNCCL.Options()
options.config.traffic_class, options.is_high_priority_stream = 96, True
for copied in (copy.copy(options), copy.deepcopy(options)):
    assert copied.config.traffic_class == 96 and copied.is_high_priority_stream
options.split_from = None
assert options.split_from is None
class Own(dist.ProcessGroupGloo):
    def extra(self):
        return super().rank()
made = Own(dist.HashStore(), 0, 1)
assert made.extra() == 0 and type(made) is Own and Own.__bases__ == (stock["gloo"],)
assert isinstance(made, dist.ProcessGroupGloo) and not isinstance(made, dist.ProcessGroupNCCL)
by_name = dist.ProcessGroupGloo(store=dist.PrefixStore("b", dist.HashStore()), rank=0, size=1)
assert type(by_name).__name__ == "DelegatingBackend" and isinstance(by_name, dist.ProcessGroupGloo)
""")


@needs_nccl
def test_attached_names_have_stocks_timeouts_and_devices() -> None:
    """As far as stock creators get without a device: the refusal is theirs, and says so."""
    out = python("""
import datetime, tempfile, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import crux_torch
before = dict(c10d.Backend.backend_capability)
crux_torch.attach()
if hasattr(c10d.Backend, "_ensure_backend_registered"):
    for name in ("nccl", "nccl2", "nccl-lazy", "nccl-legacy", "gloo"):
        c10d.Backend._ensure_backend_registered(name)
        assert hasattr(c10d.Backend._plugins[name.upper()].creator_fn, "stands_in"), name
        assert c10d._get_default_timeout(name) == (
            c10d.default_pg_timeout if name == "gloo" else c10d.default_pg_nccl_timeout), name
assert c10d._get_default_timeout("nccl") == datetime.timedelta(minutes=10)
for name, devices in before.items():
    assert c10d.Backend.backend_capability[name] == devices
try:
    dist.init_process_group("nccl", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
except Exception as error:
    print(type(error).__name__, error)
""")
    if not torch.cuda.is_available():
        assert "CUDA device" in out or "no GPUs found" in out or "GPUs" in out


@needs_nccl
@pytest.mark.skipif(OLD_TORCH, reason="before torch 2.14 the name nccl had one class")
@pytest.mark.parametrize("legacy", [False, True])
def test_which_class_nccl_is_is_still_asked_when_the_backend_is_made(legacy: bool) -> None:
    """A script may choose after Crux was attached, as at the end of ``import torch``."""
    python(f"""
import os, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import crux_torch
crux_torch.attach()
os.environ["TORCH_DIST_USE_NCCL2"] = "{int(not legacy)}"
c10d.Backend._ensure_backend_registered("nccl")
made = c10d.Backend._plugins["NCCL"].creator_fn.__wrapped__
assert made is c10d.{"_create_nccl_process_group" if legacy else "_create_nccl2_process_group"}
""")


def test_crux_takes_the_accelerator_as_c10d_maps_it() -> None:
    """Known only after the name was registered; tensors of either device go to their backend."""
    python("""
import tempfile, torch, torch.distributed as dist
import crux_torch
before = list(dist.Backend.backend_capability["crux"])
assert before == ["cpu", "cuda"], before
import fake_gpu
fake_gpu.load()
assert list(dist.Backend.backend_capability["crux"]) == ["cpu", "cuda", "fakegpu"]
assert "fakegpu" in dist.Backend.backend_capability["crux"]
assert dist.Backend.default_device_backend_map["fakegpu"] == "fakenccl"
dist.init_process_group("crux", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
backend = dist.group.WORLD._get_backend(torch.device("fakegpu"))
assert type(backend.inner("fakegpu")).__name__ == "Nccl"
assert type(backend.inner("cpu")).__name__ == "ProcessGroupGloo"
assert backend.default_inner is backend.inner("fakegpu")
for device in ("cpu", "fakegpu:0"):
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 3
dist.monitored_barrier()
dist.destroy_process_group()
""")


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 splits groups of CUDA's backends only")
def test_every_inner_backend_of_a_group_is_split_once() -> None:
    """c10d asks once for each type of device that the one backend serves."""
    python("""
import tempfile, torch, torch.distributed as dist
import fake_gpu, crux_torch
fake_gpu.load()
at = "file://" + tempfile.mktemp()
bound = torch.device("fakegpu:0")
dist.init_process_group("crux", init_method=at, rank=0, world_size=1, device_id=bound)
parent = dist.group.WORLD._get_backend(bound)
group = dist.split_group(split_ranks=[[0]], group_desc="half")
assert parent.comm_split_count() == 1
backends = [group._get_backend(torch.device(d)) for d in ("cpu", "fakegpu")]
assert backends[0] is backends[1] is not parent
assert sorted(s.device for s in backends[0].switches) == ["cpu", "fakegpu"]
assert backends[0].inner("cpu") is not parent.inner("cpu")
for device in ("cpu", "fakegpu:0"):
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor, group=group)
    assert tensor.sum().item() == 3
again = dist.split_group(split_ranks=[[0]])
assert parent.comm_split_count() == 2
dist.destroy_process_group()
""")


def test_without_an_accelerator_crux_is_gloo() -> None:
    # Asked in a process of its own: in this one a test may have loaded the fake device.
    said = python("""
import tempfile, torch, torch.distributed as dist, crux_torch
if torch.accelerator.is_available():
    print("accelerator")
    raise SystemExit
dist.init_process_group("crux", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert [s.device for s in backend.switches] == ["cpu"]
assert type(backend.default_inner).__name__ == "ProcessGroupGloo"
dist.destroy_process_group()
""")
    if "accelerator" in said:
        pytest.skip("this machine has an accelerator")


def test_an_aborted_group_ends_as_a_stock_one() -> None:
    python("""
import tempfile, time, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import fake_gpu
fake_gpu.load()
import crux_torch
from crux_torch import backend
backend.attach(also=[fake_gpu.NCCL])
at = "file://" + tempfile.mktemp()
dist.init_process_group(fake_gpu.NCCL, init_method=at, rank=0, world_size=1)
fake_gpu.inject("hold")
group = dist.new_group([0])
work = dist.all_reduce(torch.ones(3, device="fakegpu:0"), group=group, async_op=True)
inner = group._get_backend(torch.device("fakegpu")).default_inner
began = time.monotonic()
c10d._abort_process_group(group)
assert time.monotonic() - began < 20
assert inner.counters["abort"] == 1
assert fake_gpu.drain()
""")


def test_what_changes_an_inner_backend_reaches_the_next_one_too() -> None:
    """Memory pools and the like, set before a switch; symmetric memory ends switching."""
    python("""
import tempfile, torch, torch.distributed as dist
import fake_gpu
fake_gpu.load()
import crux_torch
from crux_torch import backend
from crux_torch.passed_on import default_switch
backend.attach(also=[fake_gpu.NCCL])
at = "file://" + tempfile.mktemp()
dist.init_process_group(fake_gpu.NCCL, init_method=at, rank=0, world_size=1)
class Pool:
    id = (0, 9)
made = dist.group.WORLD._get_backend(torch.device("fakegpu"))
made.register_mem_pool(Pool)
first = made.default_inner
assert first.counters["register_mem_pool"] == 1
switch = default_switch(made)
assert switch.refusal == ""
made.deregister_mem_pool(Pool)
made.register_mem_pool(Pool, symm=True)
assert "symmetric" in switch.refusal
with switch.turn() as inner:
    assert inner is first
try:
    made.register_mem_pool(1, 2, 3)
except TypeError:
    pass
else:
    raise AssertionError("as the stock class would have refused it")
try:
    made.no_such_thing
except AttributeError as error:
    assert "no_such_thing" in str(error)
dist.destroy_process_group()
""")
