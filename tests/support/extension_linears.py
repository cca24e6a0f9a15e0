"""Linears like those of TransformerEngine and Megatron: no dispatch mode sees their products.

As a script: a rank of a job that trains with them, and writes what Crux measured to the folder it
is given. The two ranks split each pair of linears by columns and rows, as Megatron does, and sum
the gradients of several micro-batches.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import crux_torch

MICRO_BATCHES = 3
LIMIT_S = 60.0


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As a library's compiled function does it: from memory to memory, past the dispatcher."""
    return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        return multiply(grad, weight), multiply(grad.t(), x)


class ExtensionLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


#: The same class, under the name by which Crux knows that its products are not seen.
TELinear = type("Linear", (ExtensionLinear,), {"__module__": "transformer_engine.pytorch.module"})


class Reduced(torch.autograd.Function):
    """Sums over the ranks: forward behind the rows, backward before the columns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: bool) -> torch.Tensor:
        ctx.backward = backward
        if not backward and dist.is_initialized():
            x = x.clone()
            dist.all_reduce(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        if ctx.backward and dist.is_initialized():
            dist.all_reduce(grad)
        return grad, None


class Model(nn.Module):
    """Pairs of a column and a row parallel linear, and a head that torch's own operators multiply.

    Args:
        linear: makes the linears of the pairs.
        ranks: that split them.
    """

    def __init__(self, linear: Any, width: int, layers: int, head: int, ranks: int = 1) -> None:
        super().__init__()
        self.columns = nn.ModuleList(linear(width, 4 * width // ranks) for _ in range(layers))
        self.rows = nn.ModuleList(linear(4 * width // ranks, width) for _ in range(layers))
        self.head = nn.Linear(width, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for columns, rows in zip(self.columns, self.rows, strict=True):
            y = torch.relu(columns(Reduced.apply(x, True)))
            x = x + Reduced.apply(rows(y), False)
        return self.head(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int, width: int) -> None:
    """One iteration: several micro-batches, then the optimizer."""
    optimizer.zero_grad()
    for _ in range(MICRO_BATCHES):
        model(torch.randn(rows, width).requires_grad_()).square().mean().backward()
    optimizer.step()


def products(rows: int, width: int, layers: int, head: int, ranks: int = 1) -> tuple[int, int]:
    """FLOPs of an iteration on one rank: of the pairs, and of the head."""
    # Forward, gradients of the inputs and of the weights, for each.
    times = 3 * 2 * MICRO_BATCHES * rows
    return times * layers * 2 * width * 4 * width // ranks, times * width * head


def main() -> None:
    folder, kind, told = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    crux_torch.count_flops(told)
    model = Model({"te": TELinear, "unknown": ExtensionLinear}[kind], 64, 2, 8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    deadline_s = time.monotonic() + LIMIT_S
    done = torch.zeros(1)
    while not done.item():
        step(model, optimizer, 32, 64)
        time.sleep(0.005)
        profile = crux_torch.profile()
        done[0] = float(profile is not None or time.monotonic() > deadline_s)
        dist.all_reduce(done, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        (folder / "profile.json").write_text(json.dumps(crux_torch.status()["profile"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
