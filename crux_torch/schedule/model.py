"""The input of a schedule and its result: plain values, no I/O, no clock.

The live leaders and the simulator build the same ``Cluster`` and read the same ``Decision``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Link = str
Path = tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that one job moves between two places in one iteration.

    Each of the ``candidates``, at least one, is a path: the links that it crosses. An empty path
    crosses no link that can be contended (both ends on one host).
    """

    bytes: float
    candidates: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst of an iteration's communication.

    Attributes:
        at: share of the iteration's compute that is done when the burst may start, 0 to 1.
        share: share of the job's bytes that it carries; a job's bursts sum to 1.
        least_s: seconds that it takes at least, if it moves anything: its rate has a ceiling.
    """

    at: float
    share: float
    least_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One training job as the scheduler sees it.

    Attributes:
        name: unique in its cluster.
        flops: W_j, FLOPs of one iteration over all its devices.
        compute_s: seconds of one iteration in which its devices compute.
        flows: traffic of one iteration.
        bursts: when in the iteration the traffic starts, ascending in ``at``.
        period_s: measured seconds of an iteration alone, for time shifts (CASSINI); 0 where the
            period follows from the other fields.
        parts: for each flow the number of the part of a burst that it belongs to. All flows of a
            part move together; each part moves on its own, and the burst ends with the last. Empty:
            all flows are one part. Only the policy ``crux``, as it plays plans, tells them apart.
    """

    name: str
    gpus: int
    flops: float
    compute_s: float
    flows: tuple[Flow, ...] = ()
    bursts: tuple[Burst, ...] = (Burst(1.0, 1.0),)
    period_s: float = 0.0
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The jobs that run now and the links that they share.

    Attributes:
        jobs: in any order; a schedule does not depend on it.
    """

    capacity_Bps: Mapping[Link, float]
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """A component whose plan is not the safe one, so that it has to be tried out.

    Attributes:
        name: equal for equal components with equal plans.
        jobs: names of the component's jobs, ascending; the first judges the trial.
        on: True if the decision has the plan; otherwise it has the safe one.
    """

    name: str
    jobs: tuple[str, ...]
    on: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """A schedule: for each job the values below, where the scheduler has such a notion.

    Attributes:
        path: index of the candidate path that each flow takes.
        level: priority level; a higher level goes first.
        priority: P_j.
        intensity: I_j in FLOP/s.
        correction: k_j.
        shift_s: start of the job's iterations, modulo ``grid_s``, from an origin that all jobs have
            in common.
        grid_s: distance of the iterations' starts: a start that is early or too late is held back
            until the next point ``shift_s + n grid_s``.
        slot_s: seconds of a slot of the links' load tables, where jobs book their rates (mlcc).
        weight_by_sent: flows weigh more in their level the more of an iteration they have sent
            (MLTCP).
        isolated: every job has a network of its own. Nothing can carry this out; the other
            schedulers are compared with it.
        notes: steps that were computed more coarsely than usual because the input is large.
        trials: components whose plans have to be tried out, where options ask for trials.
    """

    path: Mapping[str, tuple[int, ...]]
    level: Mapping[str, int]
    priority: Mapping[str, float] = field(default_factory=dict)
    intensity: Mapping[str, float] = field(default_factory=dict)
    correction: Mapping[str, float] = field(default_factory=dict)
    shift_s: Mapping[str, float] = field(default_factory=dict)
    grid_s: Mapping[str, float] = field(default_factory=dict)
    slot_s: float | None = None
    weight_by_sent: bool = False
    isolated: bool = False
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()


class Memory:
    """Results of earlier decisions, for the next ones: they take less time, and stay the same.

    Whoever decides again and again for one cluster keeps one in the options. A copy, or one that
    another process receives, is empty.

    Thread safety: decisions of several threads may share it.
    """

    def __init__(self) -> None:
        #: Reads clusters, see :func:`~crux_torch.schedule.arrays.arrays_of`.
        self.reader: Any = None
        #: Correction factor of each pair of players.
        self.games: dict[Any, float] = {}
        self._lock = threading.Lock()
        self._known: dict[Hashable, Any] = {}
        self._of_jobs: dict[str, tuple[Any, dict[Hashable, tuple[Any, Any]]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, ()

    def recall(self, key: Hashable, make: Callable[[], Any], most: int = 4096) -> Any:
        """Returns the result of ``make()`` for this key; the ``most`` used last are kept."""
        with self._lock:
            found = self._known.pop(key, None)
            if found is not None:
                self._known[key] = found  # now the one used last
                return found
        found = make()
        with self._lock:
            self._known[key] = found
            if len(self._known) > most:
                del self._known[next(iter(self._known))]
        return found

    def of_jobs(
        self,
        what: str,
        links: object,
        jobs: Sequence[tuple[tuple[Flow, ...], Hashable]],
        make: Callable[[list[int]], Iterable[Any]],
    ) -> list[Any]:
        """Returns a value of each job; those that it had in the last decision are not made again.

        Args:
            what: name of the value.
            links: the very object that all values hold for.
            jobs: of each its flows, the very object, and what else its value depends on.
            make: returns the values of the jobs with these indices.
        """
        before, known = self._of_jobs.get(what, (None, {}))
        if before is not links:
            known = {}
        keys = [(id(flows), other) for flows, other in jobs]
        fresh = [i for i, key in enumerate(keys) if key not in known]
        if fresh or not known:
            # With the flows, so that their address is not used again.
            made = zip(fresh, make(fresh), strict=True)
            known = known | {keys[i]: (jobs[i][0], value) for i, value in made}
        self._of_jobs[what] = links, {key: known[key] for key in keys}
        return [known[key][1] for key in keys]


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of a scheduler.

    Attributes:
        levels: priority levels that may be used, ascending; a higher one goes first.
        seed: of random draws; the same seed gives the same decision.
        default_path: for each job the index of the candidate that ECMP's hash gives to each of its
            flows. Of jobs that are not named, or all jobs where it is None, it is not known:
            schedulers that leave paths to the network take the first candidate.
        max_slowdown: under the levels of the policy ``crux`` no job's mean iteration takes longer
            than this many times its iteration alone, or than fair sharing guarantees where that is
            more. Infinite: no cap. Other schedulers ignore it.
        tried: names of trials, each with the job that judges it. The policy ``crux`` gives any
            other component the safe plan; None: every component gets the better plan.
        unknown_links: links that stand for paths that are not known. The policy ``crux`` gives a
            component with a flow on one the safe plan.
        memory: results of earlier decisions.
    """

    levels: tuple[int, ...] = tuple(range(8))
    seed: int = 0
    default_path: Mapping[str, tuple[int, ...]] | None = None
    max_slowdown: float = 3.0
    tried: frozenset[tuple[str, str]] | None = None
    unknown_links: frozenset[Link] = frozenset()
    memory: Memory = field(default_factory=Memory, compare=False, repr=False)


#: Pure: no I/O, no clock; equal arguments give equal decisions, in any order of the jobs.
Scheduler = Callable[[Cluster, SchedulerOptions], Decision]
