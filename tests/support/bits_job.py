"""Trains small models of many kinds; what every step computes is written as hashes.

    bits_job.py FOLDER FIRST CASE...

FIRST is how often the first case steps; 0: until Crux has counted and profiled it, and some more.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 8
LIMIT_S = 200.0
WIDTH, HEADS, LENGTH, BATCH, WORDS = 32, 4, 16, 4, 50


class Attention(nn.Module):
    """Causal, with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -torch.linspace(0, 1, 4))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat((-high, low), -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = self.turned(qkv[0]), self.turned(qkv[1]), qkv[2]
        query, key = query.to(value.dtype), key.to(value.dtype)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            found = expert(flat[token]) * weights[token, slot, None]
            out = out.index_add(0, token, found.to(out.dtype))
        return out.view_as(x)


class Scan(nn.Module):
    """A state space whose step depends on the input, after a causal depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.step = nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.linspace(-2, 0, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.inputs(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :LENGTH].transpose(1, 2))
        step = F.softplus(self.step(x))
        keep, add = torch.exp(-step * self.decay.exp()), step * x
        state, states = torch.zeros_like(add[:, 0]), []
        for i in range(LENGTH):
            state = keep[:, i] * state + add[:, i]
            states.append(state)
        return self.out(torch.stack(states, 1) * F.silu(gate))


class Residual(nn.Module):
    def __init__(self, again: bool, *parts: nn.Module) -> None:
        super().__init__()
        self.again = again
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in parts)
        self.parts = nn.ModuleList(parts)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


class Lstm(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Product(nn.Module):
    """Any dispatch mode changes the gradient of ``prod``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 + x.tanh().unflatten(-1, (-1, 4)).prod(-1)


def language(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def llama(again: bool = False) -> nn.Module:
    return language(*(Residual(again, Attention(), SwiGLU()) for _ in range(2)))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(),
        nn.Conv2d(16, 16, 3, groups=4), nn.GroupNorm(4, 16), nn.Mish(), nn.ChannelShuffle(4),
        nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Hardswish(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, WORDS),
    )  # fmt: skip


class Patches(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten(2).transpose(1, 2)


def vit() -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.1, F.gelu, batch_first=True)
        for _ in range(2)
    ]
    return nn.Sequential(Patches(nn.Conv2d(3, WIDTH, 4, 4)), *layers, nn.Linear(WIDTH, WORDS))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "checkpoint": lambda: llama(again=True),
    "mamba": lambda: language(Residual(False, Scan(), Scan())),
    "moe": lambda: language(Residual(False, Attention(), Experts())),
    "lstm": lambda: language(Lstm(WIDTH, WIDTH, 2, batch_first=True)),
    "prod": lambda: language(nn.Linear(WIDTH, 4 * WIDTH), Product()),
    "conv": images,
    "vit": vit,
}


def spread(case: str) -> nn.Module:
    """The model of a case, as ``KIND``, ``compile:KIND``, ``fsdp:KIND`` or ``tp:KIND``."""
    how, _, kind = case.rpartition(":")
    model = MODELS[kind]()
    if how == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model, model):
            fully_shard(part, mp_policy=policy)
        return model
    if how == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        for part in model.modules():
            if isinstance(part, SwiGLU):
                parallelize_module(part, mesh, plan)
        return model
    ddp = nn.parallel.DistributedDataParallel(model)
    return torch.compile(ddp) if how == "compile" else ddp  # type: ignore[return-value]


def local(tensor: Any) -> bytes:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


class Training:
    """One case, step by step."""

    def __init__(self, case: str, mixed: bool) -> None:
        torch.manual_seed(7)
        self.case, self.mixed = case, mixed
        self.model = spread(case)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        # Tensor parallel ranks see the same data.
        self.data = torch.Generator().manual_seed(0 if case.startswith("tp") else dist.get_rank())
        self.hashes: list[str] = []

    def step(self) -> None:
        shape = (BATCH, LENGTH)
        if self.case.endswith(("conv", "vit")):
            x = torch.randn(BATCH, 3, 8, 8, generator=self.data)
        else:
            x = torch.randint(WORDS, shape, generator=self.data)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            out = self.model(x)
            target = torch.randint(WORDS, out.shape[:-1], generator=self.data)
            loss = F.cross_entropy(out.flatten(0, -2).float(), target.flatten())
        loss.backward()
        seen = hashlib.sha256(local(loss))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                seen.update(local(parameter.grad))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            seen.update(local(parameter))
        self.hashes.append(seen.hexdigest())


def run(case: str, mixed: bool, wanted: int, counts: list[float] | None) -> list[str]:
    """Hashes of its steps; under Crux, it must have been counted meanwhile."""
    if counts is not None:
        counts.clear()
        look_at_once()
    training = Training(case, mixed)
    deadline_s = time.monotonic() + LIMIT_S
    done = torch.zeros(1)
    while len(training.hashes) < wanted or (not wanted and not done.item()):
        training.step()
        if not wanted:
            import crux_torch

            # Steps that are too short for a period to be seen are not measured.
            time.sleep(0.02)
            profile = crux_torch.profile()
            measured = profile is not None and profile.flops_source == "counted" and any(counts)
            done[0] = float(measured or time.monotonic() > deadline_s)
            dist.all_reduce(done, dist.ReduceOp.MIN)
    if not wanted:
        profile = crux_torch.profile()
        assert profile is not None, "the job was not measured"
        assert profile.flops > 0
        for _ in range(STEPS):
            training.step()
    assert counts is None or any(counts), f"{case} was not counted"
    hashes = training.hashes
    del training
    # The next optimizer is elected once this one is gone.
    gc.collect()
    return hashes


def look_at_once() -> None:
    """Let the meter count the next model as it counted the first."""
    from crux_torch.agent import AGENT

    running = AGENT.pipeline
    if running is not None:
        meter = running._meter.flops
        for known in (meter._ids, meter._flops, meter._seen):
            known.clear()
        meter._wanted, meter._wait, meter._pause = True, 0, 1


def observed() -> list[float]:
    """FLOPs of each count from now on, as it ends."""
    from crux_torch.measure.operators import OperatorCount

    counts: list[float] = []
    end = OperatorCount.end

    def noting(self: OperatorCount) -> None:
        end(self)
        counts.append(float(self.by_precision.total()))

    OperatorCount.end = noting  # type: ignore[method-assign]
    return counts


def main() -> None:
    folder, first, cases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    counts = observed() if "crux_torch" in sys.modules else None
    hashes = {}
    for i, case in enumerate(cases):
        mixed = case.endswith("+bf16")
        hashes[case] = run(case.removesuffix("+bf16"), mixed, STEPS if i else first, counts)
    rank = dist.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(hashes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
