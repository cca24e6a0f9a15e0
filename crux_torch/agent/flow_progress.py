"""Progress of a flow within an iteration, and its dependency on the job's others (mlcc §IV-C).

It is read from the byte counters of the flow's connections.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Literal

from crux_torch.schedule.papers.mlcc import (
    WINDOW_SLOTS,
    aggregation_change_bytes,
    broadcast_change_bytes,
    ring_change_bytes,
)

#: A rank's part in its job: a member of rings, a worker with parameter servers, or such a server.
Role = Literal["ring", "worker", "server"]

#: Iterations that tell how many bytes one has.
ITERATIONS = 5
#: Share of the volume below which bytes that are left, or have moved, do not count.
REST = 0.01
#: Share by which the bytes that a flow's rank sends and receives in an iteration may differ, if the
#: one depends on the other.
TOLERANCE = 0.1


class FlowProgress:
    """Progress of one process's flow to one host within an iteration, by its byte counters.

    The volume of an iteration is the median of the last ones. So there is none in the first.

    A server has handed over its last bytes before the network has carried them. So its iteration
    ends with these, or at the latest when workers send it those of the next.

    Args:
        hosts: of the job. A ring's worker sends its own share before it has received anything.
        role: of the rank.
    """

    def __init__(self, hosts: int, role: Role = "ring") -> None:
        self._lead = 1.0 / max(1, 2 * (hosts - 1))
        self._role = role
        #: What had been received when a mark came amid a server's last bytes.
        self._noticed: int | None = None
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
        """Bytes that an iteration sends; 0 while that is not known."""
        return statistics.median_low(self._volumes) if self._volumes else 0

    @property
    def left_bytes(self) -> int:
        """Bytes that this iteration has left to send."""
        return max(0, self.volume_bytes - (self.sent - self._base_sent))

    def read(self, mark: int, sent: int, received: int, now_s: float) -> None:
        """Takes in the counters.

        Args:
            mark: number of iterations that have ended.
            sent, received: bytes of all its connections so far.
        """
        if sent < self.sent or received < self.received:
            # Connections were closed, and their counts went with them.
            self._mark = self._noticed = None
            self._readings.clear()
        moved = sent > self.sent
        self.sent, self.received = sent, received
        rest = REST * self.volume_bytes
        if mark != self._mark and not self._is_late(received, rest):
            came = received if self._noticed is None else self._noticed
            if self._mark is not None:
                self._volumes.append(sent - self._base_sent)
                self._volumes_in.append(came - self._base_received)
            self._mark, self._base_sent, self._base_received = mark, sent, came
            self._noticed, self.begun = None, False
            return
        if moved:
            self._moved_at_s = now_s
        if self.left_bytes <= rest:
            self.begun = False
        elif moved and sent - self._base_sent > rest:
            self.begun = True

    def _is_late(self, received: int, rest: float) -> bool:
        """Returns True if a server's bytes of the iteration that ended are still on their way."""
        if self._role != "server" or self._mark is None or self.left_bytes <= rest:
            return False
        if self._noticed is None:
            self._noticed = received
        return received - self._noticed <= rest

    def is_idle(self, now_s: float, patience_s: float) -> bool:
        """Returns True if nothing was sent for ``patience_s`` seconds."""
        return now_s - self._moved_at_s > patience_s

    def end_slot(self, now_s: float) -> None:
        """Notes the counters at the end of a slot."""
        self._readings.append((now_s, self.sent, self.received))

    @property
    def sent_Bps(self) -> tuple[float, ...]:
        """The rate of each of the last slots."""
        return self._rates(1)

    @property
    def moved_bytes(self) -> int:
        """Bytes that it has sent in this iteration."""
        return max(0, self.sent - self._base_sent)

    def received_bytes(self, left_s: float) -> float:
        """Bytes that it will have received in this iteration in ``left_s`` seconds.

        The other end is expected to go on at its last rate.
        """
        before_Bps = max(self._rates(2)[-1:], default=0.0)
        return self.received - self._base_received + before_Bps * left_s

    def change_bytes(
        self, planned_bytes: float, left_s: float, others: Sequence[float] = ()
    ) -> float:
        """Returns the bytes that the dependency adds to those planned for the rest of the slot.

        It is below 0 where it takes some, and 0 for a flow that sends in an iteration another
        amount than its rank receives, which depends on nothing that is known.

        Args:
            others: F of each of the server's broadcasts for a worker, of each of the workers'
                aggregations for a server.
        """
        volume, volume_in = self.volume_bytes, statistics.median_low(self._volumes_in or (0,))
        if abs(volume - volume_in) > TOLERANCE * volume:
            return 0.0
        own = self.moved_bytes + planned_bytes
        if self._role == "worker":
            return aggregation_change_bytes(own, others)
        if self._role == "server":
            return broadcast_change_bytes(own, others)
        return ring_change_bytes(own, self.received_bytes(left_s), self._lead * volume)

    def _rates(self, column: int) -> tuple[float, ...]:
        readings = list(self._readings)
        pairs = itertools.pairwise(readings)
        return tuple((b[column] - a[column]) / max(1e-3, b[0] - a[0]) for a, b in pairs)
