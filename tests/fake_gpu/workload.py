"""What a rank does in a test of processes: ``workload.py RANK SIZE STORE OUT MODE FLAVOUR``.

MODE is ``plain``, the fake NCCL by itself, or ``crux``, the backend under test over it. OUT gets
JSON: each part's values, the operations that NCCL was given, violations, and calls of handles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fake_gpu

#: What every rank must see alike of an operation, whoever passes it on.
SEEN = ("op", "sequence", "rank", "size", "bytes", "peer", "tag", "timeout_ms", "async_op",
        "captured", "coalesced")  # fmt: skip

Part = Callable[[int, int], Any]
PARTS: dict[str, Part] = {}


def part(function: Part) -> Part:
    PARTS[function.__name__] = function
    return function


def _device() -> torch.device:
    return torch.device(fake_gpu.DEVICE, dist.get_rank())


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(_device())


def _train(model: nn.Module) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(8, 16, generator=generator).to(_device())
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
    return losses


@part
def ddp(rank: int, size: int) -> Any:
    return _train(DistributedDataParallel(_model(), bucket_cap_mb=0.001))


@part
def fsdp2(rank: int, size: int) -> Any:
    mesh = init_device_mesh(fake_gpu.DEVICE, (size,))
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model)


@part
def functional_collectives(rank: int, size: int) -> Any:
    tensor = torch.arange(4.0, device=_device()) + rank
    group = dist.group.WORLD
    results = [
        functional.all_reduce(tensor, "sum", group),
        functional.all_gather_tensor(tensor, 0, group),
        functional.reduce_scatter_tensor(tensor, "sum", 0, group),
        *functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group),
    ]
    return [result.tolist() for result in results]


@part
def compiled(rank: int, size: int) -> Any:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(tensor: torch.Tensor) -> torch.Tensor:
        reduced = functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(reduced + 1, 0, dist.group.WORLD)

    return function(torch.full((2,), rank + 1.0, device=_device())).tolist()


@part
def transfers(rank: int, size: int) -> Any:
    mine, other = torch.full((2,), rank + 1.0, device=_device()), torch.zeros(2, device=_device())
    operations = [
        dist.P2POp(dist.isend, mine, (rank + 1) % size, tag=3),
        dist.P2POp(dist.irecv, other, (rank - 1) % size, tag=3),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank == 0:
        dist.send(mine, 1, tag=5)
    elif rank == 1:
        dist.recv(other, 0, tag=5)
    return other.tolist()


@part
def splits(rank: int, size: int) -> Any:
    half = dist.split_group(split_ranks=[[0], [1]])
    alone = dist.new_group([0])
    tensor = torch.ones(2, device=_device())
    dist.all_reduce(tensor, group=half)
    if rank == 0:
        dist.all_reduce(tensor, group=alone)
    return tensor.tolist(), dist.get_world_size(half)


@part
def graph(rank: int, size: int) -> Any:
    tensor = torch.ones(4, device=_device())
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    with fake_gpu.capture() as captured:
        fake_gpu.add_(tensor, 1.0)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(tensor)
    before = tensor.tolist()
    captured.replay()
    return before, tensor.tolist(), captured.size


@part
def barriers(rank: int, size: int) -> Any:
    dist.barrier()
    return True


def _create_crux(opts: Any, options: Any) -> Any:
    """The backend under test over the fake NCCL, made by its own creator."""
    from crux_torch import _C

    parent = getattr(opts, "split_from", None)
    if parent is not None:
        opts.split_from = getattr(parent, "default_inner", parent)
    inner = fake_gpu._create_nccl(opts, options)
    recorder = _C.process_recorder(1 << 14)
    backend = _C.DelegatingBackend("nccl", inner.rank(), inner.size(), recorder)
    backend.add_inner(fake_gpu.DEVICE, inner)
    return backend


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    store, out, mode, flavour = sys.argv[3:]
    fake_gpu.load()
    fake_gpu.configure(legacy=flavour == "legacy", timing=True, strict_hooks=flavour == "nccl2")
    torch.accelerator.set_device_index(rank)
    name = fake_gpu.NCCL
    if mode == "crux":
        name = "crux_over_fake"
        devices = [fake_gpu.DEVICE]
        dist.Backend.register_backend(name, _create_crux, extended_api=True, devices=devices)
    dist.init_process_group(
        f"{fake_gpu.DEVICE}:{name}",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=50),
        device_id=torch.device(fake_gpu.DEVICE, rank),
    )
    values: dict[str, Any] = {}
    for name, run in PARTS.items():
        try:
            values[name] = ("value", run(rank, size))
        except Exception as error:
            values[name] = ("error", f"{type(error).__name__}: {error}")
    recorded = 0
    if mode == "crux":
        from crux_torch import _C

        recorded = _C.process_recorder(1 << 14).recorded
    result = {
        "values": values,
        "operations": [[of[field] for field in SEEN] for of in fake_gpu.operations()],
        "violations": fake_gpu.violations(),
        "calls": sorted(
            (method, caller, count)
            for (method, caller), count in fake_gpu.calls().items()
            if method in ("wait", "synchronize", "get_future")
        ),
        "recorded": recorded,
    }
    Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
