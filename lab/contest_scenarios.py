"""The contest's scenarios: jobs, links and arrivals that every policy meets alike."""

from __future__ import annotations

from lab.contest import Scenario
from lab.twins import Workload


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
#: By name, in the order in which they are played.
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
