"""What every scheduler takes beside the cluster, and the signature that all of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crux_torch.schedule.arrays import IntArray
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
            None: no bound. Other schedulers ignore it.
    """

    levels: tuple[int, ...] = tuple(range(8))
    seed: int = 0
    default_path: Mapping[str, tuple[int, ...]] | None = None
    max_slowdown: float | None = None


#: Pure: no I/O, no clock; equal arguments give equal decisions, in any order of the jobs.
Scheduler = Callable[[Cluster, SchedulerOptions], Decision]


def check_levels(levels: Sequence[int]) -> IntArray:
    """``levels`` as an array.

    Raises:
        ValueError: there are none, or they do not ascend.
    """
    usable = np.array(levels, np.int64)
    if not len(usable) or (np.diff(usable) <= 0).any():
        raise ValueError(f"levels must be one or more ascending numbers, not {tuple(levels)}")
    return usable
