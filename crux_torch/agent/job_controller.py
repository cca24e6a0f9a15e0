"""The leading rank's part: has the job measured, agrees with other jobs, and gives orders.

    warming -> queueing -> measuring -> running -> queueing ... (when the job has changed)

Nothing here waits: every step looks at the clock and at the messages that have come in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from crux_torch.agent.orders import Order, Pace, heading
from crux_torch.agent.pace import PaceSetter
from crux_torch.agent.summary import PlanNews
from crux_torch.agreement.claims import ProfilingSlot
from crux_torch.agreement.outcome import NO_ROUTES, Outcome, Routed
from crux_torch.agreement.problems import Network, left_out, network_of
from crux_torch.apply.dscp import dscp_of_level
from crux_torch.apply.transport import is_preloaded
from crux_torch.logs import WarnOnce, news, one_line
from crux_torch.measure.merge import merge
from crux_torch.measure.profile import JobProfile, in_words
from crux_torch.measure.sample import RankSample, SampleError
from crux_torch.network.routes import HostFlowLinks, HostRoute, PlannedPath
from crux_torch.network.topology import Topology
from crux_torch.schedule.papers.crux import link_time_s
from crux_torch.settings import Marks, Settings

if TYPE_CHECKING:
    from crux_torch.agreement.bounded_leader import BoundedLeader

_log = logging.getLogger(__name__)
_news = news(logging.getLogger("crux_torch"))

Phase = Literal["warming", "queueing", "measuring", "running"]
Collect = Callable[[], Mapping[int, bytes]]

#: Seconds after which a job that can't reach the store is measured without the slot.
WITHOUT_STORE_S = 5.0
#: Seconds that slow ranks get beyond the time of a measurement.
GRACE_S = 5.0
#: Seconds between two looks at the slot, and at the ranks' samples.
SLOT_POLL_S = 0.25
COLLECT_POLL_S = 0.25
#: Seconds from a measurement that saw nothing to the next one; the pause doubles up to the second.
RETRY_S = 10.0
MAX_RETRY_S = 600.0
#: Seconds between two handovers at least: jobs that come and go shift everyone's paths.
HANDOVER_PAUSE_S = 10.0
#: Handovers that are tried again because connections missed their paths; the pause doubles.
MAX_RETRIES = 3


class Routing:
    """Turns the plan's paths into routes, and counts generations of connections.

    Connections are made anew only if the routes differ from those of the last handover. A change of
    levels does not cause a handover, nor does a plan that was lost and comes back.

    Args:
        first_generation: above all generations that the job's store may know of.
    """

    def __init__(
        self, *, first_generation: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._warn = WarnOnce(_log)
        self._followed: object = None
        self._found = NO_ROUTES
        self._taken: tuple[HostRoute, ...] = ()
        self._generation = 0
        self._next_generation = first_generation
        self._retries = 0
        self._not_before_s = float("-inf")

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why some of the plan's paths can't be taken."""
        return self._found.problems

    def follow(self, paths: tuple[PlannedPath, ...], routed: Routed) -> None:
        """Takes a plan's paths, as routes; without any the network decides."""
        if (paths, routed) == self._followed:
            return
        self._followed, self._found = (paths, routed), routed.found
        if routed.wrong:
            self._warn("path", f"the plan's paths are not this job's: {routed.wrong}")
        elif self._found.problems:
            self._warn(
                "addresses",
                "paths of the plan that can't be taken, because the topology has "
                + "; ".join(self._found.problems),
            )

    def forget(self) -> None:
        """Leaves paths to the network: there is no plan."""
        self._followed, self._found = None, NO_ROUTES

    def routes(
        self, *, may_hand_over: bool = True, missed: int = 0
    ) -> tuple[tuple[HostRoute, ...], int]:
        """Returns all hosts' routes (empty: the network decides), and a generation.

        The generation is that of the job's connections; 0 for those that it began with. When it
        grows, connections are made anew.

        Args:
            may_hand_over: whether connections may be made anew now; otherwise that waits.
            missed: connections that were seen not to take their path although they might: a busy
                host or lost probes cut their search for a port short.
        """
        routes, now = self._found.routes, self._clock()
        if not routes or not may_hand_over or now < self._not_before_s:
            return routes, self._generation
        again = routes == self._taken
        if not again or (missed and self._retries < MAX_RETRIES):
            self._retries = self._retries + 1 if again else 0
            self._taken = routes
            self._generation = self._next_generation
            self._next_generation += 1
            self._not_before_s = now + HANDOVER_PAUSE_S * 2**self._retries
        return routes, self._generation


class JobController:
    """Drives one job's measurements and orders.

    Thread safety: the leading rank's background thread owns it; any thread may call ``status()``
    and read ``profile`` (the job's profile, once it was measured).

    Args:
        settings, incarnation, world_size: of this job.
        leader: shares this job's profile with the other jobs, and agrees on a plan; None without a
            shared store.
        slot: its place in the line for measuring; None without a shared store.
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
        leader: BoundedLeader | None,
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
        self._since_s = clock()
        self._slot_at_s = float("-inf")
        self._alone = self._quiet = False
        self._samples: dict[int, RankSample | None] = {}
        self._collect_at_s = float("-inf")
        self._failures = 0
        self._not_before_s = float("-inf")
        self._number = first_number - 1
        self._device_flops = device_flops
        self._order: Order | None = None
        self._ordered_at_s = float("-inf")
        self._plan_news = PlanNews(clock)

    def profile_job(
        self, ready: bool, changed: bool, collect: Collect, *, trains: bool = True
    ) -> None:
        """Takes the slot, has the job measured, and merges the ranks' samples into its profile.

        Args:
            ready: whether the job has run for long enough to be measured.
            changed: whether it does other work than was measured.
            collect: gives the ranks' answers.
            trains: whether this rank has seen an optimizer. A job without one, like an evaluation,
                may well have no iterations.
        """
        if self.phase == "warming" and ready and self._clock() >= self._not_before_s:
            self._enter("queueing")
        if self.phase == "queueing" and self._may_measure():
            self.measurement += 1
            self._samples = {}
            if self.leader is not None:
                self.leader.update(state="profiling")
            self._enter("measuring")
        elif self.phase == "measuring":
            self._collect_samples(collect, trains)
        elif self.phase == "running" and changed:
            self._enter("queueing")

    def agree(self) -> None:
        """Shares this job's record with the other jobs, and takes the plan, or writes one."""
        if self.leader is not None:
            self.leader.update(marks=self._marks() or msgspec.UNSET)
            self.leader.tick()

    def next_order(self) -> Order | None:
        """Returns an order to publish; None if the last one stands and need not be renewed."""
        now = self._clock()
        order = self._order_of_plan()
        renew = now - self._ordered_at_s >= self._settings.plan_valid_s / 3
        if order == self._order and not renew:
            return None
        self._order = order
        self._ordered_at_s = now
        self._number += 1
        return msgspec.structs.replace(order, number=self._number)

    def close(self) -> None:
        """Gives the slot back, and removes this job's record."""
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
    def has_topology(self) -> bool:
        """True if somebody gave the cluster a topology, by a file or in the store."""
        network = self._network()
        return network.known and not network.seen

    @property
    def misses_pace(self) -> bool:
        """True if the job was found not to fit the grid of the plan in force."""
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
        """Returns the DSCP values that the job may send with: the operator's, else its own."""
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

    def _collect_samples(self, collect: Collect, trains: bool) -> None:
        """End the measurement when every rank has answered, or when its time is up."""
        now = self._clock()
        late = now - self._since_s >= self._settings.profile_s + GRACE_S
        if now < self._collect_at_s and not late:
            return
        self._collect_at_s = now + COLLECT_POLL_S
        self._take_in(collect())
        if len(self._samples) == self._world_size or late:
            alone, quiet = self._is_alone(), self._is_quiet()
            self._alone = False
            if self._slot is not None:
                self._slot.release()
            self._conclude(alone, quiet, trains)

    def _take_in(self, by_rank: Mapping[int, bytes]) -> None:
        """Keep the answers to this measurement. A malformed one counts as an empty one."""
        expected = heading(self._incarnation, self.measurement)
        for rank, raw in by_rank.items():
            first_line, _, body = raw.partition(b"\n")
            if rank in self._samples or first_line != expected:
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
            self._samples[rank] = sample

    def _conclude(self, alone: bool, quiet: bool, trains: bool) -> None:
        present = [s for _, s in sorted(self._samples.items()) if s is not None]
        profile = self._merged(present, alone, quiet) if present else None
        if not present and not trains and len(self._samples) == self._world_size:
            _log.info("no rank saw iterations: a job without them keeps the default class")
        elif not present:
            self._warn(
                "nothing",
                f"{len(self._samples)} of {self._world_size} ranks answered and none saw whole "
                f"iterations in {self._settings.profile_s:g} s; trying again from time to time. If "
                "an iteration takes longer than a third of that, raise CRUX_PROFILE_S",
            )
        changes: dict[str, Any] = {}
        if profile is not None:
            self.profile = profile
            self._failures = 0
            _news.info("%s", one_line(f"measured: {in_words(profile)}"))
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
        """Returns the samples' profile; None if they contradict each other."""
        topology = self._topology
        if topology is not None and not {s.host for s in present} <= set(topology.hosts):
            topology = None  # t can only be measured
        flops = self._device_flops
        try:
            return merge(
                present,
                topology=topology,
                link_time_s=link_time_s,
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
        """Returns True if this job still holds the slot that it took, and may go first."""
        return self._alone and self._slot is not None and self._slot.held

    def _is_quiet(self) -> bool:
        """Returns True if the shared store names no other job of the cluster."""
        return self._quiet and self.leader is not None and self.leader.outcome.is_alone

    def _order_of_plan(self) -> Order:
        """Turn the plan in force into an order (without its number)."""
        measuring = self.phase == "measuring"
        outcome = self.leader.outcome if self.leader is not None else Outcome()
        entry = outcome.entry
        marks = self._marks()
        level = entry.level if entry is not None else None
        if entry is not None:
            values = marks.tcp or marks.rdma
            self._plan_news.tell(
                outcome, entry, None if self._observes else dscp_of_level(entry.level, values)
            )
        if measuring and self._is_alone():
            level = marks.measuring_level
        elif level is not None and level not in marks.plan_levels:
            marks = Marks()  # one level for all: jobs mean different things by theirs
        obeyed = outcome
        if self._observes:
            marks, level, obeyed = Marks(), None, Outcome()
        routes, generation = self._routes(obeyed, measuring)
        # Holds and limits in a measurement would be part of what is measured.
        active = Outcome() if measuring else obeyed
        flows, tables = self._booked(active)
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
            routes=routes,
            generation=generation,
            flows=flows,
            tables=tables,
            pace=self._pace(active),
        )

    def _pace(self, outcome: Outcome) -> Pace | None:
        """Returns the plan's pace for this job, and publishes the offset that it needs."""
        setter, leader, entry = self._pace_setter, self.leader, outcome.entry
        if setter is None:
            return None
        if leader is None or entry is None or not entry.grid:
            return setter.pace(entry)
        pace = setter.pace(entry, outcome.moved)
        leader.update(moved=setter.moved or msgspec.UNSET)
        return pace

    def _routes(self, outcome: Outcome, measuring: bool) -> tuple[tuple[HostRoute, ...], int]:
        routing, leader = self._routing, self.leader
        if routing is None or leader is None:
            return (), 0
        if outcome.entry is None:
            routing.forget()
        elif outcome.routed is not None:
            routing.follow(outcome.entry.paths, outcome.routed)
        # New connections in the middle of a measurement would be part of what is measured.
        seen = leader.record.paths
        missed = seen.missed if seen is not None else 0
        return routing.routes(may_hand_over=not measuring, missed=missed)

    def _booked(self, outcome: Outcome) -> tuple[tuple[HostFlowLinks, ...], str]:
        """Returns the flows whose rates the hosts book, and the endpoint of the tables."""
        if outcome.entry is None:
            return (), ""
        flows, unsure, address = outcome.booked
        if unsure:
            self._warn("flows", "flows without a sure link, or addresses in the topology: unpaced")
        host = f"[{address}]" if ":" in address else address
        return flows, f"tcp://{host}:{self._settings.tables_port}" if address else ""

    def status(self) -> dict[str, Any]:
        """Returns plain values for :func:`crux_torch.status`."""
        status: dict[str, Any] = {
            "phase": self.phase,
            "measurements": self.measurement,
            "left_out": list(left_out(self._settings, self._network(), preloaded=is_preloaded())),
        }
        if self.leader is not None:
            status |= self.leader.status()
        if self._routing is not None:
            status["unroutable"] = list(self._routing.problems)
        if self._pace_setter is not None:
            status["pace"] = self._pace_setter.status()
        return status
