"""The same parts on the stock backend and under Crux, each job run once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rig.job import Job, Outcomes
from rig.kind import Kind
from rig.outcome import Outcome
from rig.part import Part, load


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
    """Outcomes by world; a job is run when the first of its parts is asked for."""

    kind: Kind
    folder: Path
    _found: dict[World, Outcomes] = field(default_factory=dict)

    def outcomes(self, world: World, part: str) -> list[Outcome]:
        """What each rank got."""
        if world not in self._found:
            job = Job(
                self.kind, world.mode, world.size, parts_of(world, self.kind), world.eager, 40.0
            )
            self._found[world] = job.run(self.folder / f"{world.mode}{world.size}{world.eager}")
        return self._found[world][part]
