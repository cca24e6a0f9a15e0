"""A job's leading rank on the real leader and profiling slot, with a clock that the test moves."""

from __future__ import annotations

import dataclasses
from typing import Any

from control_fakes import FakeClock, by_name
from dscp_maps import CLASS_SELECTORS
from measure_stream import plain_sample

from crux_torch.agent.job_controller import GRACE_S, JobController
from crux_torch.agent.orders import Order, answer
from crux_torch.agreement.claims import ProfilingSlot
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.records import JobRecord
from crux_torch.measure.sample import GroupRow, RankSample, TrafficRow
from crux_torch.settings import Settings

SETTINGS = Settings(dscp_map=CLASS_SELECTORS, profile_s=3.0, lease_s=2.0, plan_valid_s=6.0)
WORLD = 2
TICK_S = 0.05


def sample(rank: int, **changes: Any) -> RankSample:
    values: dict[str, Any] = {
        "world_size": WORLD,
        "host": f"h{rank}",
        "flops": 1e9,
        "groups": (GroupRow("0", rank, (0, WORLD, 1)),),
        "traffic": (TrafficRow(0, "allreduce", -1, 10 * 4000),),
    }
    return plain_sample(rank, **{**values, **changes})


class Job:
    """One job's controller, and ranks that answer as the test wants."""

    def __init__(self, name: str, clock: FakeClock, store: Any, **options: Any) -> None:
        settings = dataclasses.replace(SETTINGS, job=name, **options.pop("changes", {}))
        self.name, self.clock, self.settings = name, clock, settings
        self.incarnation = f"{name}-0"
        self.leader = self.slot = None
        compute, published = options.pop("compute", by_name), options.pop("published", None)
        if store is not None:
            record = JobRecord(
                job=name, incarnation=self.incarnation, hosts=("h0",), gpus=2, state="starting"
            )
            self.leader = Leader(
                store, "c", record, compute, published=published,
                lease_s=settings.lease_s, plan_valid_s=settings.plan_valid_s, clock=clock,
            )  # fmt: skip
            lease_s = settings.profile_s + 2 * GRACE_S
            self.slot = ProfilingSlot(
                store, "c", name, self.incarnation, lease_s=lease_s, clock=clock
            )
        options = {"world_size": WORLD, "clock": clock, **options}
        self.controller = JobController(
            settings, self.incarnation, self.leader, self.slot, **options
        )
        self._joined = False
        self.ready, self.changed, self.answers_come, self.trains = True, False, True, True
        self.answers: dict[int, bytes] = {}
        self.orders: list[Order] = []
        self.phases = [self.controller.phase]

    def measured(self, rank: int) -> bytes:
        return answer(self.incarnation, self.controller.measurement, sample(rank))

    def collect(self) -> dict[int, bytes]:
        if self.answers_come:
            self.answers = {rank: self.measured(rank) for rank in range(WORLD)}
        return self.answers

    def step(self) -> Order | None:
        if not self._joined:
            self.controller.agree()
            self._joined = True
        self.controller.profile_job(self.ready, self.changed, self.collect, trains=self.trains)
        self.controller.agree()
        order = self.controller.next_order()
        if order is not None:
            self.orders.append(order)
        if self.controller.phase != self.phases[-1]:
            self.phases.append(self.controller.phase)
        return order

    @property
    def told(self) -> Order:
        return self.orders[-1]


def run(clock: FakeClock, seconds: float, *jobs: Job) -> None:
    for _ in range(round(seconds / TICK_S)):
        for job in jobs:
            job.step()
        clock.advance(TICK_S)
