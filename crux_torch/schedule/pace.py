"""When an iteration of a job that is shifted in time may begin (CASSINI §5.7)."""

from __future__ import annotations

#: Share of its period by which an iteration may begin after a point of its grid.
DRIFT = 0.05
#: Share by which some iterations in a row may begin late before the job is held until another
#: point. That costs an iteration, but a busy host is late once, and then the job catches up: by
#: 1.5% of the grid in each iteration, which takes about as many of them.
HICCUP = 0.25
MAX_HICCUPS = 16


def start_point(ready: int, origin: int, period: int) -> int:
    """The point of the grid ``origin + n * period`` that an iteration belongs to.

    It begins at once if it is ready at most ``DRIFT`` of the period after a point. Otherwise it is
    held until the next one, so for less than a period. The unit of all times is the same.
    """
    late = (ready - origin) % period
    return ready - late if late <= DRIFT * period else ready - late + period
