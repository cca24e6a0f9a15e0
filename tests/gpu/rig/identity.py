"""The same parts on the stock backend and under Crux, each job run once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rig.job import ATTACHED, CRUX, STOCK, Job, Outcomes
from rig.kind import Kind
from rig.outcome import Outcome
from rig.part import Part, load

#: Seconds that one part may take; a compiler takes most.
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class World:
    """How a job's process group is made."""

    mode: str
    size: int
    eager: bool


def parts_of(world: World, kind: Kind) -> tuple[str, ...]:
    """The parts that are compared in such a world, in their order."""
    return tuple(name for name, each in load().items() if runs_in(each, world, kind))


def runs_in(each: Part, world: World, kind: Kind) -> bool:
    """Whether ``each`` is compared in such a world."""
    return (
        world.size in each.sizes
        and world.eager == each.eager
        and not each.fatal
        and not each.measures
        and (kind.is_cuda or not each.needs_cuda)
    )


@dataclass
class Compared:
    """Outcomes by world; worlds that are compared run side by side, when one is first asked for.

    Attributes:
        named: the parts that are compared under Crux's own name too.
    """

    kind: Kind
    folder: Path
    named: tuple[str, ...]
    _found: dict[World, Outcomes] = field(default_factory=dict)

    def outcomes(self, world: World, part: str) -> list[Outcome]:
        """What each rank got."""
        if world not in self._found:
            modes = (STOCK, ATTACHED) if world.mode != CRUX else (CRUX,)
            worlds = [World(mode, world.size, world.eager) for mode in modes]
            with ThreadPoolExecutor() as pool:
                self._found |= dict(zip(worlds, pool.map(self._run, worlds), strict=True))
        return self._found[world][part]

    def _run(self, world: World) -> Outcomes:
        parts = self.named if world.mode == CRUX else parts_of(world, self.kind)
        job = Job(self.kind, world.mode, world.size, parts, world.eager, LIMIT_S)
        return job.run(self.folder / f"{world.mode}{world.size}{world.eager}")
