"""How to probe: pace, patience, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from crux_torch.probe.path_map import WantedHop


@dataclass(frozen=True, slots=True)
class Rules:
    """How to probe.

    Attributes:
        confidence: stop when, with this probability, no path with an equal share is missing.
        rate_per_s: probes a second at most.
        time_limit_s: for everything.
        answer_wait_s: for an answer to a probe. It is repeated after a pause as long, then twice as
            long and so on, up to 2 s.
        retries: of a probe that nobody answered, at most; fewer if hardly any probe gets lost.
        ports_per_path: ports to find of every path, at least.
        via: hops of a wanted path.
        via_ports: stop when this many ports of that path are known; 0: look for all paths.
        repeats: ports to probe a second time at the end.
    """

    confidence: float = 0.99
    rate_per_s: float = 200.0
    time_limit_s: float = 30.0
    answer_wait_s: float = 0.3
    retries: int = 7
    ports_per_path: int = 1
    via: tuple[WantedHop, ...] = ()
    via_ports: int = 0
    repeats: int = 6

    def __post_init__(self) -> None:
        for name, low, high in (
            ("confidence", 0.0, 0.999999),
            ("rate_per_s", 0.5, 1e5),
            ("time_limit_s", 0.001, 3600.0),
            ("answer_wait_s", 0.001, 60.0),
            ("retries", 0, 20),
            ("ports_per_path", 1, 65535),
            ("via_ports", 0, 65535),
            ("repeats", 0, 1000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; expected {low} to {high}")
