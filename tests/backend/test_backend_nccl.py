"""What a script does with NCCL gives the same on Crux, whichever way it got its backend.

torch's own process groups, on the rig. What needs no device at all (options, classes, the names of
creators) runs without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_rig
import pytest
import torch
import torch.distributed as dist
from programs import on_the_rig, python
from rig.identity import assert_same
from rig.job import ATTACHED, STOCK, Job
from rig.kind import LEGACY, OLD_TORCH, Kind
from rig.kind import rig as the_rig
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
    "objects",
    "sequence_numbers",
)


@pytest.fixture(scope="module")
def kind() -> Kind:
    """The rig, built before ranks that have to start in time."""
    ok, reason = cuda_rig.available()
    if not ok:
        pytest.skip(reason)
    cuda_rig.build()
    return the_rig()


def same_as_stock(folder: Path, *job: Any, **options: Any) -> None:
    kind, size, parts = job
    ours, stock = (
        Job(kind, mode, size, parts, **options).run(folder / mode) for mode in (ATTACHED, STOCK)
    )
    for part in parts:
        assert_same(ours[part], stock[part], kind, part)


@pytest.mark.full
@pytest.mark.parametrize(("env", "bound"), [(LEGACY, False), ({}, True)], ids=["legacy", "nccl2"])
def test_same_results_as_the_stock_backend(
    env: dict[str, str], bound: bool, kind: Kind, tmp_path: Path
) -> None:
    """On four ranks, with communicators made at their first use, or bound to a device."""
    same_as_stock(tmp_path, kind, FOUR, PARTS + ("splits",) * bound, eager=bound, env=env)


#: Groups that may not switch keep torch's own backend, where torch has hooks.
HOOKED = {"CRUX_SWITCH_GROUPS": "none"}
needs_hooks = pytest.mark.skipif(OLD_TORCH, reason="torch has no hooks before 2.15")


@needs_hooks
@pytest.mark.full
@pytest.mark.parametrize("bound", [False, True])
def test_same_results_by_hooks(bound: bool, kind: Kind, tmp_path: Path) -> None:
    same_as_stock(tmp_path, kind, FOUR, PARTS + ("splits",) * bound, eager=bound, env=HOOKED)


@needs_hooks
def test_hooks_record_what_the_wrapper_records(kind: Kind, tmp_path: Path) -> None:
    found = []
    for env in ({"CRUX_SWITCH_GROUPS": "all"}, HOOKED):
        job = Job(kind, ATTACHED, PAIR, ("records",), env=env)
        (ranks,) = job.run(tmp_path / env["CRUX_SWITCH_GROUPS"]).values()
        assert all(rank.kind == "value" for rank in ranks), ranks
        found.append([rank.value for rank in ranks])
    wrapped, hooked = found
    assert [one["type"] for one in wrapped + hooked] == 2 * ["DelegatingBackend"] + 2 * [
        "ProcessGroupNCCL2"
    ]
    assert {one["name"] for one in wrapped + hooked} == {wrapped[0]["name"]}
    for ours, theirs in zip(hooked, wrapped, strict=True):
        assert len(theirs["records"]) > 40
        assert ours["records"] == theirs["records"]


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


def test_crux_serves_both_devices(kind: Kind) -> None:
    """Tensors of either device go to their backend."""
    on_the_rig("""
import tempfile, torch, torch.distributed as dist
import crux_torch
assert list(dist.Backend.backend_capability["crux"]) == ["cpu", "cuda"]
torch.cuda.set_device(0)
dist.init_process_group("crux", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
backend = dist.group.WORLD._get_backend(torch.device("cuda"))
assert type(backend.inner("cuda")).__name__ == "ProcessGroupNCCL2", backend.inner("cuda")
assert type(backend.inner("cpu")).__name__ == "ProcessGroupGloo"
assert backend.default_inner is backend.inner("cuda")
for device in ("cpu", "cuda"):
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 3
dist.monitored_barrier()
dist.destroy_process_group()
""")


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 asks no creator to split")
def test_every_inner_backend_of_a_group_is_split_once(kind: Kind) -> None:
    """c10d asks once for each type of device that the one backend serves."""
    on_the_rig("""
import tempfile, torch, torch.distributed as dist
from cuda_rig import control
import crux_torch
def splits():
    return sum(each["op"] == "split" for each in control.issued())
at = "file://" + tempfile.mktemp()
bound = torch.device("cuda:0")
dist.init_process_group("crux", init_method=at, rank=0, world_size=1, device_id=bound)
parent = dist.group.WORLD._get_backend(bound)
group = dist.split_group(split_ranks=[[0]], group_desc="half")
assert splits() == 1
backends = [group._get_backend(torch.device(d)) for d in ("cpu", "cuda")]
assert backends[0] is backends[1] is not parent
assert sorted(s.device for s in backends[0].handovers) == ["cpu", "cuda"]
assert backends[0].inner("cpu") is not parent.inner("cpu")
for device in ("cpu", "cuda:0"):
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor, group=group)
    assert tensor.sum().item() == 3
again = dist.split_group(split_ranks=[[0]])
assert splits() == 2
dist.destroy_process_group()
""")


def test_without_an_accelerator_crux_is_gloo() -> None:
    said = python("""
import tempfile, torch, torch.distributed as dist, crux_torch
if torch.accelerator.is_available():
    print("accelerator")
    raise SystemExit
dist.init_process_group("crux", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert [s.device for s in backend.handovers] == ["cpu"]
assert type(backend.default_inner).__name__ == "ProcessGroupGloo"
dist.destroy_process_group()
""")
    if "accelerator" in said:
        pytest.skip("this machine has an accelerator")


@pytest.mark.parametrize("env", [LEGACY, {}], ids=["legacy", "nccl2"])
def test_an_aborted_group_ends_as_a_stock_one(env: dict[str, str], kind: Kind) -> None:
    on_the_rig(
        """
import time, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from cuda_rig import control
import crux_torch
crux_torch.attach()
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group([0])
dist.all_reduce(torch.ones(3, device="cuda"), group=group)
control.inject("hold", "all_reduce")
work = dist.all_reduce(torch.ones(3, device="cuda"), group=group, async_op=True)
began = time.monotonic()
c10d._abort_process_group(group)
assert time.monotonic() - began < 20
torch.cuda.synchronize()
assert sum(each["op"] in ("abort", "destroy") for each in control.issued()) == 1
""",
        **env,
    )


@pytest.mark.parametrize("env", [LEGACY, {}], ids=["legacy", "nccl2"])
def test_all_groups_end_in_an_abort(env: dict[str, str], kind: Kind) -> None:
    """Newer torch aborts them within a block of the world's: what is left in it is no operation."""
    on_the_rig(
        """
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from cuda_rig import control
import crux_torch
crux_torch.attach()
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
for group in (dist.new_group([0]), dist.group.WORLD):
    dist.all_reduce(torch.ones(3, device="cuda"), group=group)
c10d._abort_process_group()
assert not dist.is_initialized()
assert sum(each["op"] in ("abort", "destroy") for each in control.issued()) == 2
""",
        **env,
    )


def test_what_changes_an_inner_backend_reaches_the_next_one_too(kind: Kind) -> None:
    """Symmetric memory ends switching, and errors are the stock class's."""
    on_the_rig("""
import torch, torch.distributed as dist
import crux_torch
from crux_torch.backend.inner_backends import default_handover
crux_torch.attach()
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3, device="cuda"))
made = dist.group.WORLD._get_backend(torch.device("cuda"))
first, switch = made.default_inner, default_handover(made)
pool = torch.cuda.MemPool(made.mem_allocator)
with torch.cuda.use_mem_pool(pool):
    kept = torch.ones(1 << 20, device="cuda")
made.register_mem_pool(pool)
assert switch.refusal == ""
made.deregister_mem_pool(pool)
with switch.turn() as inner:
    assert inner is first
made.register_mem_pool(pool, symm=True)
assert "symmetric" in switch.refusal, switch.refusal
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


@pytest.mark.parametrize("order", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
def test_gloo_beside_nccl(order: str, kind: Kind) -> None:
    """c10d keeps one backend of a type in a group: attached, they must be of two."""
    on_the_rig(f"""
import torch, torch.distributed as dist
import crux_torch
crux_torch.attach()
torch.cuda.set_device(0)
dist.init_process_group("{order}", store=dist.HashStore(), rank=0, world_size=1)
world = dist.group.WORLD
cpu, device = (world._get_backend(torch.device(d)) for d in ("cpu", "cuda"))
assert cpu is not device and cpu.name() == "gloo" and device.name() == "nccl2", (cpu, device)
for place, backend in (("cpu", cpu), ("cuda:0", device)):
    assert type(backend).__name__ == "DelegatingBackend"
    tensor = torch.ones(3, device=place)
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 3
group = dist.new_group([0])
assert group._get_backend(torch.device("cuda")).name() == "nccl2"
dist.destroy_process_group()
""")
