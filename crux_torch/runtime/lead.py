"""The leading rank's side: take the slot, have the job measured, agree on a plan, give orders.

    warming -> queueing -> measuring -> running -> queueing ... (when the job has changed)

Nothing here waits: every step looks at the clock and at what has come in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from crux_torch.control.left_out import Network, left_out, network_of
from crux_torch.control.outcome import NO_ROUTES, Outcome, Routed
from crux_torch.control.records import JobRecord, PlanEntry
from crux_torch.control.slots import ProfilingSlot
from crux_torch.fabric.flow_links import HostFlowLinks
from crux_torch.fabric.route import HostRoute, PlannedPath
from crux_torch.fabric.topology import Topology
from crux_torch.log_lines import news
from crux_torch.measure.job_profile import JobProfile
from crux_torch.measure.merge import merge
from crux_torch.measure.sample import RankSample, SampleError
from crux_torch.runtime.order import Order, Pace, heading
from crux_torch.runtime.pace_setter import PaceSetter
from crux_torch.settings import Marks, Settings
from crux_torch.warn_once import WarnOnce, one_line

_log = logging.getLogger(__name__)
_news = news(logging.getLogger("crux_torch"))

Phase = Literal["warming", "queueing", "measuring", "running"]
Collect = Callable[[], Mapping[int, bytes]]

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
#: Seconds between two switches at least: jobs that come and go shift everyone's paths.
SWITCH_PAUSE_S = 10.0
#: Switches that are tried again because connections missed their paths; the pause doubles.
MAX_RETRIES = 3


class Leads(Protocol):
    """The job's part in agreeing on a plan."""

    @property
    def record(self) -> JobRecord:
        """The job's published record."""

    @property
    def outcome(self) -> Outcome:
        """The plan's outcome for the job now."""

    @property
    def topology(self) -> Topology | None:
        """The cluster's topology, where this process has parsed it."""

    @property
    def store_state(self) -> str:
        """``ok``, or what is wrong with the store."""

    def update(self, **changes: Any) -> None:
        """Publish other values of these fields of the record."""

    def tick(self) -> None:
        """Do what is due; raises nothing."""

    def close(self) -> None:
        """Remove the job's record."""

    def status(self) -> dict[str, Any]:
        """Plain values."""


class Wanted(NamedTuple):
    """What the ranks are told.

    Attributes:
        routes: of all hosts of the job; empty: the network decides.
        generation: of the job's connections; 0 for those that it began with. When it grows,
            connections are made anew.
    """

    routes: tuple[HostRoute, ...]
    generation: int


class Routing:
    """Turns the plan's paths into routes, and counts generations of connections.

    Connections are made anew only if the routes differ from those of the last switch. A change of
    levels does not cause a switch, nor does a plan that was lost and comes back.

    Args:
        first_generation: above all generations that the job's store may know of.
    """

    def __init__(
        self, *, first_generation: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._warn = WarnOnce(_log)
        self._of: object = None
        self._found = NO_ROUTES
        self._switched: tuple[HostRoute, ...] = ()
        self._generation = 0
        self._next_generation = first_generation
        self._retries = 0
        self._not_before_s = float("-inf")

    @property
    def problems(self) -> tuple[str, ...]:
        """Why some of the plan's paths can't be taken."""
        return self._found.problems

    def follow(self, paths: tuple[PlannedPath, ...], routed: Routed) -> None:
        """Want what a plan says: its ``paths``, as routes; without any the network decides."""
        if (paths, routed) == self._of:
            return
        self._of, self._found = (paths, routed), routed.found
        if routed.wrong:
            self._warn("path", f"the plan's paths are not this job's: {routed.wrong}")
        elif self._found.problems:
            self._warn(
                "addresses",
                "paths of the plan that can't be taken, because the topology has "
                + "; ".join(self._found.problems),
            )

    def forget(self) -> None:
        """Want nothing: there is no plan."""
        self._of, self._found = None, NO_ROUTES

    def wanted(self, *, may_switch: bool = True, missed: int = 0) -> Wanted:
        """What the ranks are to be told now.

        Args:
            may_switch: whether connections may be made anew now; otherwise that waits.
            missed: connections that were seen not to take their path although they might: a busy
                host or lost probes cut their search for a port short.
        """
        routes, now = self._found.routes, self._clock()
        if not routes or not may_switch or now < self._not_before_s:
            return Wanted(routes, self._generation)
        again = routes == self._switched
        if not again or (missed and self._retries < MAX_RETRIES):
            self._retries = self._retries + 1 if again else 0
            self._switched = routes
            self._generation = self._next_generation
            self._next_generation += 1
            self._not_before_s = now + SWITCH_PAUSE_S * 2**self._retries
        return Wanted(routes, self._generation)


class Conductor:
    """Drives one job's measurements and orders. The leading rank's background thread owns it.

    Args:
        settings, incarnation, world_size: of this job.
        leader, slot: its part in agreeing on a plan, and its place in the line for measuring; None
            without a shared store.
        topology: of the cluster, if this job knows it.
        routing: turns the plan's paths into routes; None: the network decides.
        pace_setter: turns the plan's grid into a pace; None: iterations begin when they are ready.
        first_number: above those of all orders that may still lie in the job's store.
        device_flops: FLOP/s of one device, for W from time; 0 if it is not known.
    """

    def __init__(
        self,
        settings: Settings,
        incarnation: str,
        leader: Leads | None,
        slot: ProfilingSlot | None,
        topology: Topology | None = None,
        *,
        world_size: int,
        routing: Routing | None = None,
        pace_setter: PaceSetter | None = None,
        first_number: int = 1,
        device_flops: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self.leader = leader
        self._slot = slot
        self._topology = topology
        self._world_size = world_size
        self._routing = routing
        self._pace_setter = pace_setter
        self._clock = clock
        self._warn = WarnOnce(_log)
        self.phase: Phase = "warming"
        self.profile: JobProfile | None = None
        self.measurement = 0
        self._trains = True
        self._since_s = clock()
        self._slot_at_s = float("-inf")
        self._alone = self._quiet = False
        self._answers: dict[int, RankSample | None] = {}
        self._collect_at_s = float("-inf")
        self._failures = 0
        self._not_before_s = float("-inf")
        self._number = first_number - 1
        self._device_flops = device_flops
        self._order: Order | None = None
        self._ordered_at_s = float("-inf")
        self._had_plan = False

    def step(
        self, ready: bool, changed: bool, collect: Collect, *, trains: bool = True
    ) -> Order | None:
        """Do what is due.

        Args:
            ready: whether the job has run for long enough to be measured.
            changed: whether it does other work than was measured.
            collect: gives the ranks' answers.
            trains: whether this rank has seen an optimizer. A job without one, like an evaluation,
                may well have no iterations.

        Returns:
            an order to publish; None if the last one stands and need not be renewed.
        """
        self._trains = trains
        if self.leader is not None:
            self.leader.update(marks=self._marks() or msgspec.UNSET)
            self.leader.tick()
        if self.phase == "warming" and ready and self._clock() >= self._not_before_s:
            self._enter("queueing")
        if self.phase == "queueing" and self._may_measure():
            self.measurement += 1
            self._answers = {}
            if self.leader is not None:
                self.leader.update(state="profiling")
            self._enter("measuring")
        elif self.phase == "measuring":
            self._measure(collect)
        elif self.phase == "running" and changed:
            self._enter("queueing")
        return self._next_order()

    def close(self) -> None:
        """Give the slot back, and tell the other jobs that this one ends."""
        try:
            if self._slot is not None:
                self._slot.release()
        finally:
            if self.leader is not None:
                self.leader.close()

    @property
    def topology(self) -> Topology | None:
        """The cluster's topology, from this job's file or from the store; None without one."""
        if self._topology is not None or self.leader is None:
            return self._topology
        return self.leader.topology

    @property
    def misses_pace(self) -> bool:
        """Whether the job was found not to fit the grid of the plan in force."""
        return self._pace_setter is not None and self._pace_setter.gave_up

    @property
    def _observes(self) -> bool:
        """True in a dry run: the job's own, or of the whole cluster."""
        return self._settings.dry_run or (self.leader is not None and self.leader.outcome.observes)

    def _network(self) -> Network:
        """Returns the facts about the topology, from this job's file or from the store."""
        if self._topology is not None or self.leader is None:
            return network_of(self._topology)
        return self.leader.outcome.network

    def _marks(self) -> Marks:
        """The DSCP values that the job may send with: the operator's, else the job's own."""
        own = self._settings.marks
        stated = network_of(self._topology).marks
        if self.leader is not None:
            stated = self.leader.outcome.network.marks
        if stated is None:
            return own
        if own and own != stated:
            self._warn("qos", "the DSCP map differs from the qos of the topology, which counts")
        return stated

    def _enter(self, phase: Phase) -> None:
        self.phase, self._since_s = phase, self._clock()

    def _may_measure(self) -> bool:
        now = self._clock()
        if self._slot is None or self.leader is None:
            return True
        if now >= self._slot_at_s:
            self._slot_at_s = now + SLOT_POLL_S
            if self._slot.acquire_step():
                outcome = self.leader.outcome
                may_go_first = bool(self._marks()) and not self._observes
                self._alone = may_go_first and not outcome.keeps_level
                self._quiet = outcome.is_alone and not outcome.keeps_level
                return True
        store_is_away = self._slot.refused or self.leader.store_state != "ok"
        return store_is_away and now - self._since_s >= WITHOUT_STORE_S

    def _measure(self, collect: Collect) -> None:
        """End the measurement when every rank has answered, or when its time is up."""
        now = self._clock()
        late = now - self._since_s >= self._settings.profile_s + GRACE_S
        if now < self._collect_at_s and not late:
            return
        self._collect_at_s = now + COLLECT_POLL_S
        self._take_in(collect())
        if len(self._answers) == self._world_size or late:
            alone, quiet = self._is_alone(), self._is_quiet()
            self._alone = False
            if self._slot is not None:
                self._slot.release()
            self._conclude(alone, quiet)

    def _take_in(self, by_rank: Mapping[int, bytes]) -> None:
        """Keep the answers to this measurement. A malformed one counts as an empty one."""
        wanted = heading(self._incarnation, self.measurement)
        for rank, raw in by_rank.items():
            told, _, body = raw.partition(b"\n")
            if rank in self._answers or told != wanted:
                continue
            sample = None
            try:
                if body:
                    sample = RankSample.from_json(body)
                    if (sample.rank, sample.world_size) != (rank, self._world_size):
                        raise SampleError(f"it is of rank {sample.rank} of {sample.world_size}")
            except Exception as error:
                sample = None
                self._warn(f"sample {rank}", f"the sample of rank {rank} is left out: {error}")
            self._answers[rank] = sample

    def _conclude(self, alone: bool, quiet: bool) -> None:
        present = [s for _, s in sorted(self._answers.items()) if s is not None]
        profile = self._merged(present, alone, quiet) if present else None
        if not present and not self._trains and len(self._answers) == self._world_size:
            _log.info("no rank saw iterations: a job without them keeps the default class")
        elif not present:
            self._warn(
                "nothing",
                f"{len(self._answers)} of {self._world_size} ranks answered and none saw whole "
                f"iterations in {self._settings.profile_s:g} s; trying again from time to time. If "
                "an iteration takes longer than a third of that, raise CRUX_PROFILE_S",
            )
        changes: dict[str, Any] = {}
        if profile is not None:
            self.profile = profile
            self._failures = 0
            changes["hosts"] = tuple(dict.fromkeys(sample.host for sample in present))
        else:
            pause_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** min(self._failures, 30))
            self._not_before_s = self._clock() + pause_s
            self._failures += 1
        if self.leader is not None:
            changes["state"] = "starting" if self.profile is None else "running"
            shared = None if self.profile is None else self.profile.to_share()
            self.leader.update(profile=shared, **changes)
        self._enter("running" if profile is not None else "warming")

    def _merged(self, present: list[RankSample], alone: bool, quiet: bool) -> JobProfile | None:
        """The samples' profile; None if they contradict each other."""
        topology = self._topology
        if topology is not None and not {s.host for s in present} <= set(topology.hosts):
            topology = None  # t can only be measured
        flops = self._device_flops
        try:
            return merge(
                present,
                topology=topology,
                device_flops=flops,
                measured_alone=alone,
                quiet=quiet,
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._warn("merge", f"no profile from {len(present)} samples: {reason}")
            _log.debug("merge failed", exc_info=True)
            return None

    def _is_alone(self) -> bool:
        """Whether this job still holds the slot that it took to measure, and may go first."""
        return self._alone and self._slot is not None and self._slot.held

    def _is_quiet(self) -> bool:
        """True if the shared store names no other job of the cluster."""
        return self._quiet and self.leader is not None and self.leader.outcome.is_alone

    def _next_order(self) -> Order | None:
        now = self._clock()
        order = self._wanted()
        renew = now - self._ordered_at_s >= self._settings.plan_valid_s / 3
        if order == self._order and not renew:
            return None
        self._order = order
        self._ordered_at_s = now
        self._number += 1
        return msgspec.structs.replace(order, number=self._number)

    def _wanted(self) -> Order:
        measuring = self.phase == "measuring"
        outcome = self.leader.outcome if self.leader is not None else Outcome()
        entry = outcome.entry
        marks = self._marks()
        level = entry.level if entry is not None else None
        if entry is not None and not self._had_plan:
            self._had_plan = True
            _news.info("%s", self._first_plan(outcome, entry))
        if measuring and self._is_alone():
            level = marks.measuring_level
        elif level is not None and level not in marks.plan_levels:
            marks = Marks()  # one level for all: jobs mean different things by theirs
        obeyed = outcome
        if self._observes:
            marks, level, obeyed = Marks(), None, Outcome()
        wanted = self._routes(obeyed, measuring)
        pace = None
        if self._pace_setter is not None:
            # Holds in a measurement would be part of what is measured.
            pace = self._paced(self._pace_setter, obeyed, None if measuring else obeyed.entry)
        flows, tables = self._booked(obeyed, measuring)
        return Order(
            incarnation=self._incarnation,
            number=1,
            level=level,
            marks=marks or None,
            measurement=self.measurement,
            measuring=measuring,
            valid_s=self._settings.plan_valid_s,
            plan_epoch=outcome.epoch,
            entry=entry,
            profile=self.profile,
            routes=wanted.routes,
            generation=wanted.generation,
            flows=flows,
            tables=tables,
            pace=pace,
        )

    def _first_plan(self, outcome: Outcome, entry: PlanEntry) -> str:
        """One line about the first plan that this job follows."""
        marks = self._marks()
        values = marks.tcp or marks.rdma
        marked = entry.level < len(values) and not self._observes
        mark = f"DSCP {values[entry.level]}" if marked else "no mark"
        return one_line(
            f"first plan, number {outcome.epoch} by {outcome.author!r}: level {entry.level} "
            f"({mark}), paths: {len(entry.paths)}, jobs: {outcome.jobs}"
        )

    def _paced(self, setter: PaceSetter, outcome: Outcome, entry: PlanEntry | None) -> Pace | None:
        """The pace that the plan gives the job; the others hear if it does not catch up."""
        leader = self.leader
        if leader is None or entry is None or not entry.grid:
            return setter.wanted(entry)
        pace = setter.wanted(entry, outcome.moved)
        leader.update(moved=setter.moved or msgspec.UNSET)
        return pace

    def _routes(self, outcome: Outcome, measuring: bool) -> Wanted:
        routing, leader = self._routing, self.leader
        if routing is None or leader is None:
            return Wanted((), 0)
        if outcome.entry is None:
            routing.forget()
        else:
            routing.follow(outcome.entry.paths, outcome.routed)
        # New connections in the middle of a measurement would be part of what is measured.
        seen = leader.record.paths
        missed = seen.missed if seen is not None else 0
        return routing.wanted(may_switch=not measuring, missed=missed)

    def _booked(self, outcome: Outcome, measuring: bool) -> tuple[tuple[HostFlowLinks, ...], str]:
        """The flows whose rates the hosts book, and where the tables are."""
        if outcome.entry is None or measuring:
            return (), ""
        flows, unsure, address = outcome.booked
        if unsure:
            self._warn("flows", "flows without a sure link, or addresses in the topology: unpaced")
        host = f"[{address}]" if ":" in address else address
        return flows, f"tcp://{host}:{self._settings.tables_port}" if address else ""

    def status(self) -> dict[str, Any]:
        """What ``crux_torch.status()`` shows of the leader; plain values."""
        status: dict[str, Any] = {
            "phase": self.phase,
            "measurements": self.measurement,
            "left_out": list(left_out(self._settings, self._network())),
        }
        if self.leader is not None:
            status |= self.leader.status()
        if self._routing is not None:
            status["unroutable"] = list(self._routing.problems)
        if self._pace_setter is not None:
            status["pace"] = self._pace_setter.status()
        return status
