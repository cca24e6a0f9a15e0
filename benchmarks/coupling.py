"""How the simulator should couple a job's transfers: beside a packet-level simulator, ns-3.

    python benchmarks/coupling.py [--json FILE] [--out DIR]

Jobs that reduce their gradients in rings over leaves and a spine, with strict priority, are played
packet by packet in ns-3 (benchmarks/ns3_rings.cc; Debian: ``apt-get install g++ libns3-dev
libgsl-dev``), and in the fluid engine under each coupling. A ring of ns-3 sends on what it has
received, over connections with a window, through queues that drop nothing.
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
from typing import Any, NamedTuple

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from crux_torch.cli.results import Result, publish
from crux_torch.schedule.model import Cluster, Decision, Flow, Job
from crux_torch.sim.play import play

SOURCE = Path(__file__).with_name("ns3_rings.cc")
MODULES = ("ns3-core", "ns3-internet", "ns3-network", "ns3-point-to-point", "ns3-traffic-control")
LEAVES = 4
RATE_BPS = 3.125e6
#: Payload of a datagram by what a link carries for it.
PAYLOAD = 1472 / 1502
#: Bytes that a connection may have on their way: about 40 ms of a link.
WINDOW = 125_000
#: Half of it may wait at each of a path's two links.
SLACK = WINDOW / 2


class Coupling(NamedTuple):
    """What moves together in the fluid engine.

    Attributes:
        apart: each ring moves on its own.
        slack_bytes: see :func:`crux_torch.sim.play.with_slack`.
    """

    apart: bool
    slack_bytes: float | None


COUPLINGS = {
    "job": Coupling(False, None),
    "ring": Coupling(True, None),
    "link": Coupling(False, float("inf")),
    "slack": Coupling(False, SLACK),
    "ring+slack": Coupling(True, SLACK),
}


@dataclass(frozen=True)
class Reducer:
    """A job.

    Attributes:
        bytes: that each of its rings reduces.
        rings: for each ring the leaf of each rank.
    """

    level: int
    compute_s: float
    bytes: int
    start_s: float
    rings: tuple[tuple[int, ...], ...]

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in an iteration, in each ring."""
        ranks = len(self.rings[0])
        return 2 * (ranks - 1) / ranks * self.bytes


#: A ring below three pairs, as in that scenario of the contest; bytes and rate are a quarter.
STARVE = (
    Reducer(0, 0.20, 500_000, 0.0, ((0, 1, 2),)),
    Reducer(1, 0.09, 357_500, 0.1, ((0, 1),)),
    Reducer(2, 0.11, 357_500, 0.2, ((1, 2),)),
    Reducer(3, 0.13, 357_500, 0.3, ((2, 0),)),
)
TWO_RINGS = (
    Reducer(0, 0.20, 500_000, 0.0, ((0, 1, 2),)),
    Reducer(1, 0.15, 350_000, 0.1, ((2, 1, 0),)),
)
#: A job with a ring in each of two pairs of leaves, below a job in each pair.
RAILS = (
    Reducer(0, 0.20, 300_000, 0.0, ((0, 1), (2, 3))),
    Reducer(1, 0.12, 357_500, 0.1, ((0, 1),)),
    Reducer(2, 0.13, 357_500, 0.2, ((2, 3),)),
)


def drawn(seed: int) -> tuple[Reducer, ...]:
    """Two to four jobs on levels of their own."""
    rng = random.Random(seed)
    places = [(0, 1, 2), (0, 1), (1, 2), (2, 0)]
    chosen = rng.sample(places, rng.randint(2, 4))
    levels = rng.sample(range(4), len(chosen))
    return tuple(
        Reducer(
            level,
            rng.uniform(0.05, 0.3),
            rng.randrange(100_000, 800_000),
            rng.uniform(0.0, 0.3),
            (leaves,),
        )
        for level, leaves in zip(levels, chosen, strict=True)
    )


def drawn_rails(seed: int) -> tuple[Reducer, ...]:
    """Two to four jobs on levels of their own or on one, each with one ring or two."""
    rng = random.Random(f"rails {seed}")
    count = rng.randint(2, 4)
    levels = rng.choice((rng.sample(range(4), count), [0] * count))
    found = []
    for level in levels:
        rings = [tuple(rng.sample(range(LEAVES), 2)) for _ in range(rng.randint(1, 2))]
        times_s = rng.uniform(0.05, 0.3), rng.uniform(0.0, 0.3)
        size = rng.randrange(100_000, 500_000)
        found.append(Reducer(level, times_s[0], size, times_s[1], tuple(rings)))
    return tuple(found)


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


def packets(program: Path, jobs: Sequence[Reducer], horizon_s: float) -> list[float | None]:
    """Mean iteration of each job in ns-3; None where none ended."""
    lines = [f"{LEAVES} {RATE_BPS:.0f} {WINDOW} {horizon_s}", str(len(jobs))]
    for job in jobs:
        shape = f"{len(job.rings[0])} {len(job.rings)}"
        places = " ".join(str(leaf) for ring in job.rings for leaf in ring)
        lines.append(f"{job.level} {job.compute_s} {job.bytes} {job.start_s} {shape} {places}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        done = subprocess.run([program, file.name], capture_output=True, text=True, check=True)
    found = [line.split() for line in done.stdout.splitlines()]
    return [float(mean) if int(ended) else None for ended, mean in found]


def fluid(reducers: Sequence[Reducer], horizon_s: float, coupling: Coupling) -> list[float | None]:
    """As :func:`packets`, in the fluid engine."""
    links = [f"{way}{leaf}" for way in ("up", "down") for leaf in range(LEAVES)]
    jobs = []
    for i, job in enumerate(reducers):
        hops = [
            (number, f"up{a}", f"down{b}")
            for number, ring in enumerate(job.rings)
            for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
        ]
        flows = tuple(Flow(job.sent, ((up, down),)) for _, up, down in hops)
        parts = tuple(number for number, *_ in hops) if coupling.apart else ()
        jobs.append(Job(str(i), len(job.rings[0]), 1.0, job.compute_s, flows, parts=parts))
    cluster = Cluster(dict.fromkeys(links, RATE_BPS * PAYLOAD), tuple(jobs))
    decision = Decision(
        path={job.name: (0,) * len(job.flows) for job in jobs},
        level={str(i): job.level for i, job in enumerate(reducers)},
    )
    start_s = {str(i): job.start_s for i, job in enumerate(reducers)}
    slack_bytes = coupling.slack_bytes
    report = play(cluster, decision, horizon_s, start_s=start_s, slack_bytes=slack_bytes)
    return [report.jobs[job.name].mean_iteration_s for job in jobs]


def measure(program: Path, name: str, jobs: Sequence[Reducer], horizon_s: float) -> dict[str, Any]:
    """One case under both simulators: seconds of each job's mean iteration."""
    return {
        "case": name,
        "ns3": packets(program, jobs, horizon_s),
        **{what: fluid(jobs, horizon_s, coupling) for what, coupling in COUPLINGS.items()},
    }


def table(rows: Sequence[dict[str, Any]], horizon_s: float) -> str:
    """The cases, and each coupling's error."""
    lines = [
        "mean iteration of each job in s, the lowest level first in starve, two-rings and rails",
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
        "fair": tuple(replace(job, level=0) for job in STARVE),
        "two-rings": TWO_RINGS,
        "rails": RAILS,
        "rails-fair": tuple(replace(job, level=0) for job in RAILS),
        **{f"drawn-{seed}": drawn(seed) for seed in range(count)},
        **{f"rails-{seed}": drawn_rails(seed) for seed in range(count)},
    }
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        rows = []
        for name, jobs in cases.items():
            rows.append(measure(program, name, jobs, horizon_s))
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
