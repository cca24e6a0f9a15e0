"""The same parts on the stock backend and under Crux, each job run once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rig.job import CRUX, Job, Outcomes, at_once
from rig.kind import Kind
from rig.outcome import VALUE, Outcome
from rig.part import Part, load

#: Seconds that one part may take; a compiler has more.
LIMIT_S = 120.0
#: How long ranks wait for one that still compiles, s.
TIMEOUT_S = 150.0


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
        and kind.name in each.kinds
    )


def assert_same(got: Iterable[Outcome], expected: Iterable[Outcome], kind: Kind, part: str) -> None:
    """What each rank got under Crux is what it gets on the stock backend, which does the part."""
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if kind.name not in load()[part].refused_on:
            assert theirs.kind == VALUE, f"{part}, stock, rank {rank}: {theirs.value}"
        told = f"{part}, rank {rank}: {str(mine)[:1500]} is not {str(theirs)[:500]}"
        assert mine.same_as(theirs), told


class Compared:
    """Outcomes by world. All worlds are under way from the start, as many at once as there are
    cores for: most of a world's time is spent on starting, compiling and waiting.

    Args:
        worlds: that will be asked for, in this order.
        named: the parts that are compared under Crux's own name too.
    """

    def __init__(
        self, kind: Kind, folder: Path, worlds: Iterable[World], named: tuple[str, ...]
    ) -> None:
        self._kind, self._folder, self._named = kind, folder, named
        self._pool = ThreadPoolExecutor(at_once())
        self._found = {world: self._pool.submit(self._run, world) for world in worlds}

    def outcomes(self, world: World, part: str) -> list[Outcome]:
        """What each rank got."""
        return self._found[world].result()[part]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _run(self, world: World) -> Outcomes:
        parts = self._named if world.mode == CRUX else parts_of(world, self._kind)
        job = Job(self._kind, world.mode, world.size, parts, world.eager, LIMIT_S, TIMEOUT_S)
        return job.run(self._folder / f"{world.mode}{world.size}{world.eager}")
