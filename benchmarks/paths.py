"""Jobs that a hash puts on one spine, and the same jobs when a plan's paths are carried out.

    python benchmarks/paths.py [--study two,four] [--steps 60] [--rounds 6] [--out DIR]

Real DDP jobs over gloo in a leaf/spine network of network namespaces, which needs root. What a
study does, and how the collision comes about, is said in lab/paths.py. Steps "alone" and
"together" are those of torchrun with stock gloo; "Crux" those of cruxrun, all jobs together.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from crux_torch.cli.results import Result, publish
from lab import netns
from lab.job import JobError
from lab.paths import PathStudy, Seen, Study, fabric_of
from lab.twins import Workload

GPT, MLP = "gpt", "mlp"
STUDIES = {
    "two": Study(
        "two",
        (
            Workload("A", GPT, ("--accelerator-ms", "200")),
            Workload("B", MLP, ("--accelerator-ms", "260", "--width", "960")),
        ),
        rate_mbit=200.0,
    ),
    "four": Study(
        "four",
        (
            Workload("A", GPT, ("--accelerator-ms", "240", "--width", "80")),
            Workload("B", MLP, ("--accelerator-ms", "200", "--width", "448")),
            Workload("C", MLP, ("--accelerator-ms", "160", "--width", "512")),
            Workload("D", MLP, ("--accelerator-ms", "120", "--width", "352")),
        ),
        rate_mbit=100.0,
    ),
}
CASES = ("alone", "together", "crux")


def run(study: Study, steps: int, rounds: int, folder: Path, console: Console) -> Seen:
    """Plays one study from its network to its end."""
    with fabric_of(study) as fabric, console.status(study.name) as line:
        playing = PathStudy(study, fabric, folder, lambda text, _: line.update(text))
        try:
            playing.start()
            playing.collide()
            playing.separate()
            playing.compare(steps, rounds)
            playing.count()
            playing.finish()
        finally:
            playing.close()
        return playing.seen


def rows_of(study: Study, seen: Seen) -> list[dict[str, Any]]:
    """A row for each job: step times in seconds, ratios by round, spines, losses; one of bytes."""
    rows: list[dict[str, Any]] = []
    for workload in study.workloads:
        name = workload.name
        equal, compared = seen.losses_equal(name)
        row: dict[str, Any] = {"study": study.name, "job": name, "seed": seen.seed}
        for case in CASES:
            spread = seen.spread(name, case)
            row[f"{case}_s"] = {
                "median": spread.median, "p10": spread.p10, "p90": spread.p90, "n": spread.count,
            }  # fmt: skip
        row |= {f"{case}_ratios": seen.ratios(name, case) for case in CASES[1:]}
        row["spine"] = {case: found[name] for case, found in seen.spines.items()}
        row["counted"] = list(seen.counted[name].values())
        row |= {"losses_equal": equal, "losses_compared": compared}
        rows.append(row)
    rows += [
        {"study": study.name, "case": case, "bytes": list(sent.values())}
        for case, sent in seen.bytes.items()
    ]
    return rows


def table(study: Study, rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one study as text."""
    jobs = [row for row in rows if "job" in row]
    lines = [
        f"{len(jobs)} jobs of 2 ranks, {len(jobs)} spines, links of {study.rate_mbit:g} Mbit/s; "
        f"hash seed {jobs[0]['seed']}, the first under which connections collide",
        f"  {'step, ms: median (p10-p90)':<28}{'alone':>16}{'together, stock':>36}"
        f"{'together, Crux':>36}{'spine':>10}  losses",
        f"  {'':<44}{'x alone, by round':>36}{'x alone, by round':>36}",
    ]
    for row in jobs:
        spine = row["spine"]
        lines.append(
            f"  {row['job']:<28}{_time(row['alone_s']):>16}"
            f"{_time(row['together_s']):>17}{_against(row, 'together'):>19}"
            f"{_time(row['crux_s']):>17}{_against(row, 'crux'):>19}"
            f"{spine['before']:>5} -> {spine['crux']}  {_losses(row)}"
        )
    heads = "".join(f"{f'spine {n}':>10}" for n in range(len(jobs)))
    lines.append(f"  {'MB over each spine':<28}{heads}")
    titles = {"together": "together, stock", "crux": "together, Crux"}
    sent = [(titles[row["case"]], row["bytes"]) for row in rows if "case" in row]
    sent += [(f"{row['job']} alone, Crux", row["counted"]) for row in jobs]
    for title, by_spine in sent:
        lines.append(f"  {title:<28}" + "".join(f"{n / 1e6:>10.1f}" for n in by_spine))
    furthest = max(row["crux_s"]["median"] / row["alone_s"]["median"] for row in jobs)
    lines.append(f"  under Crux the furthest from its time alone: x {furthest:.3f}")
    return "\n".join(lines) + "\n"


def _time(times: dict[str, float]) -> str:
    return f"{1e3 * times['median']:.0f} ({1e3 * times['p10']:.0f}-{1e3 * times['p90']:.0f})"


def _against(row: dict[str, Any], case: str) -> str:
    ratio = row[f"{case}_s"]["median"] / row["alone_s"]["median"]
    rounds = row[f"{case}_ratios"]
    return f"x {ratio:.2f} {min(rounds):.2f}-{max(rounds):.2f}"


def _losses(row: dict[str, Any]) -> str:
    return f"{'equal' if row['losses_equal'] else 'DIFFERENT'} ({row['losses_compared']})"


@click.command()
@click.option(
    "--study", "names", default="two,four", show_default=True, help="Networks: two, four."
)
@click.option("--steps", default=60, show_default=True, help="Least steps of each job and case.")
@click.option("--rounds", default=6, show_default=True, help="Turns that the cases take.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/paths.{json,txt}.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep what the jobs print here.")
def main(
    names: str, steps: int, rounds: int, json_path: Path | None, out: Path | None, logs: Path | None
) -> None:
    """Measures what the plan's paths change for jobs that collide."""
    possible, reason = netns.available()
    if not possible:
        raise click.ClickException(f"no network of namespaces here: {reason}")
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    text = []
    for name in names.split(","):
        if name not in STUDIES:
            raise click.BadParameter(f"{name!r}; expected some of {', '.join(STUDIES)}")
        study = STUDIES[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = (logs.absolute() if logs else Path(scratch)) / name
            try:
                found = rows_of(study, run(study, steps, rounds, folder, console))
            except JobError as error:
                raise click.ClickException(str(error)) from None
        rows += found
        text.append(table(study, found))
    settings = {"steps": steps, "rounds": rounds, "torch": torch.__version__}
    settings["cpus"] = os.cpu_count()
    publish(Result("paths", settings, rows), "\n".join(text), json_path, out)


if __name__ == "__main__":
    main()
