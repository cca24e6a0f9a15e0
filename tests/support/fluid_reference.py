"""The fluid model, written the slow and obvious way: every event computes everything anew.

It shares no code or data structure with ``csrc/fluid`` and is what that engine is tested against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INF = float("inf")
Traffic = list[dict[str, float]]


@dataclass
class Job:
    compute_s: float
    bursts: list[tuple[Any, ...]]  # at, traffic, and perhaps least_s
    gpus: float = 1.0
    level: int = 0
    weight: float = 1.0
    start_s: float = 0.0
    iterations: int | None = None
    pace: tuple[float, float, float] | None = None  # origin, period, tolerance
    completed: int = 0
    busy_s: float = 0.0
    comm_s: float = 0.0
    last_end_s: float = 0.0
    began_s: float | None = None
    burst: int = 0
    delay_left_s: float | None = None  # None: the burst has not been sent yet
    left: float = 1.0
    ended: bool = False
    carried: dict[str, float] = field(default_factory=dict)

    def traffic(self) -> dict[str, float]:
        return {link: m for link, m in self.bursts[self.burst][1].items() if m > 0}

    def ceiling_Bps(self) -> float:
        least_s = sum(self.bursts[self.burst][2:])
        return max(self.traffic().values()) / least_s if least_s else INF


def water_fill(
    capacity: dict[str, float], transfers: dict[str, tuple[int, float, dict[str, float], float]]
) -> dict[str, float]:
    """Rates on the busiest links of ``name: (level, weight, bytes on each link, ceiling)``."""
    room = dict(capacity)
    rate: dict[str, float] = {}
    for level in sorted({t[0] for t in transfers.values()}, reverse=True):
        names = sorted(n for n, t in transfers.items() if t[0] == level)
        links = sorted({link for n in names for link in transfers[n][2]})
        use = np.array(
            [
                [
                    transfers[n][1] * transfers[n][2].get(e, 0) / max(transfers[n][2].values())
                    for e in links
                ]
                for n in names
            ]
        )
        left = np.array([room[e] for e in links])
        rising = np.ones(len(names), dtype=bool)
        water = np.zeros(len(names))
        top = np.array([transfers[n][3] / transfers[n][1] for n in names])
        while rising.any():
            demand = use[rising].sum(axis=0)
            crossed = demand > 0
            step = np.min(np.maximum(left[crossed], 0) / demand[crossed])
            step = min(step, np.min((top - water)[rising]))
            water[rising] += step
            left = left - step * demand
            full = crossed & (left <= 1e-12 * np.array([capacity[e] for e in links]))
            rising &= ~(use[:, full] > 0).any(axis=1) & (water < top * (1 - 1e-12))
        for i, n in enumerate(names):
            rate[n] = water[i] * transfers[n][1]
        for k, e in enumerate(links):
            room[e] = max(left[k], 0.0) if left[k] > 1e-12 * capacity[e] else 0.0
    return rate


def simulate(
    capacity: dict[str, float],
    delay: dict[str, float],
    jobs: dict[str, Job],
    horizon_s: float,
    changes: Sequence[tuple[float, dict[str, Traffic]]] = (),
) -> dict[str, float]:
    """Runs ``jobs`` in place to the horizon; returns the bytes that each link carried.

    At each time of ``changes``, ascending, the named jobs get new traffic for their bursts.
    """
    now = 0.0
    ahead = list(changes)
    eps = 1e-12
    carried = dict.fromkeys(capacity, 0.0)
    while True:
        _advance_states(delay, jobs, now)
        while ahead and ahead[0][0] <= now:
            for n, traffic in ahead.pop(0)[1].items():
                both = zip(jobs[n].bursts, traffic, strict=True)
                jobs[n].bursts = [(at, new, *least_s) for (at, _, *least_s), new in both]
        moving = {
            n: (j.level, j.weight, j.traffic(), j.ceiling_Bps())
            for n, j in jobs.items()
            if j.delay_left_s is not None and j.delay_left_s <= eps and not j.ended
        }
        rate = water_fill(capacity, moving)
        speed = {n: rate[n] / max(moving[n][2].values()) for n in moving}
        next_s = min([_next_event(j, now, speed.get(n, 0.0)) for n, j in jobs.items()] + [INF])
        next_s = min([next_s] + [at for at, _ in ahead[:1]])
        if next_s > horizon_s * (1 + eps):
            next_s = horizon_s
        dt = next_s - now
        for n, j in jobs.items():
            if j.began_s is not None and not j.ended:
                j.busy_s += max(min(next_s, j.began_s + j.compute_s) - max(now, j.began_s), 0.0)
                if n in speed:
                    part = min(speed[n] * dt, j.left)
                    j.left -= part
                    j.comm_s += part * max(m / capacity[e] for e, m in moving[n][2].items())
                    for e, m in moving[n][2].items():
                        carried[e] += part * m
                elif j.delay_left_s is not None:
                    j.delay_left_s -= dt
        now = next_s
        if now >= horizon_s * (1 - eps):
            _advance_states(delay, jobs, now)
            return carried


def _next_event(j: Job, now: float, speed: float) -> float:
    if j.ended:
        return INF
    if j.began_s is None:
        return j.start_s
    if speed > 0:
        return now + j.left / speed
    if j.burst == len(j.bursts):
        return j.began_s + j.compute_s
    if j.delay_left_s is None:
        return j.began_s + j.bursts[j.burst][0] * j.compute_s
    return now + j.delay_left_s if j.delay_left_s > 1e-12 else INF


def _advance_states(delay: dict[str, float], jobs: dict[str, Job], now: float) -> None:
    reached = now * (1 + 1e-13) + 1e-13
    for j in jobs.values():
        if j.ended or (j.began_s is None and j.start_s > reached):
            continue
        if j.began_s is None:
            _begin(j, now)
            if j.began_s is None:
                continue
        while not j.ended:
            assert j.began_s is not None
            if j.burst == len(j.bursts):
                if j.began_s + j.compute_s > reached:
                    break
                j.completed += 1
                j.last_end_s = now
                j.ended = j.completed == j.iterations
                _begin(j, now)
                if j.began_s is None:
                    break
            elif not j.traffic():
                j.burst += 1
            elif j.delay_left_s is None:
                if j.began_s + j.bursts[j.burst][0] * j.compute_s > reached:
                    break
                j.delay_left_s = sum(delay[e] for e in j.traffic())
            elif j.left <= 1e-12:
                j.burst, j.delay_left_s, j.left = j.burst + 1, None, 1.0
            else:
                break


def _begin(j: Job, now: float) -> None:
    j.began_s, j.burst, j.delay_left_s, j.left = now, 0, None, 1.0
    if j.pace is None or j.ended:
        return
    origin_s, period_s, tolerance = j.pace
    late_s = (now - origin_s + 1e-9 * period_s) % period_s
    if late_s > (tolerance + 2e-9) * period_s:
        j.began_s = None
        j.start_s = origin_s + math.ceil((now - origin_s) / period_s) * period_s
