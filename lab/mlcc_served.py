"""Jobs with parameter servers in the simulator: what mlcc's two algorithms add to fair sharing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from crux_torch.sim.served import Pair, Rule, ServedJob, iteration_s
from lab.mlcc_mixes import SHAPES

#: Compared with fair sharing.
RULES: tuple[Rule, ...] = ("start-after", "initial", "mlcc")
HORIZON_S = 40.0


def served(
    name: str, shape: str, compute: float = 1.0, workers: str = "ab", server: str = "s"
) -> ServedJob:
    """A job of two workers and a parameter server, each on a host."""
    compute_s, moved = SHAPES[shape]
    pairs = (
        Pair(w, server, moved, (f"{w}>", f">{server}"), (f"{server}>", f">{w}")) for w in workers
    )
    return ServedJob(name, compute * compute_s, tuple(pairs))


def with_servers() -> dict[str, dict[str, float]]:
    """Mean time of an iteration of jobs with parameter servers, over fair sharing's, by rule."""
    links = {link: 1.0 for host in "abcs" for link in (f"{host}>", f">{host}")}
    one = served("one", "vgg16", 3.0)
    cases = {
        "one alone": (links, [one]),
        "two alike": (links, [one, served("two", "vgg16", 3.1)]),
        "a large and a small one": (links, [one, served("two", "resnet50", 3.0)]),
        "one with a slow worker": (
            links | {"a>": 0.25},
            [served("one", "vgg16"), served("two", "vgg16", 1.1, workers="bc")],
        ),
    }
    return {case: _over_fair(*of_case) for case, of_case in cases.items()}


def _over_fair(links: Mapping[str, float], jobs: Sequence[ServedJob]) -> dict[str, float]:
    def times_s(rule: Rule) -> list[float]:
        found = iteration_s(links, jobs, rule, HORIZON_S)
        return [found[job.name] or HORIZON_S for job in jobs]

    fair = times_s("fair")
    return {
        rule: statistics.fmean(a / b for a, b in zip(times_s(rule), fair, strict=True))
        for rule in RULES
    }
