"""All policies on the same jobs, arrivals and paths: real training in a leaf-spine network.

    python benchmarks/contest.py [--minutes N] [--scenarios A,B] [--policies A,B] [--out DIR]

Real DDP jobs over gloo in network namespaces with queues, which needs root; lab/contest.py says how
a turn goes. Beside each measured step is what the simulator predicts for it: the jobs as each was
measured alone, on the paths that the kernels took, with the levels and shifts of the plan in force.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from crux_torch.cli.results import Result, publish
from crux_torch.schedule.schedulers import LIVE
from lab import netns
from lab.contest import NO_TOPOLOGY, NONE, Scenario, Seen, Turn
from lab.contest_scenarios import SCENARIOS
from lab.contest_tables import TIMELINE_S, summary, table, turn_of
from lab.job import JobError
from lab.measurement import losses_equal
from lab.prediction import Alone, fitted, predict, wanted

#: In the order of their turns.
POLICIES = (
    NONE, "sincronia", "varys", "taccl", "cassini", "mlcc", "crux-pa", "crux-paper", "crux",
)  # fmt: skip
#: Entrants that can be played. Nobody but a topology says who keeps mlcc's tables.
KNOWN = (NONE, *LIVE, *(f"{policy}{NO_TOPOLOGY}" for policy in LIVE if policy != "mlcc"))
#: The policy under which jobs alone are measured: it only orders them.
MEASURED_BY = "sincronia"
QUICK = ("pair",)


def rows_of(
    scenario: Scenario, seen: Seen, stock: Seen, round_: int, seed: int
) -> list[dict[str, Any]]:
    """A row for the turn, and one for each job; times in seconds."""
    names = [w.name for w in scenario.workloads]
    ranks = {name: len(scenario.leaves(name)) for name in names}
    compute_s = {name: stock.compute_s(name) for name in names}
    about = {"scenario": scenario.name, "policy": seen.policy, "round": round_, "seed": seed}
    jobs = []
    for name in names:
        times = seen.step_s(name)
        equal, compared = losses_equal(stock.steps[name], seen.steps[name])
        planned = seen.planned.get(name)
        jobs.append(
            {
                **about,
                "job": name,
                "step_s": statistics.mean(times) if times else None,
                "median_s": statistics.median(times) if times else None,
                "steps": len(times),
                "alone_s": stock.alone_s(name),
                "predicted_s": None,
                "completion_s": seen.completion_s(name),
                "to_plan_s": None if planned is None else planned - seen.arrived[name],
                "spine": seen.spines.get(name),
                "losses_equal": equal,
                "losses_compared": compared,
            }
        )
    rate_Bps = scenario.rate_mbit * 1e6 / 8
    one_link = scenario.spines == 1 and len(names) == 2
    late = [job["corrections_per_minute"] for job in seen.status.get("jobs", ())]
    entries = (seen.status.get("plan") or {}).get("entries", ())
    grids = {e["job"]: e["grid"] for e in entries if e.get("grid")}
    turn = {
        **about,
        "utilisation": seen.utilisation(compute_s, ranks),
        "ideal": seen_alone(stock, compute_s, ranks),
        "overlap": seen.overlap(rate_Bps) if one_link else None,
        "timeline": seen.timeline(rate_Bps, TIMELINE_S) if one_link else None,
        "corrections_per_minute": [n for n in late if n is not None] or None,
        "on_paths": seen.on_paths,
        "window_s": seen.window.length_s,
        "bytes": seen.bytes,
        "drops": sum(sum(of.values()) for of in seen.drops.values()),
        "levels": {e["job"]: e["level"] for e in entries},
        "grids": {name: [grid["shift_s"], grid["period_s"]] for name, grid in grids.items()},
        "load": seen.load,
    }
    return [turn, *jobs]


def seen_alone(stock: Seen, compute_s: Mapping[str, float], ranks: Mapping[str, int]) -> float:
    """The utilisation if every job ran as it does alone."""
    busy = sum(compute_s[n] / stock.alone_s(n) * ranks[n] for n in ranks)
    return busy / sum(ranks.values())


def predicted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with what follows from the jobs' records: the mean step of each in the fluid engine
    (see the head of this file), and what they want of the busiest link.

    Of several records of a job, the one with the shortest iteration counts: what else the machine
    does only lengthens it. A scenario without records keeps the predictions that its rows have, as
    do turns whose shifts are not in them. What jobs lose to each other in queues, no job alone
    shows: :func:`fitted` finds it in other scenarios.
    """
    records: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        for record in row.get("records", ()):
            of = records[row["scenario"]]
            best = of.setdefault(record["job"], record)
            if record["profile"]["period_s"] < best["profile"]["period_s"]:
                of[record["job"]] = record
    turns = {turn_of(row): row for row in rows if "utilisation" in row}
    jobs: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "job" in row:
            jobs[turn_of(row)].append(row)
    means: dict[tuple[Any, str], float | None] = {}
    wants: dict[Any, float] = {}
    alone: dict[Any, Alone] = {}
    for key, turn in turns.items():
        if turn["scenario"] not in records:
            continue
        scenario, known = SCENARIOS[turn["scenario"]], list(records[turn["scenario"]].values())
        wants[key] = wanted(scenario, known, jobs[key])
        if turn["corrections_per_minute"] is None or "grids" in turn:
            alone[key] = Alone(scenario, known, jobs[key])
    reached = fitted([(turns[key], jobs[key], each) for key, each in alone.items()])
    for key, each in alone.items():
        found = predict(each, turns[key], reached[key[0]])
        means |= {(key, row["job"]): found.get(row["job"]) for row in jobs[key]}
    changed = []
    for row in rows:
        if "utilisation" in row and turn_of(row) in wants:
            row = row | {"wanted": wants[turn_of(row)]}
            if row["scenario"] in reached:
                row |= {"reached": asdict(reached[row["scenario"]])}
        elif "job" in row and (turn_of(row), row["job"]) in means:
            row = row | {"predicted_s": means[turn_of(row), row["job"]]}
        changed.append(row)
    return changed


def run(
    scenario: Scenario,
    policies: Sequence[str],
    round_: int,
    seed: int,
    window_s: float,
    deadline: float,
    folder: Path,
    say: Any,
) -> list[dict[str, Any]]:
    """The turns of one scenario in one round, as many as begin before the deadline."""
    rows: list[dict[str, Any]] = []
    played: dict[str, Seen] = {}
    told = partial(_say, say, f"{scenario.name}, round {round_ + 1}")
    with scenario.fabric() as fabric:
        for policy in (NONE, *(p for p in policies if p != NONE)):
            where = folder / scenario.name / f"{round_}-{policy}"
            for left in (1, 0):
                if policy != NONE and time.monotonic() >= deadline:
                    say(f"{scenario.name}, {policy}: no time left")
                    break
                try:
                    turn = Turn(scenario, policy, fabric, where, seed + round_, window_s, told)
                    played[policy] = turn.play()
                    break
                except JobError as error:
                    say(f"{scenario.name}, {policy}: {error}")
                    if policy == NONE and not left:
                        raise
        if len(played) == 1 and set(policies) != {NONE}:
            return []  # nothing to compare it with
        for seen in played.values():
            rows += rows_of(scenario, seen, played[NONE], round_, seed + round_)
        if round_ == 0 and time.monotonic() < deadline:
            where = folder / scenario.name / "records"
            turn = Turn(scenario, MEASURED_BY, fabric, where, seed, window_s, told)
            try:
                records = turn.profile()
                rows.append({"scenario": scenario.name, "round": round_, "records": records})
            except JobError as error:
                say(f"{scenario.name}, the jobs alone: {error}; nothing is predicted")
    return rows


def _say(say: Callable[[str], None], where: str, text: str) -> None:
    say(f"{where}: {text}")


def _chosen(context: click.Context, option: click.Option, value: str) -> list[str]:
    known = list(SCENARIOS) if option.name == "scenarios" else list(KNOWN)
    chosen = value.split(",")
    if unknown := set(chosen) - set(known):
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))}; expected some of {', '.join(known)}"
        )
    return chosen


@click.command()
@click.option(
    "--scenarios",
    default=",".join(SCENARIOS),
    show_default=True,
    callback=_chosen,
    help="Which ones.",
)
@click.option(
    "--policies",
    default=",".join(p for p in POLICIES if p in KNOWN),
    show_default=True,
    callback=_chosen,
    help=f"In this order; none is always played first. {NO_TOPOLOGY} after a policy: its jobs are "
    "given no topology, and find the network themselves.",
)
@click.option("--rounds", default=3, show_default=True, help="Turns of each policy and scenario.")
@click.option(
    "--window", "window_s", default=20.0, show_default=True, help="Seconds measured in a turn."
)
@click.option("--seed", default=1, show_default=True, help="Draws arrivals and paths.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Begin no turn after so many; each round plays all scenarios.",
)
@click.option("--quick", is_flag=True, help="One short round of the smallest scenario.")
@click.option(
    "--from",
    "earlier",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Play nothing, and show what these files of --json hold together.",
)
@click.option(
    "--keep",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Play, and put what these files hold before it.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/contest.{json,txt}.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep what the jobs print here.")
def main(
    scenarios: list[str],
    policies: list[str],
    rounds: int,
    window_s: float,
    seed: int,
    minutes: float | None,
    quick: bool,
    earlier: tuple[Path, ...],
    keep: tuple[Path, ...],
    json_path: Path | None,
    out: Path | None,
    logs: Path | None,
) -> None:
    """Plays every policy on the same jobs, and writes what there is after each scenario."""
    if earlier:
        _show([json.loads(file.read_text()) for file in earlier], json_path, out)
        return
    possible, reason = netns.available()
    if not possible:
        raise click.ClickException(f"no network of namespaces here: {reason}")
    if quick:
        scenarios, rounds, window_s = list(QUICK), 1, min(window_s, 8.0)
    console = Console(stderr=True)
    began_s = time.monotonic()
    deadline = began_s + 60.0 * (minutes or math.inf)
    kept = [json.loads(file.read_text()) for file in keep]
    rows: list[dict[str, Any]] = []
    settings = {
        "scenarios": scenarios, "policies": policies, "rounds": rounds, "window_s": window_s,
        "seed": seed, "torch": torch.__version__, "cpus": os.cpu_count(),
    }  # fmt: skip
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = logs.absolute() if logs else Path(scratch)
        for round_, name in itertools.product(range(rounds), scenarios):
            if time.monotonic() >= deadline:
                console.print(f"{name}, round {round_ + 1}: no time left")
                continue
            try:
                rows += run(
                    SCENARIOS[name], policies, round_, seed, window_s, deadline, folder,
                    lambda text: console.print(f"{time.monotonic() - began_s:5.0f} s  {text}"),
                )  # fmt: skip
            except Exception as error:
                # What the others show must not be lost.
                failed.append(f"{name}, round {round_ + 1}: {error!r}")
                console.print(failed[-1])
                continue
            mine = predicted([row for row in rows if row["scenario"] == name])
            console.print(table(SCENARIOS[name], mine))
            result, text = _merged([*kept, {"settings": settings, "rows": rows}])
            result.write(text, json_path, out)
    if not rows:
        raise click.ClickException("; ".join(failed) or "nothing was played")
    _show([*kept, {"settings": settings, "rows": rows}], json_path, out)
    if failed:
        raise click.ClickException("; ".join(failed))


def _show(results: Sequence[Mapping[str, Any]], json_path: Path | None, out: Path | None) -> None:
    """Print and write what some runs showed."""
    result, text = _merged(results)
    publish(result, text, json_path, out)


def _merged(results: Sequence[Mapping[str, Any]]) -> tuple[Result, str]:
    """What some runs showed together, and the tables of it."""
    rows: list[dict[str, Any]] = []
    settings: list[Any] = []
    for result in results:
        # The rounds of another file come after those that are there.
        after = Counter(dict.fromkeys(SCENARIOS, 0))
        for row in rows:
            after[row["scenario"]] = max(after[row["scenario"]], row["round"] + 1)
        rows += [row | {"round": row["round"] + after[row["scenario"]]} for row in result["rows"]]
        settings += result["settings"].get("runs", [result["settings"]])
    played = [name for name in SCENARIOS if any(row["scenario"] == name for row in rows)]
    rows = predicted(rows)
    text = "\n".join([*(table(SCENARIOS[name], rows) for name in played), summary(rows)])
    return Result("contest", {"runs": settings}, rows), text


if __name__ == "__main__":
    main()
