"""What a script does with NCCL, on the fake accelerator: run in every rank of a test.

Arguments: rank, size, folder, and the flavours and parts wanted. In one process the same parts run
in one world after the other: on the stock backend, on ``crux``, and on the stock name while Crux is
attached. Each part returns values or raises; either is kept, to be compared bit for bit.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fake_gpu
import torch
import torch.distributed as dist
import torch.nn as nn
from functional_forms import functional_forms
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from crux_torch import _C, backend
from crux_torch.apply.switch import GROUPS

#: Seconds that all of it may take.
LIMIT_S = float(os.environ.get("NCCL_WORKLOAD_LIMIT_S", "150"))

Part = Callable[[int, int], Any]
PARTS: dict[str, Part] = {}
HAS_CREATORS = hasattr(c10d.Backend, "_ensure_backend_registered")


def part(function: Part) -> Part:
    PARTS[function.__name__] = function
    return function


def device(rank: int) -> torch.device:
    return torch.device(fake_gpu.DEVICE, rank)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that are the same on the CPU and on the device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed)).to(dtype)
    return made.to(device(dist.get_rank()))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device(dist.get_rank()))


def model() -> nn.Module:
    torch.manual_seed(7)
    layers = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    return layers.to(device(dist.get_rank()))


def train(net: nn.Module, rank: int, steps: int = 3) -> list[str]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(values(rank + 10 * step, 8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


@part
def collectives(rank: int, size: int) -> Any:
    out = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.float64, torch.int64):
            t = values(rank, 24, dtype=dtype)
            dist.all_reduce(t, op)
            out.append(t)
    a, b = values(rank, 24), values(rank, 24)
    dist.broadcast(a, size - 1)
    dist.reduce(b, 0)
    flat, parts = zeros(size * 24), [zeros(24) for _ in range(size)]
    dist.all_gather_into_tensor(flat, values(rank, 24))
    dist.all_gather(parts, values(rank, 24))
    scattered, reduced, even = zeros(6), zeros(6), zeros(4 * size)
    dist.scatter(scattered, [values(i, 6) for i in range(size)] if rank == 0 else None, 0)
    dist.reduce_scatter_tensor(reduced, values(rank, 6 * size))
    dist.all_to_all_single(even, values(rank, 4 * size))
    gathered = [zeros(5) for _ in range(size)] if rank == 0 else None
    dist.gather(values(rank, 5), gathered, 0)
    dist.barrier()
    return out, a, b if rank == 0 else None, flat, parts, scattered, reduced, even, gathered


@part
def asynchronous(rank: int, size: int) -> Any:
    tensors = [values(rank + i, 500) for i in range(10)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    waited = [work.wait() for work in works]
    # Waiting is the stream's; what is_completed() says before is chance.
    torch.accelerator.synchronize()
    return tensors, waited, [work.is_completed() for work in works]


@part
def point_to_point(rank: int, size: int) -> Any:
    right, left = (rank + 1) % size, (rank - 1) % size
    got = zeros(8)
    if rank % 2:
        dist.recv(got, left)
        dist.send(values(rank, 8), right)
    else:
        dist.send(values(rank, 8), right)
        dist.recv(got, left)
    batched = zeros(8)
    operations = [
        dist.P2POp(dist.isend, values(rank + 5, 8), right),
        dist.P2POp(dist.irecv, batched, left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got, batched


@part
def coalesced(rank: int, size: int) -> Any:
    tensors = [values(rank + i, 7) for i in range(4)]
    with c10d._coalescing_manager(device=device(rank), async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    flats = [zeros(3 * size) for _ in range(2)]
    with c10d._coalescing_manager(device=device(rank)):
        for i, flat in enumerate(flats):
            dist.all_gather_into_tensor(flat, values(rank + i, 3))
    return tensors, flats


@part
def objects(rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, 0, device=device(rank))
    return gathered, shared


@part
def ddp(rank: int, size: int) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    half = DistributedDataParallel(model())
    half.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return train(net, rank), train(half, rank), [p.detach() for p in net.parameters()]


@part
def fsdp2(rank: int, size: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(), init_device_mesh(fake_gpu.DEVICE, (size,))
    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train(net, rank), [p.full_tensor() for p in net.parameters()]  # type: ignore[attr-defined]


@part
def tensor_parallel_in_fsdp2(rank: int, size: int) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(fake_gpu.DEVICE, (size // 2, 2), mesh_dim_names=("data", "tensor"))
    net = model()
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    losses = train(net, rank // 2)
    return losses, [p.full_tensor() for p in net.parameters()]  # type: ignore[attr-defined]


@part
def device_mesh(rank: int, size: int) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(fake_gpu.DEVICE, (size // 2, 2), mesh_dim_names=("a", "b"))
    t, u = values(rank, 5), values(rank, 5)
    dist.all_reduce(t, group=mesh.get_group("a"))
    dist.all_reduce(u, group=mesh.get_group("b"))
    sharded: Any = distribute_tensor(values(1, 6, 4), mesh["a"], [Shard(0)])
    return t, u, sharded.full_tensor(), (sharded @ sharded.T).full_tensor()


@part
def functional(rank: int, size: int) -> Any:
    return functional_forms(values(rank, 4 * size))


@part
def compiled(rank: int, size: int) -> Any:
    import torch.distributed._functional_collectives as fc

    def step(x: torch.Tensor) -> Any:
        world: Any = dist.group.WORLD
        return fc.all_reduce(x * 2, "sum", world) + fc.all_gather_tensor(x, 0, world)[: len(x)]

    torch._dynamo.reset()
    return torch.compile(step, backend="aot_eager", fullgraph=True)(values(rank, 12))


@part
def new_groups(rank: int, size: int) -> Any:
    """Groups of which some ranks are no members, with options and without."""
    out = []
    for members in ([0, 1], [1, 2, 3], [size - 1]):
        settle()
        group: Any = dist.new_group(members, timeout=timedelta(seconds=77))
        if rank in members:
            t = values(rank, 6)
            dist.all_reduce(t, group=group)
            made: Any = group._get_backend(device(rank))
            out.append((t, made.options._timeout.total_seconds()))
            settle()
            dist.destroy_process_group(group)
    options = fake_gpu.nccl_options(is_high_priority_stream=True)
    options.config.min_ctas = 3
    group = dist.new_group(list(range(size)), pg_options=options, group_desc="wide")
    t = values(rank, 6)
    dist.all_reduce(t, group=group)
    made = group._get_backend(device(rank))
    wide = made.options.is_high_priority_stream, made.options.config.min_ctas, group.group_desc
    return out, t, wide, sorted(made.options.global_ranks_in_group)


@part
def splits(rank: int, size: int) -> Any:
    """By colours, and with ranks that are in no part."""
    out: list[Any] = []
    parent: Any = dist.group.WORLD._get_backend(device(rank))  # type: ignore[union-attr]
    before = parent.comm_split_count()
    for colours in ([[0, 1], [2, 3]], [[1, 3]], [[3, 2, 1, 0]]):
        settle()
        group: Any = dist.split_group(split_ranks=colours, timeout=timedelta(seconds=66))
        if group is dist.GroupMember.NON_GROUP_MEMBER or group is None:
            out.append("no member")
            continue
        t = values(rank, 6)
        dist.all_reduce(t, group=group)
        made = group._get_backend(device(rank))
        out.append((t, dist.get_rank(group), made.options._timeout.total_seconds()))
    out.append(parent.comm_split_count() - before)
    return out


@part
def checked(rank: int, size: int) -> Any:
    """What torch and libraries reach through the backend object."""
    group: Any = dist.group.WORLD
    made = group._get_backend(device(rank))
    before = dict(made.counters)
    pool = torch.cuda.MemPool() if torch.cuda.is_available() else Pool()
    made.register_mem_pool(pool)
    made.deregister_mem_pool(pool)
    after = made.counters
    allocated = made.allocate_tensor(8, dtype=torch.float32, device=device(rank))
    made._set_default_timeout(timedelta(seconds=55))
    timeout = made.options._timeout.total_seconds()
    dist.all_reduce(torch.ones(3, device=device(rank)))
    return {
        "pools": [
            after[k] - before.get(k, 0) for k in ("register_mem_pool", "deregister_mem_pool")
        ],
        "allocates": made.supports_tensor_alloc(device(rank)),
        "allocated": list(allocated.shape),
        "coalesces": made.supports_coalescing,
        "splits": made.supports_splitting,
        "timeout": timeout,
        "initialized": made._is_initialized(),
        "unknown": hasattr(made, "no_such_thing"),
        "rank": (made.rank(), made.size()),
        "uid": made.options.group_name,
    }


class Pool:
    """Has what keeps memory pools apart."""

    id = (0, 7)


@part
def sequence_numbers(rank: int, size: int) -> Any:
    group: Any = dist.new_group(list(range(size)))
    for _ in range(3):
        dist.all_reduce(torch.ones(1, device=device(rank)), group=group)
    return group._get_backend(device(rank))._get_sequence_number_for_group()


def switched(rank: int, size: int) -> Any:
    """DDP and sub-groups, while their communicators are replaced; compared with a run without."""
    group: Any = dist.new_group([0, 1])
    net = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    made: Any = dist.group.WORLD._get_backend(device(rank))  # type: ignore[union-attr]
    switching = isinstance(made, _C.DelegatingBackend)
    pool = Pool()
    made.register_mem_pool(pool)
    first = made.default_inner if switching else made
    if switching:
        generation = GROUPS.generation + 1
        GROUPS.request(generation)
    deadline, go_on, losses = time.monotonic() + 60, torch.ones(1, device=device(rank)), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(24):
        optimizer.zero_grad()
        loss = net(values(rank + 10 * step, 8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        if rank < 2:
            dist.all_reduce(loss.detach(), group=group)
        if step % 12 == 3:
            settle()
            # Where a device is bound this splits, while ranks are on either side of a switch.
            late: Any = dist.new_group([0, size - 1])
            if rank in (0, size - 1):
                dist.all_reduce(loss.detach(), group=late)
    while switching:
        states = [(s.state, s.generation, s.error) for s in GROUPS.status() if s.device != "cpu"]
        done = all(s == ("idle", generation, None) for s in states)
        go_on.fill_(0 if done or time.monotonic() > deadline else 1)
        dist.all_reduce(go_on, dist.ReduceOp.MAX)
        if rank < 2:
            dist.all_reduce(torch.ones(1, device=device(rank)), group=group)
        if not go_on.item():
            break
        time.sleep(0.01)
    if switching:
        assert done, states
        assert made.default_inner is not first
        assert made.counters.get("register_mem_pool") == 1
    made.deregister_mem_pool(pool)
    return losses, [p.detach() for p in net.parameters()]


PARTS["switched"] = switched


def plain(value: Any) -> Any:
    """As JSON has it, floats by their bits."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().double().flatten().tolist()
        return [str(value.dtype), list(value.shape), [x.hex() for x in flat]]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def within(made: Any) -> Any:
    """What TORCH_DISTRIBUTED_DEBUG=DETAIL wraps."""
    return getattr(made, "wrapped_pg", made)


def settle() -> None:
    """The fake's splits are not ordered behind what is on the stream, as NCCL's are."""
    torch.accelerator.synchronize()


def records_of(operations: int, name: str, flavour: str, parts: list[str]) -> int:
    """How many records Crux leaves where the fake counts so many operations.

    A block leaves one for each part and one for the whole. Of a call with several tensors the newer
    class makes several operations, the older one; it is one call. Under ``crux`` objects are
    gathered by the CPU's backend, which is no fake: their sizes, then they.
    """
    newer = flavour == "nccl2"
    beyond = {
        "point_to_point": 2,
        "coalesced": -2 if newer else 2,
        "functional": -3 if newer else 0,
        "objects": 2 if name == "crux" else 0,
    }
    return operations + sum(beyond.get(one, 0) for one in parts)


def world(
    name: str, flavour: str, bound: bool, rank: int, size: int, folder: Path, parts: list[str]
) -> dict[str, Any]:
    """Runs the parts in a world of its own."""
    fake_gpu.configure(legacy=flavour == "legacy", watchdog_period_s=0.05)
    fake_gpu.clear()
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        "crux" if name == "crux" else fake_gpu.NCCL,
        init_method=f"file://{folder}/{name}.{flavour}.{bound}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        device_id=device(rank) if bound else None,
    )
    group: Any = dist.group.WORLD
    made = within(group._get_backend(device(rank)))
    delegates = isinstance(made, _C.DelegatingBackend)
    recorder = backend.recorder()
    before = recorder.recorded
    results: dict[str, Any] = {}
    for one in parts:
        settle()
        try:
            results[one] = ("value", plain(PARTS[one](rank, size)))
        except Exception as error:
            results[one] = ("error", f"{type(error).__name__}: {error}".splitlines()[0])
            said = [*results[one], fake_gpu.violations()[:3], GROUPS.status()]
            print(name, flavour, one, said, file=sys.stderr, flush=True)
    issued = len(fake_gpu.operations())
    stock = [
        dist.get_process_group_ranks(g)
        for g in list(c10d._world.pg_map)
        if delegates and not isinstance(within(g._get_backend(device(rank))), _C.DelegatingBackend)
    ]
    report = {
        "results": results,
        "delegates": delegates,
        "name": made.name(),
        "backend": dist.get_backend(),
        "stock_groups": stock,
        "violations": [v for v in fake_gpu.violations() if v[0] != "device_error"],
        "records": records_of(issued + 1, name, flavour, parts),
    }
    dist.barrier()
    dist.destroy_process_group()
    fake_gpu.drain()
    deadline = time.monotonic() + 10
    while delegates and recorder.recorded - before < report["records"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    report["recorded"] = recorder.recorded - before
    return report


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    wanted: dict[str, list[str]] = json.loads(sys.argv[4])
    torch.set_num_threads(1)
    # Says where a rank hangs.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    fake_gpu.load()
    reports: dict[str, Any] = {}
    for mode in ("stock", "crux", "attached"):
        if mode == "attached":
            backend.attach(also=[fake_gpu.NCCL])
        for flavour, parts in wanted.items():
            kind, bound = flavour.split(":")
            reports[f"{mode} {flavour}"] = world(
                mode, kind, bound == "bound", rank, size, folder, parts or list(PARTS)
            )
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
