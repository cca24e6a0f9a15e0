"""``crux sim``: scenarios played, compared under schedulers, and explained job by job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from crux_torch import _fluid
from crux_torch.cli.main import CleanGroup
from crux_torch.cli.plots import can_draw, plot_option, put_plot
from crux_torch.cli.progress import counted, tracked
from crux_torch.cli.results import (
    NEW_FILE,
    json_option,
    names_option,
    number,
    put_json,
    scenario_argument,
)
from crux_torch.cli.sim_import import import_command
from crux_torch.cli.sim_trace import trace
from crux_torch.errors import CruxError
from crux_torch.report.tables import Grid, console, json_text, say
from crux_torch.schedule.model import Decision, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.schedule.schedulers import LIVE, SCHEDULERS
from crux_torch.sim.advice import JobAdvice, advise
from crux_torch.sim.course import Watch
from crux_torch.sim.play import JobReport, Report, play, run_scenario
from crux_torch.sim.scenario import Scenario, cluster_of, read_scenario

Row = dict[str, Any]

#: Schedulers that a plain `advise` plays.
QUICK = tuple(name for name in LIVE if name != "mlcc")
#: So many jobs are shown one by one unless others are named.
FEW = 8
#: Least gain that is told, as a share of an iteration.
LEAST = 5e-4

levels_option = number("--levels", 1, 64, 8, "Priority levels.")


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (CruxError, _fluid.SpecError) as error:
        raise click.ClickException(f"{file}: {error}") from None


@click.command("advise")
@scenario_argument
@click.option(
    "--job", "chosen", multiple=True, metavar="NAME", help="Advise this job only; may be repeated."
)
@names_option("--schedulers", "schedulers", SCHEDULERS, ",".join(QUICK))
@levels_option
@json_option
@click.option(
    "--html",
    "html_path",
    type=NEW_FILE,
    callback=can_draw,
    help="Write the tables to this file as a page, with charts.",
)
def advise_command(
    file: Path,
    chosen: tuple[str, ...],
    schedulers: tuple[str, ...],
    levels: int,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Say who slows each job in FILE down, and what each scheduler would change.

    The jobs are played on the paths in FILE with fair sharing, again without each other job on
    their links, and under each scheduler. Without a rival, a job is faster by what that rival costs
    it; two rivals may each cost nothing if either alone is enough to hold the job up.

    mlcc plays time slots, which takes minutes for a hundred jobs: name it to have it.
    """
    scenario = read_scenario(file)
    for name in chosen:
        if name not in scenario.jobs:
            near = get_close_matches(name, scenario.jobs, n=3) or list(scenario.jobs)[:3]
            raise click.ClickException(f"{file} has no job {name!r}, but {', '.join(near)}")
    with _named_errors(file):
        cluster, default_path = cluster_of(scenario)
        options = SchedulerOptions(tuple(range(levels)), 0, default_path)
        under = {name: (cluster, SCHEDULERS[name](cluster, options)) for name in schedulers}
        with counted("plays") as played:
            found = advise(
                cluster,
                ecmp(cluster, options),
                scenario.horizon_s,
                starts_s=[{name: job.start_s for name, job in scenario.jobs.items()}],
                under=under,
                of=chosen or None,
                slack_bytes=scenario.slack_bytes,
                progress=played,
            ).jobs
    named = found if chosen or len(found) <= FEW else ()
    tables = [_worst_first(found), *(_table(name, found[name]) for name in named)]
    if html_path is not None:
        from crux_torch.report.page.simulated import advice_charts

        with _named_errors(file):
            charts = advice_charts(scenario, found)
        put_plot(html_path, f"Who slows whom down in {file.name}", tables, charts)
    jobs = {name: asdict(advice) for name, advice in found.items()}
    settings = {"file": file.name, "levels": levels}
    result = {"benchmark": "advise", "settings": settings, "jobs": jobs}
    if not put_json(json_path, json_text(result)):
        for table in tables:
            table.print(console())
        if not named:
            say(console(), "--job NAME: all rivals of a job, and all schedulers")


def _worst_first(found: Mapping[str, JobAdvice]) -> Grid:
    """A row for each job: its dearest rival and its best scheduler; who loses most comes first."""
    rows = []
    for name, advice in found.items():
        now_s, alone_s = advice.iteration_s, advice.alone_s
        row = {"job": name, "iteration s": "-", "slowdown": "-", "rival": "-", "without it": "-"}
        row |= {"scheduler": "-", "under it": "-"}
        if now_s is not None:
            row["iteration s"] = f"{now_s:.4g}"
            row["slowdown"] = f"{now_s / alone_s:.2f}" if alone_s else "-"
            for who, change, times_s in (
                ("rival", "without it", advice.without_s),
                ("scheduler", "under it", advice.under_s),
            ):
                known = {key: then_s for key, then_s in times_s.items() if then_s is not None}
                best = min(known, key=lambda key: known[key], default=None)
                if best is not None and known[best] < (1.0 - LEAST) * now_s:
                    row[who], row[change] = best, f"{known[best] / now_s - 1:+.1%}"
        rows.append((now_s is not None, -(now_s or 0.0) / (alone_s or 1.0), row))
    rows.sort(key=lambda each: each[:2])
    title = "the rival that costs each job most, and the scheduler under which it is fastest"
    return Grid([row for *_, row in rows], text=("job", "rival", "scheduler"), title=title)


def _table(name: str, advice: JobAdvice) -> Grid:
    now_s = advice.iteration_s
    title = f"{name}: {'no iteration ends' if now_s is None else f'{now_s:.4f} s an iteration'}"
    rows = []

    def row(change_of: str, then_s: float | None) -> None:
        known = now_s is not None and then_s is not None
        change = f"{then_s / now_s - 1:+.1%}" if known else "-"  # type: ignore[operator]
        shown = "-" if then_s is None else f"{then_s:.4f}"
        rows.append({"if": change_of, "iteration s": shown, "change": change})

    row("alone", advice.alone_s)
    # The one that costs most comes first.
    for rival, then_s in sorted(advice.without_s.items(), key=lambda r: (r[1] is None, r[1] or 0)):
        row(f"without {rival}", then_s)
    for scheduler, then_s in advice.under_s.items():
        row(f"under {scheduler}", then_s)
    return Grid(rows, text=("if",), title=title)


@click.command()
@scenario_argument
@names_option("--schedulers", "schedulers", SCHEDULERS, "all")
@levels_option
@click.option("--seed", default=0, help="Seed of the schedulers' random draws.")
@json_option
@plot_option
def compare(
    file: Path,
    schedulers: tuple[str, ...],
    levels: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Play the scenario in FILE under each scheduler.

    The schedulers choose levels, weights and paths; levels and weights in the file have no effect.
    A job's `path` in the file is the path that ECMP takes.
    """
    scenario = read_scenario(file)
    with _named_errors(file):
        cluster, default_path = cluster_of(scenario)
        options = SchedulerOptions(tuple(range(levels)), seed, default_path)
        start_s = {name: job.start_s for name, job in scenario.jobs.items()}

        def played(name: str) -> Report:
            decision = decisions[name] = SCHEDULERS[name](cluster, options)
            notes.extend(f"{name}: {note}" for note in decision.notes)
            return play(
                cluster,
                decision,
                scenario.horizon_s,
                start_s=start_s,
                slack_bytes=scenario.slack_bytes,
            )

        notes: list[str] = []
        decisions: dict[str, Decision] = {}
        alone = played("ideal").jobs
        rows: list[Row] = []
        for name in tracked(schedulers, "schedulers"):
            report = played(name)
            jobs = {}
            for job, result in report.jobs.items():
                mean_s, alone_s = result.mean_iteration_s, alone[job].mean_iteration_s
                times = mean_s / alone_s if mean_s is not None and alone_s else None
                jobs[job] = {"mean_iteration_s": mean_s, "slowdown": times}
            rows.append(
                {"scheduler": name, "gpu_utilization": report.gpu_utilization, "jobs": jobs}
            )
    settings = {"file": file.name, "levels": levels, "seed": seed}
    found = {"benchmark": "compare", "settings": settings, "rows": rows, "notes": notes}
    tables = [_summary(rows), _jobs(rows, alone)]
    if plot_path is not None:
        from crux_torch.report.page.simulated import compare_charts

        with _named_errors(file):
            chosen = {name: decisions[name] for name in schedulers}
            charts = compare_charts(scenario, cluster, chosen, rows)
        put_plot(plot_path, f"{file.name} under each scheduler", tables, charts)
    if put_json(json_path, json_text(found)):
        return
    to = console()
    for table in tables:
        table.print(to)
    say(to, "ideal s: mean iteration under ideal, in seconds; -: no iteration ended")
    for note in notes:
        say(to, note)


def _summary(rows: Sequence[Row]) -> Grid:
    """A row for each scheduler."""
    shown = []
    for row in rows:
        times = {name: r["slowdown"] for name, r in row["jobs"].items() if r["slowdown"]}
        worst = max(times, key=lambda name: times[name], default="")
        shown.append(
            {
                "scheduler": row["scheduler"],
                "GPU utilization": f"{row['gpu_utilization']:.1%}",
                "mean slowdown": f"{fmean(times.values()):.2f}" if times else "-",
                "worst": f"{times[worst]:.2f}" if times else "-",
                "worst job": worst or "-",
            }
        )
    return Grid(shown, text=("scheduler", "worst job"))


def _jobs(rows: Sequence[Row], alone: Mapping[str, JobReport]) -> Grid:
    """A row for each job: its iteration under ideal, and its slowdown under each scheduler."""

    def cells(job: str) -> dict[str, str]:
        ideal_s = alone[job].mean_iteration_s
        found = {row["scheduler"]: row["jobs"][job]["slowdown"] for row in rows}
        return {
            "job": job,
            "ideal s": "-" if ideal_s is None else f"{ideal_s:.4g}",
            **{name: "-" if times is None else f"{times:.2f}" for name, times in found.items()},
        }

    title = "slowdown of each job: its mean iteration over the one under ideal"
    return Grid([cells(job) for job in alone], text=("job",), title=title)


@click.group(cls=CleanGroup, context_settings={"show_default": True})
def sim() -> None:
    """Simulate jobs on a network under Crux and other schedulers."""


sim.add_command(advise_command)
sim.add_command(compare)
sim.add_command(import_command)
sim.add_command(trace)


@sim.command()
@scenario_argument
@json_option
@click.option(
    "--skip-repeats/--no-skip-repeats",
    default=True,
    help="Count repetitions of the same state instead of playing them.",
)
@click.option(
    "--repeat-tolerance",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=1e-9,
    help="Two states count as the same if they differ by at most this share of the period.",
)
@plot_option
def run(
    file: Path,
    json_path: Path | None,
    skip_repeats: bool,
    repeat_tolerance: float,
    plot_path: Path | None,
) -> None:
    """Play the scenario in FILE to its horizon."""
    scenario = read_scenario(file)
    horizon_s = scenario.horizon_s
    with _named_errors(file), counted(f"% of {horizon_s:g} s", 100) as played:
        report = run_scenario(
            scenario,
            skip_repeats=skip_repeats,
            repeat_tolerance=repeat_tolerance,
            watch=Watch((), lambda now_s: played(int(100 * now_s / horizon_s), None)),
        )
    table = _sim_table(scenario, report)
    if plot_path is not None:
        from crux_torch.report.page.simulated import run_charts

        with _named_errors(file):
            charts = run_charts(scenario, report)
        put_plot(plot_path, f"{file.name} played", [table], charts)
    if not put_json(json_path, json_text(asdict(report))):
        table.print(console())


def _sim_table(scenario: Scenario, report: Report) -> Grid:
    rows = []
    for name, job in report.jobs.items():
        spec, mean_s = scenario.jobs[name], job.mean_iteration_s
        rows.append(
            {
                "job": name,
                "GPUs": f"{spec.gpus:g}",
                "level": str(spec.level),
                "iterations": str(job.completed),
                "compute s": f"{job.compute_s:.3f}",
                "comm s": f"{job.comm_s:.3f}",
                "iteration s": "-" if mean_s is None else f"{mean_s:.4f}",
            }
        )
    title = f"{report.horizon_s:g} s, GPU utilization {report.gpu_utilization:.1%}"
    return Grid(rows, text=("job",), title=title)
