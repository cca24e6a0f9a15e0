"""CASSINI: time shifts that interleave the communication of jobs on shared links (NSDI '24).

This is Algorithm 2: circles of the jobs on every contended link, their best rotations, the Affinity
graph of jobs and links, and one time shift for each job. If a tree of jobs does not gain from that,
the jobs that hold the others up most are left out, and the rest is tried again. For several
placements, :func:`ranked` says which of them lets the jobs take turns best.
``docs/understand/schedulers.md`` says where this differs from the paper, and how shifted jobs keep
pace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from crux_torch.schedule.arrays import (
    FloatArray,
    IntArray,
    arrays_of,
    choice_of,
    traffic_matrix,
)
from crux_torch.schedule.model import Cluster, Decision, Memory, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.schedule.papers.cassini_grid import (
    FAMILY_ANGLES,
    Circles,
    best_rotation,
    mean_score,
    perimeter,
)
from crux_torch.schedule.papers.cassini_parts import Part, groups, parts_of

#: Share by which a grid is longer than it must be where bursts touch. A job that is held up there
#: holds up the next one in turn; without room, none of them would ever catch up.
ROOM = 0.005
#: Share of an angle that a burst must cover to count there.
_SLIVER = 1e-6
#: Draws of random shifts that a tree's shifts are compared with.
_DRAWS = 8
#: Numbers that are held at once while draws are compared.
_AT_ONCE = 1 << 21
#: Of a tree that does not gain, the share of jobs that is left out before the next try.
_LEFT_OUT = 0.1


def cassini(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Time shifts on the default paths, one level."""
    arrays = arrays_of(cluster, options.memory)
    traffic = traffic_matrix(arrays, choice_of(arrays, options.default_path))
    shift_s: dict[str, float] = {}
    grid_s: dict[str, float] = {}
    for jobs, part in parts_of(arrays, traffic):
        shifts = options.memory.recall(("shifts", part), partial(_part_shifts, part))
        for j, shifted in shifts.items():
            name = arrays.jobs[jobs[j]].name
            shift_s[name], grid_s[name] = shifted
    return replace(ecmp(cluster, options), shift_s=shift_s, grid_s=grid_s)


def _part_shifts(part: Part) -> dict[int, tuple[float, float]]:
    """(Shift, grid) in seconds of each job that is shifted."""
    circles = part.circles()
    demand, duty = part.matrix(), part.duty()
    graph = loop_free(_meetings(part, circles, duty))
    decided: dict[int, tuple[float, float]] = {}
    while graph:
        out: set[int] = set()
        for shift in time_shifts(graph, circles.angles):
            tree = _Tree(part, circles, demand, duty, sorted(shift))
            stretch = tree.stretch(shift)
            used, found = circles, shift
            if stretch.max() > 1.0:
                # Bursts keep their length on a longer grid: they are rotated anew there.
                used = part.circles(float(stretch.max()))
                others = set(range(len(duty))) - shift.keys()
                again = without(loop_free(_meetings(part, used, duty)), others)
                trees = time_shifts(again, used.angles)
                found = trees[0] if trees and trees[0].keys() == shift.keys() else shift
                tree = _Tree(part, used, demand, duty, tree.jobs)
                stretch = tree.stretch(found)
            if tree.gains(float(stretch.max())):
                for j, turn in found.items():
                    angle_s = float(used.angle_s[j] * stretch.max())
                    decided[j] = (turn * angle_s, used.angles[j] * angle_s)
                out |= shift.keys()
            else:
                worst = np.argsort(-stretch, kind="stable")
                out |= {tree.jobs[j] for j in worst[: max(1, int(len(worst) * _LEFT_OUT))]}
        graph = without(graph, out)
    return decided


def _links(part: Part) -> Iterator[tuple[IntArray, FloatArray]]:
    """Jobs on each link, ascending, and the share of its capacity that each asks for."""
    on_link = part.matrix().tocsc()
    for link in range(on_link.shape[1]):
        column = slice(on_link.indptr[link], on_link.indptr[link + 1])
        order = np.argsort(on_link.indices[column], kind="stable")
        yield on_link.indices[column][order], np.round(on_link.data[column][order], 9)


def _meetings(part: Part, circles: Circles, duty: FloatArray) -> list[Meeting]:
    """Rotations for the members of each family on each link; alike links meet once."""
    seen: dict[tuple[tuple[int, ...], bytes, float], None] = {}
    for jobs, demand in _links(part):
        mean = demand * duty[jobs]
        for members in groups(circles.family[jobs]):
            if len(members) > 1:
                background = round(float(mean.sum() - mean[members].sum()), 9)
                seen[tuple(jobs[members].tolist()), demand[members].tobytes(), background] = None
    meetings = []
    for jobs_here, raw, background in seen:
        demands = np.frombuffer(raw)
        own = [circles.rate[j] * d for j, d in zip(jobs_here, demands, strict=True)]
        rotation = best_rotation(own, background)
        gain = rotation.score - mean_score(own, background)
        if gain > 0:
            shift = dict(zip(jobs_here, rotation.angles, strict=True))
            asked = dict(zip(jobs_here, demands.tolist(), strict=True))
            meetings.append(Meeting(shift, gain, asked))
    return meetings


@dataclass(frozen=True, slots=True)
class Meeting:
    """A link vertex of an Affinity graph, which is a sequence of these, with edges to jobs.

    ``shift`` is each job's time shift there in angles (the edge's weight). ``gain`` is the link's
    compatibility score less that of random shifts.
    """

    shift: Mapping[int, int]
    gain: float
    demand: Mapping[int, float]


def without(graph: Sequence[Meeting], jobs: set[int]) -> list[Meeting]:
    """The graph without ``jobs``, and without the links where one job is left."""
    kept = []
    for meeting in graph:
        shift = {j: s for j, s in meeting.shift.items() if j not in jobs}
        if len(shift) > 1:
            kept.append(replace(meeting, shift=shift))
    return kept


def loop_free(meetings: Sequence[Meeting]) -> list[Meeting]:
    """The graph less the edges that close a loop; ``docs/understand/schedulers.md`` says why.

    Links join the graph from the largest gain to the smallest. Of the jobs that the graph joins
    already, only the one with the largest demand on the link keeps its edge. What remains is a
    forest.
    """
    joined = _Joined()

    def rank(m: Meeting) -> tuple[object, ...]:
        """Largest gain first; then by content, so that the order they came in decides nothing."""
        return -round(m.gain, 9), sorted(m.shift.items()), sorted(m.demand.items()), -m.gain

    kept = []
    for meeting in sorted(meetings, key=rank):
        speaker: dict[int, int] = {}
        for job in sorted(meeting.shift, key=lambda j: (-meeting.demand[j], j)):
            speaker.setdefault(joined.root(job), job)
        if len(speaker) < 2:
            continue
        first, *others = speaker
        for other in others:
            joined.join(other, first)
        edges = {job: meeting.shift[job] for job in sorted(speaker.values())}
        kept.append(replace(meeting, shift=edges))
    return kept


def time_shifts(graph: Sequence[Meeting], period: Sequence[int]) -> list[dict[int, int]]:
    """A time shift for every job of each connected subgraph (Algorithm 1).

    On a loop-free graph the shifts are unique. On every link, all jobs have the shifts of that link
    moved by one common amount, modulo their own iteration times (Theorem 1; the proof's Equation 6,
    modulo the perimeter, holds before line 17 takes the remainder). The paper draws the reference
    job; here it is the first. ``period`` holds the jobs' iteration times, in the unit of the
    shifts.
    """
    edges: dict[int, list[Mapping[int, int]]] = {}
    for meeting in graph:
        for job in meeting.shift:
            edges.setdefault(job, []).append(meeting.shift)
    shifts: list[dict[int, int]] = []
    visited: set[int] = set()
    for reference in sorted(edges):
        if reference in visited:
            continue
        shift = {reference: 0}
        queue = deque([reference])
        while queue:
            j = queue.popleft()
            for edge in edges[j]:
                for k in edge:
                    if k not in shift:
                        shift[k] = (shift[j] - edge[j] + edge[k]) % period[k]
                        queue.append(k)
        visited |= shift.keys()
        shifts.append(shift)
    return shifts


class _Joined:
    """Sets of jobs that were joined (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def root(self, job: int) -> int:
        """A job that stands for all that ``job`` is joined with."""
        parent = self._parent
        while parent.setdefault(job, job) != job:
            parent[job] = job = parent[parent[job]]
        return job

    def join(self, job: int, other: int) -> None:
        self._parent[self.root(job)] = self.root(other)


class _Tree:
    """Jobs whose shifts depend on each other, and the links that they use.

    Jobs of the part that are not in it have no fixed phase to these. What they ask for on average
    slows the tree all the time; where they can ask for more, a job may wait for a whole iteration's
    sending of theirs.
    """

    def __init__(
        self, part: Part, circles: Circles, demand: Any, duty: FloatArray, jobs: list[int]
    ) -> None:
        self.jobs = jobs
        everyone = demand[:, np.unique(demand[jobs].indices)]
        self._demand = everyone[jobs]
        self._link = self._demand.indices
        self._angles = np.array([circles.angles[j] for j in jobs])
        self._rate, self._busy = np.zeros((2, len(jobs), int(self._angles.max())))
        for row, j in enumerate(jobs):
            self._rate[row, : circles.angles[j]] = circles.rate[j]
            self._busy[row, : circles.angles[j]] = circles.busy[j]
        self._alone = np.array(part.period_s)[jobs] / circles.angle_s[jobs]

        heard = np.ones(len(duty))
        heard[jobs] = 0.0
        sending_s = duty * np.array(part.period_s)
        self._peak = (everyone.T @ heard)[self._link]
        self._mean = (everyone.T @ (heard * duty))[self._link]
        others_s = (everyone.T @ (heard * sending_s))[self._link]
        start = self._demand.indptr[:-1]
        self._others = np.maximum.reduceat(others_s, start) / circles.angle_s[jobs]

    def stretch(self, shift: dict[int, int]) -> FloatArray:
        """Factor by which the grid must be stretched for each job to keep to it, at least 1."""
        turn = np.array([shift[j] for j in self.jobs])[None]
        steady = self._waiting(turn, self._mean)[0][0]
        worst = np.minimum(self._waiting(turn, self._peak)[0][0], steady + self._others)
        needed: FloatArray = (self._alone + np.maximum(worst, steady)) / self._angles
        # Bursts that end and begin within one angle touch, whatever that angle's mean demand is.
        whole = np.ceil(self._busy - _SLIVER)
        height = np.divide(self._rate, self._busy, out=np.zeros_like(whole), where=whole > 0)
        touched = self._waiting(turn, self._mean, (whole * height, whole))[0][0] > _SLIVER
        needed = np.where(touched, (1 + ROOM) * needed, needed)
        # The mean demand on each job's busiest link, as a share of what others leave of it.
        mean = self._rate.sum(axis=1) / self._angles
        inside = (self._demand.T @ mean)[self._link]
        left = np.maximum(1.0 - self._mean, 1e-9)
        load = np.maximum.reduceat(inside / left, self._demand.indptr[:-1])
        return np.maximum(np.maximum(needed, load), 1.0)

    def gains(self, stretch: float) -> bool:
        """True if a grid stretched this much is worth more than random shifts without one."""
        turn = np.random.default_rng(2).integers(0, self._angles, (_DRAWS, len(self.jobs)))
        free = self._alone + self._waiting(turn, self._mean)[1].mean(axis=0)
        gain = self._alone * (1.0 / (self._angles * stretch) - 1.0 / free)
        return bool(gain.sum() > 1e-9 * len(self.jobs))

    def _waiting(
        self,
        turns: IntArray,
        outside: FloatArray,
        sent: tuple[FloatArray, FloatArray] | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Angles that each job waits in the longest of its iterations, and on average.

        ``turns`` has a row for each try; ``outside`` says for each entry of the demand what others
        that the job waits for ask for; ``sent`` has the jobs' rate and busy shares, if not as they
        are.
        """
        rate, busy = sent or (self._rate, self._busy)
        tries = max(1, _AT_ONCE // (FAMILY_ANGLES * len(self._link)))
        parts = [
            self._waiting_of(turns[first : first + tries], outside, rate, busy)
            for first in range(0, len(turns), tries)
        ]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _waiting_of(
        self, turns: IntArray, outside: FloatArray, rate: FloatArray, busy: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        jobs, tries = len(self.jobs), len(turns)
        turn = turns.T[:, :, None]
        angle = np.arange(FAMILY_ANGLES)
        own = (angle - turn) % self._angles[:, None, None]
        own = own.reshape(jobs, -1)
        demand = self._demand.T @ np.take_along_axis(rate, own, axis=1)
        total = demand[self._link] + (outside - 1.0)[:, None]
        wait = np.maximum.reduceat(total, self._demand.indptr[:-1], axis=0)
        around = np.take_along_axis(busy, own, axis=1)
        wait = (around * np.clip(wait, 0.0, None)).reshape(jobs, tries, FAMILY_ANGLES)
        # From the start of one of the job's iterations, so that each is in one piece.
        wait = np.take_along_axis(wait, (angle + turn) % FAMILY_ANGLES, axis=2)
        longest = np.empty((jobs, tries))
        for angles in np.unique(self._angles).tolist():
            same = self._angles == angles
            each = wait[same].reshape(int(same.sum()), tries, -1, angles).sum(axis=3)
            longest[same] = each.max(axis=2)
        mean = wait.sum(axis=2) * (self._angles / FAMILY_ANGLES)[:, None]
        return longest.T, mean.T


class Candidate(NamedTuple):
    """A placement: all jobs on the links that they would use.

    ``default_path`` has for each job the candidate that the network gives to each of its flows.
    """

    cluster: Cluster
    default_path: Mapping[str, tuple[int, ...]]


class Compatibility(NamedTuple):
    """The worth of a placement for one job.

    Attributes:
        score: mean compatibility score of the links on which jobs meet; 1 where they don't.
        loop: True if the job's Affinity graph has a loop, so that no shifts can give every link its
            best rotation.
    """

    score: float
    loop: bool


def ranked(candidates: Sequence[Candidate], job: str, memory: Memory | None = None) -> list[int]:
    """The candidates without a loop, by index, the best first; of equals the earlier.

    ``job`` is the one that is to be placed. Loops of jobs that it does not reach are common to all
    candidates and do not count.

    Raises:
        ClusterError: a cluster that contradicts itself.
    """
    found = [compatibility(candidate, job, memory) for candidate in candidates]
    kept = [i for i, one in enumerate(found) if not one.loop]
    return sorted(kept, key=lambda i: -round(found[i].score, 9))


def compatibility(candidate: Candidate, job: str, memory: Memory | None = None) -> Compatibility:
    """The worth of one placement for ``job``."""
    memory = memory or Memory()
    arrays = arrays_of(candidate.cluster, memory)
    traffic = traffic_matrix(arrays, choice_of(arrays, candidate.default_path))
    total, links, loop = 0.0, 0, False
    for jobs, part in parts_of(arrays, traffic):
        scores, looped = memory.recall(("scores", part), partial(_scores, part))
        total, links = total + sum(scores), links + len(scores)
        names = [arrays.jobs[j].name for j in jobs]
        loop = loop or (job in names and names.index(job) in looped)
    return Compatibility(total / links if links else 1.0, loop)


def _scores(part: Part) -> tuple[tuple[float, ...], frozenset[int]]:
    """The score of each link on which jobs meet, and the jobs whose graph has a loop."""
    circles = part.circles()
    scores: list[float] = []
    meetings: set[tuple[tuple[int, ...], bytes]] = set()
    for jobs, demand in _links(part):
        if len(jobs) < 2:
            continue
        families = groups(circles.family[jobs])
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
        own = [circles.rate[j] * d for j, d in zip(members, demands, strict=True)]
        around = perimeter(own)
        turned = zip(own, best_rotation(own).angles, strict=True)
        together.append(
            np.sum([np.roll(np.tile(c, around // len(c)), a) for c, a in turned], axis=0)
        )
    return mean_score(together, 0.0)


def _in_loops(meetings: Sequence[Sequence[int]]) -> frozenset[int]:
    """The jobs of each connected part of the graph of ``meetings`` that has a loop."""
    joined, closing = _Joined(), []
    for first, *others in meetings:
        for other in others:
            if joined.root(first) == joined.root(other):
                closing.append(other)
            joined.join(other, first)
    looped = {joined.root(job) for job in closing}
    return frozenset(job for jobs in meetings for job in jobs if joined.root(job) in looped)
