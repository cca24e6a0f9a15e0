"""What a schedule is computed from and what it decides: plain values, no I/O, no clock.

The live leaders and the simulator build the same ``Cluster`` and read the same ``Decision``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
    """

    at: float
    share: float


@dataclass(frozen=True, slots=True)
class Job:
    """One training job as the scheduler sees it.

    Attributes:
        name: unique in its cluster.
        gpus: devices that it occupies.
        flops: W_j, FLOPs of one iteration over all its devices.
        compute_s: seconds of one iteration in which its devices compute.
        flows: what it moves in one iteration.
        bursts: when in the iteration it moves it, ascending in ``at``.
        period_s: seconds of an iteration alone as measured, for what keeps jobs to a pace; 0 where
            the others tell.
        parts: for each flow the number of the part of a burst that it belongs to. All flows of a
            part move together; each part moves on its own, and the burst ends with the last. Empty:
            all flows are one part. Schedulers take them as one.
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
        capacity_Bps: bytes per second of every link.
        jobs: in any order; a schedule does not depend on it.
    """

    capacity_Bps: Mapping[Link, float]
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """A component whose plan is not the safe one, so that it has to be tried out.

    Attributes:
        name: of the component and its plan; equal ones have equal names.
        jobs: of the component, in the order of their names; the first judges the trial.
        on: whether the decision has the plan; otherwise it has the safe one.
    """

    name: str
    jobs: tuple[str, ...]
    on: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """A schedule.

    Attributes:
        path: for each job, the index of the candidate path that each of its flows takes.
        level: for each job its priority level; a higher level goes first.
        priority: P_j for each job, where the scheduler has such a notion.
        intensity: I_j in FLOP/s for each job, where the scheduler uses it.
        correction: k_j for each job, where the scheduler uses it.
        shift_s: for each job that is shifted in time, when its iterations start, modulo
            ``grid_s``, from an origin that all jobs have in common.
        grid_s: for each job that keeps to a grid, the distance of its iterations' starts: a start
            that is early or too late is held back until the next point ``shift_s + n grid_s``.
        slot_s: where jobs book their rates in the links' load tables (mlcc), the seconds of a slot.
        isolated: every job has a network of its own: nothing can carry this out, it is what the
            others are compared with.
        notes: what was computed more coarsely than usual because the input is large.
        trials: the components whose plans have to be tried out, where options ask for trials.
    """

    path: Mapping[str, tuple[int, ...]]
    level: Mapping[str, int]
    priority: Mapping[str, float] = field(default_factory=dict)
    intensity: Mapping[str, float] = field(default_factory=dict)
    correction: Mapping[str, float] = field(default_factory=dict)
    shift_s: Mapping[str, float] = field(default_factory=dict)
    grid_s: Mapping[str, float] = field(default_factory=dict)
    slot_s: float | None = None
    isolated: bool = False
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How a cluster is to be scheduled.

    Attributes:
        levels: priority levels that may be used, ascending; a higher one goes first.
        seed: of whatever a scheduler draws; the same seed gives the same decision.
        default_path: what the network does by itself: for each job the index of the candidate
            that ECMP's hash gives to each of its flows. Jobs that are not named, or all jobs
            where it is None, take the first candidate.
        max_slowdown: what the policy ``crux`` keeps to: under its levels no job's mean iteration
            takes longer than this many times its iteration alone, or than fair sharing guarantees
            where that is more. Infinite: no cap. Other schedulers ignore it.
        tried: the policy ``crux`` gives a component the safe plan unless the name of its trial and
            the job that judges it are in here; None: every component gets the better plan.
    """

    levels: tuple[int, ...] = tuple(range(8))
    seed: int = 0
    default_path: Mapping[str, tuple[int, ...]] | None = None
    max_slowdown: float = 3.0
    tried: frozenset[tuple[str, str]] | None = None


#: Pure: no I/O, no clock; equal arguments give equal decisions, in any order of the jobs.
Scheduler = Callable[[Cluster, SchedulerOptions], Decision]
