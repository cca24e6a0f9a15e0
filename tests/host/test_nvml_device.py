"""Which GPU is a process's own: CUDA's UUID first, then CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from crux_torch.host.activity import CudaDevice, current_device, own_gpu, visible_gpus
from crux_torch.host.nvml import Gpu

GPUS = tuple(
    Gpu(i, "NVIDIA A100-SXM4-80GB", f"GPU-{i}a-{i}", 80 << 30, f"0000:{i:02x}:00.0", 312e12)
    for i in range(4)
)
MIXED = (*GPUS[:2], replace(GPUS[2], name="NVIDIA H100 PCIe"))
SPLIT = (replace(GPUS[0], mig=True, mig_uuids=("MIG-x-1", "MIG-x-2")), GPUS[1])


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        ("1,9,2", [1]),
        ("1,-1,2", [1]),
        ("-1", []),
        ("1,x,2", [1]),
        ("1,,2", [1]),
        ("GPU-2a-2,GPU-0a", [2, 0]),
        ("GPU-", []),
        ("GPU-nobody", []),
        ("1,1", []),
        ("GPU-1a-1,GPU-1a-1", []),
        ("MIG-GPU-3a-3/7/0", [3]),
        ("MIG-unknown", []),
    ],
)
def test_cuda_visible_devices(visible: str | None, indices: list[int]) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu and gpu.index for gpu in visible_gpus(GPUS, env)] == indices


def test_different_gpus_have_cudas_order_only_by_pci_bus_id() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "2,0"}
    assert visible_gpus(MIXED, env) == (None, None)
    ordered = env | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_gpus(MIXED, ordered) == (MIXED[2], MIXED[0])
    assert visible_gpus(MIXED, env | {"CUDA_VISIBLE_DEVICES": "GPU-2a"}) == (MIXED[2],)


def test_mig_instances_belong_to_their_gpu() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "MIG-x-2"}
    assert visible_gpus(SPLIT, env) == (SPLIT[0],)
    ambiguous = {"CUDA_VISIBLE_DEVICES": "MIG-x"}
    assert visible_gpus(SPLIT, ambiguous) == (SPLIT[0],), "both instances are of the same GPU"


def test_cudas_uuid_settles_it() -> None:
    assert own_gpu(GPUS, 0, "2a-2", {"CUDA_VISIBLE_DEVICES": "1"}) == GPUS[2]
    assert own_gpu(GPUS, 0, "GPU-2a-2") == GPUS[2]
    assert own_gpu(SPLIT, 0, "x-2") == SPLIT[0]
    assert own_gpu(GPUS, 0, "of another host") is None
    assert own_gpu(GPUS, 0, "", {"CUDA_VISIBLE_DEVICES": "1"}) == GPUS[1]
    assert own_gpu(GPUS, 7) is None
    assert own_gpu(GPUS, -1) is None


def cuda(**given: Any) -> Any:
    cuda = {
        "is_initialized": lambda: True,
        "current_device": lambda: 1,
        "get_device_properties": lambda i: SimpleNamespace(uuid=f"{i}a-{i}", name="NVIDIA L4"),
    }
    return SimpleNamespace(cuda=SimpleNamespace(**{**cuda, **given}))


def test_the_current_device() -> None:
    assert current_device(cuda()) == CudaDevice(1, "1a-1", "NVIDIA L4")
    assert current_device(cuda(is_initialized=lambda: False)) is None
    nameless = cuda(get_device_properties=lambda i: SimpleNamespace(name="NVIDIA L4"))
    assert current_device(nameless) == CudaDevice(1, "", "NVIDIA L4")


def test_the_current_device_makes_no_cuda_context_here() -> None:
    import torch

    before = torch.cuda.is_initialized()
    current_device()
    assert torch.cuda.is_initialized() == before
