"""The Affinity graph: jobs, the links where they meet, and one time shift a job (CASSINI §4.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Meeting:
    """A link vertex: each job's time shift there in angles (the edge's weight), and its demand.

    ``gain`` is by how much the link's compatibility score exceeds that of random shifts.
    """

    shift: Mapping[int, int]
    gain: float
    demand: Mapping[int, float]


@dataclass(frozen=True)
class AffinityGraph:
    """A bipartite graph of jobs (by index) and meetings, the link vertices."""

    meetings: Sequence[Meeting]

    @cached_property
    def at(self) -> Mapping[int, Sequence[int]]:
        """For each job the meetings that it has an edge to."""
        at: dict[int, list[int]] = {}
        for m, meeting in enumerate(self.meetings):
            for job in meeting.shift:
                at.setdefault(job, []).append(m)
        return at

    def without(self, jobs: set[int]) -> AffinityGraph:
        """This graph without ``jobs``, and without the links where one job is left."""
        kept = []
        for meeting in self.meetings:
            shift = {j: s for j, s in meeting.shift.items() if j not in jobs}
            if len(shift) > 1:
                kept.append(Meeting(shift, meeting.gain, meeting.demand))
        return AffinityGraph(kept)


def loop_free(meetings: Sequence[Meeting]) -> AffinityGraph:
    """The graph of ``meetings`` less the edges that close a loop; ``docs/schedulers.md`` says why.

    Links join the graph from the largest gain to the smallest. Of the jobs that the graph joins
    already, only the one with the largest demand on the link keeps its edge. What remains is a
    forest.
    """
    parent: dict[int, int] = {}

    def root(job: int) -> int:
        while parent.setdefault(job, job) != job:
            parent[job] = job = parent[parent[job]]
        return job

    def rank(m: Meeting) -> tuple[object, ...]:
        """Largest gain first; then by content, so that the order they came in decides nothing."""
        return -round(m.gain, 9), sorted(m.shift.items()), sorted(m.demand.items()), -m.gain

    kept = []
    for meeting in sorted(meetings, key=rank):
        speaker: dict[int, int] = {}
        for job in sorted(meeting.shift, key=lambda j: (-meeting.demand[j], j)):
            speaker.setdefault(root(job), job)
        if len(speaker) < 2:
            continue
        first, *others = speaker
        for other in others:
            parent[other] = first
        edges = {job: meeting.shift[job] for job in sorted(speaker.values())}
        kept.append(Meeting(edges, meeting.gain, meeting.demand))
    return AffinityGraph(kept)


def time_shifts(graph: AffinityGraph, period: Sequence[int]) -> list[dict[int, int]]:
    """A time shift for every job of each connected subgraph (Algorithm 1).

    On a loop-free graph the shifts are unique. On every link, all jobs have the shifts of that link
    moved by one common amount, modulo their own iteration times (Theorem 1; the proof's Equation 6,
    modulo the perimeter, holds before line 17 takes the remainder). The paper draws the reference
    job; here it is the first. ``period`` holds the jobs' iteration times, in the unit of the
    shifts.
    """
    shifts: list[dict[int, int]] = []
    visited: set[int] = set()
    for reference in sorted(graph.at):
        if reference in visited:
            continue
        shift = {reference: 0}
        queue = deque([reference])
        while queue:
            j = queue.popleft()
            for m in graph.at[j]:
                edge = graph.meetings[m].shift
                for k in edge:
                    if k not in shift:
                        shift[k] = (shift[j] - edge[j] + edge[k]) % period[k]
                        queue.append(k)
        visited |= shift.keys()
        shifts.append(shift)
    return shifts
