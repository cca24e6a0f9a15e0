"""Which of the host's GPUs is this process's own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crux_torch.host.nvml import Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as CUDA shows it to this process: its number, UUID (empty if unknown) and model."""

    ordinal: int
    uuid: str
    name: str


def current_device(torch: Any = None) -> CudaDevice | None:
    """The CUDA device that the calling thread has chosen; None if CUDA has not been used yet.

    The choice belongs to the thread: call it on the one that trains. It never makes a CUDA context.
    """
    torch = torch or sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    ordinal = int(torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(ordinal)
    return CudaDevice(ordinal, str(getattr(properties, "uuid", "")), properties.name)


class OwnDevice:
    """The CUDA device that this process trains on: what the thread has chosen that made this."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._chosen: CudaDevice | None = None
        self.look()

    def look(self) -> None:
        """Ask CUDA again; no effect on other threads, because each thread has its own device."""
        if threading.get_ident() == self._thread:
            self._chosen = current_device() or self._chosen

    def device(self, visible: int, env: Mapping[str, str]) -> CudaDevice | None:
        """The device; None if unknown.

        A script may choose its device after its process group was made. Then it is the only one of
        the ``visible`` devices, or the one with the number of its local rank, as every launcher's
        documentation has it.
        """
        if self._chosen is not None:
            return self._chosen
        if visible == 1:
            return CudaDevice(0, "", "")
        rank = env.get("LOCAL_RANK", "")
        chosen = rank.isdecimal() and int(rank) < visible
        return CudaDevice(int(rank), "", "") if chosen else None


def own_gpu(
    gpus: Sequence[Gpu], ordinal: int, uuid: str = "", env: Mapping[str, str] | None = None
) -> Gpu | None:
    """The GPU that CUDA calls ``ordinal`` in this process; None if it is not certain.

    Args:
        uuid: as CUDA reports it, with or without its prefix. If it is known, it decides.
        env: with CUDA_VISIBLE_DEVICES, in case no UUID is known.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    if bare:
        return next(
            (g for g in gpus if g.uuid == f"GPU-{bare}" or f"MIG-{bare}" in g.mig_uuids), None
        )
    visible = visible_gpus(gpus, env or {})
    return visible[ordinal] if 0 <= ordinal < len(visible) else None


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> tuple[Gpu | None, ...]:
    """The GPUs that CUDA shows a process, in CUDA's order; None for one that is unknown.

    As the CUDA programming guide (environment variables) has it: indices, UUIDs or their unique
    beginnings, MIG instances; the first that is not valid ends the list. Unless CUDA_DEVICE_ORDER
    says PCI_BUS_ID, CUDA numbers the fastest first, which is NVML's order only among equal GPUs.
    """
    ordered = env.get(ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) < 2
    by_index: Sequence[Gpu | None] = gpus if ordered else [None] * len(gpus)
    if VISIBLE not in env:
        return tuple(by_index)
    found: list[Gpu | None] = []
    taken: set[int | str] = set()
    for token in (part.strip() for part in env[VISIBLE].split(",")):
        key: int | str = token
        if token.isdecimal() and int(token) < len(gpus):
            key = int(token)
            chosen = by_index[key]
        elif (chosen := _by_uuid(gpus, token)) is None:
            break
        if key in taken:
            # CUDA shows nothing at all if a device is named twice.
            return ()
        taken.add(key)
        found.append(chosen)
    return tuple(found)


def _by_uuid(gpus: Sequence[Gpu], token: str) -> Gpu | None:
    """The GPU with a UUID, or with an instance of that UUID, if exactly one fits."""
    if token.startswith("MIG-GPU-"):
        # MIG-GPU-UUID/INSTANCE/COMPUTE: how drivers before 470 name an instance.
        token = token.removeprefix("MIG-").partition("/")[0]
    if not token.startswith(("GPU-", "MIG-")) or len(token) == len("GPU-"):
        return None
    uuids = [(gpu, uuid) for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids)]
    fitting = {gpu.index: gpu for gpu, uuid in uuids if uuid.startswith(token)}
    return next(iter(fitting.values())) if len(fitting) == 1 else None
