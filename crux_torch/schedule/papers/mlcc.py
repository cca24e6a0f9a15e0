"""mlcc: ECMP's paths and one level; flows book rates in time slots and keep to them (mlcc §IV).

Time is divided into slots, and every link has a table of what the flows have booked on it in the
next :data:`SLOTS` of them. A flow reads the tables along its path, books its rates, and so avoids
the slots in which others send. Slot 0 is always the current one.

Everything here is pure, but for the tables' own state: there is no clock, every call gives the
number of the current slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import add

from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions

#: Slots that a table covers, seconds of one slot, and slots of the past that bound a rate
#: (mlcc §V, §VI-B, §IV-C).
SLOTS = 10
SLOT_S = 0.06
WINDOW_SLOTS = 4

#: Growth of foreign flows for which room is left, so that they can reach their share.
FOREIGN_GROWTH = 1.5
#: Slots over which foreign flows are counted. Hosts read their counters at different times in a
#: slot, so a count below this share of a link is an error of the counter.
FOREIGN_SLOTS = 2 * WINDOW_SLOTS
FOREIGN_NOISE = 0.2
#: A flow that waits for its slot still gets this share of its path, so that nothing stands still.
LEAST_SHARE = 0.01
#: Left over of a volume by rounding, as a share of it.
_ROUNDING = 1e-9


#: Share of its capacity by which bookings may exceed a link: rounding, and a slot's rest.
TOLERANCE = 1e-6


def mlcc(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Returns ECMP's plan with the length of a slot. Every flow finds its own rates live."""
    # A rank that only follows loads this module, and neither numpy nor a planner with it.
    from crux_torch.schedule.papers.baselines import ecmp

    return replace(ecmp(cluster, options), slot_s=SLOT_S)


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """One link as one flow sees it: its capacity, and the rate of the other flows in each slot."""

    capacity_Bps: float
    load_Bps: tuple[float, ...]


def room_Bps(path: Sequence[LinkLoad]) -> tuple[float, ...]:
    """The most that a flow may send in each slot: ``min_l u_l(t) - b_l(t)``."""
    left = [[link.capacity_Bps - load for load in link.load_Bps] for link in path]
    return tuple(max(0.0, min(in_slot)) for in_slot in zip(*left, strict=True))


def path_load(path: Sequence[LinkLoad]) -> tuple[float, ...]:
    """The load of each slot, each link's as a share of its capacity, summed over the path."""
    shares = [[load / link.capacity_Bps for load in link.load_Bps] for link in path]
    return tuple(map(sum, zip(*shares, strict=True)))


def initial_schedule(
    path: Sequence[LinkLoad], volume_bytes: float, slot_s: float, *, gone: float = 0.0
) -> tuple[float, ...]:
    """Algorithm 1: the flow's rate in each slot.

    For each completion slot it fills the slots up to it in the order of their path load, until the
    volume is sent. The schedule of the least cost wins: of equation (11), its completion slot plus
    what it sends times the load where it sends it, in units of one slot of the path at full rate.
    A volume that does not fit takes all the room that there is.

    Args:
        path: at least one link, all with the same number of slots.
        volume_bytes: left to send.
        slot_s: seconds of one slot.
        gone: share of the current slot that has passed.
    """
    room, load = room_Bps(path), path_load(path)
    length_s = [slot_s * (1.0 - gone)] + [slot_s] * (len(room) - 1)
    full_slot_bytes = slot_s * min(link.capacity_Bps for link in path)
    best: tuple[float, ...] | None = None
    least = float("inf")
    in_order = sorted(range(len(room)), key=lambda t: (load[t], t))
    fits_bytes = 0.0
    for end in range(1, len(room) + 1):
        fits_bytes += room[end - 1] * length_s[end - 1]
        # What fits only by rounding is left to the filling below; no later end costs less than it.
        if fits_bytes < (1.0 - 2.0 * _ROUNDING) * volume_bytes:
            continue
        if end >= least:
            break
        rates, left = _fill(room, in_order, length_s, volume_bytes, end)
        if left > _ROUNDING * volume_bytes:
            continue
        sent = (rate * length for rate, length in zip(rates, length_s, strict=True))
        cost = end + sum(b * at for b, at in zip(sent, load, strict=True)) / full_slot_bytes
        if cost < least:
            best, least = rates, cost
    return _fill(room, in_order, length_s, volume_bytes, len(room))[0] if best is None else best


def _fill(
    room: Sequence[float],
    in_order: Sequence[int],
    length_s: Sequence[float],
    volume_bytes: float,
    end: int,
) -> tuple[tuple[float, ...], float]:
    """The first ``end`` slots, filled in this order; and the bytes that did not fit."""
    rates = [0.0] * len(room)
    left = volume_bytes
    for slot in in_order:
        if left <= 0.0:
            break
        if slot >= end or length_s[slot] <= 0.0:
            continue
        rates[slot] = min(room[slot], left / length_s[slot])
        left -= rates[slot] * length_s[slot]
    return tuple(rates), left


def allocate(
    path: Sequence[LinkLoad],
    volume_bytes: float,
    slot_s: float,
    change_Bps: float,
    ceiling_Bps: float,
    *,
    gone: float = 0.0,
) -> tuple[float, ...]:
    """Algorithm 2: the schedule, with the current slot's rate as the flow's dependency asks.

    Args:
        change_Bps: addition of the dependency to the current slot's rate; may be below 0.
        ceiling_Bps: B_i, the most that a raised rate may be.
    """
    rates = initial_schedule(path, volume_bytes, slot_s, gone=gone)
    if change_Bps == 0.0 or gone >= 1.0:
        return rates
    now = max(0.0, rates[0] + change_Bps)
    if change_Bps > 0.0:
        now = max(rates[0], min(now, ceiling_Bps))
    now = min(now, volume_bytes / (slot_s * (1.0 - gone)))
    left = volume_bytes - now * slot_s * (1.0 - gone)
    later = [LinkLoad(link.capacity_Bps, link.load_Bps[1:]) for link in path]
    if len(rates) == 1 or left <= _ROUNDING * volume_bytes:
        return (now, *(0.0 for _ in rates[1:]))
    return (now, *initial_schedule(later, left, slot_s))


def applied_Bps(
    rates_Bps: Sequence[float], path: Sequence[LinkLoad], least_Bps: float = 0.0
) -> float:
    """The limit that carries out the current slot of a schedule, in bytes per second.

    A flow whose last bytes are sent in this slot takes all the room that nobody has booked: then it
    ends early in the slot. The tables hold what it needs on the slot's average. Below ``least_Bps``
    nothing can be limited.
    """
    ends_now = rates_Bps[0] > 0.0 and not any(rates_Bps[1:])
    rate_Bps = room_Bps(path)[0] if ends_now else rates_Bps[0]
    return max(rate_Bps, LEAST_SHARE * min(link.capacity_Bps for link in path), least_Bps)


def ring_change_bytes(own: float, precedent: float, lead_bytes: float = 0.0) -> float:
    """Change of what a flow of a ring sends by the end of the slot.

    Args:
        own, precedent: F_i and F_j, bytes that this flow and the one into this worker will have
            moved by the end of the slot, by their rates so far.
        lead_bytes: bytes that a worker may send before it has received anything: its first chunk.
    """
    if precedent > own:
        return precedent - own
    return min(0.0, precedent + lead_bytes - own)


def aggregation_change_bytes(own: float, broadcasts: Sequence[float]) -> float:
    """Addition to a worker's flow to a parameter server: ``(F_b^max - F_i)+``."""
    return max(0.0, max(broadcasts) - own)


def broadcast_change_bytes(own: float, aggregations: Sequence[float]) -> float:
    """Change of a parameter server's flow to a worker: ``F_a^min - F_i``.

    It sends what all workers have sent it, no more and no less.
    """
    return min(aggregations) - own


def ceiling_Bps(sent_Bps: Sequence[float], room: float) -> float:
    """B_i: the largest of a flow's last rates; where it has none, what the path has left."""
    return max(sent_Bps) if sent_Bps else room


def foreign_share_Bps(cross_Bps: float, capacity_Bps: float, flows: int) -> float:
    """Rate that is kept free on a link for flows that nobody schedules (mlcc §IV-B, Figure 11).

    They keep what they were seen to send, and may grow until they together have what each of our
    flows has, as one flow more has under fair sharing. Beyond that, congestion control decides: a
    limit only keeps our flows from taking more.

    Args:
        cross_Bps: their recent rate.
        flows: number of our flows on the link.
    """
    if cross_Bps <= FOREIGN_NOISE * capacity_Bps:
        return 0.0
    return min(FOREIGN_GROWTH * cross_Bps, capacity_Bps / (flows + 1))


@dataclass(slots=True)
class _Booking:
    """One flow: it sends ``rates_Bps`` from slot ``since`` on, over ``links``.

    ``turn`` is its job's place in the order in which jobs began; infinite once the flow has ended.
    ``readings`` are (slot, bytes sent so far), oldest first, at most one for each slot.
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

    def feedback(self, flow: str, links: Mapping[str, float], slot: int) -> list[LinkLoad]:
        """The links as ``flow`` sees them (``fetch_feedback``).

        Args:
            links: capacity of each link of the flow's path, in bytes per second.
        """
        found = []
        mine = self._flows.get(flow)
        turn = inf if mine is None else mine.turn
        for link, capacity_Bps in links.items():
            booked_Bps = self._booked_Bps(turn, link, slot, self.slots, but=flow)
            foreign_Bps = self._foreign_Bps(flow, link, capacity_Bps, slot)
            # Foreign flows take from one of ours alone what they would take from each. So ours
            # need not wait for each other beside them.
            most = capacity_Bps - self._entitled_Bps(flow, link, capacity_Bps, slot)
            load = tuple(min(most, foreign_Bps + rate_Bps) for rate_Bps in booked_Bps)
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
    ) -> bool:
        """Book ``rates_Bps`` from ``slot`` on in place of what ``flow`` had (``update_schedule``).

        Returns True if it fits beside the bookings of flows that began earlier. If not, as where
        another flow has read the same tables and booked first, the flow keeps its place only. One
        that books no slots has ended.

        Args:
            links: see :meth:`feedback`.
            sent: bytes that the flow has sent so far, by its own count.
            job: the flow's job; empty: it is one by itself.
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
            self._fits(flow, turn, link, capacity_Bps, slot, rates)
            for link, capacity_Bps in links.items()
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
        self, turn: float, link: str, slot: int, slots: int, but: str = ""
    ) -> list[float]:
        """Rates from ``slot`` on that the job with ``turn`` and earlier ones booked on ``link``."""
        booked_Bps = [0.0] * slots
        for name in self._on.get(link, ()):
            booking = self._flows[name]
            if name == but or booking.turn > turn:
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
    ) -> bool:
        """True if ``link`` has room for these rates, or ``flow`` is entitled to them."""
        most_Bps = (1.0 + TOLERANCE) * capacity_Bps
        entitled_Bps = (1.0 + TOLERANCE) * self._entitled_Bps(flow, link, capacity_Bps, slot)
        booked_Bps = self._booked_Bps(turn, link, slot, len(rates_Bps))
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
