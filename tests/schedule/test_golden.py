"""Every scheduler decides for seeded clusters what it decided before.

``python tests/schedule/test_golden.py`` writes the file anew after a change that is meant to show.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from places import SUPPORT

from crux_torch.schedule.model import Burst, Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.schedulers import SCHEDULERS

FILE = SUPPORT / "golden_decisions.json"
LINKS = tuple("uvwxyz")
BURSTS = ((Burst(1.0, 1.0),), (Burst(0.5, 1.0),), (Burst(0.25, 0.5), Burst(0.75, 0.5)))


def cluster_of(seed: int) -> Cluster:
    """Four to eight jobs of one to three flows, few links, and some ties."""
    draw = random.Random(seed)

    def flow() -> Flow:
        paths = [tuple(draw.sample(LINKS, draw.randint(1, 3))) for _ in range(draw.randint(1, 4))]
        return Flow(draw.choice((0.7, 1.0, 2.0)), tuple(paths))

    jobs = tuple(
        Job(
            name=f"job{j}",
            gpus=draw.randint(1, 8),
            flops=draw.choice((1.0, 2.0, 5.0, 100.0)),
            compute_s=draw.choice((0.5, 1.0, 1.3, 3.0)),
            flows=tuple(flow() for _ in range(draw.randint(1, 3))),
            bursts=draw.choice(BURSTS),
        )
        for j in range(draw.randint(4, 8))
    )
    return Cluster({link: draw.choice((1.0, 3.3, 10.0)) for link in LINKS}, jobs)


def decided(name: str, seed: int) -> dict[str, Any]:
    """Paths and levels exactly; numbers to nine digits, which is more than CPUs differ in."""
    options = SchedulerOptions(levels=(0, 1, 2), seed=seed)
    decision = SCHEDULERS[name](cluster_of(seed), options)
    numbers = (decision.priority, decision.shift_s, decision.grid_s)
    return {
        "path": {job: list(path) for job, path in sorted(decision.path.items())},
        "level": dict(sorted(decision.level.items())),
        "numbers": [
            {job: f"{values[job]:.9g}" for job in sorted(values)} for values in numbers if values
        ],
    }


@pytest.mark.parametrize("name", SCHEDULERS)
def test_decisions_are_those_of_the_file(name: str) -> None:
    golden = json.loads(FILE.read_text())[name]
    assert {seed: decided(name, int(seed)) for seed in golden} == golden


if __name__ == "__main__":
    found = {name: {str(seed): decided(name, seed) for seed in range(6)} for name in SCHEDULERS}
    rows = ",\n".join(
        f'"{name}": {json.dumps(decisions, separators=(",", ":"))}'
        for name, decisions in found.items()
    )
    FILE.write_text(f"{{\n{rows}\n}}\n")
