"""CASSINI: time shifts that interleave the communication of jobs on shared links (NSDI '24).

This is Algorithm 2 for a given placement: circles of the jobs on every contended link, their best
rotations, the Affinity graph, and one time shift for each job. If a tree of jobs does not gain from
that, the jobs that hold the others up most are left out, and the rest is tried again.
``docs/schedulers.md`` says where this differs from the paper, and how shifted jobs keep pace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import sparse

from crux_torch.schedule.affinity import Meeting, loop_free, time_shifts
from crux_torch.schedule.arrays import (
    Arrays,
    FloatArray,
    IntArray,
    arrays_of,
    choice_of,
    traffic_matrix,
)
from crux_torch.schedule.circle import (
    ANGLES_PER_UNIT,
    FAMILY_ANGLES,
    best_rotation,
    circle,
    families,
    mean_score,
)
from crux_torch.schedule.contention_dag import components_of
from crux_torch.schedule.ecmp import ecmp
from crux_torch.schedule.intensity import burst_times_s, solo_periods_s, transfer_times_s
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions

#: Share that a measured iteration time gets added, so that a job that came late catches up before
#: it is late again.
HEADROOM = 0.05
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
#: Components whose shifts are remembered: most come again when one job of a cluster changes.
_REMEMBERED = 4096


def cassini(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Time shifts on the default paths, one level."""
    arrays = arrays_of(cluster)
    traffic = traffic_matrix(arrays, choice_of(arrays, options.default_path))
    shift_s: dict[str, float] = {}
    grid_s: dict[str, float] = {}
    for jobs, part in parts_of(arrays, traffic):
        for j, shifted in _part_shifts(part).items():
            name = arrays.jobs[jobs[j]].name
            shift_s[name], grid_s[name] = shifted
    return replace(ecmp(cluster, options), shift_s=shift_s, grid_s=grid_s)


@dataclass(frozen=True, slots=True)
class Part:
    """Jobs that a chain of contended links joins; hashable, all that their shifts depend on.

    ``entries`` has for each job its links, and the share of their capacity that it asks for while
    it sends; ``busy_s`` says when in an iteration it sends.
    """

    entries: tuple[tuple[tuple[int, float], ...], ...]
    busy_s: tuple[tuple[tuple[float, float], ...], ...]
    period_s: tuple[float, ...]

    def matrix(self) -> Any:
        """``entries`` as a sparse matrix."""
        start = np.cumsum([0, *(len(row) for row in self.entries)])
        links = [link for row in self.entries for link, _ in row]
        shares = [share for row in self.entries for _, share in row]
        return sparse.csr_array((shares, links, start), shape=(len(start) - 1, max(links) + 1))

    def duty(self) -> FloatArray:
        """Share of its iteration in which each job sends."""
        sending_s = [sum(end - start for start, end in busy) for busy in self.busy_s]
        return np.array(sending_s, np.float64) / np.array(self.period_s, np.float64)


def parts_of(arrays: Arrays, traffic: Any) -> list[tuple[list[int], Part]]:
    """The jobs that meet on links which they can overfill together, component by component."""
    t_s = transfer_times_s(arrays, traffic)
    measured_s = np.array([job.period_s for job in arrays.jobs], np.float64)
    period_s = np.maximum(solo_periods_s(arrays, t_s), (1.0 + HEADROOM) * measured_s)
    rows = np.repeat(np.arange(traffic.shape[0]), np.diff(traffic.indptr))
    share = traffic.data / (t_s[rows] * arrays.capacity_Bps[traffic.indices])
    peak = np.bincount(traffic.indices, share, traffic.shape[1])
    # On other links no rotation matters; they would only close loops.
    counts = peak[traffic.indices] > 1 + 1e-9
    if not counts.any():
        return []
    places = (rows[counts], traffic.indices[counts])
    demand = sparse.csr_array((share[counts], places), shape=traffic.shape)
    demand.sort_indices()
    parts = []
    for jobs in groups_of(components_of(demand)):
        if len(jobs) < 2:
            continue
        mine = demand[jobs]
        _, links = np.unique(mine.indices, return_inverse=True)
        entries = list(zip(links.tolist(), mine.data.tolist(), strict=True))
        start = mine.indptr.tolist()
        part = Part(
            entries=tuple(tuple(entries[a:b]) for a, b in pairwise(start)),
            busy_s=tuple(tuple(burst_times_s(arrays.jobs[j], t_s[j])) for j in jobs.tolist()),
            period_s=tuple(period_s[jobs].tolist()),
        )
        parts.append((jobs.tolist(), part))
    return parts


@dataclass(frozen=True, slots=True)
class Circles:
    """Every job on its family's grid; ``busy`` is the share of each angle in which it sends."""

    family: IntArray
    angles: list[int]
    angle_s: FloatArray
    busy: list[FloatArray]


def circles_of(part: Part, stretch: float = 1.0) -> Circles:
    grid = families(np.array(part.period_s))
    angles = (grid.units * ANGLES_PER_UNIT).tolist()
    angle_s = grid.unit_s * (stretch / ANGLES_PER_UNIT)
    busy = [
        circle(b, n * s, n) for b, n, s in zip(part.busy_s, angles, angle_s.tolist(), strict=True)
    ]
    return Circles(grid.number, angles, angle_s, busy)


@lru_cache(_REMEMBERED)
def _part_shifts(part: Part) -> dict[int, tuple[float, float]]:
    """For each job that is shifted its shift and its grid in seconds."""
    circles = circles_of(part)
    demand, duty = part.matrix(), part.duty()
    graph = loop_free(_meetings(circles, demand, duty))
    decided: dict[int, tuple[float, float]] = {}
    while graph.at:
        out: set[int] = set()
        for shift in time_shifts(graph, circles.angles):
            tree = _Tree(part, circles, demand, duty, sorted(shift))
            stretch = tree.stretch(shift)
            used, found = circles, shift
            if stretch.max() > 1.0:
                # Bursts keep their length on a longer grid: they are rotated anew there.
                used = circles_of(part, float(stretch.max()))
                others = set(range(len(duty))) - shift.keys()
                again = loop_free(_meetings(used, demand, duty)).without(others)
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
        graph = graph.without(out)
    return decided


def groups_of(number: IntArray) -> list[IntArray]:
    """The indices of each number, ascending."""
    order = np.argsort(number, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(number[order])) + 1)


def _meetings(circles: Circles, demand_of: Any, duty: FloatArray) -> list[Meeting]:
    """Rotations for the members of each family on each link; alike links meet once."""
    on_link = demand_of.tocsc()
    seen: dict[tuple[tuple[int, ...], bytes, float], None] = {}
    for link in range(on_link.shape[1]):
        column = slice(on_link.indptr[link], on_link.indptr[link + 1])
        order = np.argsort(on_link.indices[column], kind="stable")
        jobs, demand = on_link.indices[column][order], np.round(on_link.data[column][order], 9)
        mean = demand * duty[jobs]
        for members in groups_of(circles.family[jobs]):
            if len(members) > 1:
                background = round(float(mean.sum() - mean[members].sum()), 9)
                seen[tuple(jobs[members].tolist()), demand[members].tobytes(), background] = None
    meetings = []
    for jobs_here, raw, background in seen:
        demands = np.frombuffer(raw)
        own = [circles.busy[j] * d for j, d in zip(jobs_here, demands, strict=True)]
        rotation = best_rotation(own, background)
        gain = rotation.score - mean_score(own, background)
        if gain > 0:
            shift = dict(zip(jobs_here, rotation.angles, strict=True))
            asked = dict(zip(jobs_here, demands.tolist(), strict=True))
            meetings.append(Meeting(shift, gain, asked))
    return meetings


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
        self._busy = np.zeros((len(jobs), int(self._angles.max())))
        for row, j in enumerate(jobs):
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
        """By how much the grid must be stretched for each job to keep to it, at least 1."""
        turn = np.array([shift[j] for j in self.jobs])[None]
        steady = self._waiting(turn, self._mean)[0][0]
        worst = np.minimum(self._waiting(turn, self._peak)[0][0], steady + self._others)
        needed: FloatArray = (self._alone + np.maximum(worst, steady)) / self._angles
        # Bursts that end and begin within one angle touch, whatever that angle's mean demand is.
        touched = self._waiting(turn, self._mean, np.ceil(self._busy - _SLIVER))[0][0] > _SLIVER
        needed = np.where(touched, (1 + ROOM) * needed, needed)
        return np.maximum(np.maximum(needed, self._load()), 1.0)

    def _load(self) -> FloatArray:
        """For each job the mean demand on its busiest link, in what others leave of it."""
        mean = self._busy.sum(axis=1) / self._angles
        inside = (self._demand.T @ mean)[self._link]
        left = np.maximum(1.0 - self._mean, 1e-9)
        load: FloatArray = np.maximum.reduceat(inside / left, self._demand.indptr[:-1])
        return load

    def gains(self, stretch: float) -> bool:
        """Whether a grid stretched this much is worth more than random shifts without one."""
        turn = np.random.default_rng(2).integers(0, self._angles, (_DRAWS, len(self.jobs)))
        free = self._alone + self._waiting(turn, self._mean)[1].mean(axis=0)
        gain = self._alone * (1.0 / (self._angles * stretch) - 1.0 / free)
        return bool(gain.sum() > 1e-9 * len(self.jobs))

    def _waiting(
        self, turns: IntArray, outside: FloatArray, busy: FloatArray | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Angles that each job waits in the longest of its iterations, and on average.

        ``turns`` has a row for each try; ``outside`` says for each entry of the demand what others
        that the job waits for ask for; ``busy`` is in the place of the jobs' own.
        """
        busy = self._busy if busy is None else busy
        tries = max(1, _AT_ONCE // (FAMILY_ANGLES * len(self._link)))
        parts = [
            self._waiting_of(turns[first : first + tries], outside, busy)
            for first in range(0, len(turns), tries)
        ]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _waiting_of(
        self, turns: IntArray, outside: FloatArray, busy: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        jobs, tries = len(self.jobs), len(turns)
        turn = turns.T[:, :, None]
        angle = np.arange(FAMILY_ANGLES)
        own = (angle - turn) % self._angles[:, None, None]
        around = np.take_along_axis(busy, own.reshape(jobs, -1), axis=1)
        demand = self._demand.T @ around
        total = demand[self._link] + (outside - 1.0)[:, None]
        wait = np.maximum.reduceat(total, self._demand.indptr[:-1], axis=0)
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
