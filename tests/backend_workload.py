"""What a script does with torch.distributed, as the script sees it: run in every rank of a test.

Each part returns values or raises; either is kept, so that the stock backend and Crux can be
compared bit for bit, results and error messages alike.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from functional_forms import functional_forms
from torch.nn.parallel import DistributedDataParallel

Parts = dict[str, Callable[[int, int], Any]]
PARTS: Parts = {}
#: Parts that leave the process unfit for more: run one at a time, on request.
FATAL_PARTS: Parts = {}


def part(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    PARTS[function.__name__] = function
    return function


def fatal_part(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    FATAL_PARTS[function.__name__] = function
    return function


def _input(rank: int, n: int = 24, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(n, generator=generator).to(dtype)


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def _train(model: nn.Module, rank: int, steps: int = 4) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x = _input(rank + 10 * step, 8 * 16).view(8, 16)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


@part
def all_reduce(rank: int, size: int) -> Any:
    out = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            t = _input(rank, dtype=dtype)
            dist.all_reduce(t, op)
            out.append(t)
    return out


@part
def all_reduce_async(rank: int, size: int) -> Any:
    tensors = [_input(rank + i, 1000) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    done = [(w.wait(), w.is_completed(), w.is_success()) for w in works]
    return tensors, done


@part
def all_reduce_avg_is_refused(rank: int, size: int) -> Any:
    dist.all_reduce(_input(rank), dist.ReduceOp.AVG)


@part
def all_reduce_sparse(rank: int, size: int) -> Any:
    t = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,))
    dist.all_reduce(t)
    return t.to_dense()


@part
def all_reduce_coalesced(rank: int, size: int) -> Any:
    tensors = [_input(rank), _input(rank + 1)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@part
def broadcast_and_reduce(rank: int, size: int) -> Any:
    a, b = _input(rank), _input(rank)
    dist.broadcast(a, size - 1)
    dist.reduce(b, 0)
    return a, b if rank == 0 else None


@part
def gathers(rank: int, size: int) -> Any:
    t = _input(rank)
    gathered = [torch.zeros_like(t) for _ in range(size)]
    dist.all_gather(gathered, t)
    flat = torch.zeros(size * t.numel())
    dist.all_gather_into_tensor(flat, t)
    at_root = [torch.zeros_like(t) for _ in range(size)] if rank == 0 else None
    dist.gather(t, at_root, 0)
    return gathered, flat, at_root


@part
def scatters(rank: int, size: int) -> Any:
    out = torch.zeros(6)
    dist.scatter(out, [_input(i, 6) for i in range(size)] if rank == 0 else None, 0)
    reduced = torch.zeros(6)
    dist.reduce_scatter(reduced, [_input(rank + i, 6) for i in range(size)])
    flat = torch.zeros(6)
    dist.reduce_scatter_tensor(flat, _input(rank, 6 * size))
    return out, reduced, flat


@part
def all_to_all_single(rank: int, size: int) -> Any:
    even = torch.zeros(4 * size)
    dist.all_to_all_single(even, _input(rank, 4 * size))
    sends = [1 + (rank + i) % 3 for i in range(size)]
    receives = [1 + (rank + i) % 3 for i in range(size)]
    uneven = torch.zeros(sum(receives))
    dist.all_to_all_single(uneven, _input(rank, sum(sends)), receives, sends)
    return even, uneven


@part
def all_to_all(rank: int, size: int) -> Any:
    outs = [torch.zeros(3) for _ in range(size)]
    dist.all_to_all(outs, [_input(rank + i, 3) for i in range(size)])
    return outs


@part
def send_and_receive(rank: int, size: int) -> Any:
    t = _input(rank)
    if rank == 0:
        dist.send(t, 1, tag=3)
        any_source = torch.zeros_like(t)
        source = dist.recv(any_source)
        return any_source, source
    if rank == 1:
        received = torch.zeros_like(t)
        source = dist.recv(received, 0, tag=3)
        dist.send(t, 0)
        return received, source
    return None


@part
def batched_point_to_point(rank: int, size: int) -> Any:
    t, out = _input(rank), torch.zeros(24)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, t, (rank + 1) % size),
            dist.P2POp(dist.irecv, out, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    return out


@part
def objects(rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "pad": "x" * (10 + rank)})
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, 0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list(range(size)) if rank == 0 else None, 0)
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * 11, at_root, 0)
    return gathered, shared, scattered, at_root


@part
def barriers(rank: int, size: int) -> Any:
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)


@part
def sub_groups(rank: int, size: int) -> Any:
    pairs = [dist.new_group([i, (i + 1) % size]) for i in range(size)]
    out = []
    for i, group in enumerate(pairs):
        if rank in (i, (i + 1) % size):
            t = _input(rank)
            dist.all_reduce(t, group=group)
            out.append(t)
    world = dist.new_group(list(range(size)), timeout=timedelta(seconds=50))
    t = _input(rank)
    dist.broadcast(t, 0, group=world)
    dist.destroy_process_group(world)
    return out, t


@part
def split_group(rank: int, size: int) -> Any:
    half = max(1, size // 2)
    group = dist.split_group(split_ranks=[list(range(half)), list(range(half, size))])
    t = _input(rank)
    dist.all_reduce(t, group=group)
    return t, dist.get_rank(group), dist.get_world_size(group)


@part
def sequence_numbers(rank: int, size: int) -> Any:
    group = dist.new_group(list(range(size)))
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    return group._get_sequence_number_for_group() - before


@part
def timeouts(rank: int, size: int) -> Any:
    from torch.distributed.distributed_c10d import _set_pg_timeout

    group = dist.new_group(list(range(size)))
    _set_pg_timeout(timedelta(seconds=33), group)
    backend = group._get_backend(torch.device("cpu"))
    t = _input(rank)
    dist.all_reduce(t, group=group)
    return t, backend.options._timeout.total_seconds()


@fatal_part
def late_rank_times_out(rank: int, size: int) -> Any:
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=1))
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=group)


@part
def wrong_shape_is_refused(rank: int, size: int) -> Any:
    dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(4))


@part
def ddp(rank: int, size: int) -> Any:
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
    losses = _train(model, rank)
    with model.no_sync():
        model(_input(rank, 16).view(1, 16)).sum().backward()
    return losses, [p.detach().clone() for p in model.parameters()]


@part
def ddp_static_graph_and_unused(rank: int, size: int) -> Any:
    model = DistributedDataParallel(_model(), find_unused_parameters=True)
    static = DistributedDataParallel(_model(), static_graph=True, gradient_as_bucket_view=True)
    return _train(model, rank), _train(static, rank)


@part
def ddp_compressed(rank: int, size: int) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    half = DistributedDataParallel(_model())
    half.register_comm_hook(None, default_hooks.bf16_compress_hook)
    low_rank = DistributedDataParallel(_model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    low_rank.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _train(half, rank), _train(low_rank, rank)


@part
def fsdp2(rank: int, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = _train(model, rank)
    return losses, [p.full_tensor() for p in model.parameters()]


@part
def device_mesh(rank: int, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(
        "cpu", (size // 2, 2) if size >= 4 else (size, 1), mesh_dim_names=("a", "b")
    )
    t = _input(rank)
    dist.all_reduce(t, group=mesh.get_group("a"))
    sharded = distribute_tensor(torch.arange(24.0).view(6, 4), mesh["a"], [Shard(0)])
    return t, sharded.full_tensor(), (sharded @ sharded.T).full_tensor()


@part
def functional_collectives(rank: int, size: int) -> Any:
    return functional_forms(_input(rank, 4 * size))


@part
def compiled_collectives(rank: int, size: int) -> Any:
    import torch.distributed._functional_collectives as fc

    @torch.compile(fullgraph=True, backend=os.environ.get("CRUX_TEST_COMPILER", "aot_eager"))
    def f(x: torch.Tensor) -> torch.Tensor:
        y = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
        return fc.all_gather_tensor(y + 1, 0, dist.group.WORLD).sin()

    return f(_input(rank))


@part
def checkpoints(rank: int, size: int) -> Any:
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    root = Path(str(folder[0]))
    state = {"w": _input(0), "step": 3}
    dcp.save(state, checkpoint_id=root / "a")
    dcp.async_save(state, checkpoint_id=root / "b").result()
    loaded = []
    for name in "ab":
        into = {"w": torch.zeros(24), "step": 0}
        dcp.load(into, checkpoint_id=root / name)
        loaded.append((into["w"], into["step"]))
    return loaded


@part
def names(rank: int, size: int) -> Any:
    group = dist.new_group(list(range(size)))
    return dist.is_gloo_available(), group.rank(), group.size(), dist.get_process_group_ranks(group)


def _plain(value: Any) -> Any:
    """Tensors as bytes, for an exact comparison across processes."""
    if isinstance(value, torch.Tensor):
        contiguous = value.detach().contiguous()
        return (
            str(value.dtype),
            tuple(value.shape),
            contiguous.view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _message(error: Exception) -> str:
    """What the user reads, less addresses, ports and times that differ from run to run."""
    lines = str(error).splitlines()
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', first)}"


def main() -> None:
    """``backend_workload.py MODE RANK SIZE STORE_FILE OUT [PART...]``."""
    mode, rank, size, store, out, *only = sys.argv[1:]
    if mode == "crux":
        import crux_torch
    elif mode == "attached":
        import crux_torch

        crux_torch.attach()
    backend = "crux" if mode == "crux" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    results: dict[str, Any] = {}
    for name in only or PARTS:
        run = PARTS.get(name) or FATAL_PARTS[name]
        try:
            results[name] = ("value", _plain(run(int(rank), int(size))))
        except Exception as error:
            results[name] = ("error", _message(error))
    if not set(only) & FATAL_PARTS.keys():
        # A rank that ends while another still connects would be taken for a crash.
        dist.barrier()
    Path(out).write_bytes(pickle.dumps(results))
    if mode == "stock" or set(only) & FATAL_PARTS.keys():
        # Stock Gloo sometimes aborts the process while its groups are torn down.
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
