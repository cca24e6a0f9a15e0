"""How often the guard takes a plan back without cause, and how soon with one, by simulation.

    python benchmarks/guard.py [--trials N] [--json FILE]

A trial is three jobs with iterations of 0.3, 0.5 and 0.8 s. First each is measured until its mean
under the plan before is known well enough, then under the plan on trial, which makes every
iteration longer or shorter by a factor of its own. Iterations vary by a lognormal factor; with
memory, the logarithm of one follows half of the one before. With shared noise, half of the variance
is a factor that all jobs have in common. With pauses, one iteration in 100 takes ten times as long.
The judge looks every 2 s. *Certain* are those that are taken back before the end of their trial.
Iterations are those under the plan on trial, of the slowest job.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from crux_torch.schedule.default.guard import TOLERANCE, Judgement, Member, Tally, enough, judge

PERIODS_S = (0.3, 0.5, 0.8)
LOOK_S = 2.0
#: Share of a period alone in which a job computes, and by how much it is slowed down before.
COMPUTE, SHARED = 0.6, 1.5


@dataclass(frozen=True)
class Noise:
    """How iterations vary: standard deviation of the logarithm, and what else."""

    spread: float
    memory: float = 0.0
    shared: float = 0.0
    pauses: float = 0.0


class _Stream:
    """One job's iterations."""

    def __init__(self, rng: np.random.Generator, period_s: float, noise: Noise) -> None:
        self._rng, self._period_s, self._noise = rng, period_s, noise
        self._own = 0.0

    def next(self, factor: float, shared: float) -> float:
        noise = self._noise
        fresh = self._rng.normal() * math.sqrt(1 - noise.memory**2)
        self._own = noise.memory * self._own + fresh
        z = math.sqrt(1 - noise.shared) * self._own + math.sqrt(noise.shared) * shared
        pause = 10.0 if noise.pauses and self._rng.random() < noise.pauses else 1.0
        return self._period_s * SHARED * factor * pause * math.exp(noise.spread * z)


def trial(
    rng: np.random.Generator, factors: Sequence[float], noise: Noise, cap: float = 3.0
) -> tuple[Judgement, int]:
    """How one trial ended, and the iterations of the slowest job under the plan on trial.

    Args:
        factors: by which the plan on trial makes each job's iterations longer.
    """
    streams = [_Stream(rng, s, noise) for s in PERIODS_S]
    before = [Tally(s) for s in PERIODS_S]
    after = [Tally(s) for s in PERIODS_S]
    on = False
    at_s = [0.0] * len(streams)
    for look in itertools.count(1):
        now_s, shared = look * LOOK_S, rng.normal()
        for j, stream in enumerate(streams):
            while at_s[j] < now_s:
                taken_s = stream.next(factors[j] if on else 1.0, shared)
                (after if on else before)[j].add(taken_s)
                at_s[j] += taken_s
        if not on:
            on = all(enough(tally.sample) for tally in before)
            continue
        members = {
            f"job{j}": Member(8, COMPUTE * s, s, before[j].sample, after[j].sample)
            for j, s in enumerate(PERIODS_S)
        }
        found = judge(members, cap)
        if found.verdict != "open":
            return found, min(tally.sample.iterations for tally in after)
    raise AssertionError


CASES = {
    "nothing changes": (1.0, 1.0, 1.0),
    "two gain what one loses": (0.9, 0.9, 9 / 7),
    "4% slower": (1.04, 1.04, 1.04),
    "10% slower": (1.1, 1.1, 1.1),
    "25% slower": (1.25, 1.25, 1.25),
    "one twice as slow": (1.0, 1.0, 2.0),
    "one beyond the cap, the others gain": (0.6, 0.6, 3.0),
}
NOISES = {
    "5%": Noise(0.05),
    "20%": Noise(0.2),
    "20%, memory": Noise(0.2, memory=0.5),
    "20%, shared": Noise(0.2, shared=0.5),
    "5%, pauses": Noise(0.05, pauses=0.01),
}


@click.command()
@click.option("--trials", default=1000, show_default=True, help="Trials of each case.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Where to write the rows.")
def main(trials: int, seed: int, file: Path | None) -> None:
    """Play trials, and print how they end."""
    table = Table(
        *("noise", "the plan on trial", "taken back", "certain", "within", "median", "kept within"),
        title=f"{trials} trials each; iterations of the slowest job",
    )
    rows = []
    for (noise_name, noise), (name, factors) in itertools.product(NOISES.items(), CASES.items()):
        rng = np.random.default_rng([seed, len(rows)])
        ended = [trial(rng, factors, noise) for _ in range(trials)]
        worse = [count for found, count in ended if found.verdict == "worse"]
        kept = [count for found, count in ended if found.verdict == "kept"]
        certain = [found for found, _ in ended if found.slowed or found.high < -TOLERANCE]
        row = {
            "noise": noise_name,
            "plan": name,
            "taken_back": len(worse) / trials,
            "certain": len(certain) / trials,
            "most_iterations": max(worse, default=None),
            "median_iterations": statistics.median(worse) if worse else None,
            "most_until_kept": max(kept, default=None),
        }
        rows.append(row)
        shown = ["" if v is None else f"{v:.0f}" for v in list(row.values())[4:]]
        shares = f"{row['taken_back']:.1%}", f"{row['certain']:.1%}"
        table.add_row(noise_name, name, *shares, *shown)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    if file is not None:
        file.write_text(json.dumps({"trials": trials, "seed": seed, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
