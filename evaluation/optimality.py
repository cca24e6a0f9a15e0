"""Distance of schedulers to the optimum of small cases, mechanism by mechanism (paper §4.4).

A case's every choice of paths under every assignment of levels is played; the best is the optimum.
All are played briefly first, and of these the ones near the best again at length.
In the ablation one mechanism decides, and the other two are at their optimum:

- **paths**: the scheduler's paths, under the levels that are best for these paths;
- **priority**: the scheduler's order of the jobs, on the optimal paths, in the best of all valid
  compressions of that order (no job below one that it meets and that it goes before);
- **compression**: the scheduler's compression of the optimal order, on the optimal paths. Of the
  orders that compress to the optimum, the optimal one is the best when each job has its own level.

So in each of the three the optimum itself is reached by the best decision.

- **capped**: as paths, but only plans that keep the default policy's cap on slowdowns count, of the
  optimum's, too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import permutations, product
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console

from crux_torch.cli.progress import tracked
from crux_torch.cli.results import Result, json_option, publish, workers_option
from crux_torch.report.tables import Grid
from crux_torch.schedule.arrays import (
    FloatArray,
    IntArray,
    arrays_of,
    check_levels,
    choice_of,
    traffic_matrix,
)
from crux_torch.schedule.default.cap import SlowdownCap
from crux_torch.schedule.default.contention import contention_priorities
from crux_torch.schedule.default.crux import BRIEF, FEW_WORK, crux
from crux_torch.schedule.default.rehearsal import Length, Rehearsal, RoutedJob
from crux_torch.schedule.default.search import Assignment, dense
from crux_torch.schedule.model import Cluster, Decision, Scheduler, SchedulerOptions
from crux_torch.schedule.papers.baselines import (
    compress_balanced,
    compress_first,
    ecmp,
    sincronia,
    taccl,
    varys,
)
from crux_torch.schedule.papers.crux import compress_priorities, crux_pa, crux_ps_pa
from crux_torch.schedule.papers.intensity import by_descending
from crux_torch.sim.workers import Workers, mapped
from evaluation.small_case import AGGREGATIONS, HOSTS, JOBS, RING_MODELS, TORS, SmallCase, draw_case

LEVELS = (0, 1, 2)
MECHANISMS = ("paths", "capped", "priority", "compression")
#: Plays that judge; the default policy rehearses shorter ones, from other start times.
JUDGED = Length(phases=4, iterations=400, rounds=16)
#: Brief plays of everything, and how far below their best, as a share of it, a plan may be there to
#: be judged. Next to long plays the brief ones err by 0.4% (RMS), and at most by 4%, which happens
#: to plans that starve a job.
SCREENED = Length(phases=1, iterations=150, rounds=8)
NEAR = 0.03
_JUDGE_SEED = 1 << 20
_CDF_POINTS = 201
#: Mean share of the optimum that the paper reports (§4.4); the baselines' are drawn, not stated.
PAPER = {
    ("paths", "crux-paper"): 0.9769,
    ("priority", "crux-paper"): 0.9724,
    ("compression", "crux-paper"): 0.9712,
}
PathOfJob = dict[str, tuple[int, ...]]
#: Job names, the first to send first.
Order = tuple[str, ...]
Compression = Callable[[Cluster, Order, SchedulerOptions], Mapping[str, int]]


class Table:
    """The GPU utilisation of every choice of paths under every assignment of levels.

    Args:
        cluster: jobs of few flows: all choices of their candidates are enumerated.
        levels: how many there are.
        length: of the plays that judge.
    """

    def __init__(self, cluster: Cluster, levels: int = 3, length: Length = JUDGED) -> None:
        self._rehearsal = Rehearsal(cluster, length, seed=_JUDGE_SEED)
        screen = Rehearsal(cluster, SCREENED, seed=_JUDGE_SEED)
        jobs = self._rehearsal.jobs
        self.names = tuple(job.name for job in jobs)
        self._gpus = sum(job.gpus for job in jobs)
        #: Every assignment of levels, a row each.
        self.levels: IntArray = np.array(list(product(range(levels), repeat=len(jobs))), np.int64)
        own = [list(product(*(range(len(f.candidates)) for f in job.flows))) for job in jobs]
        #: Every choice of paths: for each job the candidates that its flows take.
        self.paths: list[tuple[tuple[int, ...], ...]] = list(product(*own))
        self._row = {path: i for i, path in enumerate(self.paths)}
        plans = ((_routes(screen, path), self.levels) for path in self.paths)
        #: By brief plays: a row for each choice of paths, a column for each assignment of levels.
        self.screened: FloatArray = np.array(screen.busy_gpus(plans)) / self._gpus
        self._screening_plays = screen.plays

        peaks = self.screened.max(axis=1)
        rows = np.flatnonzero(peaks >= peaks.max() * (1 - NEAR)).tolist()
        found = [self._judged(row, self.screened[row] >= peaks.max() * (1 - NEAR)) for row in rows]
        best = max(range(len(rows)), key=lambda i: found[i][0])
        self.optimum, column = found[best]
        self._best_row = rows[best]
        self.best_path: PathOfJob = dict(zip(self.names, self.paths[self._best_row], strict=True))
        self.best_levels: IntArray = self.levels[column]
        self.best_order: Order = self._find_best_order()

    @property
    def plays(self) -> int:
        """Engines that were run."""
        return self._screening_plays + self._rehearsal.plays

    def of_paths(self, path: Mapping[str, tuple[int, ...]]) -> float:
        """The utilisation on ``path`` under the levels that are best there."""
        row = self._row[tuple(tuple(path[name]) for name in self.names)]
        return self._best(row, np.ones(len(self.levels), bool))

    def of_capped_paths(self, path: Mapping[str, tuple[int, ...]], cap: SlowdownCap) -> float:
        """As :meth:`of_paths`, of the levels under which no job is slowed down beyond the cap."""
        row = self._row[tuple(tuple(path[name]) for name in self.names)]
        return self._judged(row, self._kept(row, cap))[0]

    def capped_optimum(self, cap: SlowdownCap) -> float:
        """The optimum of the plans that keep the cap."""
        kept = [self._kept(row, cap) for row in range(len(self.paths))]
        peaks = np.array([self.screened[row, k].max() for row, k in enumerate(kept)])
        rows = np.flatnonzero(peaks >= peaks.max() * (1 - NEAR)).tolist()
        return max(self._judged(row, kept[row])[0] for row in rows)

    def _kept(self, row: int, cap: SlowdownCap) -> npt.NDArray[np.bool_]:
        """The best of the levels that keep the cap, and those near them."""
        kept = np.zeros(len(self.levels), bool)
        least = -np.inf
        for column in np.argsort(-self.screened[row], kind="stable").tolist():
            if self.screened[row, column] < least:
                break
            if cap.keeps(Assignment(self.paths[row], dense(self.levels[column].tolist()))):
                least = max(least, self.screened[row, column] * (1 - NEAR))
                kept[column] = True
        return kept

    def of_order(self, order: Order) -> float:
        """The utilisation of the best valid compression of ``order`` on the optimal paths."""
        valid = np.ones(len(self.levels), bool)
        for above, below in self._meeting(order):
            valid &= self.levels[:, above] >= self.levels[:, below]
        return self._best(self._best_row, valid)

    def of_levels(self, level: Mapping[str, int]) -> float:
        """The utilisation of an assignment of levels on the optimal paths."""
        _, rank = np.unique([level[name] for name in self.names], return_inverse=True)
        return self._judged(self._best_row, (self.levels == rank).all(axis=1))[0]

    def _best(self, row: int, allowed: npt.NDArray[np.bool_]) -> float:
        """The best of the ``allowed`` levels under the paths of ``row``."""
        near = self.screened[row] >= self.screened[row, allowed].max() * (1 - NEAR)
        return self._judged(row, allowed & near)[0]

    def _judged(self, row: int, asked: npt.NDArray[np.bool_]) -> tuple[float, int]:
        """By long plays: the utilisation of the best of the ``asked`` levels, and its column."""
        columns = np.flatnonzero(asked)
        routes = _routes(self._rehearsal, self.paths[row])
        busy = self._rehearsal.busy_gpus([(routes, self.levels[columns])])[0]
        best = int(np.argmax(busy))
        return float(busy[best]) / self._gpus, int(columns[best])

    def _meeting(self, order: Order) -> list[tuple[int, int]]:
        """Pairs of jobs that share a link on the optimal paths, the earlier one first."""
        rank = {self.names.index(name): r for r, name in enumerate(order)}
        pairs = []
        routes = _routes(self._rehearsal, self.paths[self._best_row])
        for part in self._rehearsal.parts(routes)[1]:
            for i, k in part.pairs:
                one, other = part.jobs[i], part.jobs[k]
                pairs.append((one, other) if rank[one] < rank[other] else (other, one))
        return pairs

    def _find_best_order(self) -> Order:
        level = self.best_levels
        groups = [np.flatnonzero(level == k).tolist() for k in sorted(set(level.tolist()))[::-1]]
        orders = [sum(parts, ()) for parts in product(*map(permutations, groups))]
        ranks = np.empty((len(orders), len(level)), np.int64)
        for o, order in enumerate(orders):
            ranks[o, list(order)] = np.arange(len(order), 0, -1)
        routes = _routes(self._rehearsal, self.paths[self._best_row])
        busy = self._rehearsal.busy_gpus([(routes, ranks)])[0]
        return tuple(self.names[j] for j in orders[int(np.argmax(busy))])


def _routes(rehearsal: Rehearsal, path: Sequence[tuple[int, ...]]) -> list[RoutedJob]:
    return [rehearsal.route(j, own) for j, own in enumerate(path)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Value of one scheduler's decision on one mechanism of one case.

    Attributes:
        share: of the optimal utilisation.
        decision_s: seconds that it took to decide.
        cpu_s: seconds of them that it computed; less on a machine that is busy otherwise.
    """

    share: float
    decision_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case.

    Attributes:
        seed: of the case.
        optimum: the highest utilisation of any choice of paths under any levels.
        plays: engines that were run to find it.
        verdicts: by mechanism and scheduler.
    """

    seed: int
    optimum: float
    plays: int
    verdicts: dict[tuple[str, str], Verdict]


def judge(case: SmallCase, *, length: Length = JUDGED) -> Outcome:
    """Every scheduler's share of the optimum in ``case``, for each mechanism."""
    table = Table(case.cluster, len(LEVELS), length)
    reached: dict[tuple[str, str], tuple[float, float, float]] = {}

    def add(mechanism: str, scheduler: str, decide: Callable[[], Any], worth: Any) -> Any:
        begin_s, cpu_begin_s = perf_counter(), process_time()
        decision = decide()
        taken_s, cpu_s = perf_counter() - begin_s, process_time() - cpu_begin_s
        reached[mechanism, scheduler] = worth(decision), taken_s, cpu_s
        return decision

    options = SchedulerOptions(LEVELS, seed=case.seed, default_path=case.default_path)
    cap = SlowdownCap(arrays_of(case.cluster), options.max_slowdown)
    for name, scheduler in PATHS.items():
        decision = add(
            "paths",
            name,
            partial(scheduler, case.cluster, options),
            lambda d: table.of_paths(d.path),
        )
        _, *times_s = reached["paths", name]
        reached["capped", name] = table.of_capped_paths(decision.path, cap), *times_s
    best = replace(options, default_path=table.best_path)
    for name, order_of in ORDERS.items():
        add("priority", name, partial(order_of, case.cluster, best), table.of_order)
    for name, compress_of in COMPRESSIONS.items():
        decide = partial(compress_of, case.cluster, table.best_order, best)
        add("compression", name, decide, table.of_levels)
    # What a decision reaches can be reached, even where brief plays had left it out.
    optimum = max([table.optimum, *(utilization for utilization, _, _ in reached.values())])
    of_capped = [u for (mechanism, _), (u, _, _) in reached.items() if mechanism == "capped"]
    optima = {"capped": max([table.capped_optimum(cap), *of_capped])}
    verdicts = {
        (mechanism, name): Verdict(utilization / optima.get(mechanism, optimum), taken_s, cpu_s)
        for (mechanism, name), (utilization, taken_s, cpu_s) in reached.items()
    }
    return Outcome(case.seed, optimum, table.plays, verdicts)


@cache
def _warmed_up() -> None:
    """A process's first case would pay for what is loaded or made on first use."""
    judge(draw_case(0))


def judge_seed(seed: int) -> Outcome:
    """As :func:`judge`, of the case of a seed, in any process."""
    _warmed_up()
    return judge(draw_case(seed))


def summarise(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each mechanism and scheduler: shares of the optimum, errors, decision times."""
    rows = []
    for mechanism, scheduler in outcomes[0].verdicts:
        verdicts = [outcome.verdicts[mechanism, scheduler] for outcome in outcomes]
        share = np.array([verdict.share for verdict in verdicts])
        rows.append(
            {
                "mechanism": mechanism,
                "scheduler": scheduler,
                "share_mean": float(share.mean()),
                "share_p5": float(np.quantile(share, 0.05)),
                "share_min": float(share.min()),
                "paper_share": PAPER.get((mechanism, scheduler)),
                "decision_ms": _spread_ms([verdict.decision_s for verdict in verdicts]),
                "decision_cpu_ms": _spread_ms([verdict.cpu_s for verdict in verdicts]),
                "error_cdf": _cdf(1.0 - share),
            }
        )
    return rows


def _spread_ms(times_s: Sequence[float]) -> dict[str, float]:
    times_ms = np.array(times_s) * 1e3
    median, p95, worst = np.quantile(times_ms, (0.5, 0.95, 1.0)).tolist()
    return {"median": median, "p95": p95, "max": worst}


def _cdf(errors: FloatArray) -> list[list[float]]:
    """Points (error, share of the cases with no larger one)."""
    fractions = np.linspace(0.0, 1.0, _CDF_POINTS)
    points: list[list[float]] = np.stack(
        (np.quantile(errors, fractions), fractions), axis=1
    ).tolist()
    return points


def _by_priority(scheduler: Scheduler) -> Callable[[Cluster, SchedulerOptions], Order]:
    """The order of the priorities that a scheduler assigns on the default paths."""

    def order(cluster: Cluster, options: SchedulerOptions) -> Order:
        priority = scheduler(cluster, options).priority
        return tuple(sorted(priority, key=lambda name: (-priority[name], name)))

    return order


def _crux_compression(
    cluster: Cluster, order: Order, options: SchedulerOptions
) -> Mapping[str, int]:
    """Crux's: Algorithm 1, edges weighing what the job above is worth."""
    arrays = arrays_of(cluster)
    traffic = traffic_matrix(arrays, choice_of(arrays, options.default_path))
    intensity = crux_pa(cluster, options).intensity
    names = [job.name for job in arrays.jobs]
    level, _ = compress_priorities(
        traffic[[names.index(name) for name in order]],
        np.array([intensity[name] for name in order]),
        options.levels,
        seed=options.seed,
    )
    return dict(zip(order, level.tolist(), strict=True))


def _by_rank(levels_of: Callable[[int, IntArray], IntArray]) -> Compression:
    """A compression that looks at nothing but the order."""

    def compression(cluster: Cluster, order: Order, options: SchedulerOptions) -> Mapping[str, int]:
        level = levels_of(len(order), check_levels(options.levels)).tolist()
        return dict(zip(order, level, strict=True))

    return compression


def uncapped(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """The default policy where a job may starve, as it may under the optimum."""
    return crux(cluster, replace(options, max_slowdown=float("inf")))


def _uncorrected(cluster: Cluster, options: SchedulerOptions) -> Order:
    """By intensity alone: what Crux's order would be if k_j were 1 for all."""
    intensity = crux_pa(cluster, options).intensity
    return tuple(sorted(intensity, key=lambda name: (-intensity[name], name)))


def _weighted(cluster: Cluster, options: SchedulerOptions) -> Order:
    """By corrected priorities: factors against all jobs that a job contends with."""
    arrays = arrays_of(cluster)
    choice = choice_of(arrays, options.default_path)
    priority = contention_priorities(arrays, traffic_matrix(arrays, choice)).priority
    return tuple(arrays.jobs[j].name for j in by_descending(priority).tolist())


#: Who selects paths, assigns priorities and compresses them. The baselines are the paper's. Added
#: are Varys' compression (Figure 13) and orders that show what the correction factors bring.
PATHS: dict[str, Scheduler] = {
    "crux-paper": crux_ps_pa,
    "crux": crux,
    "crux-uncapped": uncapped,
    "taccl": taccl,
    "ecmp": ecmp,
}
ORDERS: dict[str, Callable[[Cluster, SchedulerOptions], Order]] = {
    "crux-paper": _by_priority(crux_pa),
    "intensity": _uncorrected,
    "weighted": _weighted,
    "sincronia": _by_priority(sincronia),
    "varys": _by_priority(varys),
}
COMPRESSIONS: dict[str, Compression] = {
    "crux-paper": _crux_compression,
    "sincronia": _by_rank(compress_first),
    "varys": _by_rank(compress_balanced),
}
TITLES = {
    "paths": "Path selection (§4.1)",
    "capped": "Path selection where no job may be slowed down beyond the default's cap",
    "priority": "Priority assignment (§4.2)",
    "compression": "Priority compression (§4.3)",
}


@click.command()
@click.option("--cases", type=click.IntRange(1), default=1500, show_default=True)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of case 1."
)
@workers_option
@json_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write NAME.json and NAME.txt to this folder.",
)
@click.option("--name", default="optimality", show_default=True, help="Name of the result.")
def optimality(
    cases: int, seed: int, workers: Workers, json_path: Path | None, out: Path | None, name: str
) -> None:
    """Small cases whose optimum is enumerated, as in the paper's §4.4 and Figure 16."""
    found = mapped(judge_seed, [(s,) for s in range(seed, seed + cases)], workers)
    outcomes = list(tracked(found, "cases", cases))
    result = Result(name, _settings(cases, seed, outcomes), summarise(outcomes))
    text = _text(result)
    publish(result, text, json_path, out)


def _settings(cases: int, seed: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "cases": cases,
        "seed": seed,
        "jobs": JOBS,
        "hosts": [HOSTS[0], HOSTS[-1]],
        "tors": [TORS[0], TORS[-1]],
        "aggregations": AGGREGATIONS,
        "levels": len(LEVELS),
        "models": [model.name for model in RING_MODELS],
        "screened": asdict(SCREENED),
        "near": NEAR,
        "judged": asdict(JUDGED),
        "rehearsed": asdict(BRIEF),
        "rehearsal_work": FEW_WORK,
        "optimum_mean": float(np.mean([outcome.optimum for outcome in outcomes])),
        "plays": sum(outcome.plays for outcome in outcomes),
    }


def _text(result: Result) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=120, color_system=None)
    settings = result.settings
    console.print(
        f"{settings['cases']} cases of {settings['jobs']} jobs and {settings['levels']} levels: "
        f"share of the optimal GPU utilisation, which is {settings['optimum_mean']:.1%} on average"
    )
    for mechanism in MECHANISMS:
        _table([row for row in result.rows if row["mechanism"] == mechanism]).print(console)
    return buffer.getvalue()


def _table(rows: Sequence[Any]) -> Grid:
    shown = [
        {
            "scheduler": row["scheduler"],
            "mean": f"{row['share_mean']:.2%}",
            "paper": "" if row["paper_share"] is None else f"{row['paper_share']:.2%}",
            "5th percentile": f"{row['share_p5']:.2%}",
            "worst": f"{row['share_min']:.2%}",
            "decision ms": f"{row['decision_ms']['median']:.2f}",
            "CPU ms": f"{row['decision_cpu_ms']['median']:.2f}",
            "CPU p95": f"{row['decision_cpu_ms']['p95']:.2f}",
        }
        for row in rows
    ]
    return Grid(shown, text=("scheduler",), title=TITLES[rows[0]["mechanism"]])
