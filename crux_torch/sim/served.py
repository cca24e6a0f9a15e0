"""Jobs with parameter servers, simulated flow by flow in short steps (mlcc §VII).

The fluid engine moves a job's links together, so that a broadcast is always as far as what it
depends on. Here each flow has its own rate, and Algorithm 2 keeps them together, or nothing does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from crux_torch.schedule.model import Path
from crux_torch.schedule.papers.mlcc import (
    SLOT_S,
    SLOTS,
    WINDOW_SLOTS,
    aggregation_change_bytes,
    allocate,
    applied_Bps,
    broadcast_change_bytes,
    ceiling_Bps,
    initial_schedule,
    room_Bps,
)
from crux_torch.schedule.papers.mlcc_tables import LoadTables

#: Steps of a slot, in each of which hosts look at their flows, and rates stay as they are.
LOOKS = 6
#: Bytes of a flow's volume that are none, as a share of it.
ROUNDING = 1e-9

#: How rates come about: links share themselves fairly; the same, but servers send once they have
#: received everything (a coflow's "start-after"); Algorithm 1 alone; and Algorithm 2.
Rule = Literal["fair", "start-after", "initial", "mlcc"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A worker and one of its servers.

    Attributes:
        bytes: that each sends the other in an iteration.
        push, pull: links to the server, and back; at least one each.
    """

    worker: str
    server: str
    bytes: float
    push: Path
    pull: Path


@dataclass(frozen=True, slots=True)
class ServedJob:
    """A job with parameter servers: it computes, then all pairs exchange, and so on."""

    name: str
    compute_s: float
    pairs: tuple[Pair, ...]


@dataclass(slots=True, eq=False)
class _Flow:
    """One direction of a pair."""

    job: str
    src: str
    dst: str
    volume: float
    links: dict[str, float]
    is_pull: bool
    sent: float = 0.0
    limit_Bps: float = math.inf
    waits: bool = True
    booked: bool = False
    rate_Bps: float = 0.0
    past_Bps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_SLOTS))

    @property
    def name(self) -> str:
        return f"{self.job}/{self.src}>{self.dst}"

    @property
    def left(self) -> float:
        left = self.volume - self.sent
        return left if left > ROUNDING * self.volume else 0.0


def iteration_s(
    capacity_Bps: Mapping[str, float],
    jobs: Sequence[ServedJob],
    rule: Rule,
    horizon_s: float,
    slot_s: float = SLOT_S,
) -> dict[str, float | None]:
    """Returns each job's mean time of an iteration within the horizon; None where none ended.

    Args:
        capacity_Bps: of each link.
        rule: how the flows get their rates.
        slot_s: seconds of a slot of the load tables.
    """
    played = _Play(capacity_Bps, jobs, rule, slot_s)
    while played.now_s < horizon_s:
        played.step()
    return {name: sum(s) / len(s) if s else None for name, s in played.times.items()}


class _Play:
    def __init__(
        self,
        capacity_Bps: Mapping[str, float],
        jobs: Sequence[ServedJob],
        rule: Rule,
        slot_s: float,
    ) -> None:
        self._capacity_Bps, self._rule, self._slot_s = capacity_Bps, rule, slot_s
        self._jobs = {job.name: job for job in jobs}
        self._tables = LoadTables(SLOTS, slot_s)
        self._look = 0
        #: Flows of each job that communicates, pushes first; jobs in the order in which they began.
        self._flows: dict[str, list[_Flow]] = {}
        self._began_s = dict.fromkeys(self._jobs, 0.0)
        self._ready_s = {job.name: job.compute_s for job in jobs}
        self.times: dict[str, list[float]] = {job.name: [] for job in jobs}

    @property
    def now_s(self) -> float:
        return self._look * self._slot_s / LOOKS

    def step(self) -> None:
        """Let one look pass."""
        slot, part = divmod(self._look, LOOKS)
        for name, ready_s in list(self._ready_s.items()):
            if ready_s <= self.now_s:
                del self._ready_s[name]
                self._flows[name] = self._fresh(self._jobs[name])
        if part == 0:
            self._tables.expire(slot)
        moving = [flow for flows in self._flows.values() for flow in flows if self._moves(flow)]
        if self._rule in ("initial", "mlcc"):
            for flow in moving:
                if part == 0 or flow.waits or flow.is_pull:
                    self._book(flow, slot, part / LOOKS)
        step_s = self._slot_s / LOOKS
        self._share(moving, step_s)
        self._look += 1
        for flow in moving:
            flow.sent += flow.rate_Bps * step_s
        for name in list(self._flows):
            self._end(name, slot)

    def _fresh(self, job: ServedJob) -> list[_Flow]:
        found = []
        for is_pull in (False, True):
            for pair in job.pairs:
                ends = (pair.server, pair.worker) if is_pull else (pair.worker, pair.server)
                links = {n: self._capacity_Bps[n] for n in (pair.pull if is_pull else pair.push)}
                found.append(_Flow(job.name, *ends, pair.bytes, links, is_pull))
        return found

    def _into(self, flow: _Flow) -> list[_Flow]:
        """The aggregations at the server that sends ``flow``."""
        return [f for f in self._flows[flow.job] if not f.is_pull and f.dst == flow.src]

    def _ready(self, flow: _Flow) -> float:
        """Bytes that ``flow`` can have sent by now: a server's, what all workers have sent it."""
        if not flow.is_pull:
            return flow.volume
        pushes = self._into(flow)
        if self._rule == "start-after" and any(push.left for push in pushes):
            return 0.0
        return flow.volume * min(push.sent / push.volume for push in pushes)

    def _moves(self, flow: _Flow) -> bool:
        return flow.left > 0.0 and self._ready(flow) > flow.sent

    def _book(self, flow: _Flow, slot: int, gone: float) -> None:
        """One round of the control protocol, as a rank does it live."""
        if gone == 0.0:
            flow.past_Bps.append(flow.rate_Bps)
        left_s = self._slot_s * (1.0 - gone)
        path = self._tables.feedback(flow.name, flow.links, slot, flow.job)
        plan = initial_schedule(path, flow.left, self._slot_s, gone=gone)
        change = 0.0
        if self._rule == "mlcc":
            change = self._change(flow, plan[0] * left_s, left_s) / left_s
        room = room_Bps(path)
        most_Bps = ceiling_Bps(flow.past_Bps, room[0])
        rates = allocate(path, flow.left, self._slot_s, change, most_Bps, gone=gone)
        booked = [min(rate, most) for rate, most in zip(rates, room, strict=True)]
        ends, by_end = (flow.src, flow.dst), flow.sent + booked[0] * left_s
        flow.booked = self._tables.book(
            flow.name, flow.links, slot, booked, flow.sent, job=flow.job, ends=ends, by_end=by_end
        )
        if not flow.booked:
            rates = (0.0,) * len(rates)
        flow.limit_Bps = applied_Bps(rates, path)
        flow.waits = flow.limit_Bps < 0.99 * max(rates) or not any(rates)

    def _change(self, flow: _Flow, planned: float, left_s: float) -> float:
        """The dependency's change of what ``flow`` sends by the end of the slot."""
        own = flow.sent + planned
        near = self._tables.neighbours(flow.job, flow.src, flow.dst)
        if not flow.is_pull:
            return aggregation_change_bytes(own, [*near.out.values(), 0.0])
        found = (near.into.get(f.src, f.sent + f.rate_Bps * left_s) for f in self._into(flow))
        return broadcast_change_bytes(own, [*found])

    def _share(self, moving: Sequence[_Flow], step_s: float) -> None:
        """Max-min fair rates below the flows' limits."""
        left_Bps = dict(self._capacity_Bps)
        most_Bps = {
            flow: min(flow.limit_Bps, min(flow.left, self._ready(flow) - flow.sent) / step_s)
            for flow in moving
        }
        for flows in self._flows.values():
            for flow in flows:
                flow.rate_Bps = 0.0
        while most_Bps:
            count = dict.fromkeys(left_Bps, 0)
            for flow in most_Bps:
                for link in flow.links:
                    count[link] += 1
            share_Bps = {
                flow: min(most, *(max(0.0, left_Bps[n]) / count[n] for n in flow.links))
                for flow, most in most_Bps.items()
            }
            least_Bps = min(share_Bps.values())
            for flow in [f for f, share in share_Bps.items() if share <= least_Bps]:
                flow.rate_Bps = least_Bps
                for link in flow.links:
                    left_Bps[link] -= least_Bps
                del most_Bps[flow]

    def _end(self, name: str, slot: int) -> None:
        """End flows that have sent everything, and the iteration with the last."""
        for flow in self._flows[name]:
            if flow.booked and flow.left == 0.0:
                flow.booked = False
                self._tables.book(flow.name, flow.links, slot, (), flow.sent, job=name)
        if not any(flow.left for flow in self._flows[name]):
            del self._flows[name]
            self.times[name].append(self.now_s - self._began_s[name])
            self._began_s[name] = self.now_s
            self._ready_s[name] = self.now_s + self._jobs[name].compute_s
