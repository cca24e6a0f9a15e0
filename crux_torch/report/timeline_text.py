"""A timeline in characters: when a job and those on its links compute and send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import set_cell_size

from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import ClusterStatus
from crux_torch.report.explanation import near_as_alone
from crux_torch.sim.advice import by_level
from crux_torch.sim.course import Watch, change
from crux_torch.sim.play import play
from crux_torch.words import safe, seconds

#: Steps of the job that are shown, and that are played before these.
STEPS, BEFORE = 3, 40
#: Letters of a job's name, and jobs.
NAME, JOBS = 12, 8
LEGEND = "# computes   + computes and sends   = sends   - sends slowly   . waits"
#: Share of the rate that it has alone from which a job sends, and from which not slowly.
SENDS, FAST = 0.02, 0.5


def timeline_lines(
    status: ClusterStatus,
    topology: Topology | None,
    job: str,
    step_s: float,
    others: Sequence[str],
    width: int = 80,
) -> Iterator[str]:
    """Yields a heading, a line for each job, and a legend.

    Args:
        step_s: of ``job``, as played.
        others: jobs that are shown below it, the first ones if they are many.
        width: of a line, in letters.

    Raises:
        SpecError: a job or link that can't be simulated.
        ScenarioError: the clock can't resolve the shortest iteration at the end.
    """
    live, factors = near_as_alone(status, topology, job)
    cells = max(10, width - NAME - 1)
    horizon_s = (BEFORE + STEPS) * step_s
    watch = Watch(np.linspace(BEFORE * step_s, horizon_s, cells + 1).tolist())
    play(by_level(live.taken, live.now, factors), live.now, horizon_s, watch=watch)
    course = watch.course()
    yield f"Who computes and sends when, as played, in {seconds(STEPS * step_s)}"
    for name in (job, *others[: JOBS - 1]):
        computes = change(course.compute_s[name], course.time_s) > 0.5
        rates = change(course.comm_s[name], course.time_s)
        marks = map(_mark, computes.tolist(), rates.tolist())
        yield f"{set_cell_size(safe(name), NAME)} {''.join(marks)}"
    yield LEGEND


def _mark(computes: bool, rate: float) -> str:
    if computes:
        return "+" if rate >= SENDS else "#"
    if rate < SENDS:
        return "."
    return "=" if rate >= FAST else "-"
