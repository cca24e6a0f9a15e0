"""Judges by small probes if marked packets reach their queues (docs/operate/classes.md).

Probes of all levels leave in ticks: one of each level, back to back, in random order. If the
network treats two levels alike, either is equally likely to be the sooner one of a tick, however
the delays themselves vary. So the share of ticks in which a level was sooner is a sign test: 0.5
means the same queue, and near 1 means that the level is served first. A lost probe counts as later
than all that arrived.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import median
from typing import Annotated, Literal

import msgspec

from crux_torch.settings import SixBits

Mark = Literal["kept", "remarked", "dropped"]
Queue = Literal["before", "same", "after", "unclear", "no queue", "choked", "loaded", "not tried"]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]

#: Normal quantile of a two-sided confidence of 99.9%: with 64 levels one false verdict in 16 runs.
Z = 3.29
#: Bounds of the share of ticks in which a level is sooner: halfway from "alike" to "always".
SOONER, LATER = 0.75, 0.25
#: Loss without load above which a class is dropped; a network that works loses far less.
DROPPED = 0.1
#: Share of probes of the loaded level that must wait longer than 95% of those without load. If
#: fewer do, most ticks met no queue, and can't show who is served first.
QUEUED = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One probe.

    Attributes:
        tick: number of the tick that it left in; unique in a run.
        turn: number of the turn (without load, then with it) that the tick belongs to.
        delay_s: arrival by the far end's clock minus departure by this one's; infinite: lost.
        dscp: value that the far end saw; None: lost.
    """

    level: int
    tick: int
    turn: int
    loaded: bool
    delay_s: float = inf
    dscp: int | None = None


class LevelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The network's treatment of one level.

    Attributes:
        queue: against the loaded level; ``no queue``: the load made no packet wait; ``choked``: the
            far host was too slow for the load, and has one queue for all levels.
        seen: probes by the DSCP value that the far end saw.
        loss, loss_loaded: shares of the probes, without load and with it; None: none were sent.
        wait_s, wait_loaded_s: median of the delays over the median delay without load of all
            levels; infinite if more were lost, None if none were sent.
        sooner: bounds of the share of ticks in which it arrived before the loaded level.
        between: the two routers or hosts between which its DSCP value changed, or all its packets
            got lost, if known.
    """

    level: SixBits
    dscp: SixBits
    mark: Mark
    queue: Queue
    seen: dict[SixBits, int] = {}
    loss: Share | None = None
    loss_loaded: Share | None = None
    wait_s: float | None = None
    wait_loaded_s: float | None = None
    sooner: tuple[Share, Share] = (0.0, 1.0)
    between: tuple[str, str] | None = None

    def is_right(self, reference: int) -> bool:
        """True if its mark arrives, and the order of service against ``reference`` is right."""
        if self.mark != "kept":
            return False
        expected: Queue = "before" if self.level > reference else "after"
        return self.queue in ("loaded", "not tried", expected)

    def text(self, reference: int) -> str:
        """The verdict in words."""
        if self.mark == "kept":
            return self._queue_text(reference)
        where = f" between {self.between[0]} and {self.between[1]}" if self.between else ""
        if self.mark == "dropped":
            lost = 1.0 if self.loss is None else self.loss
            return f"dropped on the way{where}: {lost:.0%} lost without load"
        seen = max(self.seen, key=lambda dscp: self.seen[dscp])
        said = f"remarked on the way{where}: the far end sees DSCP {seen}"
        tried = self.queue in ("before", "same", "after")
        return f"{said}; {self._queue_text(reference)}" if tried else said

    def _queue_text(self, reference: int) -> str:
        low, high = self.sooner
        return {
            "before": f"served before level {reference}",
            "same": f"same queue as level {reference}",
            "after": f"served after level {reference}",
            "unclear": f"unclear, sooner in {low:.0%} to {high:.0%} of ticks: probe longer",
            "no queue": "not shown: the load made no packet wait",
            "choked": "not shown: the far host is too slow for the load",
            "loaded": "arrives; the level that is loaded",
            "not tried": "arrives; queues not tried without --load",
        }[self.queue]


def judge(
    samples: Iterable[Sample], dscp_of: Mapping[int, int], reference: int, *, choked: bool = False
) -> tuple[LevelVerdict, ...]:
    """Returns a verdict for each level.

    Args:
        dscp_of: value of each level.
        reference: the level that was loaded.
        choked: True if the far host was too slow for the load.
    """
    of_level: dict[int, list[Sample]] = defaultdict(list)
    for sample in _without_offset(samples):
        of_level[sample.level].append(sample)
    loaded = of_level[reference]
    queued = _queued(loaded)
    found = (
        _verdict(level, dscp_of[level], of_level[level], loaded, level == reference, queued)
        for level in sorted(dscp_of)
    )
    if not choked:
        return tuple(found)
    # A level that goes first all the same does so before the far host.
    return tuple(
        msgspec.structs.replace(one, queue="choked")
        if one.queue in ("same", "after", "unclear")
        else one
        for one in found
    )


def _without_offset(samples: Iterable[Sample]) -> list[Sample]:
    """Samples whose delays begin at the median without load of their turn.

    That takes away the offset of the two clocks, and with a turn of seconds most of their drift.
    """
    kept = list(samples)
    offsets: dict[int, list[float]] = defaultdict(list)
    for sample in kept:
        if not sample.loaded and sample.delay_s < inf:
            offsets[sample.turn].append(sample.delay_s)
    offset_s = {turn: median(delays) for turn, delays in offsets.items()}
    otherwise_s = median(offset_s.values()) if offset_s else 0.0
    return [replace(s, delay_s=s.delay_s - offset_s.get(s.turn, otherwise_s)) for s in kept]


def _queued(reference: Sequence[Sample]) -> bool | None:
    """True if packets of the loaded level waited; None if it was not loaded."""
    idle = sorted(s.delay_s for s in reference if not s.loaded)
    busy = [s.delay_s for s in reference if s.loaded]
    if not idle or not busy:
        return None
    most = idle[min(len(idle) - 1, int(0.95 * len(idle)))]
    return wilson(sum(delay > most or delay == inf for delay in busy), len(busy))[0] > QUEUED


def _verdict(
    level: int,
    dscp: int,
    mine: Sequence[Sample],
    reference: Sequence[Sample],
    is_reference: bool,
    queued: bool | None,
) -> LevelVerdict:
    idle = [s for s in mine if not s.loaded]
    busy = [s for s in mine if s.loaded]
    seen = Counter(s.dscp for s in mine if s.dscp is not None)
    lost = sum(s.dscp is None for s in idle)
    mark: Mark = "kept"
    if not seen or wilson(lost, len(idle))[0] > DROPPED:
        mark = "dropped"
    elif seen[dscp] <= sum(seen.values()) / 2:
        mark = "remarked"
    sooner = wilson(*_sooner(busy, [s for s in reference if s.loaded]))
    return LevelVerdict(
        level=level,
        dscp=dscp,
        mark=mark,
        queue=_queue(sooner, is_reference, queued),
        seen=dict(sorted(seen.items())),
        loss=_loss(idle),
        loss_loaded=_loss(busy),
        wait_s=_median(idle),
        wait_loaded_s=_median(busy),
        sooner=sooner,
    )


def _queue(sooner: tuple[float, float], is_reference: bool, queued: bool | None) -> Queue:
    if queued is None:
        return "not tried"
    if not queued:
        return "no queue"
    if is_reference:
        return "loaded"
    low, high = sooner
    if low > SOONER:
        return "before"
    if high < LATER:
        return "after"
    return "same" if low > LATER and high < SOONER else "unclear"


def _sooner(mine: Iterable[Sample], reference: Iterable[Sample]) -> tuple[int, int]:
    """Ticks in which a level was sooner than the loaded one, and ticks in which one was."""
    by_tick = {s.tick: s.delay_s for s in reference}
    pairs = [(s.delay_s, by_tick[s.tick]) for s in mine if s.tick in by_tick]
    unequal = [(a, b) for a, b in pairs if a != b]
    return sum(a < b for a, b in unequal), len(unequal)


def _loss(samples: Sequence[Sample]) -> float | None:
    return sum(s.dscp is None for s in samples) / len(samples) if samples else None


def _median(samples: Sequence[Sample]) -> float | None:
    return median(s.delay_s for s in samples) if samples else None


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Returns the bounds of a share that ``hits`` of ``count`` show (Wilson 1927), with ``Z``."""
    if not count:
        return 0.0, 1.0
    share = hits / count
    centre = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    half /= 1 + Z * Z / count
    return max(0.0, centre - half), min(1.0, centre + half)
