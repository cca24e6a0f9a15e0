"""One rank books the rates of its flows in the load tables, and paces them (mlcc §III).

Everything fails open. A flow has a limit only while it is under way and the tables answer. A table
service that is silent for ``load_tables.TIMEOUT_S`` ends all limits; so does a leader that is
silent for as long as an order lasts. If the scheduler's thread itself stands still, the rank's
other thread ends them after ``SILENT_S``.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from crux_torch.agreement.load_tables import TIMEOUT_S, Feedback, TablesClient, UpdateSchedule
from crux_torch.apply.transport import Connection
from crux_torch.apply.wire import Key, Wire
from crux_torch.errors import CruxError
from crux_torch.host.interfaces import interface_of, moved_bytes
from crux_torch.logs import WarnOnce
from crux_torch.measure.iterations import IterationMarks
from crux_torch.network.routes import HostFlowLinks
from crux_torch.schedule.papers.mlcc import (
    WINDOW_SLOTS,
    LinkLoad,
    allocate,
    applied_Bps,
    ceiling_Bps,
    ring_change_bytes,
    room_Bps,
)
from crux_torch.settings import Settings
from crux_torch.store.endpoint import OWN_TABLES, embedded
from crux_torch.store.frames import read_secret

_log = logging.getLogger(__name__)

#: Iterations that tell how many bytes one has.
ITERATIONS = 5
#: Share of the volume below which bytes that are left, or have moved, do not count.
REST = 0.01
#: Share by which the bytes that a ring's worker sends and receives in an iteration may differ.
RING_TOLERANCE = 0.1
#: How often in a slot a rank looks at its counters; flows that wait look at the tables as often.
LOOKS = 6
#: Seconds without a look after which limits end: more than a look may take.
SILENT_S = 5 * TIMEOUT_S
#: Of a slot of its path, below which an iteration's bytes are not worth booking.
LEAST_SLOTS = 0.5
#: Slots without a byte after which a flow gives back what it has booked, and keeps its place: of
#: one that sends, because its next gradients are still computed, and of one that waits, which sends
#: a burst now and then.
IDLE_SLOTS, WAITING_IDLE_SLOTS = 0.5, 2.0
#: A connection is busy if it has sent this share of what the flow's busiest one has sent.
BUSY = 0.1
#: What the kernel may send of a paced socket at once, however low its rate. Then it sends nothing
#: until the rate allows for that, and a higher limit does not wake it.
BURST_BYTES = 1 << 16
#: Bursts that each socket may send in a slot at least, so that it sleeps for half of one at most.
LEAST_BURSTS = 2
#: Attempts at a booking that other flows forestall.
ATTEMPTS = 3


class FlowProgress:
    """Progress of one process's flow to one host within an iteration, by its byte counters.

    The volume of an iteration is the median of the last ones. So there is none in the first.

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
        """Returns True if nothing was sent for ``patience_s`` seconds."""
        return now_s - self._moved_at_s > patience_s

    def end_slot(self, now_s: float) -> None:
        """Notes the counters at the end of a slot."""
        self._readings.append((now_s, self.sent, self.received))

    @property
    def sent_Bps(self) -> tuple[float, ...]:
        """The rate of each of the last slots."""
        return self._rates(1)

    def change_bytes(self, planned_bytes: float, left_s: float) -> float:
        """Returns the bytes that the ring adds to those planned for the rest of the slot, or takes.

        The preceding flow is expected to go on at its last rate. 0 if the flows form no ring: a
        worker of one sends in an iteration as much as it receives.
        """
        volume, volume_in = self.volume_bytes, statistics.median_low(self._volumes_in or (0,))
        if abs(volume - volume_in) > RING_TOLERANCE * volume:
            return 0.0
        before_Bps = max(self._rates(2)[-1:], default=0.0)
        own = self.sent - self._base_sent + planned_bytes
        precedent = self.received - self._base_received + before_Bps * left_s
        return ring_change_bytes(own, precedent, self._lead * volume)

    def _rates(self, column: int) -> tuple[float, ...]:
        readings = list(self._readings)
        pairs = itertools.pairwise(readings)
        return tuple((b[column] - a[column]) / max(1e-3, b[0] - a[0]) for a, b in pairs)


class _Flow:
    """A flow that this rank paces.

    Args:
        booked: the flow of its hosts, with links.
        local: True if its host keeps the tables, which are then those of the link that leaves it.
        hosts: of the job.
        enters: the link that enters the rank's host; empty if no flow of the job ends there.
    """

    def __init__(
        self, name: str, booked: HostFlowLinks, *, local: bool, hosts: int, enters: str
    ) -> None:
        self.name, self.endpoints, self.enters = name, booked, enters
        self.links = booked.links
        if local:
            self.links = {booked.leaves: booked.links[booked.leaves]} if booked.leaves else {}
        self.progress = FlowProgress(hosts)
        self.connections: list[Connection] = []
        self.booked = False
        self.waits = False
        self.limit_Bps: float | None = None
        self.due_s = float("-inf")

    @property
    def least_bytes(self) -> float:
        return LEAST_SLOTS * min(self.links.values())


class RateScheduler:
    """Paces the flows that leave this rank, slot by slot.

    Thread safety: any thread may call the methods. A thread of its own does the work while there
    are flows; the lock guards the limits, so that none is set after they were lifted.

    Args:
        job, rank: the job's name in the cluster, and this process's rank in it.
        host: where it runs, as the topology calls it.
        connect: gives a client of the tables at an endpoint.
        slot_s: seconds of a slot, until the tables say otherwise.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        host: str,
        marks: IterationMarks,
        wire: Wire,
        connect: Callable[[str], TablesClient],
        *,
        slot_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._name, self._host = job, f"{job}/{rank}", host
        self._marks, self._wire, self._connect = marks, wire, connect
        self._slot_s, self._clock = slot_s, clock
        self._warn = WarnOnce(_log)
        self._lock = threading.Lock()
        self._followed: tuple[Sequence[HostFlowLinks], str | None] = (), None
        self._stop: threading.Event | None = None
        self._looked_s = float("-inf")
        self._limits: dict[Key, int] = {}
        self._problem = self._unlimited = ""
        self._rounds = self._refused = self._changes = 0
        self._flows: list[_Flow] = []

    @classmethod
    def from_settings(
        cls, settings: Settings, rank: int, host: str, marks: IterationMarks, wire: Wire
    ) -> RateScheduler:
        """Returns the scheduler of a rank as the settings say."""

        def connect(endpoint: str) -> TablesClient:
            connector = embedded(endpoint or OWN_TABLES, settings.store_group)
            secret = read_secret(settings.store_secret)
            return TablesClient(connector, secret, dscp=settings.control_dscp)

        job = f"{settings.cluster}/{settings.job}"
        return cls(job, rank, host, marks, wire, connect, slot_s=settings.slot_ms / 1e3)

    def follow(self, flows: Sequence[HostFlowLinks], tables: str) -> None:
        """Paces ``flows`` of the job by the tables at ``tables``; none: paces nothing.

        Args:
            flows: those of all hosts of the job.
            tables: endpoint of the service; empty: this host's own.
        """
        if (tuple(flows), tables) == self._followed:
            return
        self._followed = tuple(flows), tables
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        self._flows = []
        if not flows:
            self.lift()
            return
        hosts = len({end for flow in flows for end in (flow.src, flow.dst)})
        entering = {flow.enters for flow in flows if flow.dst == self._host} - {""}
        enters = min(entering, default="")
        mine = [
            _Flow(f"{self._name}>{flow.dst}", flow, local=not tables, hosts=hosts, enters=enters)
            for flow in flows
            if flow.src == self._host
        ]
        self._flows = [flow for flow in mine if flow.links]
        self._stop = threading.Event()
        args = self._flows, tables, self._stop
        threading.Thread(target=self._run, args=args, name="crux-rates", daemon=True).start()

    def check(self) -> None:
        """Ends the limits if the thread that renews them stands still."""
        if self._limits and self._clock() - self._looked_s > SILENT_S:
            self._warn("silent", "flows are not paced: their thread stands still")
            self.lift()

    def lift(self) -> None:
        """Ends all limits."""
        with self._lock:
            if self._limits:
                self._limits = {}
                self._wire.limit({})

    def revert(self) -> None:
        """Stops pacing."""
        self.follow((), "")
        self.lift()

    def status(self) -> dict[str, Any]:
        """Returns plain values for :func:`crux_torch.status`."""
        return {
            "paced": len(self._limits),
            "changes": self._changes,
            "rounds": self._rounds,
            "forestalled": self._refused,
            "why_not": self._problem or None,
            "unlimited": self._unlimited or None,
            "flows": [
                {
                    "to": flow.endpoints.dst,
                    "links": list(flow.links),
                    "volume_bytes": flow.progress.volume_bytes,
                    "limit_Bps": flow.limit_Bps,
                }
                for flow in self._flows
            ],
        }

    def _run(self, flows: list[_Flow], endpoint: str, stop: threading.Event) -> None:
        tables: TablesClient | None = None
        try:
            while not stop.wait(self._slot_s / LOOKS):
                try:
                    tables = tables or self._connect(endpoint)
                    self._look(flows, tables, stop)
                except Exception as error:
                    self._problem = str(error) or type(error).__name__
                    self._warn("rates", f"flows are not paced: {self._problem}")
                    if not isinstance(error, CruxError):
                        _log.debug("details", exc_info=True)
                    for flow in flows:
                        flow.booked, flow.limit_Bps = False, None
                    self.lift()
        finally:
            if tables is not None:
                tables.close()

    def _look(self, flows: list[_Flow], tables: TablesClient, stop: threading.Event) -> None:
        """Read the counters; book for flows that began, wait, or come to another slot."""
        now_s = self._clock()
        self._read(flows, now_s)
        for flow in flows:
            progress = flow.progress
            if progress.begun and progress.volume_bytes >= flow.least_bytes * self._slot_s:
                due = now_s >= flow.due_s or not flow.booked
                patience = WAITING_IDLE_SLOTS if flow.waits else IDLE_SLOTS
                if progress.is_idle(now_s, patience * self._slot_s):
                    if due or flow.limit_Bps is not None:
                        self._keep_place(flow, tables)
                elif due or flow.waits or flow.limit_Bps is None:
                    self._book(flow, tables)
            elif flow.booked:
                seen = self._fetch(flow, tables)
                tables.update_schedule(self._schedule(flow, seen.slot, ()))
                flow.booked, flow.limit_Bps, flow.due_s = False, None, float("-inf")
        self._apply(flows, stop)
        self._looked_s = self._clock()

    def _fetch(self, flow: _Flow, tables: TablesClient) -> Feedback:
        seen = tables.fetch_feedback(flow.name, flow.links)
        # Cleared only here: a look without flows under way does not ask the tables.
        self._problem = ""
        return seen

    def _keep_place(self, flow: _Flow, tables: TablesClient) -> None:
        """Book nothing, for a flow whose iteration has more to send later."""
        seen = self._fetch(flow, tables)
        nothing = (0.0,) * len(seen.loads_Bps[0])
        tables.update_schedule(self._schedule(flow, seen.slot, nothing))
        flow.booked, flow.limit_Bps, flow.waits = True, None, False
        flow.due_s = self._clock() + seen.slot_s * (1.0 - seen.gone)

    def _read(self, flows: list[_Flow], now_s: float) -> None:
        connections = self._wire.connections()
        for flow in flows:
            flow.connections = [c for c in connections if c.peer in flow.endpoints.destinations]
        # A ring's worker sends to one host what it has received from another.
        received = sum(c.bytes_received for flow in flows for c in flow.connections)
        for flow in flows:
            sent = sum(c.bytes_sent for c in flow.connections)
            flow.progress.read(self._marks.total, sent, received, now_s)

    def _book(self, flow: _Flow, tables: TablesClient) -> None:
        """One round of the control protocol: feedback, Algorithm 2, schedule."""
        progress = flow.progress
        if self._clock() >= flow.due_s:
            progress.end_slot(self._clock())
        for _ in range(ATTEMPTS):
            self._rounds += 1
            seen = self._fetch(flow, tables)
            self._slot_s = seen.slot_s
            path = [
                LinkLoad(capacity, load)
                for capacity, load in zip(flow.links.values(), seen.loads_Bps, strict=True)
            ]
            left_s = seen.slot_s * (1.0 - seen.gone)
            volume = float(progress.left_bytes)
            plan = allocate(path, volume, seen.slot_s, 0.0, 0.0, gone=seen.gone)
            change = progress.change_bytes(plan[0] * left_s, left_s) / max(left_s, 1e-3)
            most_Bps = ceiling_Bps(progress.sent_Bps, room_Bps(path)[0])
            rates = allocate(path, volume, seen.slot_s, change, most_Bps, gone=seen.gone)
            # A raise beyond the room is not booked: it uses what others leave.
            booked = [min(rate, most) for rate, most in zip(rates, room_Bps(path), strict=True)]
            if tables.update_schedule(self._schedule(flow, seen.slot, booked)):
                break
            self._refused += 1
        else:
            rates = (0.0,) * len(rates)
        flow.booked = True
        flow.limit_Bps = applied_Bps(rates, path)
        flow.waits = flow.limit_Bps < 0.99 * max(rates) or not any(rates)
        flow.due_s = self._clock() + left_s

    def _schedule(self, flow: _Flow, slot: int, rates_Bps: Sequence[float]) -> UpdateSchedule:
        return UpdateSchedule(
            flow.name,
            dict(flow.links),
            slot,
            tuple(rates_Bps),
            flow.progress.sent,
            self._job,
            self._counters(flow),
        )

    def _counters(self, flow: _Flow) -> dict[str, float]:
        """Returns the bytes that this host's interface has moved over its links, each direction."""
        local = next((c.local for c in flow.connections), None)
        interface = interface_of(local) if local is not None else None
        moved = moved_bytes(interface) if interface is not None else None
        if moved is None:
            return {}
        found = {flow.endpoints.leaves: float(moved[0]), flow.enters: float(moved[1])}
        return {link: count for link, count in found.items() if link}

    def _apply(self, flows: list[_Flow], stop: threading.Event) -> None:
        """Divide each flow's limit among its busy connections."""
        limits: dict[Key, int] = {}
        for flow in flows:
            if flow.limit_Bps is None:
                continue
            most = max((c.bytes_sent for c in flow.connections), default=0)
            used = [c for c in flow.connections if c.bytes_sent > BUSY * most]
            share = max(1, round(flow.limit_Bps / max(1, len(used))))
            least = round(LEAST_BURSTS * BURST_BYTES / self._slot_s)
            for c in used:
                limits[c.kind, c.id] = share if c.kind == "qp" else max(share, least)
        with self._lock:
            if limits != self._limits and not stop.is_set():
                self._limits = limits
                self._changes += 1
                self._unlimited = self._wire.limit(limits)
                if self._unlimited:
                    self._warn("unlimited", f"without a rate: {self._unlimited}")
