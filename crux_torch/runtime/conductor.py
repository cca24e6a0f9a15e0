"""The leader's side: take the slot, have the job measured, agree on a plan, give orders.

    warming -> queueing -> measuring -> running -> queueing ... (when the job has changed)

Nothing here waits: every step looks at the clock and at what has come in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from crux_torch.control.job_channel import Samples
from crux_torch.control.leader import Leader
from crux_torch.control.records import PlanEntry
from crux_torch.control.slots import ProfilingSlot
from crux_torch.control.warn_once import WarnOnce
from crux_torch.profile.job_profile import JobProfile
from crux_torch.profile.merge import Topology, merge
from crux_torch.profile.sample import RankSample, SampleError
from crux_torch.runtime.order import Order
from crux_torch.runtime.routing import Routing, Wanted
from crux_torch.settings import Settings

_log = logging.getLogger(__name__)

Phase = Literal["warming", "queueing", "measuring", "running"]

#: Seconds after which a job that can't reach the store is measured without the slot.
WITHOUT_STORE_S = 5.0
#: Seconds that slow ranks get beyond the time of a measurement.
GRACE_S = 5.0
#: Seconds between two looks at the slot, and at the ranks' answers.
SLOT_POLL_S = 0.25
COLLECT_POLL_S = 0.25
#: Seconds from a measurement that saw nothing to the next one; the pause doubles up to the second.
RETRY_S = 10.0
MAX_RETRY_S = 600.0


class Conductor:
    """Drives one job's measurements and orders; owned by the leader rank's background thread.

    Args:
        settings: of this job.
        incarnation: of this job.
        leader: its part in agreeing on a plan; None where there is no shared store.
        slot: its place in the line for measuring; None where there is no shared store.
        topology: of the cluster, where it is known.
        published: the topology's bytes, for the shared store.
        routing: makes routes of the plan's paths; None: the network decides.
        first_turn: above that of every order that may still lie in the job's store.
        device_flops: FLOP/s of one device, for W from time; 0 where it is not known.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        settings: Settings,
        incarnation: str,
        leader: Leader | None,
        slot: ProfilingSlot | None,
        topology: Topology | None = None,
        *,
        published: bytes | None = None,
        routing: Routing | None = None,
        first_turn: int = 1,
        device_flops: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self._leader = leader
        self._slot = slot
        self._topology = topology
        self._topology_bytes = published
        self._topology_is_there = False
        self._routing = routing
        self._clock = clock
        self._warn = WarnOnce(_log)
        self.phase: Phase = "warming"
        self.profile: JobProfile | None = None
        self.measurement = 0
        self._since_s = clock()
        self._slot_at_s = float("-inf")
        self._alone = False
        self._answers: dict[int, RankSample | None] = {}
        self._collect_at_s = float("-inf")
        self._failures = 0
        self._not_before_s = float("-inf")
        self._turn = first_turn - 1
        self._device_flops = device_flops
        self._order: Order | None = None
        self._ordered_at_s = float("-inf")

    @property
    def leader(self) -> Leader | None:
        """This job's part in agreeing on a plan."""
        return self._leader

    def step(self, ready: bool, changed: bool, collect: Callable[[], Samples]) -> Order | None:
        """Do what is due.

        Args:
            ready: whether the job has run for long enough to be measured.
            changed: whether the job does other work than was measured.
            collect: gives the samples that the ranks have sent.

        Returns:
            an order to publish, None where the last one stands and need not be renewed.
        """
        if self._leader is not None:
            self._leader.tick()
            self._share_topology(self._leader)
        if self.phase == "warming" and ready and self._clock() >= self._not_before_s:
            self._enter("queueing")
        if self.phase == "queueing" and self._may_measure():
            self.measurement += 1
            self._answers = {}
            if self._leader is not None:
                self._leader.set_profiling(True)
            self._enter("measuring")
        elif self.phase == "measuring":
            self._measure(collect)
        elif self.phase == "running" and changed:
            self._enter("queueing")
        return self._next_order()

    def close(self) -> None:
        """Give the slot back and let the other jobs know that this one ends."""
        try:
            if self._slot is not None:
                self._slot.release()
        finally:
            if self._leader is not None:
                self._leader.close()

    def _share_topology(self, leader: Leader) -> None:
        """Write the topology to the store, and again to one that may have lost it."""
        if leader.store_state != "ok":
            self._topology_is_there = False
        elif self._topology_bytes is not None and not self._topology_is_there:
            self._topology_is_there = leader.publish_topology(self._topology_bytes)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._since_s = self._clock()

    def _may_measure(self) -> bool:
        now = self._clock()
        if self._slot is None or self._leader is None:
            return True
        if now >= self._slot_at_s:
            self._slot_at_s = now + SLOT_POLL_S
            if self._slot.acquire_step():
                self._alone = True
                return True
        store_is_away = self._leader.store_state != "ok"
        return store_is_away and now - self._since_s >= WITHOUT_STORE_S

    def _measure(self, collect: Callable[[], Samples]) -> None:
        """End the measurement when every rank has answered, or when time is up."""
        now = self._clock()
        late = now - self._since_s >= self._settings.profile_s + GRACE_S
        if now < self._collect_at_s and not late:
            return
        self._collect_at_s = now + COLLECT_POLL_S
        samples = collect()
        ranks = len(samples.by_rank) + len(samples.missing)
        self._take_in(samples.by_rank, ranks)
        if len(self._answers) == ranks or late:
            alone = self._is_alone()
            self._alone = False
            if self._slot is not None:
                self._slot.release()
            self._conclude(ranks, alone)

    def _take_in(self, by_rank: Mapping[int, bytes], ranks: int) -> None:
        """Keep the answers to this measurement; a malformed one is as good as an empty one."""
        wanted = _heading(self._incarnation, self.measurement)
        for rank, raw in by_rank.items():
            heading, _, body = raw.partition(b"\n")
            if rank in self._answers or heading != wanted:
                continue
            sample = None
            try:
                if body:
                    sample = RankSample.from_json(body)
                    if (sample.rank, sample.world_size) != (rank, ranks):
                        raise SampleError(f"it is of rank {sample.rank} of {sample.world_size}")
            except Exception as error:
                sample = None
                self._warn(f"sample {rank}", f"the sample of rank {rank} is left out: {error}")
            self._answers[rank] = sample

    def _conclude(self, ranks: int, alone: bool) -> None:
        """From what the ranks answered to the job's profile."""
        present = [s for _, s in sorted(self._answers.items()) if s is not None]
        profile = self._merged(present, alone) if present else None
        if not present:
            self._warn(
                "nothing",
                f"{len(self._answers)} of {ranks} ranks answered and none saw whole iterations in "
                f"{self._settings.profile_s:g} s, trying again from time to time: is an iteration "
                "longer than a third of that, raise CRUX_PROFILE_S",
            )
        if profile is not None:
            self.profile = profile
            self._failures = 0
            if self._leader is not None:
                self._leader.set_hosts(list(dict.fromkeys(sample.host for sample in present)))
        else:
            pause_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** min(self._failures, 30))
            self._not_before_s = self._clock() + pause_s
            self._failures += 1
        if self._leader is not None:
            self._leader.set_profile(self.profile)
        self._enter("running" if profile is not None else "warming")

    def _merged(self, present: list[RankSample], alone: bool) -> JobProfile | None:
        """The samples' profile; None where they contradict each other."""
        try:
            return merge(
                present,
                topology=self._known_topology(present),
                device_flops=self._device_flops,
                measured_alone=alone,
            )
        except Exception as error:
            self._warn(
                "merge", f"no profile from {len(present)} samples: {type(error).__name__}: {error}"
            )
            _log.debug("merge failed", exc_info=True)
            return None

    def _is_alone(self) -> bool:
        """Whether this job still holds the slot that it took for this measurement."""
        return self._alone and self._slot is not None and self._slot.held

    def _known_topology(self, samples: list[RankSample]) -> Topology | None:
        """The topology where it knows every host of the job; else t can only be measured."""
        if self._topology is None:
            return None
        known = set(getattr(self._topology, "hosts", ()))
        return self._topology if all(sample.host in known for sample in samples) else None

    def _next_order(self) -> Order | None:
        now = self._clock()
        order = self._wanted()
        renew = now - self._ordered_at_s >= self._settings.plan_valid_s / 3
        if order == self._order and not renew:
            return None
        self._order = order
        self._ordered_at_s = now
        self._turn += 1
        return msgspec.structs.replace(order, turn=self._turn)

    def _wanted(self) -> Order:
        measuring = self.phase == "measuring"
        plan = self._leader.plan if self._leader is not None else None
        entry = plan.entry(self._settings.job) if plan is not None else None
        level = entry.level if entry is not None else None
        if measuring and self._is_alone():
            level = self._settings.profiling_level
        wanted = self._routes(entry, measuring)
        return Order(
            incarnation=self._incarnation,
            turn=1,
            level=level,
            measurement=self.measurement,
            measuring=measuring,
            valid_s=self._settings.plan_valid_s,
            plan_epoch=plan.epoch if plan is not None else 0,
            entry=entry,
            profile=self.profile,
            routes=wanted.routes,
            switch=wanted.switch,
        )

    def _routes(self, entry: PlanEntry | None, measuring: bool) -> Wanted:
        """The plan's paths as the ranks can take them."""
        routing, leader = self._routing, self._leader
        if routing is None or leader is None:
            return Wanted((), 0)
        if entry is None:
            routing.forget()
        elif self.profile is not None and leader.plan_fits:
            routing.resolve(entry.path, self.profile.flows, leader.topology)
        # New connections in the middle of a measurement would be part of what is measured.
        seen = leader.record.paths
        missed = seen.missed if seen is not None else 0
        return routing.wanted(may_switch=not measuring, missed=missed)

    def status(self) -> dict[str, Any]:
        """What ``crux_torch.status()`` shows of the leader; plain values."""
        status: dict[str, Any] = {"phase": self.phase, "measurements": self.measurement}
        if self._leader is not None:
            status |= self._leader.status()
        if self._routing is not None:
            status["unroutable"] = list(self._routing.problems)
        return status


def answer(incarnation: str, measurement: int, sample: RankSample | None) -> bytes:
    """A rank's answer to a measurement: which one, then the sample, or nothing where it saw none.

    The incarnation tells it from an answer that an earlier world left in the same store.
    """
    return (
        _heading(incarnation, measurement) + b"\n" + (b"" if sample is None else sample.to_json())
    )


def _heading(incarnation: str, measurement: int) -> bytes:
    return f"{incarnation} {measurement}".encode()
