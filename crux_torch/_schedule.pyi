"""The loops of a decision (csrc/schedule, csrc/bindings/schedule_py.cpp)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from crux_torch.schedule.model import Job

_Ints = npt.NDArray[np.int64]
_Links = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float64]

class FlowReader:
    """Reads flows into arrays, and remembers the candidates that it has read.

    Args:
        flow_type: flows of exactly this type are immutable. Tuples of them that were in the jobs
            read last are not looked into again.
    """

    def __init__(self, flow_type: type | None = None) -> None: ...
    def read(
        self, jobs: Sequence[Job], links: tuple[str, ...]
    ) -> tuple[_Ints, _Floats, _Ints, _Ints, _Ints, _Links]:
        """The flows of all jobs: see :class:`crux_torch.schedule.arrays.Arrays`.

        Flows that hold the same ``candidates`` object share one candidate set. Candidates that are
        tuples of tuples, and that were read before for the same links, are not looked into again.

        Args:
            jobs: in the order of the result.
            links: their places number the links; one more number stands for the link of an empty
                path.

        Returns:
            ``flow_start``, ``flow_bytes``, ``flow_set``, ``set_start``, ``path_start``,
            ``path_links``.

        Raises:
            KeyError: a path crosses a link that is not in ``links``.
        """

def unrouted_transfer_times_s(
    *,
    set_start: _Ints,
    path_start: _Ints,
    path_links: _Links,
    capacity_Bps: _Floats,
    flow_start: _Ints,
    flow_set: _Ints,
    flow_bytes: _Floats,
) -> _Floats:
    """See :func:`crux_torch.schedule.papers.intensity.unrouted_transfer_times_s`.

    Args: as the attributes of :class:`crux_torch.schedule.arrays.Arrays`.

    Raises:
        ValueError: a number out of its range.
    """

def place(
    *,
    set_start: _Ints,
    path_start: _Ints,
    path_links: _Links,
    capacity_Bps: _Floats,
    flow_set: _Ints,
    rate_Bps: _Floats,
    sweeps: int = 0,
) -> _Ints:
    """The candidate that each flow takes when flows choose one after the other.

    Args:
        set_start: paths of set s are ``set_start[s]`` to ``set_start[s + 1]``.
        path_start: entries of path p in ``path_links``, likewise.
        path_links: link of every entry.
        capacity_Bps: of every link.
        flow_set: candidate set of each flow, in the order in which flows choose.
        rate_Bps: what each flow asks for.
        sweeps: times that every flow then chooses again, with all others in place.

    Raises:
        ValueError: a number out of its range.
    """

def rates_when_second(
    *,
    compute_s: _Floats,
    burst_start: _Ints,
    due_s: _Floats,
    burst_s: _Floats,
    second: _Ints,
    first: _Ints,
    phases: int,
    warm_up: int,
    measured: int,
    rounding: float,
) -> _Floats:
    """Link seconds per second of each job ``second[i]`` when ``first[i]`` has priority.

    See :mod:`crux_torch.schedule.papers.correction`.

    Args:
        compute_s: of every job.
        burst_start: bursts of job p are ``burst_start[p]`` to ``burst_start[p + 1]``; at least one.
        due_s: seconds of computation after which each burst may start.
        burst_s: link seconds of each burst.
        second: jobs that wait for the link.
        first: jobs that have priority.
        phases: of the first job, from which the other begins.
        warm_up: iterations of the second job that do not count.
        measured: iterations that do.
        rounding: share of a period by which two events may differ through rounding alone.

    Raises:
        ValueError: a number out of its range, or a job without bursts.
    """

def traffic(
    *,
    set_start: _Ints,
    path_start: _Ints,
    path_links: _Links,
    capacity_Bps: _Floats,
    flow_start: _Ints,
    flow_set: _Ints,
    flow_bytes: _Floats,
    choice: _Ints,
) -> tuple[_Floats, _Links, _Links]:
    """The ``data``, ``indices`` and ``indptr`` of
    :func:`crux_torch.schedule.arrays.traffic_matrix`. Other arguments are as in ``Arrays``.

    Raises:
        ValueError: a number out of its range.
    """

def components(*, start: _Ints, links: _Links, link_count: int) -> _Ints:
    """The component of each job, numbered by their first jobs.

    Args:
        start: links of job j are ``links[start[j]]`` to ``links[start[j + 1]]``.

    Raises:
        ValueError: a number out of its range.
    """

def depths(*, start: _Ints, links: _Links, link_count: int) -> _Ints:
    """For each job how many are before it in the longest chain of jobs, in ascending order, of
    which each shares a link with the next. Arguments are those of :func:`components`.

    Raises:
        ValueError: a number out of its range.
    """
