"""A network and its time, played: routers that answer, limit their answers, lose or keep silent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from crux_torch.network.probe.packets import Answer, Probe

LATENCY_S = 0.0005


@dataclass
class Router:
    """One router: how many answers a second it gives after a burst, None: all of them.

    ``spent``: others have just had the burst.
    """

    address: str
    limit_per_s: float | None = None
    burst: int = 6
    loss: float = 0.0
    silent: bool = False
    spent: bool = False
    _tokens: float = field(default=0.0, init=False)
    _at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._tokens = 0 if self.spent else self.burst

    def answers(self, now: float, chance: random.Random) -> bool:
        if self.silent or chance.random() < self.loss:
            return False
        if self.limit_per_s is None:
            return True
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.limit_per_s)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Network:
    """The packets and the clock of a search.

    Args:
        route: the routers on the way from a source port, the first of TTL 1. Beyond the last one
            the destination answers.
        taken: source ports that this host uses for something else.
        seed: of what is lost.
    """

    destination = "203.0.113.9"

    def __init__(
        self, route: Callable[[int], list[Router]], taken: set[int] | None = None, seed: int = 0
    ) -> None:
        self.now = 0.0
        self.sent: list[tuple[float, Probe]] = []
        self._route, self._taken = route, taken or set()
        self._chance = random.Random(seed)
        self._on_the_way: list[tuple[float, Answer]] = []

    def clock(self) -> float:
        return self.now

    def send(self, probe: Probe) -> bool:
        if probe.port in self._taken:
            return False
        self.sent.append((self.now, probe))
        routers = self._route(probe.port)
        if probe.ttl > len(routers):
            answer = Answer(probe, self.destination, "destination")
        else:
            router = routers[probe.ttl - 1]
            if not router.answers(self.now, self._chance):
                return True
            answer = Answer(probe, router.address, "hop")
        self._on_the_way.append((self.now + LATENCY_S, answer))
        return True

    def receive(self, timeout_s: float) -> list[Answer]:
        until = self.now + timeout_s
        first = min((at for at, _ in self._on_the_way), default=float("inf"))
        self.now = max(self.now, min(first, until))
        due = [answer for at, answer in self._on_the_way if at <= self.now]
        self._on_the_way = [(at, a) for at, a in self._on_the_way if at > self.now]
        return due

    def forget(self, probe: Probe) -> None:
        self._on_the_way = [(at, a) for at, a in self._on_the_way if a.probe != probe]


def leaf_and_spines(
    spines: int, seed: int = 1, **options: float
) -> tuple[Callable[[int], list[Router]], list[Router]]:
    """Ports spread at random over spines between two leaves; and the spines."""
    leaf, far = Router("10.0.0.1", **options), Router("10.0.1.1", **options)  # type: ignore[arg-type]
    layer = [Router(f"10.1.{j}.1", **options) for j in range(spines)]  # type: ignore[arg-type]

    def route(port: int) -> list[Router]:
        return [leaf, layer[random.Random(port * 7919 + seed).randrange(spines)], far]

    return route, layer
