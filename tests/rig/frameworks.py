"""The private calls of frameworks on groups and backends: docs/start/frameworks.md lists their
places."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from rig.collectives import all_are, ones, total
from rig.kind import CUDA, OLD_TORCH
from rig.outcome import message
from rig.part import DEVICES, PAIR, Rank, part


@part(sizes=(PAIR,))
def timeouts_of_live_groups(rank: Rank) -> Any:
    """Megatron-LM after its first iteration; torchtitan by the public name that newer torch has."""
    group: Any = dist.new_group()
    set_timeout = getattr(dist, "set_timeout", c10d._set_pg_timeout)
    dist.barrier(group)
    c10d._set_pg_timeout(timedelta(seconds=77), group)
    set_timeout(timedelta(seconds=88), group)
    dist.all_reduce(ones(rank), group=group)
    return group._get_backend(rank.device).options._timeout.total_seconds()


@part(sizes=(PAIR,))
def coalesced_gradients(rank: Rank) -> Any:
    """Megatron-LM's buckets, without a device; DeepSpeed and TransformerEngine name it."""
    wholes = [rank.input(32, seed=i) for i in range(3)]
    shards = [torch.zeros(16, device=rank.device) for _ in wholes]
    with c10d._coalescing_manager(dist.group.WORLD, async_ops=True) as block:
        for whole, shard in zip(wholes, shards, strict=True):
            dist.reduce_scatter_tensor(shard, whole, async_op=True)
    block.wait()
    named = rank.device if rank.device.type != "cpu" else None
    with c10d._coalescing_manager(dist.group.WORLD, device=named, async_ops=True) as block:
        for whole, shard in zip(wholes, shards, strict=True):
            dist.all_gather_into_tensor(whole, shard)
    block.wait()
    return wholes, shards


@part(sizes=(PAIR,), kinds=DEVICES)
def borrowed_communicator(rank: Rank) -> Any:
    """TransformerEngine's expert parallelism and DeepEP, in Python."""
    group: Any = dist.new_group()
    dist.barrier(group=group, device_ids=[rank.device.index])
    return bool(group._get_backend(rank.device)._comm_ptr()), bool(group.group_name)


@part(sizes=(PAIR,), kinds=DEVICES, refused_on=DEVICES if OLD_TORCH else (CUDA,))
def pools_of_a_group(rank: Rank) -> Any:
    """Megatron-LM's NCCL allocator, without windows and with them."""
    dist.all_reduce(ones(rank))
    backend: Any = dist.group.WORLD._get_backend(rank.device)  # type: ignore[union-attr]
    found = []
    for symm in (False, True):
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            found.append(ones(rank, 1 << 20))
        backend.register_mem_pool(pool, symm=symm)
        dist.all_reduce(found[-1])
        all_are(found[-1], total(rank.size))
        backend.deregister_mem_pool(pool)
    return [tensor[:10] for tensor in found]


@part(sizes=(PAIR,))
def groups_by_name(rank: Rank) -> Any:
    """torchtitan's graph passes: a group by its name, and a second one over its ranks."""
    source = dist.group.WORLD
    found = c10d._resolve_process_group(source.group_name)  # type: ignore[union-attr]
    options = None
    if rank.device.type == "cuda":
        options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    extra = dist.new_group(dist.get_process_group_ranks(found), pg_options=options)
    gathered = functional.all_gather_tensor(rank.input(8), 0, extra)
    return functional.wait_tensor(gathered), found is source


@part(sizes=(PAIR,))
def barriers_by_name(rank: Rank) -> Any:
    """lightning and accelerate: devices for NCCL alone, and a gloo group that may wait for days."""
    dist.barrier(device_ids=[rank.device.index] if dist.get_backend() == "nccl" else None)
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=10000))
    group.monitored_barrier()
    known = group in c10d._pg_map, c10d._world.pg_map.get(group) is not None
    dist.destroy_process_group(group)
    return known, group in c10d._world.pg_map


@part(sizes=(PAIR,))
def device_and_host_groups(rank: Rank) -> Any:
    """vLLM's coordinator: a group for the device, with options, and one of gloo beside it."""
    options = None
    if rank.device.type == "cuda":
        options = torch._C._distributed_c10d.ProcessGroupNCCL.Options()
        options.config.blocking = 0
    both = list(range(rank.size))
    device_group = dist.new_group(both, backend=dist.get_backend(), pg_options=options)
    host_group = dist.new_group(both, backend="gloo", timeout=timedelta(seconds=60))
    values = [ones(rank), torch.full((4,), float(rank.rank + 1))]
    for value, group in zip(values, (device_group, host_group), strict=True):
        dist.all_reduce(value, group=group)
        all_are(value, total(rank.size))
    return values


@part(sizes=(PAIR,))
def a_group_of_its_own(rank: Rank) -> Any:
    """vLLM's stateless groups: made of their parts, and unknown to c10d."""
    cuda = rank.device.type == "cuda"
    store = dist.PrefixStore("stateless", c10d._get_default_store())
    group: Any = dist.ProcessGroup(store, rank.rank, rank.size)
    backend: Any
    if cuda:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=60)
        backend = c10d.ProcessGroupNCCL(store, rank.rank, rank.size, options)
    else:
        backend = c10d.ProcessGroupGloo(store, rank.rank, rank.size, timedelta(seconds=60))
    types = dist.ProcessGroup.BackendType
    kind = types.NCCL if cuda else types.GLOO
    group._set_default_backend(kind)
    group._register_backend(rank.device, kind, backend)
    value = ones(rank)
    group.allreduce([value]).wait()
    rank.synchronize()
    group.shutdown()
    return value


@part(
    sizes=(PAIR,),
    kinds=() if OLD_TORCH else DEVICES,
    why="torch 2.11 casts the backend",
    refused_on=(CUDA,),
)
def symmetric_memory_of_nccl(rank: Rank) -> Any:
    """Megatron-LM, DeepSpeed, torchtitan. The last part: its process stays with this memory."""
    import torch.distributed._symmetric_memory as symmetric

    dist.all_reduce(ones(rank))
    symmetric.set_backend("NCCL")
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    tensor = symmetric.empty(1024, dtype=torch.float32, device=rank.device)
    tensor.fill_(rank.rank + 1)
    handle = symmetric.rendezvous(tensor, name)
    peers = [handle.get_buffer(peer, tensor.shape, tensor.dtype) for peer in range(rank.size)]
    rank.synchronize()
    dist.barrier()
    for peer, seen in enumerate(peers):
        all_are(seen, peer + 1)
    dist.barrier()
    dist.all_reduce(tensor)
    rank.synchronize()
    dist.barrier()
    for seen in peers:
        all_are(seen, total(rank.size))
    try:
        by_kernel: Any = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name)
    except RuntimeError as error:
        by_kernel = message(error)
    return handle.world_size, handle.rank, tensor, by_kernel
