"""Stand-in for an accelerator: layers that take as long as they would on one.

A few CPU cores can't compute at the pace of the accelerators that share a network, so that the
ratio of computation to communication would be wrong. The computation stays real; where it is done
sooner than the accelerator would be, the layer waits for the rest.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Accelerator:
    """Paces one training step: a third of it forward and two thirds backward, shared by the layers.

    Args:
        step_ms: what the accelerator would take to compute a step, milliseconds; 0 adds no wait.
        layers: how many layers call :meth:`layer` in a step.
    """

    def __init__(self, step_ms: float, layers: int) -> None:
        self._forward_s = step_ms / 1e3 / 3 / layers
        self._backward_s = 2 * self._forward_s
        self._due = 0.0

    def begin_step(self) -> None:
        """The step starts now."""
        self._due = time.monotonic()

    def layer(self, output: torch.Tensor) -> torch.Tensor:
        """``output`` unchanged, once the layer would be done; its gradient likewise."""
        if not self._forward_s:
            return output
        return _Pace.apply(output, self)

    def wait_forward(self) -> None:
        self._wait(self._forward_s)

    def wait_backward(self) -> None:
        self._wait(self._backward_s)

    def _wait(self, share_s: float) -> None:
        # Counted from the step's start, so that real computation fills the time instead of adding.
        self._due += share_s
        time.sleep(max(0.0, self._due - time.monotonic()))


class _Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
        ctx.accelerator = accelerator
        accelerator.wait_forward()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.accelerator.wait_backward()
        return gradient, None
