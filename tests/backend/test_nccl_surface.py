"""What torch asks of a NCCL backend reaches it, one method at a time.

Read from the torch that is installed: its headers and its Python classes. What a newer torch adds
fails here until somebody has said what becomes of it.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import nccl_stand_in
import pytest
import torch
import torch.distributed as dist
from places import ROOT
from programs import python
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from crux_torch import _C
from crux_torch.backend import inner_backends, torch_patches
from crux_torch.errors import CruxError
from crux_torch.measure.records import from_bytes

pytestmark = pytest.mark.slow

HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


def virtuals(header: str) -> set[str]:
    text = re.sub(r"//[^\n]*", "", (HEADERS / header).read_text())
    return set(re.findall(r"virtual\s+[^;{}()]*?(\w+)\s*\(", text))


def overridden(header: str) -> set[str]:
    text = (ROOT / "csrc/process_group" / header).read_text()
    return set(re.findall(r"\b(\w+)\s*\([^;{]*\)[^;{]*\boverride\b", text))


#: Virtual methods of torch's Backend that are left to the base class.
LEFT_TO_THE_BASE = {
    "all_gather_single": "calls _allgather_base",
    "all_gather_single_coalesced": "calls allgather_into_tensor_coalesced",
    "all_to_all_single": "calls alltoall_base",
    "gather_single": "calls gather_into_tensor",
    "reduce_scatter_single": "calls _reduce_scatter_base",
    "reduce_scatter_single_coalesced": "calls reduce_scatter_tensor_coalesced",
    "getBoundDeviceId": "setBoundDeviceId keeps it in the base class too",
    "clone": "of Backend's options, which are the inner backend's",
}


def test_every_virtual_method_of_a_backend_is_passed_on() -> None:
    asked = virtuals("Backend.hpp")
    assert {"allreduce", "split", "abort"} <= asked
    assert asked - overridden("delegating_backend.h") - LEFT_TO_THE_BASE.keys() == set()


def test_every_virtual_method_of_a_handle_is_passed_on() -> None:
    asked = virtuals("Work.hpp")
    assert {"wait", "getFuture", "isCompleted"} <= asked
    assert asked - overridden("waited_work.h") == set()


#: What only a stock class has, and why it may be asked of the current inner backend as it is.
ASKED_OF_THE_CURRENT_ONE = {
    "Options": "a class",
    "_Options": "a class",
    "NCCLConfig": "a class",
    "NCCL_CTA_POLICY_DEFAULT": "a constant",
    "NCCL_CTA_POLICY_EFFICIENCY": "a constant",
    "NCCL_CTA_POLICY_ZERO": "a constant",
    "Device": "a class",
    "create_device": "of the class",
    "create_default_device": "of the class",
    "get_build_nccl_version": "of the class",
    "get_runtime_nccl_version": "of the class",
    "options": "the communicator's own; those of the next are copied from them",
    "uid": "a number of the process for each communicator",
    "bound_device_id": "the same for all",
    "get_error": "of what is in use",
    "comm_split_count": "of what is in use",
    "_is_initialized": "of what is in use",
    "_num_active_channels": "of what is in use",
    "_verify_work_timeout": "of a handle",
    "_group_start": "of the thread",
    "_group_end": "of the thread",
}
STOCK_CLASSES = [
    name
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
    if hasattr(torch._C._distributed_c10d, name)
]


@pytest.mark.skipif(not STOCK_CLASSES, reason="this torch has no NCCL")
@pytest.mark.parametrize("name", STOCK_CLASSES)
def test_what_only_a_stock_class_has_is_known(name: str) -> None:
    stock: Any = getattr(torch._C._distributed_c10d, name)
    base: Any = torch._C._distributed_c10d.Backend
    own = {a for a in vars(stock) if not a.startswith("__")} - {"_pybind11_conduit_v1_"}
    # What Backend has too goes through csrc/process_group, or through __getattr__ where it is not
    # a method of this torch's Backend.
    own -= set(vars(base))
    known = (
        ASKED_OF_THE_CURRENT_ONE.keys()
        | inner_backends._CHANGES.keys()
        | inner_backends._BINDS.keys()
    )
    assert own - known == set()
    assert not ASKED_OF_THE_CURRENT_ONE.keys() & inner_backends._CHANGES.keys()


class Handover:
    device = "cuda"

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.backend = Delegating.default_inner

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)


class Delegating:
    """A delegating backend as far as ``inner_backends.attribute`` sees it."""

    class default_inner:
        comm_ptr = 77

        @staticmethod
        def _comm_ptr() -> int:
            return 77

        @staticmethod
        def _start_time_estimate() -> None:
            pass

        @staticmethod
        def _end_time_estimate() -> float:
            return 12.5

    def __init__(self) -> None:
        self.handovers = [Handover()]
        self.estimating = False

    def _set_estimating(self, estimating: bool) -> None:
        self.estimating = estimating


@pytest.mark.parametrize("name", ["comm_ptr", "_comm_ptr"])
def test_a_communicator_whose_address_was_given_away_is_kept(name: str) -> None:
    """A handover would free it under the script's own kernels."""
    made = Delegating()
    got = inner_backends.attribute(made, name)
    assert (got() if callable(got) else got) == 77
    assert "address" in made.handovers[0].refusals[0]


def test_operations_that_are_estimated_are_told_to_be() -> None:
    """torch 2.11 estimates past c10d's Backend: the ranks' counts would differ from then on."""
    made = Delegating()
    inner_backends.attribute(made, "_start_time_estimate")()
    assert made.estimating
    assert inner_backends.attribute(made, "_end_time_estimate")() == 12.5
    assert not made.estimating


def test_estimated_operations_are_neither_counted_nor_recorded() -> None:
    recorder = _C.process_recorder(65536)
    recorder.drain(1 << 30)
    made = _C.DelegatingBackend("fake", 0, 2, recorder)
    made.add_inner("cpu", FakeProcessGroup._create_internal(0, 2))
    (switch,) = made.handovers
    made._set_estimating(True)
    made.allreduce([torch.ones(2)])
    assert switch.collectives == 0
    made._set_estimating(False)
    made.allreduce([torch.ones(2)]).wait()
    assert switch.collectives == 1
    assert len(from_bytes(recorder.drain(8))) == 1


def _next(current: Any) -> Any:
    return inner_backends.make_next(current, dist.HashStore(), timedelta(seconds=1))


needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")


@needs_nccl
@pytest.mark.parametrize(
    ("members", "expected"), [([], [0, 1, 2, 3]), ([4, 6, 7, 9], [4, 6, 7, 9])]
)
def test_the_next_communicator_knows_its_members(members: list[int], expected: list[int]) -> None:
    """The first of a process takes an empty list for the world, later ones read past its end."""
    options = c10d.ProcessGroupNCCL.Options()
    options.global_ranks_in_group = members
    made = _next(nccl_stand_in.ProcessGroupNCCL(None, 1, 4, options))
    assert list(made.options.global_ranks_in_group) == expected
    assert list(options.global_ranks_in_group) == members


@needs_nccl
@pytest.mark.parametrize("name", ["TORCH_", ""])
def test_no_handover_while_all_memory_is_registered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator goes on registering with a ProcessGroupNCCL that was shut down."""
    variable = f"{name}NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    current = nccl_stand_in.ProcessGroupNCCL(None, 0, 1, c10d.ProcessGroupNCCL.Options())
    monkeypatch.setenv(variable, "0")
    _next(current)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(CruxError, match="all memory is registered"):
        _next(current)


class ProcessGroupNCCL:
    def __init__(self) -> None:
        self.pools: list[Any] = []

    def register_mem_pool(self, pool: Any) -> None:
        self.pools.append(pool)


class ProcessGroupNCCL2(ProcessGroupNCCL):
    """Lets torch's allocator go when it ends."""


@pytest.mark.parametrize("stock", [ProcessGroupNCCL, ProcessGroupNCCL2])
def test_registered_memory_keeps_a_legacy_communicator(stock: type) -> None:
    """Shut down, it stays in torch's allocator, whose next segment of the pool fails then."""

    class Configured(Handover):
        def configure(self, name: str, setting: Any) -> None:
            setting(self.backend)

    class Pool:
        id = (0, 1)

    made: Any = Delegating()
    switch: Any = Configured()
    switch.backend = made.default_inner = stock()
    made.handovers = [switch]
    inner_backends.attribute(made, "register_mem_pool")(Pool)
    assert switch.backend.pools == [Pool]
    assert bool(switch.refusals) == (stock is ProcessGroupNCCL)


@needs_nccl
def test_no_handover_while_symmetric_memory_uses_nccls_communicators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its windows are bound to the communicator, and nobody tells which groups have some."""
    current = nccl_stand_in.ProcessGroupNCCL(None, 0, 1, c10d.ProcessGroupNCCL.Options())
    monkeypatch.setattr(torch_patches, "symmetric_memory", lambda: "NCCL")
    with pytest.raises(CruxError, match="symmetric memory"):
        _next(current)
    monkeypatch.setattr(torch_patches, "symmetric_memory", lambda: "CUDA")
    _next(current)


@needs_nccl
def test_what_symmetric_memory_uses_is_asked_of_torch() -> None:
    python("""
import torch
from torch._C._distributed_c10d import _SymmetricMemory
from crux_torch.backend import torch_patches
assert torch_patches.symmetric_memory() != "NCCL"
_SymmetricMemory.set_backend("NCCL")
assert torch_patches.symmetric_memory() == "NCCL"
""")
