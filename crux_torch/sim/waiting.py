"""Jobs that have arrived and wait for GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from crux_torch.sim.traces import TraceJob


class FifoQueue:
    """Strictly first come, first served: nobody overtakes a job that does not fit yet.

    So the order of starts is the order of arrivals whatever the scheduler does, and no job
    starves. The price is idle GPUs behind a wide job, the same for all schedulers.
    """

    def __init__(self, jobs: Iterable[TraceJob] = ()) -> None:
        self._jobs = deque(jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: TraceJob) -> None:
        """A job has arrived."""
        self._jobs.append(job)

    def fitting(self, free_gpus: int) -> Iterator[TraceJob]:
        """Takes out the first jobs for as long as they find room in ``free_gpus``."""
        while self._jobs and self._jobs[0].gpus <= free_gpus:
            job = self._jobs.popleft()
            free_gpus -= job.gpus
            yield job
