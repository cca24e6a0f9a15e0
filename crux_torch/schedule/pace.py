"""When an iteration of a job that is shifted in time may begin (CASSINI §4.2, §5.7)."""

from __future__ import annotations

from collections.abc import Sequence

#: Share of its period by which an iteration may begin after a point of its grid.
DRIFT = 0.05
#: Share by which an iteration may fall behind at once. Beyond it, going on costs more than to wait
#: for the next point: until the others have heard, each iteration meets their bursts.
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
    """By how much a job's grid must be moved ``ahead`` iterations from now; 0: not at all.

    A job that is late for a moment catches up, since its grid has room. One that stays more than
    ``DRIFT`` of the period late, and not less than before, does not: its bursts run into others',
    which delays both. Then the grids of all jobs that are shifted with it have to move.

    Args:
        late: by how much its last iterations began late, the last one last; at least two count.
        period: of the grid, in the same unit.
        ahead: iterations until the grids move; the job goes on losing time until then.
    """
    if len(late) < 2 or min(late[-2:]) <= DRIFT * period or late[-1] < late[-2]:
        return 0
    return late[-1] + round(ahead * (late[-1] - late[-2]))
