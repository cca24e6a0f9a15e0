"""The grid of a job's iterations, and demand rolled around it (CASSINI, NSDI '24, §3 to §5.7).

**Circles.** Time is a circle. A job's own circle is one iteration of it, its unified circle as many
iterations as the least common multiple of the periods on a link takes. Demand is a share of the
link's capacity, averaged over each angle; a rotation is a whole number of angles.

Iteration times are rounded up onto the grid of a *family* of jobs
(``docs/understand/schedulers.md``). Every period is a whole number of units, and a unit is a whole
number of angles. So the circles of a family share their angles exactly, and no unified circle
exceeds ``FAMILY_ANGLES``.

**Pace.** A job that is shifted in time begins its iterations at the points of its grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # ranks that follow keep pace, and load no planner
    from crux_torch.schedule.arrays import FloatArray, IntArray

#: Iterations of a job in one of its family's base: the ratios whose common multiple stays small.
RATIOS = tuple(Fraction(*r) for r in ((1, 3), (1, 2), (2, 3), (1, 1), (3, 2), (2, 1), (3, 1)))
#: Share of its iteration by which a job may be slowed to fit its family's grid: CASSINI's own
#: tolerance for drift (§5.7).
ROUNDING = 0.05

BASE_UNITS = math.lcm(*(r.denominator for r in RATIOS))
_UNITS = tuple(int(r * BASE_UNITS) for r in RATIOS)
ANGLES_PER_UNIT = 72 // BASE_UNITS
FAMILY_ANGLES = math.lcm(*_UNITS) * ANGLES_PER_UNIT

#: Sweeps over the jobs of a link that a search for rotations makes at most.
_SWEEPS = 8
#: Random rotations that the mean score is taken over.
_DRAWS = 32
#: Scores that differ by less are equal, so that rounding decides nothing.
_SAME = 1e-9


class Families(NamedTuple):
    """Number of each job's family, its rounded period in units, and seconds of a unit."""

    number: IntArray
    units: IntArray
    unit_s: FloatArray


def families(period_s: FloatArray) -> Families:
    """Puts jobs into families, in turn the largest that the remaining jobs allow.

    A base with a longer iteration goes first among those that gather equally many. The periods are
    those of jobs that meet no other, and above 0.
    """
    number = np.full(len(period_s), -1, np.int64)
    units = np.full(len(period_s), BASE_UNITS, np.int64)
    unit_s = period_s / BASE_UNITS
    family = 0
    while (number < 0).any():
        left = np.flatnonzero(number < 0)
        ascending = np.sort(period_s[left])
        bases = np.unique(ascending)[::-1]
        gathered = np.zeros(len(bases), np.int64)
        for n in _UNITS:
            low, high = _window(bases * (n / BASE_UNITS))
            gathered += np.searchsorted(ascending, high, "right")
            gathered -= np.searchsorted(ascending, low, "left")
        base = float(bases[int(np.argmax(gathered))])
        for n in _UNITS:
            low, high = _window(base * (n / BASE_UNITS))
            mine = left[(period_s[left] >= low) & (period_s[left] <= high)]
            number[mine], units[mine], unit_s[mine] = family, n, base / BASE_UNITS
        family += 1
    return Families(number, units, unit_s)


def _window(period_s: FloatArray | float) -> tuple[FloatArray | float, FloatArray | float]:
    """The iteration times that are rounded to ``period_s``."""
    return period_s / (1 + ROUNDING), period_s * (1 + 1e-12)


class Arc(NamedTuple):
    """An Up phase: its time in the iteration, and its rate as a share of the job's highest."""

    start_s: float
    end_s: float
    height: float = 1.0


def circle(arcs: Iterable[tuple[float, float] | Arc], period_s: float, angles: int) -> FloatArray:
    """The mean height over each of ``angles`` equal arcs of one iteration."""
    edge = np.arange(angles + 1) * (period_s / angles)
    covered = np.zeros(angles + 1)
    for start, end, height in (Arc(*arc) for arc in arcs):
        covered += height * np.clip(edge - start, 0.0, end - start)
    return np.diff(covered) * (angles / period_s)


@dataclass(frozen=True, slots=True)
class Circles:
    """Every job on its family's grid.

    Attributes:
        rate: mean of each angle, as a share of the job's highest.
        busy: share of each angle in which the job sends, at whatever rate.
    """

    family: IntArray
    angles: list[int]
    angle_s: FloatArray
    rate: list[FloatArray]
    busy: list[FloatArray]


def circles_of(
    arcs: Sequence[Sequence[Arc]], period_s: FloatArray, stretch: float = 1.0
) -> Circles:
    """The circles of jobs with these Up phases, on a stretched grid."""
    grid = families(period_s)
    angles = (grid.units * ANGLES_PER_UNIT).tolist()
    angle_s = grid.unit_s * (stretch / ANGLES_PER_UNIT)
    whole_s = [n * s for n, s in zip(angles, angle_s.tolist(), strict=True)]
    rate = [circle(own, s, n) for own, s, n in zip(arcs, whole_s, angles, strict=True)]
    ends = [[(arc.start_s, arc.end_s) for arc in own] for own in arcs]
    busy = [circle(own, s, n) for own, s, n in zip(ends, whole_s, angles, strict=True)]
    return Circles(grid.number, angles, angle_s, rate, busy)


def perimeter(circles: Sequence[FloatArray]) -> int:
    """Angles of the unified circle of jobs, given the own circle of each: the LCM."""
    return math.lcm(*(len(own) for own in circles))


def compatibility_score(demand: FloatArray) -> float:
    """Equation 2: 1 less the mean excess of ``demand`` (shares of capacity) over the angles."""
    return 1.0 - float(np.clip(demand - 1.0, 0.0, None).mean())


class Rotation(NamedTuple):
    """Angles by which each job of a link is rotated, and the score that they give."""

    angles: tuple[int, ...]
    score: float


def best_rotation(circles: Sequence[FloatArray], background: float = 0.0) -> Rotation:
    """The rotations that maximise the compatibility score (Table 1).

    Each is within the job's own circle (Equation 4); the first job is not rotated, since only
    differences count. Two jobs: every rotation is tried. More: the jobs are put in one by one, the
    largest demand first, each at its best rotation among those before it; then each in turn is
    rotated to its best until none gains, which need not be the best of all combinations.
    ``background`` is demand at all angles that does not belong to these jobs.
    """
    around = perimeter(circles)
    tiled = [np.tile(own, around // len(own)) for own in circles]
    order = sorted(range(len(circles)), key=lambda j: (-float(circles[j].mean()), j))
    angles = [0] * len(circles)
    demand = np.full(around, background)
    score = 1.0
    for j in order:
        angles[j], score = _best_place(demand, circles[j])
        demand = demand + np.roll(tiled[j], angles[j])
    for _ in range(_SWEEPS if len(circles) > 2 else 0):
        before = score
        for j in order:
            rest = demand - np.roll(tiled[j], angles[j])
            place, placed_score = _best_place(rest, circles[j])
            if placed_score > score + _SAME:
                angles[j], score = place, placed_score
                demand = rest + np.roll(tiled[j], place)
        if score <= before + _SAME:
            break
    first = angles[0]
    turned = tuple((a - first) % len(own) for a, own in zip(angles, circles, strict=True))
    return Rotation(turned, score)


def _best_place(demand: FloatArray, own: FloatArray) -> tuple[int, float]:
    """The best rotation of one job over ``demand``, and the score there.

    Where several are best, the middle one is taken, so that drift to either side costs least.
    """
    count, around = len(own), len(demand)
    excess = np.clip(demand[None] + own[_turned(count, around)] - 1.0, 0.0, None).mean(axis=1)
    best = _middle(excess <= excess.min() + _SAME)
    return best, 1.0 - float(excess[best])


def _middle(good: npt.NDArray[np.bool_]) -> int:
    """The middle of the longest run of true entries around a circle; 0 if all are true."""
    count = len(good)
    if good.all():
        return 0
    start = int(np.argmin(good))
    edges = np.diff(np.concatenate(([0], np.roll(good, -start).astype(np.int8), [0])))
    begin, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    longest = int(np.argmax(end - begin))
    return (start + int(begin[longest] + end[longest] - 1) // 2) % count


@cache
def _turned(count: int, around: int) -> npt.NDArray[np.int16]:
    """Angle of the own circle at each unified angle, a row for each of ``count`` rotations."""
    return np.asarray((np.arange(around)[None] - np.arange(count)[:, None]) % count, np.int16)


def mean_score(circles: Sequence[FloatArray], background: float) -> float:
    """The mean score over ``_DRAWS`` random rotations: what to expect without CASSINI."""
    rng = np.random.default_rng(len(circles))
    around = perimeter(circles)
    demand = np.full((_DRAWS, around), background)
    for own in circles:
        turn = rng.integers(0, len(own), _DRAWS)
        demand += own[(np.arange(around)[None] - turn[:, None]) % len(own)]
    return compatibility_score(demand)


#: Share of its period by which an iteration may begin after a point of its grid.
DRIFT = 0.05
#: Share by which an iteration may fall behind at once. Beyond it, to wait for the next point costs
#: less: until the others have moved their grids, each iteration meets their bursts.
HELD_UP = 0.25


def start_point(ready: int, origin: int, period: int) -> int:
    """The point of the grid ``origin + n * period`` that an iteration belongs to.

    It begins at once if it is ready at most ``DRIFT`` of the period after a point. Otherwise it is
    held until the next one, so for less than a period. The unit of all times is the same.
    """
    late = (ready - origin) % period
    return ready - late if late <= DRIFT * period else ready - late + period


def following_point(ready: int, before: int, late: int, period: int) -> int:
    """The point of the iteration after one that began ``late`` after its point ``before``.

    An iteration that is ready before its point is held until then, for at most a period. One that
    is late begins at once, and catches up. But if it was held up by more than ``HELD_UP`` of the
    period at once, or is a period late, it is held until the next point: it would run into others'
    bursts for longer than that.
    """
    due = before + period
    over = ready - due
    if over > min(late + HELD_UP * period, period):
        return due - (-over // period) * period
    return due - max(0, (due - ready - 1) // period) * period


def behind(late: Sequence[int], period: int, ahead: float) -> int:
    """Offset by which a job's grid must be moved ``ahead`` iterations from now; 0: not at all.

    A job that is late for a moment catches up, since its grid has room. One that stays more than
    ``DRIFT`` of the period late, and not less than before, does not: its bursts run into others',
    which delays both. Then the grids of all jobs that are shifted with it have to move.

    Args:
        late: delays of its last iterations, the last one last; at least two count.
        period: of the grid, in the same unit.
        ahead: iterations until the grids move; the job goes on losing time until then.
    """
    if len(late) < 2 or min(late[-2:]) <= DRIFT * period or late[-1] < late[-2]:
        return 0
    return late[-1] + round(ahead * (late[-1] - late[-2]))
