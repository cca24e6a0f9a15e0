"""The pace of probes that die at one TTL: routers limit how many ICMP errors they send."""

from __future__ import annotations

import math
from collections import deque

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
