"""The rules of probing: its pace, and when to stop.

Routers limit how many ICMP errors they send, so each TTL has a pace of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf

from crux_torch.network.probe.packets import Hops

#: A hop that a path must pass: at a TTL, one address or any of several.
RequiredHop = tuple[int, "str | Collection[str]"]

#: Results after which the rate is reconsidered.
_EPOCH = 8
#: If a larger share of the probes is lost, the router is assumed to limit its answers.
_TOLERATED_LOSS = 0.25
_SPEED_UP = 1.5
_STEEPEST = 1 / 8
#: A lower rate gains nothing: Linux answers each host once a second by default.
FLOOR_per_s = 0.5
#: Waits end late, by a millisecond or so. At most this much is made up for.
_CATCH_UP_S = 0.005
#: A port is given up once an answer would have come with this probability, if any ever came.
_PATIENCE = 0.999
_MEMORY = 32


class Pacer:
    """The pace of probes that die at one TTL, ``limit_per_s`` at most.

    Routers limit how many ICMP errors they send (docs/understand/paths.md). So after every eight
    results the rate changes: if more than a quarter was lost, to the share that was answered; if
    none was lost, up by half. A probe counts as lost only if the same port got an answer later.
    """

    def __init__(self, limit_per_s: float) -> None:
        self.limit_per_s = max(limit_per_s, FLOOR_per_s)
        self.rate_per_s = self.limit_per_s
        self.next_at = 0.0
        self._epoch_from = -math.inf
        self._answered = self._lost = 0
        self._memory: deque[bool] = deque(maxlen=_MEMORY)

    @property
    def slowed(self) -> bool:
        """True if the hop answers more slowly than it might be asked."""
        return self.rate_per_s < self.limit_per_s

    @property
    def attempts(self) -> int:
        """Probes without an answer after which no answer is to be expected."""
        lost = (self._memory.count(False) + 1) / (len(self._memory) + 2)
        return max(2, math.ceil(math.log(1 - _PATIENCE) / math.log(lost)))

    def sent(self, now: float) -> None:
        """Count a probe; the next one may leave at ``next_at``."""
        self.next_at = max(now - _CATCH_UP_S, self.next_at) + 1 / self.rate_per_s

    def result(self, sent_at: float, answered: bool, now: float) -> None:
        """Take note of a probe that was answered, or that was lost on the way."""
        self._memory.append(answered)
        if sent_at < self._epoch_from:
            return
        self._answered += answered
        self._lost += not answered
        total = self._answered + self._lost
        if total < _EPOCH:
            return
        if self._lost > _TOLERATED_LOSS * total:
            factor = max(self._answered / total, _STEEPEST)
            self.rate_per_s = max(self.rate_per_s * factor, FLOOR_per_s)
            # What was sent at the old rate must not slow the new one again.
            self._epoch_from = now
        elif not self._lost:
            self.rate_per_s = min(self.rate_per_s * _SPEED_UP, self.limit_per_s)
        self._answered = self._lost = 0


def draws_needed(paths: int, confidence: float) -> int:
    """Returns the ports without a new path after which ``paths`` known ones count as all.

    The smallest n with (k / (k + 1))^n <= 1 - confidence: docs/understand/paths.md says why. The
    hypothesis "k paths against k + 1" is that of the Multipath Detection Algorithm (Augustin,
    Friedman, Teixeira, "Multipath tracing with Paris traceroute", 2007; Veitch et al., INFOCOM
    2009).

    Raises:
        ValueError: fewer than 1 path, or a confidence that is not from 0 to less than 1.
    """
    if paths < 1 or not 0 <= confidence < 1:
        raise ValueError(f"{paths} paths, confidence {confidence}; expected >= 1 and 0 to < 1")
    if confidence == 0:
        return 0
    needed = max(1, math.ceil(math.log(1 - confidence) / math.log(paths / (paths + 1))))
    # The logarithms may end a hair beside a whole number: settle it by the inequality itself.
    while needed > 1 and confidence_after(paths, needed - 1) >= confidence:
        needed -= 1
    while confidence_after(paths, needed) < confidence:
        needed += 1
    return needed


def confidence_after(paths: int, draws: int) -> float:
    """Returns the confidence that ``draws`` ports without a new path give to ``paths`` paths."""
    return 1 - (paths / (paths + 1)) ** draws if paths else 0.0


def passes(hops: Hops, required: Sequence[RequiredHop]) -> bool:
    """True if ``hops`` has, at each required TTL, one of the addresses required there."""
    answers = dict(hops)
    several = [(ttl, [given] if isinstance(given, str) else given) for ttl, given in required]
    # As error queues name them: the shortest form of an IPv6 address.
    return all(answers.get(ttl) in {str(ip_address(a)) for a in given} for ttl, given in several)


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of probing.

    Attributes:
        confidence: stop when, with this probability, no path with an equal share is missing.
        rate_per_s: probes a second at most.
        answer_wait_s: for an answer to a probe. It is repeated after a pause as long, then twice as
            long and so on, up to 2 s.
        retries: of a probe that nobody answered, at most; fewer if hardly any probe gets lost.
        ports_per_path: ports to find of every path, at least.
        via: hops of a required path.
        via_ports: stop when this many ports of that path are known; 0: look for all paths.
        repeats: ports to probe a second time at the end.
        count_silent: count a port whose path crosses a router that surely stays silent, though
            others at its TTL answer.
        ttl_rate_per_s: probes a second that expire at one TTL at most.
    """

    confidence: float = 0.99
    rate_per_s: float = 200.0
    time_limit_s: float = 30.0
    answer_wait_s: float = 0.3
    retries: int = 7
    ports_per_path: int = 1
    via: tuple[RequiredHop, ...] = ()
    via_ports: int = 0
    repeats: int = 6
    count_silent: bool = False
    ttl_rate_per_s: float = inf

    def __post_init__(self) -> None:
        for name, low, high in (
            ("confidence", 0.0, 0.999999),
            ("rate_per_s", 0.5, 1e5),
            ("ttl_rate_per_s", 0.5, inf),
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
