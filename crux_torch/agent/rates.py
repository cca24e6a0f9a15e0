"""One rank books the rates of its flows in the load tables, and paces them (mlcc §III).

Everything fails open. A flow has a limit only while it is under way and the tables answer. A table
service that is silent for ``load_tables.TIMEOUT_S`` ends all limits; so does a leader that is
silent for as long as an order lasts. If the scheduler's thread itself stands still, the rank's
other thread ends them after ``SILENT_S``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from crux_torch.agent.flow_progress import REST, FlowProgress, Role
from crux_torch.agreement.load_tables import TIMEOUT_S, Feedback, TablesClient, UpdateSchedule
from crux_torch.apply.transport import Connection
from crux_torch.apply.wire import Key, Wire
from crux_torch.errors import CruxError
from crux_torch.host.interfaces import interface_of, moved_bytes
from crux_torch.logs import WarnOnce
from crux_torch.measure.iterations import IterationMarks
from crux_torch.network.routes import HostFlowLinks
from crux_torch.schedule.papers.mlcc import LinkLoad, allocate, applied_Bps, ceiling_Bps, room_Bps
from crux_torch.settings import Settings
from crux_torch.store.endpoint import OWN_TABLES, embedded
from crux_torch.store.frames import read_secret

_log = logging.getLogger(__name__)

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


class _Flow:
    """A flow that this rank paces.

    Args:
        booked: the flow of its hosts, with links.
        local: True if its host keeps the tables, which are then those of the link that leaves it.
        hosts: of the job.
        enters: the link that enters the rank's host; empty if no flow of the job ends there.
        role: of the rank.
    """

    def __init__(
        self, name: str, booked: HostFlowLinks, *, local: bool, hosts: int, enters: str, role: Role
    ) -> None:
        self.name, self.endpoints, self.enters = name, booked, enters
        self.links = booked.links
        if local:
            self.links = {booked.leaves: booked.links[booked.leaves]} if booked.leaves else {}
        self.progress = FlowProgress(hosts, role)
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
        role: of the rank in its job.
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
        role: Role = "ring",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._name, self._host = job, f"{job}/{rank}", host
        self._marks, self._wire, self._connect = marks, wire, connect
        self._slot_s, self._role, self._clock = slot_s, role, clock
        self._warn = WarnOnce(_log)
        self._lock = threading.Lock()
        self._followed: tuple[Sequence[HostFlowLinks], str | None] = (), None
        self._stop: threading.Event | None = None
        self._looked_s = float("-inf")
        self._limits: dict[Key, int] = {}
        self._problem = self._unlimited = ""
        self._rounds = self._refused = self._changes = self._depended = 0
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

        job, slot_s = f"{settings.cluster}/{settings.job}", settings.slot_ms / 1e3
        role: Role = "ring"
        if settings.servers:
            role = "server" if rank in settings.servers else "worker"
        return cls(job, rank, host, marks, wire, connect, slot_s=slot_s, role=role)

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
        more: Any = {"local": not tables, "hosts": hosts, "enters": enters, "role": self._role}
        mine = [
            _Flow(f"{self._name}>{flow.dst}", flow, **more)
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
            "role": self._role,
            "paced": len(self._limits),
            "changes": self._changes,
            "rounds": self._rounds,
            "depended": self._depended,
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
                elif due or flow.waits or flow.limit_Bps is None or self._role == "server":
                    # A server learns at every look what a worker's change takes from its flows.
                    self._book(flow, flows, tables)
            elif flow.booked:
                seen = self._fetch(flow, tables)
                tables.update_schedule(self._schedule(flow, seen.slot, ()))
                flow.booked, flow.limit_Bps, flow.due_s = False, None, float("-inf")
        self._apply(flows, stop)
        self._looked_s = self._clock()

    def _fetch(self, flow: _Flow, tables: TablesClient) -> Feedback:
        ends = () if self._role == "ring" else (self._job, self._host, flow.endpoints.dst)
        seen = tables.fetch_feedback(flow.name, flow.links, *ends)
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
        all_in = sum(c.bytes_received for flow in flows for c in flow.connections)
        for flow in flows:
            sent = sum(c.bytes_sent for c in flow.connections)
            mine_in = sum(c.bytes_received for c in flow.connections)
            received = all_in if self._role == "ring" else mine_in
            flow.progress.read(self._marks.total, sent, received, now_s)

    def _book(self, flow: _Flow, flows: list[_Flow], tables: TablesClient) -> None:
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
            others = self._others(flow, flows, seen, left_s)
            change = progress.change_bytes(plan[0] * left_s, left_s, others) / max(left_s, 1e-3)
            self._depended += change != 0.0
            most_Bps = ceiling_Bps(progress.sent_Bps, room_Bps(path)[0])
            rates = allocate(path, volume, seen.slot_s, change, most_Bps, gone=seen.gone)
            # A raise beyond the room is not booked: it uses what others leave.
            booked = [min(rate, most) for rate, most in zip(rates, room_Bps(path), strict=True)]
            by_end = progress.moved_bytes + booked[0] * left_s
            if tables.update_schedule(self._schedule(flow, seen.slot, booked, by_end)):
                break
            self._refused += 1
        else:
            rates = (0.0,) * len(rates)
        flow.booked = True
        flow.limit_Bps = applied_Bps(rates, path)
        flow.waits = flow.limit_Bps < 0.99 * max(rates) or not any(rates)
        flow.due_s = self._clock() + left_s

    def _others(
        self, flow: _Flow, flows: list[_Flow], seen: Feedback, left_s: float
    ) -> list[float]:
        """Returns F of the flows that ``flow`` depends on, where there are parameter servers.

        The tables know those under way that are booked there. Of the others it is what this rank
        will have received.
        """
        if self._role == "worker":
            return [*seen.out.values(), flow.progress.received_bytes(left_s)]
        if self._role == "server":
            least = REST * flow.progress.volume_bytes
            return [
                seen.into.get(f.endpoints.dst, f.progress.received_bytes(left_s))
                for f in flows
                if f.progress.volume_bytes > least
            ]
        return []

    def _schedule(
        self, flow: _Flow, slot: int, rates_Bps: Sequence[float], by_end: float | None = None
    ) -> UpdateSchedule:
        """Returns the message that books; ``by_end``: F, if more than was sent so far."""
        told = float(flow.progress.moved_bytes) if by_end is None else by_end
        return UpdateSchedule(
            flow.name,
            dict(flow.links),
            slot,
            tuple(rates_Bps),
            flow.progress.sent,
            self._job,
            self._counters(flow),
            *(() if self._role == "ring" else (self._host, flow.endpoints.dst, told)),
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
