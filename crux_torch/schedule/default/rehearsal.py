"""Rehearsal: plays plans in the fluid engine, and counts the GPUs that they keep busy.

The engine (``csrc/fluid``) is a pure function of its input: no clock, no I/O, no torch. So a
scheduler may play plans before it decides, and pays for them in plays, which it counts.

**Parts.** Under a choice of paths the jobs fall into parts that share no link, and each is played
by itself. Within a part only who goes before whom on a common link matters, not the levels'
numbers: plans that agree in that are one, and are played once. A job that meets nobody is not
played at all; how it runs is known in closed form.

A job's rings are parts of another kind (``Job.parts``): each moves on its own, as on a network. A
job whose rings meet each other is played once alone, to know its iteration.

**Phases.** The phases at which jobs meet decide how they fall into step. So every play is repeated
from ``phases`` sets of start times, the same ones for all plans, and the results are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np

from crux_torch import _fluid
from crux_torch.schedule.arrays import FloatArray, IntArray
from crux_torch.schedule.model import Cluster, Job, Link
from crux_torch.schedule.papers.intensity import burst_times_s, bursts_of_parts, part_traffic

#: Bounds what a play costs where jobs' iterations differ by orders of magnitude.
_LONGEST = 40
#: Seconds that run before the count begins, as a share of those that are counted.
_WARM_UP = 0.2
#: Shares of a play after which its work is looked at, where that is limited.
_STEPS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(frozen=True, slots=True)
class Length:
    """Length of a play.

    Attributes:
        phases: sets of start times that every play is averaged over.
        iterations: iterations of all jobs together that one play lasts for.
        rounds: iterations of the slowest job that it lasts for at least, unless all jobs together
            would do more than ``_LONGEST`` times ``iterations`` in that time.
    """

    phases: int
    iterations: int
    rounds: int


@dataclass(frozen=True, slots=True, eq=False)
class RoutedJob:
    """A job (by index) on one choice of paths: bytes an iteration on each link, period alone.

    ``traffic`` has them of each part that moves on its own.
    """

    job: int
    traffic: tuple[Mapping[Link, float], ...]
    period_s: float

    @property
    def links(self) -> set[Link]:
        """Links that any of its parts crosses."""
        return set[Link]().union(*self.traffic)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Jobs that meet each other, directly or through others, in the order of their indices.

    ``pairs`` are places in ``routes`` of jobs that share a link. Parts of equal ``key`` play alike,
    whatever their links are called.
    """

    routes: tuple[RoutedJob, ...]
    pairs: tuple[tuple[int, int], ...]
    key: tuple[object, ...]

    @property
    def jobs(self) -> list[int]:
        """Indices of its jobs."""
        return [route.job for route in self.routes]

    def relations(self, levels: IntArray) -> list[bytes]:
        """Order of each pair, for each row of ``levels`` (of all jobs of the cluster)."""
        mine = levels[:, self.jobs]
        above, below = np.array(self.pairs).T
        signs = np.sign(mine[:, above] - mine[:, below]).astype(np.int8)
        return [row.tobytes() for row in signs]


#: Busy GPUs of the jobs that meet nobody, the number of plans, and for each part its relations.
_Planned = tuple[float, int, list[tuple[Neighbours, list[bytes]]]]
#: Parts to play and all jobs' levels, by what makes a play.
_Missing = dict[tuple[object, bytes], tuple[Neighbours, IntArray]]


class Rehearsal:
    """Plays plans of one cluster, and remembers what it has played.

    Jobs are numbered in the order of their names; ``seed`` is that of the start times.
    """

    def __init__(self, cluster: Cluster, length: Length, *, seed: int = 0) -> None:
        self.jobs: tuple[Job, ...] = tuple(sorted(cluster.jobs, key=lambda job: job.name))
        #: Engines that have been run; a new plan of a part takes ``phases`` of them.
        self.plays = 0
        #: What that took, by ``Engine.work``. A budget in it gives equal plans on any machine.
        self.work = 0
        self._cluster = cluster
        self._capacity_Bps = cluster.capacity_Bps
        self._length = length
        self.phases = self._length.phases
        self._start = np.random.default_rng(seed).random((self._length.phases, len(self.jobs)))
        self._routes: dict[tuple[int, tuple[int, ...]], RoutedJob] = {}
        self._parts: dict[tuple[int, ...], tuple[float, tuple[Neighbours, ...]]] = {}
        self._played: dict[tuple[object, bytes], float] = {}
        self._engines: dict[Neighbours, list[_fluid.Engine]] = {}

    def anew(self, length: Length, seed: int) -> Rehearsal:
        """Returns a rehearsal of the same jobs and routes that has played nothing."""
        other = Rehearsal(self._cluster, length, seed=seed)
        other._routes, other._parts = self._routes, self._parts
        return other

    def route(self, job: int, path: tuple[int, ...]) -> RoutedJob:
        """Job ``job`` when flow i takes its candidate ``path[i]``."""
        known = self._routes.get((job, path))
        if known is None:
            found = (
                {e: moved for e, moved in part.items() if np.isfinite(self._capacity_Bps[e])}
                for part in part_traffic(self.jobs[job], path)
            )
            traffic = tuple(part for part in found if part) or ({},)
            known = RoutedJob(job, traffic, self._alone_s(job, traffic))
            self._routes[job, path] = known
        return known

    def _alone_s(self, job: int, traffic: tuple[Mapping[Link, float], ...]) -> float:
        """Seconds of an iteration that meets no other job; its parts may meet each other."""
        spec = self.jobs[job]
        loads_s = [[m / self._capacity_Bps[e] for e, m in part.items()] for part in traffic]
        times_s = burst_times_s(spec, max(chain.from_iterable(loads_s), default=0.0))
        least_s = max(spec.compute_s, times_s[-1][1] if times_s else 0.0)
        if sum(map(len, traffic)) == len(set().union(*traffic)):
            return least_s
        engine = self._engine_of([RoutedJob(job, traffic, least_s)], [0.0])
        played_s = played_alone_s(engine, spec.name, least_s)
        self.work += engine.work
        return played_s

    def busy_gpus(self, plans: Iterable[tuple[Sequence[RoutedJob], IntArray]]) -> list[FloatArray]:
        """Mean number of GPUs that compute, for each choice of paths and row of its levels.

        A plan has the routes of all jobs, in order, and levels: a row for each plan, a level for
        each job; a higher one goes first. All that is new is played together.

        Raises:
            SpecError: jobs that the engine can't play.
        """
        planned, missing = self._planned(plans)
        self._play(missing)
        result = []
        for alone, rows, asked in planned:
            total = np.full(rows, alone, np.float64)
            for part, relations in asked:
                total += [self._played[part.key, relation] for relation in relations]
            result.append(total)
        return result

    def takes_at_most(self, work: int, routes: Sequence[RoutedJob], level: IntArray) -> bool:
        """True if a plan can be played within so much work; the play ends where it can't.

        Raises:
            SpecError: jobs that the engine can't play.
        """
        _, missing = self._planned([(routes, level[None, :])])
        return self._play(missing, work)

    def _planned(
        self, plans: Iterable[tuple[Sequence[RoutedJob], IntArray]]
    ) -> tuple[list[_Planned], _Missing]:
        """The parts of each plan, and those that have not been played."""
        planned: list[_Planned] = []
        missing: _Missing = {}
        for routes, levels in plans:
            alone, parts = self.parts(routes)
            asked = []
            for part in parts:
                relations = part.relations(levels)
                asked.append((part, relations))
                for row, relation in enumerate(relations):
                    if (part.key, relation) not in self._played:
                        missing.setdefault((part.key, relation), (part, levels[row]))
            planned.append((alone, len(levels), asked))
        return planned, missing

    def parts(self, routes: Sequence[RoutedJob]) -> tuple[float, tuple[Neighbours, ...]]:
        """Busy GPUs of the jobs that meet nobody, and the parts of the others."""
        ids = tuple(map(id, routes))
        if ids not in self._parts:
            groups = _components(routes)
            alone = sum(self._alone(group[0]) for group in groups if len(group) == 1)
            parts = tuple(self._part(group) for group in groups if len(group) > 1)
            self._parts[ids] = alone, parts
        return self._parts[ids]

    def _alone(self, route: RoutedJob) -> float:
        job = self.jobs[route.job]
        return job.gpus * job.compute_s / route.period_s if route.period_s > 0 else 0.0

    def _part(self, members: Sequence[RoutedJob]) -> Neighbours:
        routes = _distinct_links(members, self._capacity_Bps)
        number: dict[Link, int] = {}
        shape = []
        for route in routes:
            crossed = tuple(
                tuple(
                    (number.setdefault(link, len(number)), self._capacity_Bps[link], moved)
                    for link, moved in part.items()
                )
                for part in route.traffic
            )
            shape.append((route.job, crossed))
        links = [route.links for route in routes]
        pairs = tuple(
            (i, k)
            for (i, one), (k, other) in combinations(enumerate(links), 2)
            if not one.isdisjoint(other)
        )
        return Neighbours(tuple(routes), pairs, tuple(shape))

    def _play(self, missing: _Missing, most_work: float = math.inf) -> bool:
        """Fills in what ``missing`` asks for, unless it takes more than ``most_work``."""
        engines: list[_fluid.Engine] = []
        warm_s: list[float] = []
        until_s: list[float] = []
        for part, level in missing.values():
            horizon_s = self._horizon_s(part)
            for phase in range(self._length.phases):
                engines.append(self.engine(part, level, phase))
                warm_s.append(_WARM_UP * horizon_s)
                until_s.append((1 + _WARM_UP) * horizon_s)
        if not self._run(engines, warm_s, most_work):
            return False
        before = [engine.results() for engine in engines]
        if not self._run(engines, until_s, most_work):
            return False
        self.plays += len(engines)
        self.work += sum(engine.work for engine in engines)
        for m, (key, (part, _)) in enumerate(missing.items()):
            busy = 0.0
            for e in range(m * self._length.phases, (m + 1) * self._length.phases):
                after = engines[e].results()
                for job in (self.jobs[j] for j in part.jobs):
                    span_s = until_s[e] - warm_s[e]
                    share = share_computing(job, before[e][job.name], after[job.name], span_s)
                    busy += job.gpus * share
            self._played[key] = busy / self._length.phases
        return True

    def _run(self, engines: list[_fluid.Engine], until_s: list[float], most_work: float) -> bool:
        """Plays on; in steps where the work is limited, as nobody knows it before."""
        begun_s = [engine.now_s for engine in engines]
        for share in (1.0,) if most_work == math.inf else _STEPS:
            stop_s = [
                s if share == 1.0 else a + share * (s - a)
                for a, s in zip(begun_s, until_s, strict=True)
            ]
            _fluid.run_all(engines, stop_s)
            if sum(engine.work for engine in engines) > most_work:
                self.plays += len(engines)
                self.work += sum(engine.work for engine in engines)
                return False
        return True

    def _horizon_s(self, part: Neighbours) -> float:
        periods_s = [route.period_s for route in part.routes]
        rate = sum(1.0 / period_s for period_s in periods_s)
        enough_s = self._length.iterations / rate
        return min(max(enough_s, self._length.rounds * max(periods_s)), _LONGEST * enough_s)

    def engine(self, part: Neighbours, level: IntArray, phase: int) -> _fluid.Engine:
        """An engine at time 0 with the jobs of ``part``; ``level`` is that of all jobs."""
        if part not in self._engines:
            self._engines[part] = [self._on_one_level(part, k) for k in range(self.phases)]
        engine = copy(self._engines[part][phase])
        for j in part.jobs:
            engine.set_level(self.jobs[j].name, int(level[j]))
        return engine

    def _on_one_level(self, part: Neighbours, phase: int) -> _fluid.Engine:
        start_s = [float(self._start[phase, r.job]) * r.period_s for r in part.routes]
        return self._engine_of(part.routes, start_s)

    def _engine_of(self, routes: Sequence[RoutedJob], start_s: Sequence[float]) -> _fluid.Engine:
        crossed = dict.fromkeys(link for r in routes for part in r.traffic for link in part)
        engine = _fluid.Engine([(link, self._capacity_Bps[link], 0.0) for link in crossed])
        for route, begin_s in zip(routes, start_s, strict=True):
            job = self.jobs[route.job]
            engine.add_job(
                job.name,
                compute_s=job.compute_s,
                bursts=bursts_of_parts(job, route.traffic),
                gpus=job.gpus,
                start_s=begin_s,
            )
        return engine


def _distinct_links(
    routes: Sequence[RoutedJob], capacity_Bps: Mapping[Link, float]
) -> list[RoutedJob]:
    """``routes`` without the links that slow the same parts as much as another link does.

    Of those the one of the largest capacity stays: a part's share follows its busiest link.
    """
    held: dict[Link, list[tuple[int, int, float]]] = {}
    for i, route in enumerate(routes):
        for k, part in enumerate(route.traffic):
            for link, moved in part.items():
                held.setdefault(link, []).append((i, k, moved / capacity_Bps[link]))
    kept: dict[tuple[tuple[int, int, float], ...], Link] = {}
    for link, column in held.items():
        alike = tuple(column)
        if alike not in kept or capacity_Bps[link] > capacity_Bps[kept[alike]]:
            kept[alike] = link
    stay = set(kept.values())
    return [
        replace(
            route,
            traffic=tuple({e: m for e, m in part.items() if e in stay} for part in route.traffic),
        )
        for route in routes
    ]


def played_alone_s(engine: _fluid.Engine, job: str, least_s: float) -> float:
    """Seconds of an iteration of a job that meets nobody in ``engine``, by playing it.

    Parts that share a link in equal shares may take longer than one transfer, ``least_s``, would.
    """
    mean_s = None
    while mean_s is None:
        engine.run_until(2.0 * max(engine.now_s, least_s))
        mean_s = engine.result(job)["mean_iteration_s"]
    return mean_s


def share_computing(
    job: Job, before: _fluid.JobResult, after: _fluid.JobResult, span_s: float
) -> float:
    """Share of the time in which a job computes, by the iterations that it ended in ``span_s``.

    Whole iterations, since a few of a slow job's would otherwise be outweighed by where the play
    cuts its first and last; a job that ended none is counted by its seconds.
    """
    ended = after["completed"] - before["completed"]
    spent_s = after["completed"] * (after["mean_iteration_s"] or 0.0)
    spent_s -= before["completed"] * (before["mean_iteration_s"] or 0.0)
    if not ended or spent_s <= 0:
        return (after["compute_s"] - before["compute_s"]) / span_s
    return ended * job.compute_s / spent_s


def _components(routes: Sequence[RoutedJob]) -> list[list[RoutedJob]]:
    """``routes`` grouped by whether a chain of common links joins them, each in order."""
    groups: list[tuple[set[Link], list[RoutedJob]]] = []
    for route in routes:
        own = route.links
        links, members = set(own), [route]
        apart = []
        for group in groups:
            if group[0].isdisjoint(own):
                apart.append(group)
            else:
                links |= group[0]
                members = group[1] + members
        groups = [*apart, (links, members)]
    return [sorted(members, key=lambda route: route.job) for _, members in groups]
