"""`crux explain` beside the measurement of what it says: each job of heavy-3 paused in turn.

    python benchmarks/explain.py [--policies A,B] [--window S] [--rounds N] [--out DIR]

Real DDP jobs over gloo in network namespaces, which needs root (lab/contest.py). When a plan is in
force, `crux explain` is asked about every job. Then, round after round, each job waits between two
steps for a while, and the steps of the others are measured: the plan stays, so what they gain is
what that job cost them. A pause also frees the machine's cores, which the hosts of this network
share: so a cost is what the *wait* of a step becomes shorter, from its last gradient to the begin
of the next step. What its computation becomes shorter is told beside it.

Each cost is the median over the rounds; one round compares a pause with what was before and after.
A job's resolution is half of the 95% confidence interval of such a median, by the spread of all its
costs from round to round. What is below it can't be told from nothing, and counts as found if
`crux explain` says less than that, too.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).parents[1]))

from crux_torch.cli.results import Result, json_option, publish
from crux_torch.report.explain_text import render
from crux_torch.report.explanation import Explanation
from lab import netns, sockets
from lab.contest import CLUSTER, Turn
from lab.contest_scenarios import SCENARIOS
from lab.job import JobError

#: Costs within this share of the measured one count as found.
WITHIN = 0.20
#: Seconds that the steps which the store tells are the mean of, and of a pause before it is looked
#: at.
TOLD_S, SETTLE_S = 30.0, 1.5
#: Standard error of a median over that of a mean, of normal values.
MEDIAN_ERROR = 1.25
COLUMNS = "{:11} {:4} {:6} {:>9} {:>9} {:>11} {:>9} {:>9} {:>7}"
HEADS = ("policy", "job", "rival", "step", "measured", "resolution", "explain", "compute", "found")

Found = Literal["yes", "below", "no"]


@dataclass(frozen=True)
class StepParts:
    """Means of one job's steps in a window: from begin to begin, and computation."""

    step_s: float
    compute_s: float

    @property
    def wait_s(self) -> float:
        """The rest of the step."""
        return self.step_s - self.compute_s


#: Of one window, the steps of each job that ran.
Window = dict[str, StepParts]


@dataclass(frozen=True)
class Round:
    """Windows with all jobs, and without each: with the numbers of those before and after."""

    together: list[Window]
    without: dict[str, tuple[Window, int, int]]

    def costs_s(self, job: str, rival: str, of: str = "wait_s") -> float:
        """Seconds by which the job waits (or computes) longer beside the rival."""
        window, before, after = self.without[rival]
        beside = [getattr(self.together[i][job], of) for i in (before, after)]
        return float(statistics.mean(beside) - getattr(window[job], of))


class Explained(Turn):
    """A turn in whose window every job is explained, and paused again and again."""

    rounds = 3

    def _measure(self) -> None:
        self._say(f"{self.seen.policy}: all jobs run for {TOLD_S:g} s")
        self._wait(TOLD_S)
        told = {name: self._explain(name) for name in self._jobs}
        spines = {}
        for name, job in self._jobs.items():
            with sockets.busiest(job.workers()[0]) as connection:
                ports = connection.getsockname()[1], connection.getpeername()[1]
            spines[name] = self._spine(name, 0, ports)
        rounds = []
        for number in range(self.rounds):
            self._say(f"{self.seen.policy}: round {number + 1} of {self.rounds}")
            rounds.append(self._round())
        self.rows = rows_of(self.seen.policy, told, rounds, self._named(told, spines))
        self.text = {name: _text(found) for name, found in told.items()}

    def _round(self) -> Round:
        """Two jobs pause one after the other between two windows with all."""
        names = list(self._jobs)
        together, without = [self._window()], {}
        for first in range(0, len(names), 2):
            before = len(together) - 1
            for absent in names[first : first + 2]:
                self._jobs[absent].pause()
                without[absent] = self._window(), before, before + 1
                self._jobs[absent].resume()
            together.append(self._window())
        return Round(together, without)

    def _window(self) -> Window:
        self._wait(SETTLE_S)
        begin = time.monotonic()
        self._wait(self._window_s)
        end = time.monotonic()
        found = {}
        for name, job in self._jobs.items():
            steps = [step for step in job.steps() if begin <= step.start <= end]
            if len(steps) > 2:
                found[name] = StepParts(
                    (steps[-1].start - steps[0].start) / (len(steps) - 1),
                    statistics.mean(step.computed - step.start for step in steps[:-1]),
                )
        return found

    def _named(self, told: dict[str, Explanation], spines: dict[str, int]) -> dict[str, bool]:
        """True for each job that is told of the links and jobs that its packets meet."""
        right = {}
        for name, found in told.items():
            met = {other for other in spines if other != name and spines[other] == spines[name]}
            spine = f"spine{spines[name]}"
            links = {
                link
                for leaf in self._scenario.leaves(name)
                for link in (f"leaf{leaf}->{spine}", f"{spine}->leaf{leaf}")
            }
            right[name] = {rival.job for rival in found.rivals} == met and (
                {link for link, _ in found.links} == (links if met else set())
            )
        return right

    def _explain(self, job: str) -> Explanation:
        first = self._hosts[self._scenario.workloads[0].name][0]
        store = self._status["store"]
        secret = str(self._folder / "secret")
        # It plays for seconds, on the cores that the jobs' hosts share.
        argv = ["nice", "-n", "19", "env", f"CRUX_STORE_SECRET={secret}", sys.executable]
        argv += ["-m", "crux_torch.cli", "explain", job, "--store", store]
        argv += ["--cluster", CLUSTER, "--json"]
        return msgspec.json.decode(self._fabric.run(first, argv), type=Explanation)


def _text(found: Explanation) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        render(found)
    return text.getvalue()


def rows_of(
    policy: str, told: dict[str, Explanation], rounds: Sequence[Round], named: dict[str, bool]
) -> list[dict[str, Any]]:
    """A row for each job, and one for each pair of jobs."""
    rows: list[dict[str, Any]] = []
    for name, found in told.items():
        windows = [window[name] for each in rounds for window in each.together]
        step_s = statistics.median(window.step_s for window in windows)
        rivals = sorted(told.keys() - {name})
        costs_s = {r: [each.costs_s(name, r) for each in rounds] for r in rivals}
        # Over all rivals: of few rounds, the spread of one is a matter of luck.
        variance = statistics.mean(statistics.variance(values) for values in costs_s.values())
        quantile = float(student.ppf(0.975, len(rivals) * (len(rounds) - 1)))
        resolution_s = quantile * MEDIAN_ERROR * (variance / len(rounds)) ** 0.5
        about = {"policy": policy, "job": name, "step_s": step_s, "resolution_s": resolution_s}
        rows.append(
            {**about, "rival": "", "named": named[name], "told_s": found.steps.step_s}
            | {"played_s": found.played_s, "links": [link for link, _ in found.links]}
        )
        said = {rival.job: rival.costs_s or 0.0 for rival in found.rivals}
        for rival in rivals:
            cost_s, told_s = statistics.median(costs_s[rival]), said.get(rival, 0.0)
            compute_s = [each.costs_s(name, rival, "compute_s") for each in rounds]
            rows.append(
                {**about, "rival": rival, "costs_s": cost_s, "told_costs_s": told_s}
                | {"rounds_s": costs_s[rival], "compute_s": statistics.median(compute_s)}
                | {"found": verdict(told_s, cost_s, resolution_s)}
            )
    return rows


def verdict(told_s: float, cost_s: float, resolution_s: float) -> Found:
    """``yes``: within ``WITHIN`` of the measured cost; ``below``: neither can be resolved."""
    if abs(cost_s) <= resolution_s:
        return "below" if abs(told_s) <= resolution_s else "no"
    return "yes" if abs(told_s - cost_s) <= WITHIN * abs(cost_s) else "no"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [COLUMNS.format(*HEADS)]
    costs = [row for row in rows if row["rival"]]
    for row in costs:
        keys = ("step_s", "costs_s", "resolution_s", "told_costs_s", "compute_s")
        # The sum has no minus before a zero.
        ms = (f"{round(1e3 * row[key], 1) + 0.0:.1f} ms" for key in keys)
        lines.append(COLUMNS.format(row["policy"], row["job"], row["rival"], *ms, row["found"]))
    count = {found: sum(row["found"] == found for row in costs) for found in ("yes", "below", "no")}
    error = statistics.median(abs(row["told_costs_s"] - row["costs_s"]) for row in costs)
    jobs = [row for row in rows if not row["rival"]]
    lines += [
        f"links and jobs are named as they are for {sum(row['named'] for row in jobs)} of "
        f"{len(jobs)} jobs",
        f"of {len(costs)} costs: {count['yes']} within {WITHIN:.0%} of the measured one (yes), "
        f"{count['below']} too",
        f"small to be measured, and told so (below), {count['no']} otherwise (no); "
        f"median error {1e3 * error:.1f} ms",
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--policies", default="crux,crux-paper", show_default=True, help="One after another.")
@click.option("--window", "window_s", default=5.0, show_default=True, help="Seconds a measurement.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(2))
@click.option("--seed", default=1, show_default=True, help="Draws arrivals and paths.")
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/explain.{json,txt}.")
def main(
    policies: str, window_s: float, rounds: int, seed: int, json_path: Path | None, out: Path | None
) -> None:
    """Compares what `crux explain` says a job costs another with what pausing that job gives."""
    possible, reason = netns.available()
    if not possible:
        raise click.ClickException(f"no network of namespaces here: {reason}")
    scenario = SCENARIOS["heavy-3"]
    rows: list[dict[str, Any]] = []
    told = []
    say = partial(click.echo, err=True)
    for policy in policies.split(","):
        for left in (1, 0):
            with scenario.fabric() as fabric, tempfile.TemporaryDirectory() as folder:
                turn = Explained(scenario, policy, fabric, Path(folder), seed, window_s, say)
                turn.rounds = rounds
                try:
                    turn.play()
                except JobError as error:
                    # On a busy machine, the store may not answer in time.
                    say(f"{policy}: {error}")
                    if not left:
                        raise click.ClickException(f"{policy}: no measurement") from None
                    continue
            rows += turn.rows
            told += [f"$ crux explain {job}\n{text}" for job, text in turn.text.items()]
            break
    settings = {"scenario": scenario.name, "window_s": window_s, "rounds": rounds, "seed": seed}
    publish(Result("explain", settings, rows), "\n".join([table(rows), *told]), json_path, out)


if __name__ == "__main__":
    main()
