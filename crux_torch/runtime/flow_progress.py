"""How far one flow of an iteration has come, by the counters of its connections (mlcc §III-A)."""

from __future__ import annotations

import itertools
import statistics
from collections import deque

from crux_torch.schedule.rates import WINDOW_SLOTS, ring_change_bytes

#: Iterations that tell how many bytes one has.
ITERATIONS = 5
#: Of the volume, below which what is left, or what has moved, does not count.
REST = 0.01
#: By which what a ring's worker receives and sends in an iteration may differ, as a share.
RING_TOLERANCE = 0.1


class FlowProgress:
    """Counts what one process sends to one host, and receives, from one iteration's end to the
    next.

    The volume of an iteration is what the last ones had. So there is none in the first.

    Args:
        hosts: of the job. A ring's worker sends its own share before it has received anything.
    """

    def __init__(self, hosts: int) -> None:
        self._lead = 1.0 / max(1, 2 * (hosts - 1))
        self.sent = self.received = 0
        self._mark: int | None = None
        self._base_sent = self._base_received = 0
        self._volumes: deque[int] = deque(maxlen=ITERATIONS)
        self._volumes_in: deque[int] = deque(maxlen=ITERATIONS)
        self._moved_at_s = float("-inf")
        self._readings: deque[tuple[float, int, int]] = deque(maxlen=WINDOW_SLOTS + 1)
        #: Whether this iteration has begun to send, and has more to send.
        self.begun = False

    @property
    def volume_bytes(self) -> int:
        """What an iteration sends; 0 while that is not known."""
        return statistics.median_low(self._volumes) if self._volumes else 0

    @property
    def left_bytes(self) -> int:
        """What this iteration has left to send."""
        return max(0, self.volume_bytes - (self.sent - self._base_sent))

    def read(self, mark: int, sent: int, received: int, now_s: float) -> None:
        """Take in the counters.

        Args:
            mark: number of iterations that have ended.
            sent, received: bytes of all its connections so far.
        """
        if sent < self.sent or received < self.received:
            # Connections were closed, and their counts went with them.
            self._mark = None
            self._readings.clear()
        moved = sent > self.sent
        self.sent, self.received = sent, received
        if mark != self._mark:
            if self._mark is not None:
                self._volumes.append(sent - self._base_sent)
                self._volumes_in.append(received - self._base_received)
            self._mark, self._base_sent, self._base_received = mark, sent, received
            self.begun = False
            return
        if moved:
            self._moved_at_s = now_s
        rest = REST * self.volume_bytes
        if self.left_bytes <= rest:
            self.begun = False
        elif moved and sent - self._base_sent > rest:
            self.begun = True

    def is_idle(self, now_s: float, patience_s: float) -> bool:
        """Whether nothing was sent for ``patience_s`` seconds."""
        return now_s - self._moved_at_s > patience_s

    def end_slot(self, now_s: float) -> None:
        """A slot has ended: remember what was sent in it."""
        self._readings.append((now_s, self.sent, self.received))

    @property
    def sent_Bps(self) -> tuple[float, ...]:
        """The rate of each of the last slots."""
        return self._rates(1)

    def change_bytes(self, planned_bytes: float, left_s: float) -> float:
        """What the ring's dependency adds to what is planned for the rest of the slot; below 0:
        takes from it.

        The flow before goes on as it was seen to. 0 for what is no ring: a worker of one sends in
        an iteration as much as it receives.
        """
        volume, volume_in = self.volume_bytes, statistics.median_low(self._volumes_in or (0,))
        if abs(volume - volume_in) > RING_TOLERANCE * volume:
            return 0.0
        before_Bps = max(self._rates(2)[-1:], default=0.0)
        own = self.sent - self._base_sent + planned_bytes
        precedent = self.received - self._base_received + before_Bps * left_s
        return ring_change_bytes(own, precedent, self._lead * volume)

    def _rates(self, of: int) -> tuple[float, ...]:
        readings = list(self._readings)
        pairs = itertools.pairwise(readings)
        return tuple((b[of] - a[of]) / max(1e-3, b[0] - a[0]) for a, b in pairs)
