"""The course of a simulation: measures of an engine at given times while it is played."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crux_torch import _fluid

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Course:
    """Measures at the times ``time_s``, each a total since time 0.

    Attributes:
        compute_s, comm_s: of each job, as in a job's result.
        link_bytes: bytes that each link has carried.
    """

    time_s: Values
    compute_s: Mapping[str, Values]
    comm_s: Mapping[str, Values]
    link_bytes: Mapping[str, Values]


def change(values: Values, time_s: Values) -> Values:
    """Returns the mean change in a second between each two times that follow each other."""
    found: Values = np.diff(values) / np.diff(time_s)
    return found


class Watch:
    """Takes an engine's measures at the times ``time_s``.

    Args:
        time_s: ascending; later than the end of the simulation has no measure.
        progress: called with the simulated time on the way; it must not use the engine.
    """

    def __init__(
        self, time_s: Sequence[float], progress: Callable[[float], object] | None = None
    ) -> None:
        self._time_s = tuple(time_s)
        self._progress = progress
        self._jobs: list[dict[str, _fluid.JobResult]] = []
        self._links: list[dict[str, float]] = []

    def run_until(self, engine: _fluid.Engine, until_s: float) -> None:
        """Plays ``engine`` to ``until_s``, with a stop at each of the times before that."""
        for at_s in self._time_s[len(self._jobs) :]:
            if at_s > until_s:
                break
            engine.run_until(at_s, self._progress)
            self._jobs.append(engine.results())
            self._links.append(engine.link_bytes())
        engine.run_until(until_s, self._progress)

    def course(self) -> Course:
        """Returns what was taken so far."""
        return Course(
            np.array(self._time_s[: len(self._jobs)]),
            {n: np.array([r[n]["compute_s"] for r in self._jobs]) for n in self._names()},
            {n: np.array([r[n]["comm_s"] for r in self._jobs]) for n in self._names()},
            {n: np.array([r[n] for r in self._links]) for n in (self._links or [{}])[0]},
        )

    def _names(self) -> tuple[str, ...]:
        return tuple(self._jobs[0]) if self._jobs else ()
