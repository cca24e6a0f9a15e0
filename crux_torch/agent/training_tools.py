"""Crux in the tools of a training script: torch.profiler and TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._autograd import _profiler_enabled

from crux_torch.errors import CruxError

if TYPE_CHECKING:
    from crux_torch.agent.orders import Order


class PlanSpans:
    """Names the plan in force in the traces of torch.profiler, as a span of no length.

    A trace shows the plan at its first iteration, and each plan that follows.

    Thread safety: the training thread calls :meth:`on_mark`.

    Args:
        order: returns the order that this rank follows.
    """

    def __init__(self, order: Callable[[], Order | None]) -> None:
        self._order = order
        self._shown: str | None = None

    def on_mark(self, _mark_ns: int) -> None:
        """Shows the plan if a profiler is on and has not seen it."""
        if not _profiler_enabled():
            self._shown = None
            return
        text = plan_text(self._order())
        if text != self._shown:
            self._shown = text
            with torch.profiler.record_function(f"crux: {text}"):
                pass


def plan_text(order: Order | None) -> str:
    """Returns the plan of ``order`` in words: its epoch, level and number of steered paths."""
    if order is None or order.plan_epoch == 0:
        return "no plan"
    level = "network's default" if order.level is None else str(order.level)
    return f"plan {order.plan_epoch}, level {level}, paths {len(order.routes)}"


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Adds one value of a curve."""

    def add_text(self, tag: str, text_string: str, global_step: int) -> object:
        """Adds one text."""


class TensorBoard:
    """Writes curves of this job to TensorBoard, at the ends of optimizer steps.

    Args:
        writer: a ``SummaryWriter``, or an object with its ``add_scalar`` and ``add_text``.
        status: returns :func:`crux_torch.status`.
        every_s: seconds between two values of a curve at least.
        step: returns the step number for the x-axis; default: optimizer steps counted from here.

    Thread safety: the training thread owns it.
    """

    def __init__(
        self,
        writer: Writer,
        status: Callable[[], dict[str, Any]],
        every_s: float = 5.0,
        step: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not every_s >= 0:
            raise CruxError(f"every_s is {every_s!r}; expected seconds, 0 or more")
        self._writer, self._status, self._every_s = writer, status, every_s
        self._own_step, self._clock = step, clock
        self._at_s, self._iterations_then = clock(), 0
        self._iterations = self._steps = 0
        self._plan = ""
        self._handle: Any = None

    def install(self) -> None:
        """Begins to write after optimizer steps."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._handle = register_optimizer_step_post_hook(lambda *_: self.on_step())

    def close(self) -> None:
        """Stops writing; the writer stays open."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def on_step(self) -> None:
        """Counts an optimizer step, and writes if it is time."""
        self._steps += 1
        now_s = self._clock()
        if now_s - self._at_s < self._every_s:
            return
        status = self._status()
        step = self._own_step() if self._own_step is not None else self._steps
        iterations = status.get("iterations") or 0
        ended = iterations - self._iterations_then
        if ended > 0:
            self._writer.add_scalar("crux/step_s", (now_s - self._at_s) / ended, step)
        self._at_s, self._iterations_then = now_s, iterations
        for tag, value in curves(status).items():
            self._writer.add_scalar(f"crux/{tag}", value, step)
        plan = (status.get("order") or {}).get("plan_epoch") or 0
        level = (status.get("order") or {}).get("level")
        text = f"plan {plan}, level {'of the network' if level is None else level}"
        if plan and text != self._plan:
            self._plan = text
            self._writer.add_text("crux/plan", text, step)


def curves(status: dict[str, Any]) -> dict[str, float]:
    """Returns the values of TensorBoard's curves by name; those that are not known are absent."""
    profile, order = status.get("profile") or {}, status.get("order") or {}
    found: dict[str, float | None] = {
        "alone_s": profile.get("period_s") if profile.get("measured_alone") else None,
        "period_s": profile.get("period_s"),
        "W_flops": profile.get("flops"),
        "t_s": profile.get("t_s"),
        "intensity_flops_per_s": profile.get("intensity"),
        "level": order.get("level"),
        "plan_epoch": order.get("plan_epoch"),
    }
    if profile.get("period_s"):
        exposed_s = max(0.0, profile["period_s"] - profile["compute_s"])
        found["exposed_share"] = exposed_s / profile["period_s"]
    return {name: float(value) for name, value in found.items() if value is not None}
