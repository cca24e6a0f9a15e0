"""What every scheduler takes beside the cluster, and the signature that all of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crux_torch.schedule.model import Cluster, Decision


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How a cluster is to be scheduled.

    Attributes:
        levels: priority levels that may be used, ascending; a higher one goes first.
        seed: of whatever a scheduler draws; the same seed gives the same decision.
        default_path: what the network does by itself: for each job the index of the candidate
            that ECMP's hash gives to each of its flows. Jobs that are not named, or all jobs
            where it is None, take the first candidate.
        max_slowdown: what crux-fair guarantees: no job's mean iteration takes longer than this
            many times its iteration alone, or than fair sharing guarantees where that is more.
            None: no bound. Other schedulers do not heed it.
        bursts: whether Crux sees every burst of an iteration; otherwise the one burst, hence one
            overlap ratio, that the paper's model has (§7.1). Other schedulers do not heed it.
    """

    levels: tuple[int, ...] = tuple(range(8))
    seed: int = 0
    default_path: Mapping[str, tuple[int, ...]] | None = None
    max_slowdown: float | None = None
    bursts: bool = True


#: Pure: no I/O, no clock; equal arguments give equal decisions, in any order of the jobs.
Scheduler = Callable[[Cluster, SchedulerOptions], Decision]
