"""What a rank does in a test: a part, run alike on the stock backend and under Crux."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from rig.kind import CUDA, GLOO, RIG, Kind
from rig.outcome import VALUE, Outcome

#: Sizes of worlds that the parts run in.
ALONE, PAIR, FOUR = 1, 2, 4
#: Kinds of device.
EVERY, DEVICES = (CUDA, RIG, GLOO), (CUDA, RIG)


@dataclass(frozen=True, slots=True)
class Rank:
    """This process in its job.

    Attributes:
        crux: whether Crux stands in for the stock backend.
        arguments: of the test, as strings.
    """

    rank: int
    size: int
    kind: Kind
    device: torch.device
    crux: bool
    arguments: dict[str, str] = field(default_factory=dict)

    def input(self, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random numbers that depend on the rank, the same on every kind of device."""
        generator = torch.Generator().manual_seed(1000 * (seed + 1) + self.rank)
        return torch.randn(n, generator=generator).to(dtype).to(self.device)

    def synchronize(self) -> None:
        self.kind.synchronize(self.device)

    def event(self) -> torch.Event:
        return torch.Event(self.device, enable_timing=True)


Run = Callable[[Rank], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to do and to compare.

    Attributes:
        sizes: worlds in which it makes sense.
        kinds: devices on which it makes sense.
        why: it makes no sense on the rig.
        eager: needs communicators that exist before the first operation, bound to a device.
        refused_on: kinds whose stock backend may refuse it; there the messages are compared.
        fatal: leaves the process unfit for more.
        only_crux: does nothing on a stock backend, so that nothing issued is compared.
        measures: gives figures, which a test of its own judges, instead of results to compare.
        limit_s: that it may take, where the job allows less.
    """

    name: str
    run: Run
    sizes: tuple[int, ...] = (ALONE, PAIR)
    kinds: tuple[str, ...] = EVERY
    why: str = ""
    eager: bool = False
    refused_on: tuple[str, ...] = ()
    fatal: bool = False
    only_crux: bool = False
    measures: bool = False
    limit_s: float = 0.0

    def spoilt_by(self, outcome: Outcome, kind: str) -> bool:
        """Whether the process may be in any state after it: other ranks may not have failed."""
        return outcome.kind != VALUE and kind not in self.refused_on


#: What has parts, in the order in which they run.
MODULES = (
    "collectives",
    "groups",
    "gloo_only",
    "training",
    "graphs",
    "memory",
    "measured",
    "switching",
    "network",
    "frameworks",
    "failures",
)
#: Every part by name, in the order in which they run: what is worth most comes first.
PARTS: dict[str, Part] = {}


def part(**properties: Any) -> Callable[[Run], Run]:
    """Register a function as a part under its own name."""

    def register(run: Run) -> Run:
        name = run.__name__
        assert name not in PARTS, name
        PARTS[name] = Part(name, run, **properties)
        return run

    return register


def load() -> dict[str, Part]:
    """All parts."""
    for name in MODULES:
        import_module(f"rig.{name}")
    return PARTS
