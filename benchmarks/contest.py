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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from lab.contest import JOB_STEPS, NO_TOPOLOGY, NONE, Scenario, Seen, Turn
from lab.job import JobError
from lab.measurement import losses_equal
from lab.prediction import Alone, fitted, predict, wanted
from lab.twins import Workload

#: In the order of their turns.
POLICIES = (
    NONE, "sincronia", "varys", "taccl", "cassini", "mlcc", "crux-pa", "crux-paper", "crux",
)  # fmt: skip
#: Entrants that can be played. Nobody but a topology says who keeps mlcc's tables.
KNOWN = (NONE, *LIVE, *(f"{policy}{NO_TOPOLOGY}" for policy in LIVE if policy != "mlcc"))
#: Seconds of a timeline, and of one of its characters.
TIMELINE_S, CELL_S = 3.0, 0.05
#: The policy under which jobs alone are measured: it only orders them.
MEASURED_BY = "sincronia"
#: Whom a job meets on its links.
MEETS = ("first on its links", "behind others", "beside others of its level")


def _gpt(name: str, ms: int, width: int) -> Workload:
    return Workload(name, "gpt", ("--accelerator-ms", str(ms), "--width", str(width)))


def _mlp(name: str, ms: int, width: int, seed: int = 0) -> Workload:
    flags = ("--accelerator-ms", str(ms), "--width", str(width), "--seed", str(seed))
    return Workload(name, "mlp", flags)


_LIGHT = (
    _mlp("B", 160, 384, 1),
    _mlp("C", 200, 448, 2),
    _mlp("D", 120, 320, 3),
    _mlp("E", 180, 352, 4),
)
_HEAVY = _gpt("A", 240, 80)
SCENARIOS = {
    s.name: s
    for s in (
        Scenario(
            "heavy-2", "Crux Fig. 19: two light jobs", (_HEAVY, *_LIGHT[:2]), spines=2, heavy="A"
        ),
        Scenario(
            "heavy-3", "Crux Fig. 19: three light jobs", (_HEAVY, *_LIGHT[:3]), spines=2, heavy="A"
        ),
        Scenario(
            "heavy-4", "Crux Fig. 19: four light jobs", (_HEAVY, *_LIGHT), spines=2, heavy="A"
        ),
        Scenario(
            "five",
            "Crux Fig. 20: a mix of five jobs",
            (
                _gpt("A", 200, 96), _gpt("B", 150, 64), _mlp("C", 250, 512, 2),
                _mlp("D", 100, 256, 3), _mlp("E", 160, 416, 4),
            ),
            spines=2,
            heavy="A",
        ),
        Scenario(
            "pair",
            "CASSINI Fig. 2: two compatible jobs that start together on one link",
            (_mlp("A", 300, 640), _mlp("B", 300, 640, 1)),
            rate_mbit=200.0,
            arrivals_s=0.0,
        ),
        Scenario(
            "clash",
            "CASSINI §2.2: two jobs that no shift parts",
            (_mlp("A", 60, 640), _mlp("B", 60, 640, 1)),
            rate_mbit=100.0,
            arrivals_s=0.0,
        ),
        Scenario(
            "starve",
            "a ring over three leaves that meets another job on each of its links",
            (
                _mlp("R", 200, 384), _gpt("X", 90, 80), _gpt("Y", 110, 80), _gpt("Z", 130, 80),
            ),
            leaves_of={"R": (0, 1, 2), "X": (0, 1), "Y": (1, 2), "Z": (2, 0)},
        ),
    )
}  # fmt: skip
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
    turns = {_turn_of(row): row for row in rows if "utilisation" in row}
    jobs: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "job" in row:
            jobs[_turn_of(row)].append(row)
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
        if "utilisation" in row and _turn_of(row) in wants:
            row = row | {"wanted": wants[_turn_of(row)]}
            if row["scenario"] in reached:
                row |= {"reached": asdict(reached[row["scenario"]])}
        elif "job" in row and (_turn_of(row), row["job"]) in means:
            row = row | {"predicted_s": means[_turn_of(row), row["job"]]}
        changed.append(row)
    return changed


def _turn_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["scenario"], row["policy"], row["round"]


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


def table(scenario: Scenario, rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one scenario as text: medians over rounds."""
    mine = [row for row in rows if row["scenario"] == scenario.name]
    turns = [row for row in mine if "utilisation" in row]
    names = [w.name for w in scenario.workloads]
    ideal = statistics.median(t["ideal"] for t in turns)
    wide = _wide(rows)
    lines = [
        f"{scenario.name}: {scenario.about}; {scenario.spines} spine"
        f"{'s' if scenario.spines > 1 else ''}, links of {scenario.rate_mbit:g} Mbit/s",
        f"  each alone: utilisation {ideal:.1%}",
        f"  {'policy':<{wide}}{'utilisation':>24}{'to plan':>9}{'drops':>7}{'link':>6}"
        f"{'wanted':>8}  step x alone (predicted): {', '.join(names)}",
    ]
    for policy in dict.fromkeys(t["policy"] for t in turns):
        of = [t for t in turns if t["policy"] == policy]
        jobs = [r for r in mine if "job" in r and r["policy"] == policy]
        used = [t["utilisation"] for t in of]
        waits = [j["to_plan_s"] for j in jobs if j["to_plan_s"] is not None]
        cells = ", ".join(_ratio([j for j in jobs if j["job"] == name]) for name in names)
        spread = f"{statistics.median(used):.1%} ({min(used):.1%}-{max(used):.1%})"
        wait = f"{statistics.median(waits):.0f} s" if waits else ""
        equal = all(j["losses_equal"] for j in jobs)
        overlaps = [t["overlap"] for t in of if t["overlap"] is not None]
        notes = f"; overlap {statistics.median(overlaps):.0%}" if overlaps else ""
        late = [n for t in of for n in t["corrections_per_minute"] or ()]
        notes += f"; late in a minute {max(late)}" if late else ""
        notes += "" if equal else "; LOSSES DIFFER"
        notes += "" if all(t["on_paths"] is not False for t in of) else "; paths not all taken"
        drops = statistics.median(t["drops"] for t in of)
        link = statistics.median(busiest_link(scenario, t) for t in of)
        wants = [t["wanted"] for t in of if "wanted" in t]
        want = f"{statistics.median(wants):.0%}" if wants else ""
        head = f"  {policy:<{wide}}{spread:>24}{wait:>9}{drops:>7.0f}{link:>6.0%}{want:>8}"
        lines.append(f"{head}  {cells}{notes}")
    last = {t["policy"]: t["timeline"] for t in turns if t.get("timeline")}
    if last:
        lines.append(f"  who sends in the last {TIMELINE_S:g} s, {1e3 * CELL_S:g} ms a character")
    for policy, lanes in last.items():
        lines += [f"  {policy:<{wide}}{name}  {_lane(spans)}" for name, spans in lanes.items()]
    return "\n".join(lines) + "\n"


def busiest_link(scenario: Scenario, turn: Mapping[str, Any]) -> float:
    """The share of its rate that the busiest direction of a link carried in the window."""
    most = max(sum(of.values()) for of in turn["bytes"].values())
    return most / turn["window_s"] / (scenario.rate_mbit * 1e6 / 8)


def _lane(spans: Sequence[Sequence[float]]) -> str:
    """A job's timeline: # where it sends for half of a character's time or longer."""
    cells = []
    for n in range(round(TIMELINE_S / CELL_S)):
        begin, end = n * CELL_S, (n + 1) * CELL_S
        sends_s = sum(max(0.0, min(b, end) - max(a, begin)) for a, b in spans)
        cells.append("#" if sends_s >= CELL_S / 2 else ".")
    return "".join(cells)


def _wide(rows: Sequence[dict[str, Any]]) -> int:
    """Characters of the column of entrants."""
    return max([12, *(len(row["policy"]) + 1 for row in rows if "policy" in row)])


def _ratio(jobs: Sequence[dict[str, Any]]) -> str:
    measured = [j["step_s"] / j["alone_s"] for j in jobs if j["step_s"]]
    if not measured:
        return "stopped"
    predicted = [j["predicted_s"] / j["alone_s"] for j in jobs if j["predicted_s"]]
    told = f" ({statistics.median(predicted):.2f})" if predicted else ""
    return f"{statistics.median(measured):.2f}{told}"


def _mean(scenarios: Iterable[Sequence[float]]) -> float:
    return statistics.mean(statistics.mean(values) for values in scenarios)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Over all scenarios, each counted once: utilisation and completion against no Crux, the job
    that is slowed down the most, and the prediction."""
    turns = [row for row in rows if "utilisation" in row]
    base = {(t["scenario"], t["round"]): t["utilisation"] for t in turns if t["policy"] == NONE}
    jobs = [row for row in rows if "job" in row]
    played = dict.fromkeys(t["scenario"] for t in turns)
    stock = {
        (j["scenario"], j["round"], j["job"]): j["completion_s"]
        for j in jobs
        if j["policy"] == NONE
    }
    head = f"completion of {JOB_STEPS} steps x {NONE}"
    wide = _wide(rows)
    lines = [
        "all scenarios, means",
        f"  {'policy':<{wide}}{'utilisation':>12}{f'x {NONE}':>9}{'worst':>8}{'slowest job':>13}"
        f"{head:>34}",
    ]
    for policy in dict.fromkeys(t["policy"] for t in turns):
        used: dict[str, list[float]] = defaultdict(list)
        against: dict[str, list[float]] = defaultdict(list)
        done: dict[str, list[float]] = defaultdict(list)
        slowed: dict[tuple[str, str], list[float]] = defaultdict(list)
        for t in (t for t in turns if t["policy"] == policy):
            used[t["scenario"]].append(t["utilisation"])
            against[t["scenario"]].append(t["utilisation"] / base[t["scenario"], t["round"]])
        mine = [j for j in jobs if j["policy"] == policy]
        for j in mine:
            before = stock[j["scenario"], j["round"], j["job"]]
            if j["completion_s"] and before:
                done[j["scenario"]].append(j["completion_s"] / before)
            if j["step_s"]:
                slowed[j["scenario"], j["job"]].append(j["step_s"] / j["alone_s"])
        gains = [statistics.mean(ratios) for ratios in against.values()]
        slowest = max(map(statistics.median, slowed.values()), default=math.nan)
        stopped = sum(j["completion_s"] is None for j in mine)
        tail = f", {stopped} stopped" if stopped else ""
        if lacks := [name for name in played if name not in used]:
            tail += f", without {', '.join(lacks)}"
        lines.append(
            f"  {policy:<{wide}}{_mean(used.values()):>12.1%}{statistics.mean(gains):>9.3f}"
            f"{min(gains):>8.3f}{slowest:>13.2f}{_mean(done.values()):>34.3f}{tail}"
        )
    lines += [f"  {line}" for line in [*_heavy(jobs), *_errors(turns, jobs)]]
    told = [j for j in jobs if j["losses_equal"] is not None]
    same = sum(j["losses_equal"] for j in told)
    lines.append(f"  losses equal to stock: {same} of {len(told)} jobs")
    return "\n".join(lines) + "\n"


def _heavy(jobs: Sequence[dict[str, Any]]) -> list[str]:
    """The first job of the scenarios that have a heavy one: mean and median step over alone."""
    heavy = [j for j in jobs if j["job"] == SCENARIOS[j["scenario"]].heavy]
    names = list(dict.fromkeys(j["scenario"] for j in heavy))
    if not names:
        return []
    wide = _wide(jobs)
    lines = ["the heavy job, mean step x alone (median step)"]
    lines.append(f"  {'policy':<{wide}}" + "".join(f"{name:>14}" for name in names))
    for policy in dict.fromkeys(j["policy"] for j in heavy):
        cells = []
        for name in names:
            mine = [j for j in heavy if (j["policy"], j["scenario"]) == (policy, name)]
            mean, median = (
                [j[key] / j["alone_s"] for j in mine if j[key]] for key in ("step_s", "median_s")
            )
            both = (
                f"{statistics.median(mean):.2f} ({statistics.median(median):.2f})" if mean else ""
            )
            cells.append(f"{both:>14}")
        lines.append(f"  {policy:<{wide}}" + "".join(cells))
    return lines


def _errors(turns: Sequence[dict[str, Any]], jobs: Sequence[dict[str, Any]]) -> list[str]:
    """How far predicted steps are from the measured ones, by whom a job meets on its links."""
    of_turn = {_turn_of(turn): turn for turn in turns}
    signed: dict[str, list[float]] = defaultdict(list)
    for job in jobs:
        if job["predicted_s"] and job["step_s"]:
            turn = of_turn[_turn_of(job)]
            met = _met(job, [j for j in jobs if _turn_of(j) == _turn_of(job)], turn["levels"])
            signed[met].append(job["predicted_s"] / job["step_s"] - 1.0)
    if not signed:
        return []
    everyone = list(itertools.chain(*signed.values()))
    lines = [f"the simulator's error of a step: {_spread(everyone)}"]
    told = [t["reached"] for t in turns if "reached" in t]
    for which, who in (("together", "jobs of one level"), ("beside", "a level beside others")):
        if shares := [each[which] for each in told]:
            lines.append(
                f"  {who}: {min(shares):.2f} to {max(shares):.2f} of what they reach alone, by the "
                "other scenarios"
            )
    lines += [
        f"  {met}: {_spread(signed[met])}, signed {statistics.median(signed[met]):+.1%}"
        for met in MEETS
        if met in signed
    ]
    return lines


def _spread(signed: Sequence[float]) -> str:
    errors = sorted(map(abs, signed))
    ninth = errors[round(0.9 * (len(errors) - 1))]
    return (
        f"median {statistics.median(errors):.1%}, 90th percentile {ninth:.1%}, "
        f"of {len(errors)} jobs"
    )


def _met(
    job: Mapping[str, Any], others: Iterable[Mapping[str, Any]], levels: Mapping[str, int]
) -> str:
    """Which of ``MEETS`` a job is in its turn."""
    scenario = SCENARIOS[job["scenario"]]

    def links(row: Mapping[str, Any]) -> set[tuple[int, int]]:
        return {(leaf, row["spine"] or 0) for leaf in scenario.leaves(row["job"])}

    own = levels.get(job["job"], 0)
    met = [
        levels.get(other["job"], 0)
        for other in others
        if other["job"] != job["job"] and links(other) & links(job)
    ]
    return MEETS[2] if own in met else MEETS[1] if max(met, default=-1) > own else MEETS[0]


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
