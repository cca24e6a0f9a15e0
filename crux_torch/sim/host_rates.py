"""Rates that hosts set while jobs are played: mlcc's bookings, and MLTCP's weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from crux_torch import _fluid
from crux_torch.schedule.papers.mlcc import SLOTS, LinkLoad, applied_Bps, initial_schedule
from crux_torch.schedule.papers.mlcc_tables import LoadTables
from crux_torch.schedule.papers.mltcp import weight
from crux_torch.sim.course import Watch

#: A job's name, and the number of a part that moves on its own.
PartKey = tuple[str, int]
#: Bytes of an iteration on each link, of each part of each job.
PartTraffic = Mapping[str, Sequence[Mapping[str, float]]]

#: Looks of an MLTCP host at its shortest transfer, and the shortest time between two.
SHARES, LEAST_LOOK_S = 32, 1e-3
#: A transfer that has this share of an iteration left has sent it all, but for rounding.
ROUNDING = 1e-9


def run_by_sent(
    engine: _fluid.Engine,
    capacity_Bps: Mapping[str, float],
    traffic: PartTraffic,
    horizon_s: float,
    watch: Watch | None = None,
) -> None:
    """Play ``engine`` to ``horizon_s`` with MLTCP's weights.

    Args:
        capacity_Bps: of each link.
        watch: takes measures on the way.
    """
    watch = watch or Watch(())
    alone_s = {
        key: max(m / capacity_Bps[link] for link, m in moved.items())
        for key, moved in _sending(traffic).items()
    }
    look_s = max(LEAST_LOOK_S, min(alone_s.values(), default=horizon_s) / SHARES)
    looks = 0
    while engine.now_s < horizon_s:
        for key, one_s in alone_s.items():
            if engine.bytes_left(*key) is not None:
                iterations = engine.comm_s(*key) / one_s
                name, part = key
                sent = iterations - math.floor(iterations + ROUNDING)
                engine.set_weight(name, weight(sent), part)
        looks += 1
        watch.run_until(engine, min(horizon_s, looks * look_s))


def _sending(
    traffic: PartTraffic, foreign: Collection[str] = ()
) -> dict[PartKey, Mapping[str, float]]:
    """The parts that send anything."""
    return {
        (name, part): moved
        for name, parts in traffic.items()
        for part, moved in enumerate(parts)
        if name not in foreign and any(moved.values())
    }


#: How often in a slot a host looks whether a flow has begun or ended, or may end its wait.
LOOKS = 6


def run_in_slots(
    engine: _fluid.Engine,
    capacity_Bps: Mapping[str, float],
    traffic: PartTraffic,
    slot_s: float,
    horizon_s: float,
    foreign: Collection[str] = (),
    least_Bps: float = 0.0,
    watch: Watch | None = None,
) -> None:
    """Play ``engine`` to ``horizon_s`` with the jobs' rates booked in slots.

    Args:
        capacity_Bps: of each link.
        foreign: jobs that book nothing. The links' counters show what they send.
        least_Bps: the least limit of a part, on its busiest link.
        watch: takes measures on the way.
    """
    watch = watch or Watch(())
    hosts = _Hosts(engine, capacity_Bps, _sending(traffic, foreign), least_Bps)
    tables = LoadTables(SLOTS, slot_s)
    look = 0
    while engine.now_s < horizon_s:
        slot, part = divmod(look, LOOKS)
        if part == 0:
            tables.expire(slot)
            if foreign:
                for link, moved_bytes in engine.link_bytes().items():
                    tables.count(link, slot, moved_bytes)
        hosts.book(tables, slot, part / LOOKS)
        look += 1
        watch.run_until(engine, min(horizon_s, look * slot_s / LOOKS))


class _Hosts:
    """The hosts' schedulers, which take turns in the order in which their flows began."""

    def __init__(
        self,
        engine: _fluid.Engine,
        capacity_Bps: Mapping[str, float],
        traffic: Mapping[PartKey, Mapping[str, float]],
        least_Bps: float,
    ) -> None:
        self._engine = engine
        self._least_Bps = least_Bps
        self._capacity_Bps = capacity_Bps
        #: Bytes of a part on each link, as a share of those on its busiest.
        self._shares: dict[PartKey, dict[str, float]] = {}
        #: Bytes on the busiest link, and the seconds that an iteration's bytes take alone.
        self._most: dict[PartKey, tuple[float, float]] = {}
        for key, moved in traffic.items():
            most = max(moved.values())
            self._shares[key] = {link: m / most for link, m in moved.items() if m}
            self._most[key] = most, max(m / capacity_Bps[link] for link, m in moved.items())
        self._waits: dict[PartKey, bool] = {}

    def book(self, tables: LoadTables, slot: int, gone: float) -> None:
        left = {key: self._engine.bytes_left(*key) for key in self._shares}
        for key in [n for n in self._waits if left[n] is None]:
            del self._waits[key]
            self._limit(key, None)
            self._tell(tables, key, slot, ())
        begun = [n for n, volume in left.items() if volume is not None and n not in self._waits]
        for key in [*self._waits, *begun]:
            volume = left[key]
            if volume is not None and (gone == 0.0 or self._waits.get(key, True)):
                self._schedule(tables, key, slot, gone, volume)

    def _schedule(
        self, tables: LoadTables, key: PartKey, slot: int, gone: float, volume: float
    ) -> None:
        """Algorithm 1 for the rate on the busiest link, to which the other links' are in
        proportion."""
        path = []
        for link, share in self._shares[key].items():
            (seen,) = tables.feedback(_flow(key, link), {link: self._capacity_Bps[link]}, slot)
            loads = tuple(load / share for load in seen.load_Bps)
            path.append(LinkLoad(seen.capacity_Bps / share, loads))
        rates = initial_schedule(path, volume, tables.slot_s, gone=gone)
        self._tell(tables, key, slot, rates)
        limit_Bps = applied_Bps(rates, path, self._least_Bps)
        self._waits[key] = limit_Bps < max(rates)
        self._limit(key, limit_Bps)

    def _limit(self, key: PartKey, limit_Bps: float | None) -> None:
        name, part = key
        self._engine.set_rate_limit(name, limit_Bps, part)

    def _tell(self, tables: LoadTables, key: PartKey, slot: int, rates: tuple[float, ...]) -> None:
        most, alone_s = self._most[key]
        sent = self._engine.comm_s(*key) / alone_s * most
        for link, share in self._shares[key].items():
            links = {link: self._capacity_Bps[link]}
            scaled = [rate * share for rate in rates]
            tables.book(_flow(key, link), links, slot, scaled, sent * share, job=key[0])


def _flow(key: PartKey, link: str) -> str:
    name, part = key
    return f"{name}/{part}@{link}"
