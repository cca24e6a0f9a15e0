"""When tasks that depend on each other start, on a network that takes no time."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from crux_torch.sim.workload import ImportFailed


@dataclass(slots=True)
class Task:
    """Something that a rank does.

    Attributes:
        duration_s: seconds that it computes; 0 for what it sends or receives.
        unit: what it occupies meanwhile, one task at a time; None: nothing.
        after: tasks that have to end before it starts.
        with_start_of: tasks that have to start before it does.
    """

    duration_s: float
    unit: Hashable | None
    after: list[int] = field(default_factory=list)
    with_start_of: list[int] = field(default_factory=list)


def starts_of(tasks: Sequence[Task]) -> tuple[list[float], float]:
    """When each task starts, and when the last one ends, in seconds.

    A unit takes what is ready first, and of those ready at once what comes first in the list.

    Raises:
        ImportFailed: tasks wait for each other in a circle, or none computes.
    """
    waits = [len(task.after) + len(task.with_start_of) for task in tasks]
    next_after: list[list[int]] = [[] for _ in tasks]
    next_start: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for before in task.after:
            next_after[before].append(i)
        for before in task.with_start_of:
            next_start[before].append(i)
    ready_s = [0.0] * len(tasks)
    start_s = [-1.0] * len(tasks)
    free_s: dict[Hashable, float] = {}
    queue = [(0.0, i) for i, count in enumerate(waits) if not count]
    done, last_s = 0, 0.0
    while queue:
        ready, i = heapq.heappop(queue)
        task = tasks[i]
        start = ready if task.unit is None else max(ready, free_s.get(task.unit, 0.0))
        start_s[i], end = start, start + task.duration_s
        if task.unit is not None:
            free_s[task.unit] = end
        done, last_s = done + 1, max(last_s, end)
        for waiting, time_s in ((next_after[i], end), (next_start[i], start)):
            for j in waiting:
                ready_s[j] = max(ready_s[j], time_s)
                waits[j] -= 1
                if not waits[j]:
                    heapq.heappush(queue, (ready_s[j], j))
    if done < len(tasks):
        raise ImportFailed(f"{len(tasks) - done} operations wait for each other in a circle")
    if not last_s:
        raise ImportFailed("nothing is computed, expected an operation that takes time")
    return start_s, last_s
