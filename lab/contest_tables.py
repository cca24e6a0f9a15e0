"""The contest's tables: medians over rounds, timelines, and how far predicted steps are off."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.contest import JOB_STEPS, NONE, Scenario
from lab.contest_scenarios import SCENARIOS

#: Seconds of a timeline, and of one of its characters.
TIMELINE_S, CELL_S = 3.0, 0.05
#: Kinds of meeting: the levels of the jobs on a job's links beside its own.
MEETS = ("first on its links", "behind others", "beside others of its level")


def turn_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["scenario"], row["policy"], row["round"]


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
    """Lines on the error of predicted steps, by whom a job meets on its links."""
    of_turn = {turn_of(turn): turn for turn in turns}
    signed: dict[str, list[float]] = defaultdict(list)
    for job in jobs:
        if job["predicted_s"] and job["step_s"]:
            turn = of_turn[turn_of(job)]
            met = _met(job, [j for j in jobs if turn_of(j) == turn_of(job)], turn["levels"])
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
    """Returns the one of ``MEETS`` that a job is in its turn."""
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
