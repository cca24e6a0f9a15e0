"""What a script does with NCCL gives the same on Crux, whichever way it got its backend.

NCCL is the fake one of ``fake_gpu``, on its fake accelerator. What needs no device at all (options,
classes, the names of creators) is torch's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
import torch.distributed as dist
from programs import python
from rig.identity import assert_same
from rig.job import ATTACHED, STOCK, Job
from rig.kind import FLAVOUR, OLD_TORCH, Kind, fakes
from rig.part import FOUR, PAIR

pytestmark = pytest.mark.slow

#: On four ranks. What is not here runs in tests/gpu on one and two.
PARTS = (
    "all_reduce",
    "all_reduce_async",
    "gathers",
    "scatters",
    "all_to_all",
    "batched_point_to_point",
    "coalesced",
    "ddp_with_hooks",
    "fsdp2",
    "tensor_parallel_in_fsdp2",
    "device_mesh",
    "functional_collectives",
    "compiled_collectives",
    "new_groups",
    "attributes",
)
#: torch 2.11 gives the devices of objects and sequence numbers to its own backends only, and tells
#: creators not what to split from.
ONLY_NEWER = ("objects", "sequence_numbers")


@pytest.fixture(scope="module", autouse=True)
def kind() -> Kind:
    """The fakes, built before ranks that have to start in time."""
    ok, reason = fake_gpu.available()
    if not ok:
        pytest.skip(reason)
    python("import fake_gpu; fake_gpu.load()", limit_s=600)
    return fakes()


def same_as_stock(folder: Path, *job: Any, **options: Any) -> None:
    kind, size, parts = job
    ours, stock = (
        Job(kind, mode, size, parts, **options).run(folder / mode) for mode in (ATTACHED, STOCK)
    )
    for part in parts:
        assert_same(ours[part], stock[part], kind, part)


@pytest.mark.parametrize(
    ("flavour", "bound"), [("legacy", False), ("nccl2", not OLD_TORCH)], ids=["legacy", "nccl2"]
)
def test_same_results_as_the_stock_backend(
    flavour: str, bound: bool, kind: Kind, tmp_path: Path
) -> None:
    """On four ranks, with communicators made at their first use, or bound to a device."""
    parts = PARTS if OLD_TORCH else PARTS + ONLY_NEWER + ("splits",) * bound
    same_as_stock(tmp_path, kind, FOUR, parts, eager=bound, env={FLAVOUR: flavour})


@pytest.mark.full
def test_same_results_while_collectives_are_checked(kind: Kind, tmp_path: Path) -> None:
    parts = ("all_reduce", "all_reduce_async", *(() if OLD_TORCH else ("coalesced",)), "ddp")
    same_as_stock(tmp_path, kind, PAIR, parts, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


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
from crux_torch.c10d import backend
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
from crux_torch.c10d import backend
from crux_torch.c10d.passed_on import default_switch
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
