"""Which placement lets the jobs take turns best (CASSINI's Algorithm 2, NSDI '24, §4.2).

``docs/schedulers.md`` says where this differs from the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from crux_torch.schedule.arrays import FloatArray, arrays_of, choice_of, traffic_matrix
from crux_torch.schedule.cassini import Circles, Part, circles_of, groups_of, parts_of
from crux_torch.schedule.circle import best_rotation, mean_score, perimeter
from crux_torch.schedule.model import Cluster

#: Components whose score is remembered: candidates differ in few of them.
_REMEMBERED = 4096


class Candidate(NamedTuple):
    """A placement: all jobs on the links that they would use.

    Attributes:
        default_path: for each job the candidate that the network gives to each of its flows.
    """

    cluster: Cluster
    default_path: Mapping[str, tuple[int, ...]]


class Compatibility(NamedTuple):
    """What a placement is worth.

    Attributes:
        score: mean compatibility score of the links on which jobs meet; 1 where they don't.
        loop: whether the Affinity graph of the job in question has a loop, so that no shifts can
            give every link its best rotation.
    """

    score: float
    loop: bool


def ranked(candidates: Sequence[Candidate], job: str) -> list[int]:
    """The candidates without a loop, by index, the best first; of equals the earlier.

    ``job`` is the one that is to be placed. Loops of jobs that it does not reach are common to all
    candidates and do not count.

    Raises:
        ClusterError: a cluster that contradicts itself.
    """
    found = [compatibility(candidate, job) for candidate in candidates]
    kept = [i for i, one in enumerate(found) if not one.loop]
    return sorted(kept, key=lambda i: -round(found[i].score, 9))


def compatibility(candidate: Candidate, job: str) -> Compatibility:
    """The score of one placement, and whether ``job`` is in a loop there."""
    arrays = arrays_of(candidate.cluster)
    traffic = traffic_matrix(arrays, choice_of(arrays, candidate.default_path))
    total, links, loop = 0.0, 0, False
    for jobs, part in parts_of(arrays, traffic):
        scores, looped = _judged(part)
        total, links = total + sum(scores), links + len(scores)
        names = [arrays.jobs[j].name for j in jobs]
        loop = loop or (job in names and names.index(job) in looped)
    return Compatibility(total / links if links else 1.0, loop)


@lru_cache(_REMEMBERED)
def _judged(part: Part) -> tuple[tuple[float, ...], frozenset[int]]:
    """The score of each link on which jobs meet, and the jobs whose graph has a loop."""
    circles, on_link = circles_of(part), part.matrix().tocsc()
    scores: list[float] = []
    meetings: set[tuple[tuple[int, ...], bytes]] = set()
    for link in range(on_link.shape[1]):
        column = slice(on_link.indptr[link], on_link.indptr[link + 1])
        order = np.argsort(on_link.indices[column], kind="stable")
        jobs, demand = on_link.indices[column][order], np.round(on_link.data[column][order], 9)
        if len(jobs) < 2:
            continue
        families = groups_of(circles.family[jobs])
        scores.append(_score(circles, [(jobs[f].tolist(), demand[f]) for f in families]))
        for members in families:
            if len(members) > 1:
                # Links that ask for the same rotations are one vertex.
                meetings.add((tuple(jobs[members].tolist()), demand[members].tobytes()))
    return tuple(scores), _in_loops([jobs for jobs, _ in sorted(meetings)])


def _score(circles: Circles, families: Sequence[tuple[list[int], FloatArray]]) -> float:
    """Equation 2 with each family at its best rotation, and families at random to each other."""
    together = []
    for members, demands in families:
        own = [circles.busy[j] * d for j, d in zip(members, demands, strict=True)]
        around = perimeter(own)
        turned = zip(own, best_rotation(own).angles, strict=True)
        together.append(
            np.sum([np.roll(np.tile(c, around // len(c)), a) for c, a in turned], axis=0)
        )
    return mean_score(together, 0.0)


def _in_loops(meetings: Sequence[Sequence[int]]) -> frozenset[int]:
    """The jobs of each connected part of the graph of ``meetings`` that has a loop."""
    parent: dict[int, int] = {}

    def root(job: int) -> int:
        while parent.setdefault(job, job) != job:
            parent[job] = job = parent[parent[job]]
        return job

    closing = []
    for first, *others in meetings:
        for other in others:
            if root(first) == root(other):
                closing.append(other)
            parent[root(other)] = root(first)
    looped = {root(job) for job in closing}
    return frozenset(job for job in list(parent) if root(job) in looped)
