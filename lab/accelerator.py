"""Stand-in for an accelerator: layers that take as long as they would on one.

A few CPU cores compute more slowly than the accelerators that would share such a network, relative
to their traffic. Here the computation stays real; where it is done sooner than the accelerator
would be, the layer waits for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch


class Accelerator:
    """Paces the steps of a model: a third of each forward, two thirds backward.

    Args:
        step_ms: time that the accelerator takes to compute a step, milliseconds; 0 adds no wait.
        layers: of the model; each takes an equal share.
    """

    def __init__(self, step_ms: float, layers: Collection[torch.nn.Module]) -> None:
        self._forward_s = step_ms / 1e3 / 3 / len(layers)
        self._due = 0.0
        for layer in layers if step_ms else ():
            layer.register_forward_hook(lambda _layer, _inputs, output: _Pace.apply(output, self))

    def begin_step(self) -> None:
        """A step starts now."""
        self._due = time.monotonic()

    def wait(self, passes: int) -> None:
        """Waits until a layer has done ``passes`` times the work of its forward pass."""
        # Counted from the start of the step, so that real computation fills the time.
        self._due += passes * self._forward_s
        time.sleep(max(0.0, self._due - time.monotonic()))


class _Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
        ctx.accelerator = accelerator
        accelerator.wait(1)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.accelerator.wait(2)
        return gradient, None
