"""mlcc: ECMP's paths and one level; flows book rates in time slots and keep to them (mlcc §IV).

Time is divided into slots, and every link has a table of what the flows have booked on it in the
next :data:`SLOTS` of them. A flow reads the tables along its path, books its rates, and so avoids
the slots in which others send. Slot 0 is always the current one.

Everything here is pure. The tables are in :mod:`crux_torch.schedule.papers.mlcc_tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    Above 0 it is the raise of the flow itself (Figure 6a). Below 0 it is the release that a slower
    worker asks for (Algorithm 2, lines 13 to 16). The server sends what all workers have sent it,
    no more and no less.
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
