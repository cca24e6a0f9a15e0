"""How the simulator should couple a job's transfers: beside a packet-level simulator, ns-3.

    python benchmarks/coupling.py [--json FILE] [--out DIR]

Jobs that reduce their gradients in rings over three leaves, with strict priority, are played packet
by packet in ns-3 (benchmarks/ns3_rings.cc; Debian: ``apt-get install g++ libns3-dev libgsl-dev``),
and in the fluid engine under each coupling. A ring of ns-3 sends on what it has received, over
connections with a window, through queues that drop nothing.
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from crux_torch.cli.results import Result, publish
from crux_torch.schedule.model import Cluster, Decision, Flow, Job
from crux_torch.sim.play import play

SOURCE = Path(__file__).with_name("ns3_rings.cc")
MODULES = ("ns3-core", "ns3-internet", "ns3-network", "ns3-point-to-point", "ns3-traffic-control")
LEAVES = 3
RATE_BPS = 3.125e6
#: Payload of a datagram by what a link carries for it.
PAYLOAD = 1472 / 1502
#: Bytes that a connection may have on their way: about 40 ms of a link.
WINDOW = 125_000
#: Half of it may wait at each of a path's two links.
SLACK = WINDOW / 2
#: What bounds how far the parts of one job's transfer may be apart in the fluid engine.
COUPLINGS: dict[str, float | None] = {"job": None, "link": float("inf"), "slack": SLACK}


@dataclass(frozen=True)
class Ring:
    """A job: its level, computation, gradients, start, and the leaf of each rank."""

    level: int
    compute_s: float
    bytes: int
    start_s: float
    leaves: tuple[int, ...]

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in an iteration."""
        return 2 * (len(self.leaves) - 1) / len(self.leaves) * self.bytes


#: A ring below three pairs, as in that scenario of the contest; bytes and rate are a quarter.
STARVE = (
    Ring(0, 0.20, 500_000, 0.0, (0, 1, 2)),
    Ring(1, 0.09, 357_500, 0.1, (0, 1)),
    Ring(2, 0.11, 357_500, 0.2, (1, 2)),
    Ring(3, 0.13, 357_500, 0.3, (2, 0)),
)
TWO_RINGS = (
    Ring(0, 0.20, 500_000, 0.0, (0, 1, 2)),
    Ring(1, 0.15, 350_000, 0.1, (2, 1, 0)),
)


def drawn(seed: int) -> tuple[Ring, ...]:
    """Two to four jobs on levels of their own."""
    rng = random.Random(seed)
    places = [(0, 1, 2), (0, 1), (1, 2), (2, 0)]
    chosen = rng.sample(places, rng.randint(2, 4))
    levels = rng.sample(range(4), len(chosen))
    return tuple(
        Ring(
            level,
            rng.uniform(0.05, 0.3),
            rng.randrange(100_000, 800_000),
            rng.uniform(0.0, 0.3),
            leaves,
        )
        for level, leaves in zip(levels, chosen, strict=True)
    )


def build(folder: Path) -> Path:
    """Compiles the ns-3 side.

    Raises:
        ClickException: there is no compiler or no ns-3; says which.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise click.ClickException("no g++")
    program = folder / "ns3_rings"
    try:
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", *MODULES],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        subprocess.run(
            [compiler, "-O2", "-std=c++17", SOURCE, "-o", program, *flags],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        raise click.ClickException(
            f"ns-3 can't be compiled against (apt-get install libns3-dev libgsl-dev): {why[-400:]}"
        ) from None
    return program


def packets(program: Path, rings: Sequence[Ring], horizon_s: float) -> list[float | None]:
    """Mean iteration of each job in ns-3; None where none ended."""
    lines = [f"{LEAVES} {RATE_BPS:.0f} {WINDOW} {horizon_s}", str(len(rings))]
    for ring in rings:
        places = " ".join(map(str, ring.leaves))
        lines.append(
            f"{ring.level} {ring.compute_s} {ring.bytes} {ring.start_s} {len(ring.leaves)} {places}"
        )
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        done = subprocess.run([program, file.name], capture_output=True, text=True, check=True)
    found = [line.split() for line in done.stdout.splitlines()]
    return [float(mean) if int(ended) else None for ended, mean in found]


def fluid(rings: Sequence[Ring], horizon_s: float, slack_bytes: float | None) -> list[float | None]:
    """As :func:`packets`, in the fluid engine."""
    links = [f"{way}{leaf}" for way in ("up", "down") for leaf in range(LEAVES)]
    jobs = []
    for i, ring in enumerate(rings):
        hops = zip(ring.leaves, (*ring.leaves[1:], ring.leaves[0]), strict=True)
        flows = tuple(Flow(ring.sent, ((f"up{a}", f"down{b}"),)) for a, b in hops)
        jobs.append(Job(str(i), len(ring.leaves), 1.0, ring.compute_s, flows))
    cluster = Cluster(dict.fromkeys(links, RATE_BPS * PAYLOAD), tuple(jobs))
    decision = Decision(
        path={job.name: (0,) * len(job.flows) for job in jobs},
        level={str(i): ring.level for i, ring in enumerate(rings)},
    )
    start_s = {str(i): ring.start_s for i, ring in enumerate(rings)}
    report = play(cluster, decision, horizon_s, start_s=start_s, slack_bytes=slack_bytes)
    return [report.jobs[job.name].mean_iteration_s for job in jobs]


def measure(program: Path, name: str, rings: Sequence[Ring], horizon_s: float) -> dict[str, Any]:
    """One case under both simulators: seconds of each job's mean iteration."""
    return {
        "case": name,
        "ns3": packets(program, rings, horizon_s),
        **{what: fluid(rings, horizon_s, slack) for what, slack in COUPLINGS.items()},
    }


def table(rows: Sequence[dict[str, Any]], horizon_s: float) -> str:
    """The cases, and each coupling's error."""
    lines = [
        "mean iteration of each job in s, the lowest level first in starve and two-rings",
        f"  {'case':<12}{'in ns-3':<34}" + "".join(f"{what:<34}" for what in COUPLINGS),
    ]
    for row in rows:
        cells = (
            ", ".join("-" if s is None else f"{s:.3f}" for s in row[what])
            for what in ("ns3", *COUPLINGS)
        )
        lines.append(f"  {row['case']:<12}" + "".join(f"{cell:<34}" for cell in cells).rstrip())
    lines.append("error against ns-3, a job whose iterations did not end counting as the horizon")
    for what in COUPLINGS:
        errors = sorted(
            abs((ours or horizon_s) / (theirs or horizon_s) - 1.0)
            for row in rows
            for ours, theirs in zip(row[what], row["ns3"], strict=True)
        )
        lines.append(
            f"  {what:<12}median {statistics.median(errors):.1%}, 90th percentile "
            f"{errors[round(0.9 * (len(errors) - 1))]:.1%}, largest {errors[-1]:.0%} "
            f"of {len(errors)} jobs"
        )
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--drawn", "count", default=8, show_default=True, help="Cases drawn at random.")
@click.option("--horizon-s", default=40.0, show_default=True, help="Simulated seconds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Results folder.")
def main(count: int, horizon_s: float, json_path: Path | None, out: Path | None) -> None:
    """Compare the fluid engine's couplings with packets in ns-3."""
    cases = {
        "starve": STARVE,
        "fair": tuple(replace(ring, level=0) for ring in STARVE),
        "two-rings": TWO_RINGS,
        **{f"drawn-{seed}": drawn(seed) for seed in range(count)},
    }
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        rows = []
        for name, rings in cases.items():
            rows.append(measure(program, name, rings, horizon_s))
            click.echo(name, err=True)
    settings = {"horizon_s": horizon_s, "rate_Bps": RATE_BPS, "window_bytes": WINDOW}
    publish(
        Result("coupling", settings | {"slack_bytes": SLACK}, rows),
        table(rows, horizon_s),
        json_path,
        out,
    )


if __name__ == "__main__":
    main()
