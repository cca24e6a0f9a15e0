"""The probes that routers may still get: a discovery's bound of probes a router in any second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crux_torch.network.discover.tasks import Peer, Search, Sound, Task
from crux_torch.network.probe.live_trace import SOUND_ATTEMPTS

#: The bound of probes a router holds in each span of this length.
SECOND_S = 1.0
#: A pace is kept up to this factor (:mod:`crux_torch.network.probe.rules` makes up for late waits).
HASTE = 1.01
#: Hashes send more than the bound to one router with this chance a second at most.
_MISCHANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Load:
    """Probes that expire in a second at the busiest router between the leaves.

    Attributes:
        most: if all hosts send theirs over that router.
        mean, variance: if all probes of a host in that second have one port, at random.
        step: the most of one host.
    """

    most: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    step: float = 0.0

    def plus(self, most: float, share: float) -> Load:
        """Returns the load with one more task, of which the router gets a share of the ports."""
        return Load(
            self.most + most,
            self.mean + most * share,
            self.variance + most * most * share * (1 - share),
            max(self.step, most),
        )

    @property
    def bound(self) -> float:
        """The load that is passed with a chance of ``_MISCHANCE`` at most (Bernstein)."""
        c = -math.log(_MISCHANCE)
        jump = c * self.step / 3
        return min(self.most, self.mean + jump + math.sqrt(jump * jump + 2 * c * self.variance))


class Room:
    """The probes that each router may still get in any second.

    All tasks may share their busiest router between the leaves.
    """

    def __init__(
        self, limit: float, leader: Callable[[Peer], Peer], busiest: Mapping[Peer, float]
    ) -> None:
        self._limit, self._leader, self._busiest = limit, leader, busiest
        self._between = Load()
        self._at_leaf: Counter[Peer] = Counter()

    def is_full(self, rate_per_s: float) -> bool:
        """True if no task at this rate has room."""
        share = min(self._busiest.values(), default=1.0)
        return self._between.plus(_most(rate_per_s / 2), share).bound > self._limit

    def take(self, task: Task) -> bool:
        """Take the room that ``task`` needs; False if there is not enough."""
        most, share, leaves = self._needs(task)
        if self._between.plus(most, share).bound > self._limit:
            return False
        if any(self._at_leaf[leaf] + most > self._limit for leaf in leaves):
            return False
        self.fill(task)
        return True

    def fill(self, task: Task) -> None:
        """Take the room that ``task`` has."""
        most, share, leaves = self._needs(task)
        self._between = self._between.plus(most, share)
        self._at_leaf.update(dict.fromkeys(leaves, most))

    def _needs(self, task: Task) -> tuple[int, float, set[Peer]]:
        most = most_in_a_second(task)
        if isinstance(task, Sound):
            return most, 1.0, set()
        source = self._leader(task.source)
        return most, self._busiest.get(source, 1.0), {source, self._leader(task.peer)}


def most_in_a_second(task: Task) -> int:
    """Returns the most probes of a task that expire at one router within any second."""
    if isinstance(task, Search):
        return _most(task.rules.ttl_rate_per_s)
    return min(_most(task.rate_per_s), SOUND_ATTEMPTS * len(task.peers))


def _most(rate_per_s: float) -> int:
    return math.floor(rate_per_s * HASTE * SECOND_S) + 1
