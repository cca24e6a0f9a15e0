"""The game of §4.2 as the paper plays it: two jobs on one link, for some seconds from one start."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from crux_torch import _fluid
from crux_torch.schedule.correction import GameJob, bounded_factors


class Outcome(NamedTuple):
    """Seconds of the horizon in which each player (first, second) used the link and computed."""

    link_s: tuple[float, float]
    compute_s: tuple[float, float]


def play(first: GameJob, second: GameJob, horizon_s: float, *, fresh: bool = False) -> Outcome:
    """Two jobs on one link under strict, preemptive priority.

    Args:
        first: the job with priority.
        second: the other.
        horizon_s: seconds to play.
        fresh: both begin an iteration at the start; otherwise each is about to send its first
            burst, as in Figures 11 and 12.
    """
    players = {"first": first, "second": second}
    due_s = {n: 0.0 if fresh else p.compute_s * p.bursts[0][0] for n, p in players.items()}
    begin_s = max(due_s.values())
    # A link of its own beside the common one tells how much of that a player has used.
    engine = _fluid.Engine([("common", 1.0, 0.0), *((name, 1.0, 0.0) for name in players)])
    for level, (name, p) in enumerate(reversed(players.items())):
        engine.add_job(
            name,
            compute_s=p.compute_s,
            bursts=[(at, {"common": link_s, name: link_s}) for at, link_s in p.bursts],
            level=level,
            start_s=begin_s - due_s[name],
        )
    engine.run_until(begin_s)
    link_before_s, before = engine.link_bytes(), engine.results()
    engine.run_until(begin_s + horizon_s)
    link_s, after = engine.link_bytes(), engine.results()
    used = [link_s[name] - link_before_s[name] for name in players]
    computed = [after[name]["compute_s"] - before[name]["compute_s"] for name in players]
    return Outcome((used[0], used[1]), (computed[0], computed[1]))


def factor(reference: GameJob, job: GameJob, horizon_s: float, *, fresh: bool = False) -> float:
    """k_j of ``job`` against the reference job, whose own is 1."""
    a_r, a_j = play(reference, job, horizon_s, fresh=fresh).link_s
    b_j, b_r = play(job, reference, horizon_s, fresh=fresh).link_s
    return float(bounded_factors(*(np.array([x]) for x in (a_r, a_j, b_r, b_j)))[0])
