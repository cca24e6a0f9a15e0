"""Events per second of the fluid engine beside SimGrid's, on the same transfers.

Both simulate the same start times, sizes and paths on a two-layer Clos fabric; an event is the
start or the end of a transfer. The run fails when any transfer's end differs by more than 1%.
SimGrid (Debian: libsimgrid-dev) runs its plain max-min model; its wall time is taken inside its own
process and covers the run alone, as the engine's does.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
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
    made = []
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
    return wall_s, [results[f"t{i}"]["end_s"] for i in range(len(transfers))]


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
            f"SimGrid can't be compiled against (libsimgrid-dev): {done.stderr[-400:]}"
        )
    return program


def measure(
    program: Path | None, hosts: int, transfers: int, repeats: int, spread_s: float
) -> dict:
    """Median events per second of both sides over ``repeats`` seeds, run alternately."""
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
    row: dict[str, float] = {
        "hosts": hosts,
        "transfers": transfers,
        "repeats": repeats,
        "engine_events_per_s": statistics.median(ours),
    }
    if program is not None:
        row |= {
            "simgrid_events_per_s": statistics.median(theirs),
            "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            "worst_difference": worst,
        }
    return row


@click.command()
@click.option("--hosts", multiple=True, type=int, default=(256, 2048), show_default=True)
@click.option("--transfers", type=int, default=2048, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--spread-s", type=float, default=1.0, show_default=True, help="span of the starts")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    hosts: tuple[int, ...], transfers: int, repeats: int, spread_s: float, json_path: Path | None
) -> None:
    """Compare the fluid engine's speed with SimGrid's."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        program: Path | None = None
        try:
            program = build_simgrid(Path(folder))
        except RuntimeError as error:
            console.print(f"without SimGrid: {error}", style="yellow")
        rows = [measure(program, n, transfers, repeats, spread_s) for n in hosts]
    table = Table(title=f"{transfers} transfers, median of {repeats} seeds")
    for column in ("hosts", "engine events/s", "SimGrid events/s", "ratio", "worst difference"):
        table.add_column(column, justify="right")
    for row in rows:
        compared = "ratio" in row
        table.add_row(
            str(row["hosts"]),
            f"{row['engine_events_per_s']:,.0f}",
            f"{row['simgrid_events_per_s']:,.0f}" if compared else "-",
            f"{row['ratio']:.1f}" if compared else "-",
            f"{row['worst_difference']:.2e}" if compared else "-",
        )
    console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=2) + "\n")
    if any(row.get("worst_difference", 0.0) > 0.01 for row in rows):
        console.print("results differ by more than 1%", style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
