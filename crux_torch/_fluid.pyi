"""The fluid network simulator's engine (csrc/fluid, csrc/bindings/fluid_py.cpp)."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

#: Bytes on each link, by name, or as the links' numbers in the engine's order and their bytes.
Traffic: TypeAlias = dict[str, float] | tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]
#: Of one burst, or a list of its parts.
Sent: TypeAlias = Traffic | list[Traffic] | list[dict[str, float]]
#: Of an iteration: at, traffic, and perhaps least_s.
Burst: TypeAlias = tuple[float, Sent] | tuple[float, Sent, float]

class SpecError(ValueError):
    """What was asked for can't be simulated: which job or link, and what was expected."""

class JobResult(TypedDict):
    completed: int
    compute_s: float
    comm_s: float
    mean_iteration_s: float | None
    start_s: float
    end_s: float | None

class Engine:
    """The event-driven fluid simulator; jobs may come, go and change while it runs.

    Every change takes effect at :attr:`now_s`. All methods raise SpecError for what can't be
    simulated, and leave the engine as it was. An engine is used by one thread at a time.
    """

    def __init__(
        self,
        links: Sequence[tuple[str, float, float]],
        *,
        skip_repeats: bool = True,
        repeat_tolerance: float = 1e-9,
        steady_tolerance: float = 0.0,
    ) -> None:
        """An empty network at time 0.

        Args:
            links: name, capacity in bytes/s and delay in seconds of each.
            skip_repeats: advance jobs that meet nobody, and jobs that provably repeat together,
                without playing their events.
            repeat_tolerance: states are the same when no time in them differs by more than this
                share of the period; a skip over T seconds displaces a job by at most this share.
            steady_tolerance: above 0, jobs that meet but never repeat advance at their mean rates
                once these differ by no more than this share between two successive windows of at
                least 4 iterations of each (of jobs that others starve: fewer). The difference is
                the root of the jobs' mean square, weighted by GPUs. That lasts until something
                reaches these jobs from outside, one of them comes to its last iteration, or a
                growing multiple of the window has passed, after which another window is played.
                Contention that comes and goes more slowly than a window is seen as it was then.
                0.02 suits traces of weeks; 0 plays everything.
        """

    def add_job(
        self,
        name: str,
        *,
        compute_s: float,
        bursts: Iterable[Burst],
        gpus: float = 1.0,
        level: int = 0,
        weight: float = 1.0,
        start_s: float | None = None,
        iterations: int | None = None,
    ) -> None:
        """Adds a job that starts to compute at start_s (default: now).

        Args:
            bursts: of each iteration, in order: the share of the compute after which it may start,
                and its traffic. A list of such: parts that move on their own, and the next burst
                begins when all have ended. What sets a rate limit of such a job, or asks for its
                bytes left, raises SpecError. Then the seconds that each part takes at least, if it
                moves anything: its rate has a ceiling.
            level: a higher one goes first.
            weight: share within its level.
            iterations: after which it ends; None: never.
        """

    def __copy__(self) -> Engine:
        """An engine in the same state that goes on by itself."""

    def remove_job(self, name: str) -> None:
        """Ends a job now; its results stay."""

    def set_level(self, name: str, level: int) -> None: ...
    def set_weight(self, name: str, weight: float, part: int | None = None) -> None:
        """Sets the weight of a part of the job's bursts; None: of all."""

    def set_traffic(self, name: str, traffic: Sequence[Sent]) -> None:
        """New traffic for every burst, in no more parts than before; one under way goes on."""

    def shift(self, name: str, by_s: float) -> None:
        """Starts the job's next iteration this much later than it could."""

    def set_pace(
        self, name: str, *, origin_s: float, period_s: float | None, tolerance: float
    ) -> None:
        """Keeps a job's starts to the grid origin_s + n * period_s (CASSINI's drift correction).

        An iteration that would start later than a point of the grid by more than tolerance times
        period_s is held until the next point, so none starts early; any other starts at once. An
        iteration that is under way or held already is left as it is.

        Args:
            period_s: None: the job is paced no longer.
            tolerance: share of the period, from 0 to 0.5.
        """

    def set_rate_limit(self, name: str, limit_Bps: float | None, part: int = 0) -> None:
        """Limits the rate of a part of the job's bursts on that part's busiest link."""

    def bytes_left(self, name: str, part: int = 0) -> float | None:
        """Bytes that a part of the burst under way has left for its busiest link, if it moves."""

    def comm_s(self, name: str, part: int = 0) -> float:
        """Seconds that what a part has sent would have taken at its links' full rate."""

    def run_until(self, until_s: float, progress: Callable[[float], object] | None = None) -> None:
        """Plays to until_s.

        Args:
            progress: called with the simulated time each 10,000 events, and at the end; it must not
                use the engine.
        """

    def run_until_end_of_any(self, until_s: float) -> list[str]:
        """Stops as soon as jobs have done all their iterations, and names them; [] at until_s."""

    def result(self, name: str) -> JobResult: ...
    def results(self) -> dict[str, JobResult]: ...
    def link_bytes(self) -> dict[str, float]:
        """Bytes that each link has carried."""

    def gpu_utilization(self) -> float:
        """Sum of compute_s times GPUs over all jobs, by now_s times all jobs' GPUs."""

    @property
    def now_s(self) -> float: ...
    @property
    def events(self) -> int:
        """Events played so far; what was skipped has none."""
    @property
    def work(self) -> int:
        """What jobs and events took, in a unit of 5 to 10 ns that is the same on every machine."""

def run_all(engines: Sequence[Engine], until_s: Sequence[float], threads: int = 1) -> None:
    """Runs independent engines, each to its own time, `threads` at a time without the GIL.

    Ctrl-C ends it; every engine is then somewhere on its way and can be run further.
    """
