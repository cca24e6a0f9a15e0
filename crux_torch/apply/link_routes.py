"""Which links this process crosses: stand-in links by name, or PCIe links by where its GPU is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crux_torch.apply.links import HostLinks, LinkRoutes, PcieRoutes, StandInRoutes, nvlinked_with
from crux_torch.apply.nccl_conf import NcclVariables
from crux_torch.host.inside import usable_nics
from crux_torch.host.nic import Nic, read_nics
from crux_torch.host.nvml import Gpu, bounded, read_gpus
from crux_torch.host.nvml_device import OwnDevice, own_gpu, visible_gpus
from crux_torch.host.pcie import PcieTree
from crux_torch.own_folders import group_id, usable_folder
from crux_torch.settings import Settings


def make_links(settings: Settings, device: OwnDevice) -> HostLinks:
    """What keeps this process's gate, by ``CRUX_LINKS``."""

    def routes() -> LinkRoutes | None:
        if settings.links == ("none",):
            return StandInRoutes((), "switched off: CRUX_LINKS=none")
        if settings.links == ("auto",):
            return pcie_routes(device, os.environ)
        return StandInRoutes(settings.links)

    def folder() -> Path:
        return usable_folder(group_id(settings.store_group))

    wait_s = settings.link_wait_ms / 1e3
    return HostLinks(_process_gate, routes, settings.cluster, wait_s, folder=folder)


def pcie_routes(device: OwnDevice, env: Mapping[str, str]) -> LinkRoutes | None:
    """The PCIe links of this process; None while it has no GPU in use, or it isn't known which."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_available() or not cuda.is_initialized():
        return None
    gpus = bounded(read_gpus) or ()
    chosen = device.device(cuda.device_count(), env)
    gpu = own_gpu(gpus, chosen.ordinal, chosen.uuid, env) if chosen else None
    if gpu is None:
        return None
    tree = PcieTree.read()
    nic = tree.nic_of(gpu.pci_address, usable_nics(read_nics(), tree))
    return PcieRoutes(
        tree,
        gpu.pci_address,
        nic.pci_address if nic is not None else None,
        local_gpus(gpu, visible_gpus(gpus, env), env),
        nvlinked_with(gpu, gpus),
        direct=nic is not None and reads_gpu(nic, env),
    )


def reads_gpu(nic: Nic, env: Mapping[str, str]) -> bool:
    """Whether NCCL lets a NIC below a GPU's switch read the GPU's memory itself.

    With RDMA it does, unless its variables say otherwise; that the driver can is taken for granted.
    """
    variables = NcclVariables(env)
    net, level = variables.get("NCCL_NET"), variables.get("NCCL_NET_GDR_LEVEL")
    if nic.rdma_device is None or (net is not None and net.text.lower() == "socket"):
        return False
    if variables.integer("NCCL_IB_DISABLE"):
        return False
    return level is None or level.text not in ("LOC", "0")


def local_gpus(
    own: Gpu, visible: tuple[Gpu | None, ...], env: Mapping[str, str]
) -> dict[int, str | None]:
    """PCI address of the GPU of each global rank on this host, as torchrun numbers them."""
    try:
        rank, local, count = (int(env[k]) for k in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError):
        return {}
    # With one GPU visible to each process nobody tells which the others have.
    gpus = visible if len(visible) >= count else ()
    found = {
        rank - local + i: gpu.pci_address if gpu is not None else None
        for i, gpu in enumerate((*gpus, *[None] * count)[:count])
    }
    return found | {rank: own.pci_address}


def _process_gate() -> object:
    from crux_torch import _C

    return _C.link_gate()
