"""An imported workload: one iteration of a job as collectives of its ranks, before it is placed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from crux_torch.errors import CruxError
from crux_torch.sim.parallelism import Collective, Group

#: Payload round a ring once, where an all-reduce goes round twice.
ONE_ROUND = frozenset({"allgather", "reduce_scatter"})


class ImportFailed(CruxError, ValueError):
    """A file that can't be imported: where it is wrong, and what was expected."""


@dataclass(frozen=True, slots=True)
class ImportedJob:
    """One iteration of a job.

    Attributes:
        ranks: GPUs that it needs, one a rank.
        compute_s: seconds of an iteration in which its ranks compute.
        collectives: what it sends, with the share of the compute after which each may start.
        notes: what the reader of a result has to know of the file, one a line.
    """

    ranks: int
    compute_s: float
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...] = ()


def collectives_of(
    op: str, bytes: float, groups: Iterable[Group], at: float, *, root: int = 0
) -> list[Collective]:
    """One operation as the collectives that the simulator places.

    A ring carries all-reduces, all-gathers, reduce-scatters, broadcasts and reduces. Gathers and
    scatters are sends to the root and from it. Groups of one rank and empty payloads send nothing.
    Groups of different sizes become collectives of their own.

    Args:
        op: ``allreduce``, ``allgather``, ``reduce_scatter``, ``broadcast``, ``reduce``, ``gather``,
            ``scatter``, ``alltoall`` or ``send``.
        bytes: payload as docs/recorder.md counts it: the output of an all-gather, the input of a
            reduce-scatter, what a rank gives to an all-to-all, the root's tensor of a gather.
        root: place of the root in each group, of a gather or scatter.
    """
    by_size: dict[int, list[Group]] = {}
    for group in groups:
        if len(group) > 1:
            by_size.setdefault(len(group), []).append(group)
    found = []
    for size, same in sorted(by_size.items()):
        if op in ONE_ROUND:
            kind, payload = "allreduce", bytes / 2
        elif op in ("broadcast", "reduce"):
            kind, payload = "allreduce", bytes * size / (2 * (size - 1))
        elif op in ("gather", "scatter"):
            kind, payload = "send", bytes / size
            same = [
                (rank, group[root]) if op == "gather" else (group[root], rank)
                for group in same
                for i, rank in enumerate(group)
                if i != root
            ]
        else:
            kind, payload = op, bytes
        if payload > 0:
            found.append(Collective(kind, payload, tuple(same), at))  # type: ignore[arg-type]
    return found


def in_bursts(collectives: Iterable[Collective], bursts: int) -> tuple[Collective, ...]:
    """The same collectives, with those that start close to each other starting together.

    The compute is divided into ``bursts`` equal parts. All that may start in a part starts with its
    last collective, so none starts before it is computed. Equal collectives become one that runs
    several times.
    """
    latest: dict[int, float] = {}
    listed = list(collectives)
    for one in listed:
        part = min(math.floor(one.at * bursts), bursts - 1)
        latest[part] = max(latest.get(part, 0.0), one.at)
    counts: dict[Collective, int] = {}
    for one in listed:
        moved = replace(one, at=latest[min(math.floor(one.at * bursts), bursts - 1)], count=1)
        counts[moved] = counts.get(moved, 0) + one.count
    merged = (replace(one, count=count) for one, count in counts.items())
    return tuple(sorted(merged, key=lambda one: one.at))
