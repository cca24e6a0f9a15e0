"""mlcc's load tables: what flows have booked on each link, slot by slot (mlcc §IV-A).

There is no clock here: every call gives the number of the current slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import add
from typing import NamedTuple

from crux_torch.schedule.papers.mlcc import (
    FOREIGN_SLOTS,
    TOLERANCE,
    LinkLoad,
    foreign_share_Bps,
)


class Neighbours(NamedTuple):
    """F, the bytes by the end of the slot, of the flows before and behind a flow, by other end."""

    into: Mapping[str, float]
    out: Mapping[str, float]


@dataclass(slots=True)
class _Booking:
    """One flow: it sends ``rates_Bps`` from slot ``since`` on, over ``links``.

    ``turn`` is its job's place in the order in which jobs began; infinite once the flow has ended.
    ``readings`` are (slot, bytes sent so far), oldest first, at most one for each slot. ``ends``
    are its hosts, and ``by_end`` is its F_i; both only where the job has parameter servers.
    """

    job: str
    links: tuple[str, ...]
    turn: float
    since: int
    rates_Bps: tuple[float, ...]
    readings: deque[tuple[int, float]] = field(default_factory=deque)
    ends: tuple[str, str] = ("", "")
    by_end: float = 0.0

    def rate_Bps(self, slot: int) -> float:
        at = slot - self.since
        return self.rates_Bps[at] if 0 <= at < len(self.rates_Bps) else 0.0

    def from_slot(self, slot: int) -> tuple[float, ...]:
        """Rates of ``slot`` and those that follow."""
        at = slot - self.since
        return self.rates_Bps[at:] if at >= 0 else (0.0,) * -at + self.rates_Bps

    def wants(self, slot: int) -> bool:
        """True if it has booked anything from ``slot`` on."""
        return any(self.from_slot(slot))

    def is_over(self, slot: int) -> bool:
        return slot >= self.since + len(self.rates_Bps) + FOREIGN_SLOTS


class LoadTables:
    """The load tables of switches (mlcc §IV-A): the bookings on each link, slot by slot.

    A flow sees what jobs that began before its own have booked. So one that falls behind its
    schedule keeps its place, and those behind it give way at their next look. If it saw all
    bookings, its last bytes would have to wait for everybody else's. All flows of a job have one
    place: if each of two rings came first on another link, both would stand still.

    A booking reaches ``slots`` slots ahead, so that of a flow that fell silent is over after that.
    Readings of a link's counters count for ``FOREIGN_SLOTS``.
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

    def feedback(
        self, flow: str, links: Mapping[str, float], slot: int, family: str = ""
    ) -> list[LinkLoad]:
        """The links as ``flow`` sees them (``fetch_feedback``).

        Args:
            links: capacity of each link of the flow's path, in bytes per second.
            family: the flow's job, if it has parameter servers. Its flows do not wait for each
                other, since the server waits for all of them: on each link the flow sees its part.
        """
        found = []
        mine = self._flows.get(flow)
        turn = inf if mine is None else mine.turn
        for link, capacity_Bps in links.items():
            booked_Bps = self._booked_Bps(turn, link, slot, self.slots, flow, family)
            foreign_Bps = self._foreign_Bps(flow, link, capacity_Bps, slot)
            # Foreign flows take from one of ours alone what they would take from each. So ours
            # need not wait for each other beside them.
            most = capacity_Bps - self._entitled_Bps(flow, link, capacity_Bps, slot)
            load = tuple(min(most, foreign_Bps + rate_Bps) for rate_Bps in booked_Bps)
            parts = self._parts(flow, family, link, slot)
            # The rest is load to it.
            load = tuple(capacity_Bps - (capacity_Bps - b) / parts for b in load)
            found.append(LinkLoad(capacity_Bps, load))
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
        ends: tuple[str, str] = ("", ""),
        by_end: float = 0.0,
    ) -> bool:
        """Book ``rates_Bps`` from ``slot`` on in place of what ``flow`` had (``update_schedule``).

        Returns True if it fits beside the bookings of flows that began earlier. If not, as where
        another flow has read the same tables and booked first, the flow keeps its place only. One
        that books no slots has ended.

        Args:
            links: see :meth:`feedback`.
            sent: bytes that the flow has sent so far, by its own count.
            job: the flow's job; empty: it is one by itself.
            ends, by_end: its hosts, and its F_i, see :meth:`neighbours`.
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
        fits = all(
            self._fits(flow, turn, link, capacity_Bps, slot, rates, job if ends[0] else "")
            for link, capacity_Bps in links.items()
        )
        _read(readings, slot, sent)
        kept = rates if fits else (0.0,) * len(rates)
        self._flows[flow] = _Booking(job, tuple(links), turn, slot, kept, readings, ends, by_end)
        for link in links:
            self._on.setdefault(link, {})[flow] = None
        return fits

    def neighbours(self, job: str, src: str, dst: str) -> Neighbours:
        """Returns F of the job's flows under way into ``src`` and out of ``dst``.

        The paper's receivers tell them in the payload of their ACKs (mlcc §IV-A).
        """
        into: dict[str, float] = {}
        out: dict[str, float] = {}
        for booking in self._flows.values():
            if booking.job != job or booking.turn == inf:
                continue
            start, end = booking.ends
            if end == src:
                into[start] = into.get(start, 0.0) + booking.by_end
            if start == dst:
                out[end] = out.get(end, 0.0) + booking.by_end
        return Neighbours(into, out)

    def count(self, link: str, slot: int, moved: float) -> None:
        """The counter of ``link`` stands at ``moved`` bytes, foreign flows' included."""
        readings = self._counted.setdefault(link, deque())
        _read(readings, slot, moved)

    def cross_Bps(self, link: str, slot: int) -> float:
        """Recent rate of flows that book nothing on ``link``; 0 if nobody counts it."""
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
        """Rate that ``flow`` has booked in ``slot``."""
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
        """Number of our flows that would send over ``link`` now under fair sharing, with this."""
        others = (self._flows[f] for f in self._on.get(link, ()) if f != flow)
        return 1 + sum(other.wants(slot) for other in others)

    def _parts(self, flow: str, family: str, link: str, slot: int) -> int:
        """Number of the job's flows that would send over ``link`` now, with this one."""
        if not family:
            return 1
        others = (self._flows[f] for f in self._on.get(link, ()) if f != flow)
        return 1 + sum(other.job == family and other.wants(slot) for other in others)

    def _foreign_Bps(self, flow: str, link: str, capacity_Bps: float, slot: int) -> float:
        if link not in self._counted:
            return 0.0
        wanting = self._wanting(flow, link, slot)
        return foreign_share_Bps(self.cross_Bps(link, slot), capacity_Bps, wanting)

    def _entitled_Bps(self, flow: str, link: str, capacity_Bps: float, slot: int) -> float:
        """Fair share of ``flow`` beside foreign flows, which it may send whoever began earlier."""
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

    def _booked_Bps(
        self, turn: float, link: str, slot: int, slots: int, but: str = "", family: str = ""
    ) -> list[float]:
        """Rates from ``slot`` on that the job with ``turn`` and earlier ones booked on ``link``.

        Those of the flow ``but`` and of the job ``family`` are left out.
        """
        booked_Bps = [0.0] * slots
        for name in self._on.get(link, ()):
            booking = self._flows[name]
            if name == but or booking.turn > turn or booking.job == family:
                continue
            rates_Bps = booking.from_slot(slot)[:slots]
            booked_Bps[: len(rates_Bps)] = map(add, booked_Bps, rates_Bps)
        return booked_Bps

    def _fits(
        self,
        flow: str,
        turn: float,
        link: str,
        capacity_Bps: float,
        slot: int,
        rates_Bps: Sequence[float],
        family: str,
    ) -> bool:
        """True if ``link`` has room for these rates, or ``flow`` is entitled to them."""
        most_Bps = (1.0 + TOLERANCE) * capacity_Bps
        entitled_Bps = (1.0 + TOLERANCE) * self._entitled_Bps(flow, link, capacity_Bps, slot)
        booked_Bps = self._booked_Bps(turn, link, slot, len(rates_Bps), flow, family)
        return all(
            rate == 0.0 or rate <= max(most_Bps - booked, entitled_Bps)
            for rate, booked in zip(rates_Bps, booked_Bps, strict=True)
        )

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
