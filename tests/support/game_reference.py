"""The game of two jobs on one link in numpy: what ``csrc/schedule/game.cc`` must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from crux_torch.schedule.papers.correction import GameJob

_Floats = npt.NDArray[np.float64]


class Players:
    """Some players of one number of bursts as arrays, a row each."""

    def __init__(self, players: Sequence[GameJob]) -> None:
        self.compute_s = np.array([p.compute_s for p in players])
        # Bursts and windows are indexed first: each is one array over players.
        self.due_s = np.array([[at * p.compute_s for at, _ in p.bursts] for p in players]).T
        self.burst_s = np.array([[link_s for _, link_s in p.bursts] for p in players]).T
        start_s = np.empty_like(self.due_s)
        end_s = np.zeros(len(players))
        for b, (due_s, burst_s) in enumerate(zip(self.due_s, self.burst_s, strict=True)):
            start_s[b] = np.maximum(due_s, end_s)
            end_s = start_s[b] + burst_s
        self.start_s = start_s
        self.period_s = np.maximum(self.compute_s, end_s)
        self.link_s = self.burst_s.sum(axis=0)
        self.free_s = self.period_s - self.link_s
        #: Seconds of free link before each window.
        self.free_before_s = start_s - (np.cumsum(self.burst_s, axis=0) - self.burst_s)


def rates_when_second(
    second: Players, first: Players, phases: int, warm_up: int, measured: int, rounding: float
) -> _Floats:
    """Link seconds per second of each second player, when the first has priority."""
    begun = (np.arange(phases) + 0.5) / phases
    now_s = since_s = first.period_s[:, None] * begun
    compute_s = second.compute_s[:, None]
    for iteration in range(warm_up + measured):
        if iteration == warm_up:
            since_s = now_s
        end_s = now_s
        for due_s, burst_s in zip(second.due_s, second.burst_s, strict=True):
            start_s = np.maximum(now_s + due_s[:, None], end_s)
            end_s = _sent_by(first, start_s, burst_s[:, None], rounding)
        now_s = np.maximum(now_s + compute_s, end_s)
    link_s = second.link_s * (measured * phases)
    rate = link_s / (now_s - since_s).sum(axis=1)
    # A first player that never leaves the link leaves nothing.
    return np.asarray(np.where(first.free_s > rounding * first.period_s, rate, 0.0))


def _sent_by(first: Players, start_s: _Floats, need_s: _Floats, rounding: float) -> _Floats:
    """When ``need_s`` seconds of link have passed since ``start_s`` that the first left free."""
    period_s = first.period_s[:, None]
    free_s = np.maximum(first.free_s, rounding * first.period_s)[:, None]
    rounding_s = rounding * period_s
    periods = np.floor(start_s / period_s)
    into_s = start_s - periods * period_s
    target_s = into_s + need_s
    for window_s, busy_s in zip(first.start_s, first.burst_s, strict=True):
        target_s -= np.clip(into_s - window_s[:, None], 0.0, busy_s[:, None])
    more = np.maximum(np.ceil((target_s - rounding_s) / free_s) - 1.0, 0.0)
    target_s -= more * free_s
    end_s: _Floats = target_s + (periods + more) * period_s
    for before_s, busy_s in zip(first.free_before_s, first.burst_s, strict=True):
        end_s += np.where(target_s > before_s[:, None] + rounding_s, busy_s[:, None], 0.0)
    return end_s
