"""The load tables of switches (mlcc §IV-A): what is booked on each link, slot by slot.

Plain state without a clock: slots are numbered, and every call says which one is the current.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from crux_torch.schedule.rates import FOREIGN_SLOTS, LinkLoad, foreign_share_Bps

#: Of its capacity, by which bookings may exceed a link: rounding, and a slot's rest.
TOLERANCE = 1e-6


@dataclass(slots=True)
class _Booking:
    """What one flow sends: ``rates_Bps`` from slot ``since`` on, over ``links``.

    ``turn``: its job's place in the order in which jobs began; infinite once the flow has ended.
    ``readings``: slot and bytes sent so far, oldest first, at most one for each slot.
    """

    job: str
    links: tuple[str, ...]
    turn: float
    since: int
    rates_Bps: tuple[float, ...]
    readings: deque[tuple[int, float]] = field(default_factory=deque)

    def rate_Bps(self, slot: int) -> float:
        at = slot - self.since
        return self.rates_Bps[at] if 0 <= at < len(self.rates_Bps) else 0.0

    def wants(self, slot: int) -> bool:
        """Whether it has booked anything from ``slot`` on."""
        return any(self.rates_Bps[max(0, slot - self.since) :])

    def is_over(self, slot: int) -> bool:
        return slot >= self.since + len(self.rates_Bps) + FOREIGN_SLOTS


class LoadTables:
    """The tables of any number of links.

    A flow sees what jobs that began before its own have booked. So one that falls behind its
    schedule keeps its place, and those behind it give way at their next look. If it saw all
    bookings, its last bytes would have to wait for everybody else's. All flows of a job have one
    place: if each of two rings came first on another link, both would stand still.

    A booking reaches ``slots`` slots ahead, so what a flow that fell silent has booked is over
    after that. What the counters of a link showed counts for ``FOREIGN_SLOTS``.

    Args:
        slots: that a table covers.
        slot_s: seconds of one slot.
    """

    def __init__(self, slots: int, slot_s: float) -> None:
        self.slots, self.slot_s = slots, slot_s
        self._flows: dict[str, _Booking] = {}
        self._turns = 0
        self._on: dict[str, dict[str, None]] = {}
        self._counted: dict[str, deque[tuple[int, float]]] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def __contains__(self, flow: str) -> bool:
        return flow in self._flows

    def feedback(self, flow: str, links: Mapping[str, float], slot: int) -> list[LinkLoad]:
        """Each link as ``flow`` sees it (``fetch_feedback``).

        Args:
            links: capacity of each link of the flow's path, in bytes per second.
        """
        found = []
        mine = self._flows.get(flow)
        turn = inf if mine is None else mine.turn
        for link, capacity_Bps in links.items():
            before = self._before(turn, link, but=flow)
            foreign_Bps = self._foreign_Bps(flow, link, capacity_Bps, slot)
            # Foreign flows take from one of ours alone what they would take from each. So ours
            # need not wait for each other beside them.
            most = capacity_Bps - self._entitled_Bps(flow, link, capacity_Bps, slot)
            load = (
                min(most, foreign_Bps + sum(b.rate_Bps(slot + k) for b in before))
                for k in range(self.slots)
            )
            found.append(LinkLoad(capacity_Bps, tuple(load)))
        return found

    def book(
        self,
        flow: str,
        links: Mapping[str, float],
        slot: int,
        rates_Bps: Sequence[float],
        sent: float,
        *,
        job: str = "",
    ) -> bool:
        """Book ``rates_Bps`` from ``slot`` on in place of what ``flow`` had (``update_schedule``).

        Returns whether it fits beside what flows that began earlier have booked; if not, the flow
        has its place, and nothing else. Where two flows have read the same tables, the one that
        books second is told so. One that books no slots has ended.

        Args:
            links: see :meth:`feedback`.
            sent: bytes that the flow has sent so far, by its own count.
            job: whose flow it is; empty: it is one by itself.
        """
        job = job or flow
        rates = tuple(rates_Bps[: self.slots])
        before = self._flows.pop(flow, None)
        readings = before.readings if before is not None else deque()
        if before is not None:
            self._off(flow, before)
        turn = inf if before is None else before.turn
        if not rates:
            turn = inf
        elif turn == inf:
            turn = self._turn(job)
        entitled_Bps = {
            link: (1.0 + TOLERANCE) * self._entitled_Bps(flow, link, capacity_Bps, slot)
            for link, capacity_Bps in links.items()
        }
        fits = all(
            rate == 0.0
            or rate <= max(self._left_Bps(turn, link, capacity_Bps, slot + k), entitled_Bps[link])
            for link, capacity_Bps in links.items()
            for k, rate in enumerate(rates)
        )
        _read(readings, slot, sent)
        kept = rates if fits else (0.0,) * len(rates)
        self._flows[flow] = _Booking(job, tuple(links), turn, slot, kept, readings)
        for link in links:
            self._on.setdefault(link, {})[flow] = None
        return fits

    def count(self, link: str, slot: int, moved: float) -> None:
        """The counter of ``link`` stands at ``moved`` bytes, foreign flows' included."""
        readings = self._counted.setdefault(link, deque())
        _read(readings, slot, moved)

    def cross_Bps(self, link: str, slot: int) -> float:
        """What flows that book nothing have sent over ``link`` lately; 0 if nobody counts it."""
        readings = self._counted.get(link)
        if not readings or readings[-1][0] < slot - FOREIGN_SLOTS or len(readings) < 2:
            return 0.0
        # By the second half of the window, too, so that one that has ended is soon forgotten.
        first, last = readings[0], readings[-1]
        later = next(r for r in readings if 2 * r[0] >= first[0] + last[0])
        begins = (first,) if later is last else (first, later)
        return min(self._beside_ours_Bps(link, begin, last) for begin in begins)

    def _beside_ours_Bps(
        self, link: str, begin: tuple[int, float], end: tuple[int, float]
    ) -> float:
        """The rate that a counter shows between two readings, without that of our flows."""
        (first, before), (last, now) = begin, end
        ours = sum(_moved(self._flows[f].readings, first, last) for f in self._on.get(link, ()))
        return max(0.0, now - before - ours) / ((last - first) * self.slot_s)

    def rate_Bps(self, flow: str, slot: int) -> float:
        """What ``flow`` has booked in ``slot``."""
        booking = self._flows.get(flow)
        return booking.rate_Bps(slot) if booking is not None else 0.0

    def expire(self, slot: int) -> None:
        """Forget flows and counters that have been silent for longer than a table reaches."""
        for flow in [f for f, booking in self._flows.items() if booking.is_over(slot)]:
            self._off(flow, self._flows.pop(flow))
        oldest = slot - self.slots - FOREIGN_SLOTS
        for link in [n for n, readings in self._counted.items() if readings[-1][0] < oldest]:
            del self._counted[link]

    def _wanting(self, flow: str, link: str, slot: int) -> int:
        """How many of our flows would send over ``link`` now under fair sharing, this one among
        them: those that wait count, too."""
        others = (self._flows[f] for f in self._on.get(link, ()) if f != flow)
        return 1 + sum(other.wants(slot) for other in others)

    def _foreign_Bps(self, flow: str, link: str, capacity_Bps: float, slot: int) -> float:
        wanting = self._wanting(flow, link, slot)
        return foreign_share_Bps(self.cross_Bps(link, slot), capacity_Bps, wanting)

    def _entitled_Bps(self, flow: str, link: str, capacity_Bps: float, slot: int) -> float:
        """What ``flow`` may send whoever began before it: its fair share beside foreign flows."""
        if not self._foreign_Bps(flow, link, capacity_Bps, slot):
            return 0.0
        return capacity_Bps / (self._wanting(flow, link, slot) + 1)

    def _turn(self, job: str) -> float:
        """The place of ``job``: that of its flows under way, or behind everybody."""
        known = (b.turn for b in self._flows.values() if b.job == job and b.turn < inf)
        turn = next(known, 0.0)
        if not turn:
            self._turns += 1
        return turn or self._turns

    def _before(self, turn: float, link: str, but: str = "") -> list[_Booking]:
        """What is booked on ``link`` by jobs that began before ``turn``, and by flows of the job
        that has it."""
        on = (self._flows[f] for f in self._on.get(link, ()) if f != but)
        return [booking for booking in on if booking.turn <= turn]

    def _left_Bps(self, turn: float, link: str, capacity_Bps: float, slot: int) -> float:
        booked = sum(booking.rate_Bps(slot) for booking in self._before(turn, link))
        return capacity_Bps * (1.0 + TOLERANCE) - booked

    def _off(self, flow: str, booking: _Booking) -> None:
        for link in booking.links:
            flows = self._on[link]
            flows.pop(flow, None)
            if not flows:
                del self._on[link]


def _read(readings: deque[tuple[int, float]], slot: int, total: float) -> None:
    """Keep one reading of a counter for each slot of the window; one that fell begins anew."""
    if readings and total < readings[-1][1]:
        readings.clear()
    if not readings or readings[-1][0] < slot:
        readings.append((slot, total))
    while readings[0][0] < slot - FOREIGN_SLOTS and len(readings) > 1:
        readings.popleft()


def _moved(readings: Sequence[tuple[int, float]], first: int, last: int) -> float:
    """Bytes that a flow sent between two slots, by the readings nearest to them."""
    inside = [sent for slot, sent in readings if first <= slot <= last]
    return inside[-1] - inside[0] if inside else 0.0
