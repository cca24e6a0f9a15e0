"""The pipeline of one rank: measure, profile, agree, schedule, apply.

The background thread runs it. An error ends in the network's default behaviour and one warning,
never in the training thread. The pipeline holds no lock that training could want. Ten times a
second it takes the GIL, for well under a millisecond.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from crux_torch.agent.discovery import JobDiscovery, RankSearches
from crux_torch.agent.follower import Follower
from crux_torch.agent.metrics_process import MetricsProcess
from crux_torch.agent.orders import Order, PathReports, RollCall, answer
from crux_torch.agent.pace import PaceKeeper
from crux_torch.agent.rank_meter import RankMeter
from crux_torch.agent.summary import SummaryKeeper, summary_file
from crux_torch.agent.training_tools import PlanSpans
from crux_torch.agreement.job_channel import MAX_SAMPLE_BYTES, JobChannel
from crux_torch.agreement.problems import place_of_this_process
from crux_torch.agreement.records import MAX_RECORD_BYTES
from crux_torch.backend.tcp_sockets import Ownership
from crux_torch.host.activity import OwnDevice
from crux_torch.job_name import may_host_store
from crux_torch.logs import WarnOnce
from crux_torch.measure.chrome_trace import chrome_trace, write_trace
from crux_torch.measure.iterations import IterationMarks
from crux_torch.measure.profile import JobProfile
from crux_torch.measure.records import RecordWindow
from crux_torch.settings import Settings, is_attached_by_environment, is_launched
from crux_torch.store.host import host_of

if TYPE_CHECKING:
    from crux_torch.agent.job_controller import JobController
    from crux_torch.store import SharedStore

_log = logging.getLogger(__name__)

#: Seconds between two looks for an order, and for new sockets.
ORDER_POLL_S = 0.2
REFRESH_S = 1.0
#: Iterations over which the agent looks for a change of the job's traffic, and what counts as one.
DRIFT_ITERATIONS = 20
DRIFT_SHARE = 0.1
#: Seconds between two measurements at least, and between two looks for a change.
REMEASURE_S = 60.0
DRIFT_POLL_S = 1.0
#: Records that a trace holds at most.
TRACE_RECORDS = 1 << 18


class Pipeline:
    """Five steps, from a rank's records to the class and the paths of its connections.

    Every rank measures and applies. Rank 0 leads: it also profiles, agrees and schedules.

    Thread safety: the background thread makes it and calls :meth:`run`; any thread may call the
    rest, which reads what :meth:`run` has left.

    Args:
        rank, world_size: of this process in the job.
        store: of the job's first process group.
        recorder: the process's recorder (``crux_torch._C.Recorder``).
        ownership: the inner backends' sockets.
        device: that this rank trains on.
        marks: ends of iterations; the training thread adds them.
        stop: set when the pipeline is to end.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        world_size: int,
        store: Any,
        recorder: Any,
        ownership: Ownership,
        device: OwnDevice,
        marks: IterationMarks,
        stop: threading.Event,
    ) -> None:
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.host = settings.host or socket.gethostname()
        self._meter = RankMeter(recorder, settings, rank, world_size, self.host, device, marks)
        self._pace = PaceKeeper(marks)
        self._follower = Follower(
            settings,
            rank=rank,
            host=self.host,
            ownership=ownership,
            store=store,
            device=device,
            marks=marks,
            pace=self._pace,
        )
        self._channel = JobChannel(store, rank, world_size)
        self._path_reports = PathReports(self._channel)
        self._searches = self._discovery = None
        if settings.discovery:
            self._searches = RankSearches(self._channel, self.host)
            self._discovery = JobDiscovery(self._channel) if rank == 0 else None
        self._warn = WarnOnce(_log)
        place = place_of_this_process(settings, self.host)
        self._roll_call = RollCall(self._channel, world_size, place, self._warn)
        # Where only the environment attaches Crux, nobody else keeps the embedded store running.
        may_host = may_host_store(rank, os.environ)
        hosts = may_host and is_attached_by_environment() and not is_launched()
        self._store_host = host_of(settings) if hosts else None
        self._trace = RecordWindow(TRACE_RECORDS, max_age_s=1e9) if settings.trace else None
        file = summary_file() if rank == 0 else ""
        self._summary = SummaryKeeper(file, marks) if file else None
        self._metrics: MetricsProcess | None = None
        self._controller: JobController | None = None
        self._shared_store: SharedStore | None = None
        self._unpublished: Order | None = None
        self._measuring: Order | None = None
        self._answered = ("", 0)
        self._unsent: bytes | None = None
        self._order_at_s = self._refresh_at_s = float("-inf")
        self._measured_at_s = self._drift_at_s = float("-inf")
        self._bytes_then: float | None = None
        self._stop = stop
        self._refresh = threading.Event()
        self._errors: dict[str, str] = {}

    def run(self) -> None:
        """Repeats the steps until the world's end, or until told to stop; takes all back then."""
        if self._store_host is not None:
            self._store_host.start()
        self._meter.install()
        self._pace.install()
        stop_showing = self._meter.marks.add_listener(
            PlanSpans(lambda: self._follower.order).on_mark
        )
        saw_world = False
        while not self._stop.is_set():
            initialized = dist.is_initialized()
            saw_world |= initialized
            if saw_world and not initialized:
                break  # the script destroyed the process group
            self._attempt("measure", self._measure)
            if self.rank == 0 and self._controller is None:
                self._attempt("lead", self._begin_to_lead)
            if self._controller is not None:
                self._attempt("profile", self._profile, self._controller)
                self._attempt("agree", self._agree, self._controller)
                self._attempt("schedule", self._schedule, self._controller)
                self._attempt("sum up", self._sum_up, self._controller)
            self._attempt("apply", self._apply)
            self._stop.wait(self.settings.tick_s)
        self._attempt("revert", self._follower.revert)
        self._attempt("unhook", self._meter.remove)
        if self._controller is not None:
            self._attempt("sum up", self._sum_up, self._controller, True)
        stop_showing()
        self._attempt("close", self._close)
        self._attempt("trace", self._write_trace)

    def _attempt(self, name: str, step: Callable[..., object], *args: object) -> None:
        """Run one step. An error is logged once, and the step is tried again next time."""
        try:
            step(*args)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._warn(name, f"Crux can't {name}, training goes on: {reason}")
            _log.debug("details", exc_info=True)
            self._errors[name] = reason
        else:
            self._errors.pop(name, None)

    def _measure(self) -> None:
        """Step 1, every rank: drain the recorder, and answer a measurement that has seen enough."""
        self._roll_call.send()
        records = self._meter.drain()
        if self._trace is not None:
            self._trace.append(records)
        if self._measuring is not None and self._meter.due():
            order, self._measuring = self._measuring, None
            self._measured_at_s = time.monotonic()
            self._bytes_then = None
            # An empty answer, in case the rest fails: the leader needn't wait for this rank.
            self._unsent = answer(order.incarnation, order.measurement, None)
            raw = answer(order.incarnation, order.measurement, self._meter.finish())
            if len(raw) <= MAX_SAMPLE_BYTES:
                self._unsent = raw
            else:
                reason = f"a sample of {len(raw)} bytes is over {MAX_SAMPLE_BYTES}: left out"
                self._warn("sample", reason)
        if self._unsent is not None and self._channel.put_sample(self._unsent):
            self._unsent = None

    def _begin_to_lead(self) -> None:
        """Join the cluster, once it is known which orders an earlier life of this job has left."""
        earlier = self._channel.order()
        if self._channel.error is not None:
            return
        from crux_torch.agent.join import make_controller

        controller, self._shared_store = make_controller(
            self.settings,
            incarnation=secrets.token_hex(8),
            host=self.host,
            world_size=self.world_size,
            first_number=_number_of(earlier) + 1,
            keeper=self._pace,
            marks=self._meter.marks,
            warn=self._warn,
        )
        # Before the first measurement: the operator may have said how this job is to be measured.
        controller.agree()
        self._controller = controller
        if self.settings.metrics:
            self._metrics = MetricsProcess(self.settings, self._warn)

    def _profile(self, controller: JobController) -> None:
        """Step 2, rank 0: have the job measured, and merge the ranks' samples into its profile."""
        self._attempt("roll call", self._roll_call.gather, controller.topology)
        now = time.monotonic()
        changed = False
        if controller.phase == "running" and now >= self._drift_at_s:
            self._drift_at_s = now + DRIFT_POLL_S
            moved = self._meter.bytes_per_iteration(DRIFT_ITERATIONS)
            if self._bytes_then is None:
                self._bytes_then = moved
            if now - self._measured_at_s >= REMEASURE_S:
                changed = self._moves_other_amounts(moved) or self._outgrew_pace(controller)
        controller.profile_job(
            controller.phase == "warming" and self._meter.is_warm(),
            changed,
            self._channel.collect,
            trains=self._meter.marks.count > 0,
        )

    def _agree(self, controller: JobController) -> None:
        """Step 3, rank 0: share the profile, and take the plan or write one, by the scheduler."""
        if self._metrics is not None:
            self._metrics.look()
        if controller.leader is not None:
            followed = self._follower.order
            routes = followed.routes if followed is not None else ()
            host_at = self._roll_call.host_at
            report = self._path_reports.gather(bool(routes), host_at)
            if self._discovery is not None and not controller.has_topology:
                astray = report.counts is not None and report.counts.elsewhere > 0
                fragment = self._discovery.step(
                    self._path_reports.by_rank,
                    controller.profile,
                    host_at,
                    steered={(route.src, to) for route in routes for to in route.destinations},
                    astray=astray,
                    lost=controller.leader.outcome.lost,
                )
                controller.leader.tell_network(fragment)
            controller.leader.update(
                paths=report.counts,
                seen=report.seen or msgspec.UNSET,
                corrections_per_minute=(
                    self._pace.corrections_per_minute if self._pace.keeps else None
                ),
            )
        controller.agree()

    def _schedule(self, controller: JobController) -> None:
        """Step 4, rank 0: publish what the plan says for this job as an order to its ranks."""
        self._unpublished = controller.next_order() or self._unpublished
        if self._unpublished is not None and self.publish(self._unpublished):
            self._unpublished = None

    def _sum_up(self, controller: JobController, ended: bool = False) -> None:
        """Rank 0: keep the summary that ``cruxrun`` prints at the job's end."""
        if self._summary is None:
            return
        order = self._follower.order
        if self._summary.look(order) or ended:
            leader = controller.leader
            self._summary.write(
                controller.status(),
                controller.profile,
                leader.record.paths if leader is not None else None,
                order.generation if order is not None else 0,
                ended=ended,
            )

    def _apply(self) -> None:
        """Step 5, every rank: look for an order and obey it, also on connections made since."""
        now = time.monotonic()
        if now >= self._order_at_s:
            self._order_at_s = now + ORDER_POLL_S
            raw = self._channel.order()
            order = self._follower.hear(raw) if raw is not None else None
            if order is not None:
                self._measure_for(order)
                # Last, because it raises if the transport refuses.
                self._follower.steer(order)
        self._follower.check()
        if self._refresh.is_set() or now >= self._refresh_at_s:
            self._refresh.clear()
            self._refresh_at_s = now + REFRESH_S
            self._path_reports.send(self._follower.refresh())
            if self._searches is not None:
                self._searches.tick()
            self._attempt("gate", lambda: self._follower.gate(self._meter.groups()))

    def _moves_other_amounts(self, bytes_per_iteration: float | None) -> bool:
        """Returns True if iterations move other amounts than right after the measurement."""
        then = self._bytes_then
        if bytes_per_iteration is None or then is None:
            return False
        return abs(bytes_per_iteration - then) > DRIFT_SHARE * max(then, 1.0)

    def _outgrew_pace(self, controller: JobController) -> bool:
        """Returns True if the plan's grid is of an iteration that is not the job's any more."""
        if controller.misses_pace:
            return True
        own_s, profile = self._pace.iteration_s, controller.profile
        if own_s is None or profile is None or not self._pace.keeps:
            return False
        return own_s < (1.0 - DRIFT_SHARE) * profile.period_s

    def publish(self, order: Order) -> bool:
        """Publishes an order to this job's ranks; returns True if that succeeded."""
        raw = order.to_json()
        if len(raw) > MAX_RECORD_BYTES:
            self._warn("order", f"an order of {len(raw)} bytes: the ranks don't get the profile")
            raw = msgspec.structs.replace(order, profile=None).to_json()
        return self._channel.publish(raw)

    def _measure_for(self, order: Order) -> None:
        """Begin the measurement that ``order`` asks for, unless it was begun before."""
        incarnation, measurement = self._answered
        if incarnation != order.incarnation:
            if self._measuring is not None:
                self._meter.give_up()
            self._measuring, measurement = None, 0
        if order.measuring and order.measurement > measurement:
            measurement = order.measurement
            self._measuring = order
            self._meter.begin()
        self._answered = order.incarnation, measurement

    def refresh(self) -> None:
        """Has the sockets of a new process group marked at the next tick."""
        self._refresh.set()

    @property
    def planned_qp_dscp(self) -> int | None:
        """DSCP that the plan gives this job's queue pairs; see :attr:`Follower.qp_dscp`."""
        return self._follower.qp_dscp

    @property
    def may_mark_pairs(self) -> bool:
        """True if queue pairs of this job may have a class of Crux."""
        order = self._follower.order
        if order is None:
            return bool(self.settings.rdma_dscp_map) and not self.settings.dry_run
        return order.marks is not None and bool(order.marks.rdma)

    def profile(self) -> JobProfile | None:
        """Returns the job's profile as this rank knows it."""
        return self._follower.profile if self._controller is None else self._controller.profile

    def status(self) -> dict[str, Any]:
        """Returns plain values; see :func:`crux_torch.status`."""
        order, profile = self._follower.order, self.profile()
        plain_profile = None
        if profile is not None:
            follows = ("intensity", "achieved_flops", "utilization")
            plain_profile = msgspec.to_builtins(profile)
            plain_profile |= {name: getattr(profile, name) for name in follows}
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "job": self.settings.job,
            "leader": self._controller.status() if self._controller is not None else None,
            "hosts": self._roll_call.status() if self.rank == 0 else None,
            "channel": self._channel.error or "ok",
            "discovery": self._discovery.status if self._discovery is not None else None,
            "order": msgspec.to_builtins(order) if order is not None else None,
            "plan": msgspec.to_builtins(order.entry) if order and order.entry else None,
            "profile": plain_profile,
            "iterations": self._meter.marks.count,
            "device": msgspec.to_builtins(self._meter.device.last),
            **self._follower.status(),
            "errors": dict(self._errors),
        }

    def _close(self) -> None:
        if self._searches is not None:
            self._searches.end()
        with contextlib.ExitStack() as stack:
            if self._store_host is not None:
                stack.callback(self._store_host.stop)
            stack.callback(self._channel.close)
            if self._shared_store is not None:
                stack.callback(self._shared_store.close)
            if self._metrics is not None:
                stack.callback(self._metrics.close)
            if self._controller is not None:
                self._controller.close()

    def _write_trace(self) -> None:
        if self._trace is None:
            return
        self._trace.append(self._meter.drain())
        trace = chrome_trace(
            self._trace.records(),
            self._meter.groups(),
            rank=self.rank,
            world_size=self.world_size,
            backend="nccl" if torch.cuda.is_available() else "gloo",
            marks_ns=self._meter.marks.marks_ns(),
        )
        write_trace(self.settings.trace, self.host, trace)


def _number_of(raw: bytes | None) -> int:
    """Returns the number of the order in ``raw``; 0 if it is none."""
    try:
        return Order.from_json(raw).number if raw is not None else 0
    except ValueError:
        return 0
