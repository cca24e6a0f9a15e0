"""Memory that NCCL knows, and torch's symmetric memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rig.collectives import all_are, ones, total
from rig.kind import CUDA, OLD_TORCH, RIG
from rig.part import ALONE, DEVICES, Rank, part

MAPPED = "torch's own symmetric memory is mapped by the driver"


@part(sizes=(ALONE,), eager=True, kinds=DEVICES, refused_on=(RIG,) if OLD_TORCH else ())
def registered_memory(rank: Rank) -> Any:
    group: Any = dist.group.WORLD
    backend = group._get_backend(rank.device)
    dist.all_reduce(ones(rank))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.full((1 << 20,), float(rank.rank + 1), device=rank.device)
    backend.register_mem_pool(pool)
    dist.all_reduce(tensor)
    all_are(tensor, total(rank.size))
    backend.deregister_mem_pool(pool)
    return tensor[:10]


@part(sizes=(ALONE,), eager=True, kinds=(CUDA,), why=MAPPED, refused_on=(CUDA,))
def symmetric_memory(rank: Rank) -> Any:
    import torch.distributed._symmetric_memory as symmetric

    group: Any = dist.group.WORLD
    tensor = symmetric.empty(1024, dtype=torch.float32, device=rank.device)
    handle = symmetric.rendezvous(tensor, group.group_name)
    tensor.fill_(rank.rank + 1)
    reduced = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group.group_name)
    all_are(reduced, total(rank.size))
    return handle.world_size, handle.rank, reduced
