"""Training, as scripts do it: data parallel, sharded, tensor parallel, compiled, checkpointed."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rig.kind import CUDA, GLOO, RIG
from rig.part import FOUR, Rank, part

INDUCTOR = "inductor generates code for GPUs"
#: The first code that is generated on a machine takes longest.
COMPILE_S = 120.0


def model(rank: Rank) -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers).to(rank.device)


def train(net: nn.Module, rank: Rank, steps: int = 5) -> list[str]:
    """The losses, exactly; they must go down or up, but move."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(rank.input(8 * 16, seed=step).view(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    assert len(set(losses)) == steps
    return losses


def in_parallel(net: nn.Module, mesh: Any) -> nn.Module:
    """The first two layers of ``net``, split over the ranks of ``mesh``."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def are_equal_everywhere(rank: Rank, tensors: list[torch.Tensor]) -> None:
    """Every rank must hold the same replica."""
    flat = torch.cat([t.flatten() for t in tensors])
    lowest, highest = flat.clone(), flat.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest)


@part()
def ddp(rank: Rank) -> Any:
    net = DistributedDataParallel(model(rank), bucket_cap_mb=0.01)
    losses = train(net, rank)
    with net.no_sync():
        net(rank.input(16).view(1, 16)).sum().backward()
    are_equal_everywhere(rank, weights(net))
    return losses, weights(net)


@part()
def ddp_in_its_other_forms(rank: Rank) -> Any:
    unused = DistributedDataParallel(model(rank), find_unused_parameters=True)
    static = DistributedDataParallel(model(rank), static_graph=True, gradient_as_bucket_view=True)
    return train(unused, rank), train(static, rank)


@part()
def ddp_with_hooks(rank: Rank) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    half = DistributedDataParallel(model(rank))
    half.register_comm_hook(None, default_hooks.bf16_compress_hook)
    low_rank = DistributedDataParallel(model(rank))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    low_rank.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(half, rank), train(low_rank, rank)


@part()
def fsdp2(rank: Rank) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(rank.device.type, (rank.size,))
    out = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        net = model(rank)
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        out.append((train(net, rank), [p.full_tensor() for p in net.parameters()]))
    return out


@part(sizes=(FOUR,), kinds=(RIG,))
def tensor_parallel_in_fsdp2(rank: Rank) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    net = model(rank)
    in_parallel(net, mesh["tensor"])
    fully_shard(net, mesh=mesh["data"])
    # Ranks of one tensor parallel group see the same rows.
    losses = train(net, replace(rank, rank=rank.rank // 2))
    return losses, [p.full_tensor() for p in net.parameters()]


@part()
def tensor_parallel(rank: Rank) -> Any:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    net = model(rank)
    whole = model(rank)
    split = in_parallel(net, mesh)
    # One tensor at a time: some parameters are DTensors and some are not.
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (split, whole)
    ]
    losses = []
    for step in range(4):
        # Ranks of one tensor parallel group see the same rows.
        rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(rank.device)
        each_loss = []
        for net_, optimizer in zip((split, whole), optimizers, strict=True):
            optimizer.zero_grad()
            loss = net_(rows).square().mean()
            loss.backward()
            optimizer.step()
            each_loss.append(loss.item())
        assert abs(each_loss[0] - each_loss[1]) < 1e-4 * abs(each_loss[1]), each_loss
        losses.append(each_loss[0].hex())
    return losses


@part()
def device_mesh(rank: Rank) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    shape = (2, 2) if rank.size == FOUR else (rank.size, 1)
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("a", "b"))
    reduced, other = rank.input(24), rank.input(24)
    dist.all_reduce(reduced, group=mesh.get_group("a"))
    dist.all_reduce(other, group=mesh.get_group("b"))
    whole = torch.arange(24.0, device=rank.device).view(6, 4)
    sharded = distribute_tensor(whole, mesh["a"], [Shard(0)])
    assert torch.equal(sharded.full_tensor(), whole)
    return reduced, other, (sharded @ sharded.T).full_tensor()


@part()
def functional_collectives(rank: Rank) -> Any:
    import torch.distributed._functional_collectives as fc

    group: Any = dist.group.WORLD
    t = rank.input(4 * rank.size)
    return [
        fc.all_reduce(t, "sum", group) + 0,
        fc.all_gather_tensor(t, 0, group) + 0,
        fc.reduce_scatter_tensor(t, "sum", 0, group) + 0,
        fc.broadcast(t, 0, group) + 0,
        fc.all_to_all_single(t, None, None, group) + 0,
        [x + 0 for x in fc.all_reduce_coalesced([t, t + 1], "sum", group)],
        [x + 0 for x in fc.all_gather_into_tensor_coalesced([t, t + 1], group)],
        [x + 0 for x in fc.reduce_scatter_tensor_coalesced([t, t + 1], "sum", [0, 0], group)],
    ]


def _compiled(rank: Rank, compiler: str) -> Any:
    import torch.distributed._functional_collectives as fc

    torch._dynamo.reset()

    def eager(x: torch.Tensor) -> torch.Tensor:
        y = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
        return fc.all_gather_tensor(y + 1, 0, dist.group.WORLD) * 3

    x = rank.input(64)
    compiled = torch.compile(eager, fullgraph=True, backend=compiler)(x)
    torch.testing.assert_close(compiled, eager(x))
    return compiled


@part()
def compiled_collectives(rank: Rank) -> Any:
    return _compiled(rank, "aot_eager")


@part(kinds=(CUDA,), why=INDUCTOR, limit_s=COMPILE_S)
def compiled_by_inductor(rank: Rank) -> Any:
    return _compiled(rank, "inductor")


@part(kinds=(CUDA,), why=INDUCTOR, limit_s=COMPILE_S)
def compiled_ddp(rank: Rank) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(7)
    # Dynamo splits the graph where a bucket is full, and takes none below DDP's first, 1 MiB.
    widths = (16, 600, 600, 600, 4)
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers[:-1]).to(rank.device)
    compiled = torch.compile(DistributedDataParallel(net, bucket_cap_mb=1))
    return train(compiled, rank)  # type: ignore[arg-type]


@part()
def checkpoints(rank: Rank) -> Any:
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if rank.rank == 0 else None]
    dist.broadcast_object_list(folder, 0, device=rank.device)
    root = Path(str(folder[0]))
    state = {"w": torch.arange(24.0, device=rank.device), "step": 3}
    dcp.save(state, checkpoint_id=root)
    into: dict[str, Any] = {"w": torch.zeros(24, device=rank.device), "step": 0}
    dcp.load(into, checkpoint_id=root)
    assert torch.equal(into["w"], state["w"])
    if rank.kind.name == GLOO:
        dcp.async_save(state, checkpoint_id=root / "later").result()
        dcp.load(into, checkpoint_id=root / "later")
    return into["w"], into["step"]
