"""Events per second of the fluid engine beside SimGrid's, on the same transfers.

Both simulate the same start times, sizes and paths on a two-layer Clos fabric; an event is the
start or the end of a transfer, so both count the same 2 for each. The run fails when any
transfer's end differs by more than 1%. SimGrid (Debian: ``apt-get install g++ libsimgrid-dev``;
without it the engine is measured alone) runs its plain max-min model with lazy updates of what an
event changed and without the traffic of acknowledgements: its fastest settings. Its wall time is
taken inside its own process and covers the run alone, as the engine's does; one actor sends all.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import matplotlib
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from crux_torch._fluid import Engine

SOURCE = Path(__file__).with_name("simgrid_transfers.cpp")


@dataclass(frozen=True)
class Transfer:
    start_s: float
    bytes: int
    source: int
    destination: int
    links: tuple[int, ...]


def clos(
    hosts: int, transfers: int, seed: int, spread_s: float
) -> tuple[list[float], list[Transfer]]:
    """Random transfers on a Clos fabric of 16 hosts a ToR, 8 spines, oversubscribed 2:1.

    Args:
        hosts: number of hosts, a multiple of 16.
        transfers: between distinct pairs of hosts, each pair hashed onto one spine.
        seed: of everything random.
        spread_s: starts are uniform over this many seconds.

    Returns:
        Bytes per second of each link, and the transfers.
    """
    rng = random.Random(seed)
    tors, spines, nic_Bps = hosts // 16, 8, 12.5e9
    capacity_Bps = [nic_Bps] * (2 * hosts) + [nic_Bps] * (2 * tors * spines)
    pairs: set[tuple[int, int]] = set()
    made: list[Transfer] = []
    while len(made) < transfers:
        source, destination = rng.randrange(hosts), rng.randrange(hosts)
        if source == destination or (source, destination) in pairs:
            continue
        pairs.add((source, destination))
        spine = rng.randrange(spines)
        up = 2 * hosts + (source // 16) * spines + spine
        down = 2 * hosts + tors * spines + (destination // 16) * spines + spine
        middle = () if source // 16 == destination // 16 else (up, down)
        links = (source, *middle, hosts + destination)
        size = int(rng.lognormvariate(0.0, 1.0) * 2e9)
        made.append(Transfer(rng.uniform(0.0, spread_s), size, source, destination, links))
    return capacity_Bps, made


def run_engine(capacity_Bps: list[float], transfers: list[Transfer]) -> tuple[float, list[float]]:
    """Wall seconds of the run, and the end of each transfer."""
    engine = Engine([(f"l{i}", c, 0.0) for i, c in enumerate(capacity_Bps)])
    for i, t in enumerate(transfers):
        traffic = {f"l{link}": float(t.bytes) for link in t.links}
        engine.add_job(
            f"t{i}", compute_s=0.0, bursts=[(1.0, traffic)], start_s=t.start_s, iterations=1
        )
    begin = time.perf_counter()
    engine.run_until(1e5)
    wall_s = time.perf_counter() - begin
    results = engine.results()
    ends = [results[f"t{i}"]["end_s"] for i in range(len(transfers))]
    return wall_s, [end for end in ends if end is not None]


def run_simgrid(
    program: Path, hosts: int, capacity_Bps: list[float], transfers: list[Transfer]
) -> tuple[float, list[float]]:
    """As run_engine, by SimGrid."""
    lines = [str(len(capacity_Bps)), *map(repr, capacity_Bps), str(hosts), str(len(transfers))]
    for t in transfers:
        lines.append(
            f"{t.start_s!r} {t.bytes} {t.source} {t.destination} {len(t.links)} "
            + " ".join(map(str, t.links))
        )
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        done = subprocess.run(
            [program, file.name, "--log=root.threshold:critical"],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    wall_s, *ends = map(float, done.stdout.split())
    return wall_s, ends


def build_simgrid(folder: Path) -> Path:
    """Compiles the SimGrid side.

    Raises:
        RuntimeError: there is no compiler or no SimGrid; says which.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no g++")
    program = folder / "simgrid_transfers"
    done = subprocess.run(
        [compiler, "-O2", "-std=c++17", SOURCE, "-o", program, "-lsimgrid"],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(
            "SimGrid can't be compiled against (apt-get install libsimgrid-dev): "
            + done.stderr[-400:]
        )
    return program


def measure(
    program: Path | None, hosts: int, transfers: int, repeats: int, spread_s: float
) -> dict[str, float]:
    """Both sides over ``repeats`` seeds, run alternately: medians and spread."""
    ours, theirs, worst = [], [], 0.0
    for seed in range(repeats):
        capacity_Bps, made = clos(hosts, transfers, seed, spread_s)
        wall_s, ends = run_engine(capacity_Bps, made)
        ours.append(2 * transfers / wall_s)
        if program is None:
            continue
        wall_s, reference = run_simgrid(program, hosts, capacity_Bps, made)
        theirs.append(2 * transfers / wall_s)
        for t, a, b in zip(made, ends, reference, strict=True):
            worst = max(worst, abs(a - b) / (b - t.start_s))
    row: dict[str, float] = {"hosts": hosts, "transfers": transfers, "repeats": repeats}
    row |= summary("engine_events_per_s", ours)
    if program is not None:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        row |= summary("simgrid_events_per_s", theirs) | summary("ratio", ratios)
        row["worst_difference"] = worst
    return row


def summary(name: str, values: list[float]) -> dict[str, float]:
    """Median under ``name``, and the extremes beside it."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def scaling(hosts: tuple[int, ...], jobs: tuple[int, ...], seed: int = 0) -> list[dict[str, float]]:
    """Cost of an event of jobs that iterate and contend, against their number and the links'.

    Every job sends between a pair of hosts of its own, computes in between, and is played for so
    long that each makes 20 iterations or so. Nothing is skipped.
    """
    rows = []
    for host_count in hosts:
        for job_count in jobs:
            capacity_Bps, made = clos(host_count, job_count, seed, spread_s=1.0)
            links = [(f"l{i}", c, 0.0) for i, c in enumerate(capacity_Bps)]
            engine = Engine(links, skip_repeats=False)
            rng = random.Random(seed)
            for i, t in enumerate(made):
                traffic = {f"l{link}": 2.5e9 for link in t.links}
                engine.add_job(
                    f"j{i}",
                    compute_s=rng.uniform(0.5, 1.5),
                    bursts=[(0.5, traffic)],
                    level=rng.randrange(8),
                    start_s=t.start_s,
                )
            begin = time.perf_counter()
            engine.run_until(20.0)
            wall_s = time.perf_counter() - begin
            rows.append(
                {
                    "hosts": host_count,
                    "links": len(capacity_Bps),
                    "jobs": job_count,
                    "events": engine.events,
                    "event_us": wall_s / engine.events * 1e6,
                }
            )
    return rows


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Microseconds an event against jobs, a line for each number of links."""
    matplotlib.use("Agg")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for links in sorted({row["links"] for row in rows}):
        line = [row for row in rows if row["links"] == links]
        axes.plot(
            [r["jobs"] for r in line], [r["event_us"] for r in line], "o-", label=f"{links:,} links"
        )
    axes.set(xscale="log", yscale="log", xlabel="jobs", ylabel="time per event (µs)")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    axes.set_title("Fluid engine: cost of an event, 8 levels, nothing skipped")
    figure.savefig(path, dpi=150)


def peak_memory_MiB() -> float:
    """Most memory that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def comparison_table(rows: list[dict[str, float]], transfers: int) -> Table:
    table = Table(title=f"{transfers} transfers, median of the seeds (least to most)")
    for column in ("hosts", "engine events/s", "SimGrid events/s", "ratio", "worst difference"):
        table.add_column(column, justify="right")

    def spread(row: dict[str, float], name: str, form: str) -> str:
        if name not in row:
            return "-"
        return f"{row[name]:{form}} ({row[f'{name}_min']:{form}} to {row[f'{name}_max']:{form}})"

    for row in rows:
        table.add_row(
            str(row["hosts"]),
            spread(row, "engine_events_per_s", ",.0f"),
            spread(row, "simgrid_events_per_s", ",.0f"),
            spread(row, "ratio", ".1f"),
            f"{row['worst_difference']:.1e}" if "worst_difference" in row else "-",
        )
    return table


def scaling_table(rows: list[dict[str, float]]) -> Table:
    table = Table(title="jobs that iterate and contend, 8 levels, nothing skipped")
    for column in ("hosts", "links", "jobs", "events", "µs an event"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            *(f"{row[k]:,}" for k in ("hosts", "links", "jobs", "events")), f"{row['event_us']:.1f}"
        )
    return table


@click.command()
@click.option("--hosts", multiple=True, type=int, default=(256, 2048), show_default=True)
@click.option("--transfers", type=int, default=2048, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--spread-s", type=float, default=1.0, show_default=True, help="span of the starts")
@click.option(
    "--jobs", multiple=True, type=int, default=(64, 128, 256, 512, 1024), show_default=True
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="results folder")
def main(
    hosts: tuple[int, ...],
    transfers: int,
    repeats: int,
    spread_s: float,
    jobs: tuple[int, ...],
    json_path: Path | None,
    out: Path | None,
) -> None:
    """Compare the fluid engine's speed with SimGrid's, and show how its cost grows."""
    console = Console(record=True, width=110)
    with tempfile.TemporaryDirectory() as folder:
        program: Path | None = None
        try:
            program = build_simgrid(Path(folder))
        except RuntimeError as error:
            console.print(f"without SimGrid: {error}", style="yellow")
        compared = [measure(program, n, transfers, repeats, spread_s) for n in hosts]
    console.print(comparison_table(compared, transfers))
    grown = scaling(hosts, jobs)
    console.print(scaling_table(grown))
    memory_MiB = peak_memory_MiB()
    console.print(f"most memory of this process, Python included: {memory_MiB:.0f} MiB")
    document = {
        "benchmark": "sim_speed",
        "settings": {
            "hosts": hosts,
            "transfers": transfers,
            "repeats": repeats,
            "spread_s": spread_s,
            "jobs": jobs,
        },
        "rows": compared,
        "scaling": grown,
        "peak_memory_MiB": memory_MiB,
    }
    text = json.dumps(document, indent=2) + "\n"
    if json_path is not None:
        json_path.write_text(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "sim_speed.json").write_text(text)
        (out / "sim_speed.txt").write_text(console.export_text())
        plot(grown, out / "sim_speed.png")
    if any(row.get("worst_difference", 0.0) > 0.01 for row in compared):
        console.print("results differ by more than 1%", style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
