"""Workers for each job as Themis (NSDI '20) and Pollux (OSDI '21) share them out, in short.

Agents tell the truth, so Themis's hidden payments are left out. Pollux's statistical efficiency is
not published for these models: its goodput is throughput here. No job gets more than it asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log

#: Themis offers free GPUs to the share 1 - f of the jobs; its f.
HIDDEN = 0.8
#: Gain of fitness for which Pollux moves jobs; it models the cost of a restart, this stands for it.
WORTH_MOVING = 0.05


@dataclass(frozen=True, slots=True)
class Bid:
    """A job in the eyes of a scheduler.

    Attributes:
        held: workers that it keeps in any case.
        wanted: workers that it asked for.
        waited_s: since it arrived.
        left, total: its work, in iterations times workers.
        rate: of that work in a second, alone, on a number of workers.
        unit: it uses multiples of this many.
    """

    name: str
    held: int
    wanted: int
    waited_s: float
    left: float
    total: float
    rate: Callable[[int], float]
    unit: int = 1

    def fair(self, gpus: int, jobs: int) -> int:
        """Workers in a cluster of ``gpus`` by ``jobs``, which is for this job alone."""
        return max(self.unit, min(self.wanted, gpus // jobs // self.unit * self.unit))


def unfairness(bid: Bid, workers: int, fair: int) -> float:
    """Themis's finish-time fairness: finish in the shared cluster over that in a fair one."""
    if workers == 0:
        return inf
    if bid.left == inf:  # as if it had just come, and were to run for ever
        return bid.rate(fair) / bid.rate(workers)
    return (bid.waited_s + bid.left / bid.rate(workers)) / (bid.total / bid.rate(fair))


def themis(bids: Sequence[Bid], gpus: int, rng: random.Random) -> dict[str, int]:
    """Workers that each job wins of those that nobody holds.

    The jobs that are worst off take part. Each unit goes to the one whose fairness it improves by
    the largest factor, which maximises the product; what is left goes to the other jobs at random.
    """
    free = gpus - sum(bid.held for bid in bids)
    has = {bid.name: bid.held for bid in bids}
    fair = {bid.name: bid.fair(gpus, len(bids)) for bid in bids}
    hungry = [bid for bid in bids if bid.held + bid.unit <= bid.wanted]
    hungry.sort(key=lambda bid: -unfairness(bid, bid.held, fair[bid.name]))
    taking_part = hungry[: ceil((1 - HIDDEN) * len(bids))]

    def gain(bid: Bid) -> float:
        now = unfairness(bid, has[bid.name], fair[bid.name])
        return (
            now
            if now == inf
            else log(now / unfairness(bid, has[bid.name] + bid.unit, fair[bid.name]))
        )

    def can(bid: Bid) -> bool:
        return bid.unit <= free and has[bid.name] + bid.unit <= bid.wanted

    while able := [bid for bid in taking_part if can(bid)]:
        best = max(able, key=gain)
        has[best.name] += best.unit
        free -= best.unit
    while able := [bid for bid in hungry if can(bid)]:
        lucky = rng.choice(able)
        has[lucky.name] += lucky.unit
        free -= lucky.unit
    return {bid.name: has[bid.name] - bid.held for bid in bids}


def fitness(bids: Sequence[Bid], workers: Mapping[str, int], gpus: int) -> float:
    """Pollux's fitness: the harmonic mean of the jobs' speedups over a fair share."""
    slowness = 0.0
    for bid in bids:
        if not workers[bid.name]:
            return 0.0
        slowness += bid.rate(bid.fair(gpus, len(bids))) / bid.rate(workers[bid.name])
    return len(bids) / slowness if bids else 1.0


def pollux(bids: Sequence[Bid], gpus: int) -> dict[str, int]:
    """Workers of each job, of which ``held`` are those of now, with the largest fitness.

    Jobs get a unit each, in the order given; then each unit goes where it helps most.
    """
    has, free = dict.fromkeys((bid.name for bid in bids), 0), gpus

    def helps(bid: Bid) -> float:
        fair, now = bid.rate(bid.fair(gpus, len(bids))), has[bid.name]
        return fair / bid.rate(now) - fair / bid.rate(now + bid.unit) if now else inf

    while able := [
        bid for bid in bids if bid.unit <= free and has[bid.name] + bid.unit <= bid.wanted
    ]:
        best = max(able, key=helps)
        has[best.name] += best.unit
        free -= best.unit
    now = {bid.name: bid.held for bid in bids}
    keeps = fitness(bids, has, gpus) <= (1 + WORTH_MOVING) * fitness(bids, now, gpus)
    return now if keeps and all(now.values()) else has
