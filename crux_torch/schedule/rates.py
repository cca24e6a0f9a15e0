"""mlcc's sending rates: what one flow sends in each of the next time slots (mlcc §IV).

Time is divided into slots, and every link has a table of what the flows have booked on it in the
next :data:`SLOTS` of them. A flow reads the tables along its path, books what it wants to send, and
so avoids the slots in which others send. Slot 0 is always the current one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Slots that a table covers, seconds of one slot, and slots of the past that bound a rate
#: (mlcc §V, §VI-B, §IV-C).
SLOTS = 10
SLOT_S = 0.06
WINDOW_SLOTS = 4

#: Of what foreign flows send, they are left this much more, so that they can grow to their share.
FOREIGN_GROWTH = 1.5
#: Slots over which they are counted. Hosts read their counters at different times in a slot, so
#: what a counter shows beside our flows below this share of a link is its error.
FOREIGN_SLOTS = 2 * WINDOW_SLOTS
FOREIGN_NOISE = 0.2
#: A flow that waits for its slot still gets this share of its path, so that nothing stands still.
LEAST_SHARE = 0.01
#: Left over of a volume by rounding, as a share of it.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """One link as one flow sees it.

    Attributes:
        capacity_Bps: of the link.
        load_Bps: what the other flows send over it in each slot, from the current one on.
    """

    capacity_Bps: float
    load_Bps: tuple[float, ...]


def room_Bps(path: Sequence[LinkLoad]) -> tuple[float, ...]:
    """What a flow may send at most in each slot: ``min_l u_l(t) - b_l(t)``, in bytes per second."""
    by_slot = zip(*(link.load_Bps for link in path), strict=True)
    return tuple(
        max(0.0, min(link.capacity_Bps - load for link, load in zip(path, loads, strict=True)))
        for loads in by_slot
    )


def path_load(path: Sequence[LinkLoad]) -> tuple[float, ...]:
    """The load of each slot, each link's as a share of its capacity, summed over the path."""
    by_slot = zip(*(link.load_Bps for link in path), strict=True)
    return tuple(
        sum(load / link.capacity_Bps for link, load in zip(path, loads, strict=True))
        for loads in by_slot
    )


def initial_schedule(
    path: Sequence[LinkLoad], volume_bytes: float, slot_s: float, *, gone: float = 0.0
) -> tuple[float, ...]:
    """Algorithm 1: the flow's rate in each slot, in bytes per second.

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
    rates = (0.0,) * len(room)
    for end in range(1, len(room) + 1):
        rates, left = _fill(room, load, length_s, volume_bytes, end)
        if left > _ROUNDING * volume_bytes:
            continue
        sent = (rate * length for rate, length in zip(rates, length_s, strict=True))
        cost = end + sum(b * at for b, at in zip(sent, load, strict=True)) / full_slot_bytes
        if cost < least:
            best, least = rates, cost
    return rates if best is None else best


def _fill(
    room: Sequence[float],
    load: Sequence[float],
    length_s: Sequence[float],
    volume_bytes: float,
    end: int,
) -> tuple[tuple[float, ...], float]:
    """The cheapest of the first ``end`` slots, filled; and the bytes that did not fit."""
    rates = [0.0] * len(room)
    left = volume_bytes
    for slot in sorted(range(end), key=lambda t: (load[t], t)):
        if left <= 0.0 or length_s[slot] <= 0.0:
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
        path, volume_bytes, slot_s, gone: see :func:`initial_schedule`.
        change_Bps: what the dependency adds to the current slot's rate; below 0: takes from it.
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
    wanted = room_Bps(path)[0] if ends_now else rates_Bps[0]
    return max(wanted, LEAST_SHARE * min(link.capacity_Bps for link in path), least_Bps)


def ring_change_bytes(own: float, precedent: float, lead_bytes: float = 0.0) -> float:
    """What a flow of a ring sends more (or, below 0, less) by the end of the slot.

    Args:
        own, precedent: F_i and F_j, bytes that this flow and the one into this worker will have
            moved by the end of the slot, by their rates so far.
        lead_bytes: what a worker may send before it has received anything: its own first chunk.
    """
    if precedent > own:
        return precedent - own
    return min(0.0, precedent + lead_bytes - own)


def aggregation_change_bytes(own: float, broadcasts: Sequence[float]) -> float:
    """What a worker's flow to a parameter server sends more: ``(F_b^max - F_i)+``."""
    return max(0.0, max(broadcasts) - own)


def broadcast_change_bytes(own: float, aggregations: Sequence[float]) -> float:
    """What a parameter server's flow to a worker sends more, or, below 0, less.

    It sends what all workers have sent it, no more and no less: ``F_a^min - F_i``.
    """
    return min(aggregations) - own


def ceiling_Bps(sent_Bps: Sequence[float], room: float) -> float:
    """B_i: the largest of a flow's last rates; where it has none, what the path has left."""
    return max(sent_Bps) if sent_Bps else room


def foreign_share_Bps(cross_Bps: float, capacity_Bps: float, flows: int) -> float:
    """What is kept free on a link for flows that nobody schedules (mlcc §IV-B, Figure 11).

    They keep what they were seen to send, and may grow until they together have what each of our
    flows has, as one flow more has under fair sharing. Beyond that, congestion control decides: a
    limit only keeps our flows from taking more.

    Args:
        cross_Bps: bytes per second that they sent lately.
        flows: of ours on the link.
    """
    if cross_Bps <= FOREIGN_NOISE * capacity_Bps:
        return 0.0
    return min(FOREIGN_GROWTH * cross_Bps, capacity_Bps / (flows + 1))
