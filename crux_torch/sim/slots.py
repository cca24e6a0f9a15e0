"""Plays jobs whose rates are booked slot by slot (mlcc), in the fluid engine.

A job's transfer is one flow here: the engine moves all links of a transfer together, at the pace of
the slowest, so the flows of a ring already keep each other's pace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from crux_torch import _fluid
from crux_torch.schedule.load_tables import LoadTables
from crux_torch.schedule.rates import SLOTS, LinkLoad, applied_Bps, initial_schedule

#: How often in a slot a host looks whether a flow has begun or ended, or may end its wait.
LOOKS = 6


def run_in_slots(
    engine: _fluid.Engine,
    capacity_Bps: Mapping[str, float],
    traffic: Mapping[str, Mapping[str, float]],
    slot_s: float,
    horizon_s: float,
    foreign: Collection[str] = (),
    least_Bps: float = 0.0,
) -> None:
    """Play ``engine`` to ``horizon_s`` with the jobs' rates booked in slots.

    Args:
        capacity_Bps: of each link.
        traffic: bytes of an iteration of each job on each link.
        foreign: jobs that book nothing. The links' counters show what they send.
        least_Bps: the least limit of a job, on its busiest link.
    """
    booked = [name for name, moved in traffic.items() if any(moved.values())]
    ours = {n: traffic[n] for n in booked if n not in foreign}
    hosts = _Hosts(engine, capacity_Bps, ours, least_Bps)
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
        engine.run_until(min(horizon_s, look * slot_s / LOOKS))


class _Hosts:
    """The hosts' schedulers, which take turns in the order in which their flows began."""

    def __init__(
        self,
        engine: _fluid.Engine,
        capacity_Bps: Mapping[str, float],
        traffic: Mapping[str, Mapping[str, float]],
        least_Bps: float,
    ) -> None:
        self._engine = engine
        self._least_Bps = least_Bps
        self._capacity_Bps = capacity_Bps
        self._traffic = {n: {e: m for e, m in moved.items() if m} for n, moved in traffic.items()}
        self._waits: dict[str, bool] = {}

    def book(self, tables: LoadTables, slot: int, gone: float) -> None:
        left = {name: self._engine.bytes_left(name) for name in self._traffic}
        for name in [n for n in self._waits if left[n] is None]:
            del self._waits[name]
            self._engine.set_rate_limit(name, None)
            self._tell(tables, name, slot, ())
        begun = [n for n, volume in left.items() if volume is not None and n not in self._waits]
        for name in [*self._waits, *begun]:
            volume = left[name]
            if volume is not None and (gone == 0.0 or self._waits.get(name, True)):
                self._schedule(tables, name, slot, gone, volume)

    def _schedule(
        self, tables: LoadTables, name: str, slot: int, gone: float, volume: float
    ) -> None:
        """Algorithm 1 for the rate on the busiest link, to which the other links' are in
        proportion."""
        path = []
        for link, share in self._shares(name).items():
            (seen,) = tables.feedback(f"{name}@{link}", {link: self._capacity_Bps[link]}, slot)
            loads = tuple(load / share for load in seen.load_Bps)
            path.append(LinkLoad(seen.capacity_Bps / share, loads))
        rates = initial_schedule(path, volume, tables.slot_s, gone=gone)
        self._tell(tables, name, slot, rates)
        limit_Bps = applied_Bps(rates, path, self._least_Bps)
        self._waits[name] = limit_Bps < max(rates)
        self._engine.set_rate_limit(name, limit_Bps)

    def _tell(self, tables: LoadTables, name: str, slot: int, rates: tuple[float, ...]) -> None:
        traffic = self._traffic[name]
        alone_s = max(moved / self._capacity_Bps[link] for link, moved in traffic.items())
        iterations = self._engine.result(name)["comm_s"] / alone_s
        for link, share in self._shares(name).items():
            links = {link: self._capacity_Bps[link]}
            scaled = [rate * share for rate in rates]
            tables.book(f"{name}@{link}", links, slot, scaled, iterations * traffic[link])

    def _shares(self, name: str) -> dict[str, float]:
        traffic = self._traffic[name]
        most = max(traffic.values())
        return {link: moved / most for link, moved in traffic.items()}
