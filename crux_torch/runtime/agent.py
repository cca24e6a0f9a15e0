"""The background thread of one rank: it measures, talks to its leader, and carries orders out.

An error here ends in the network's default behaviour and one warning, never in the training thread.
The thread holds no lock that training could want. Ten times a second it takes the GIL, for well
under a millisecond.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from crux_torch.apply.classes import TrafficClass
from crux_torch.apply.wire import Wire
from crux_torch.c10d.ownership import Ownership
from crux_torch.control.job_channel import MAX_SAMPLE_BYTES, JobChannel
from crux_torch.control.places import place_of_this_process
from crux_torch.control.records import MAX_RECORD_BYTES
from crux_torch.host.nvml_device import OwnDevice
from crux_torch.measure.iterations import IterationMarks
from crux_torch.measure.job_profile import JobProfile
from crux_torch.measure.trace import chrome_trace, write_trace
from crux_torch.measure.window import RecordWindow
from crux_torch.runtime.follow import Follower
from crux_torch.runtime.measure import RankMeter
from crux_torch.runtime.order import Order, PathReports, answer
from crux_torch.runtime.pace_keeper import PaceKeeper
from crux_torch.runtime.rate_scheduler import RateScheduler, make_rate_scheduler
from crux_torch.runtime.roll_call import RollCall
from crux_torch.settings import Settings
from crux_torch.warn_once import WarnOnce

if TYPE_CHECKING:
    from crux_torch.runtime.lead import Conductor
    from crux_torch.store.shared_store import SharedStore

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


class Agent:
    """One rank of one job, from the creation of its first process group to its exit.

    One background thread makes it and calls :meth:`run`; any thread may call the rest.

    Args:
        device, settings, recorder, rank, world_size: of this process.
        marks: where iterations end.
        stop: set when it is to end.
        ownership: knows the inner backends' sockets.
        store: the store of the job's first process group.
    """

    def __init__(
        self,
        device: OwnDevice,
        marks: IterationMarks,
        stop: threading.Event,
        settings: Settings,
        recorder: Any,
        ownership: Ownership,
        store: Any,
        rank: int,
        world_size: int,
    ) -> None:
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.host = settings.host or socket.gethostname()
        self._meter = RankMeter(recorder, settings, rank, world_size, self.host, device, marks)
        self._pace = PaceKeeper(marks)

        def rates(traffic_class: TrafficClass) -> RateScheduler:
            wire = Wire(ownership, traffic_class)
            return make_rate_scheduler(settings, rank, self.host, marks, wire)

        about = settings, self.host, ownership, store, device
        self._follower = Follower(*about, self._pace, rates)
        self._channel = JobChannel(store, rank, world_size)
        self._path_reports = PathReports(self._channel)
        place = place_of_this_process(settings, self.host)
        self._warn = WarnOnce(_log)
        self._roll_call = RollCall(self._channel, world_size, place, self._warn)
        self._trace = RecordWindow(TRACE_RECORDS, max_age_s=1e9) if settings.trace else None
        self._conductor: Conductor | None = None
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
        self._saw_world = False

    def refresh(self) -> None:
        """Mark the sockets of a new process group at the next tick."""
        self._refresh.set()

    @property
    def planned_qp_dscp(self) -> int | None:
        """See :attr:`crux_torch.runtime.follow.Follower.qp_dscp`."""
        return self._follower.qp_dscp

    @property
    def may_mark_pairs(self) -> bool:
        """True if queue pairs of this job may have a class of Crux."""
        order = self._follower.order
        if order is None:
            return bool(self.settings.rdma_dscp_map) and not self.settings.dry_run
        return order.marks is not None and bool(order.marks.rdma)

    def profile(self) -> JobProfile | None:
        """The job's profile as this rank knows it."""
        return self._follower.profile if self._conductor is None else self._conductor.profile

    def status(self) -> dict[str, Any]:
        """Plain values; see :func:`crux_torch.status`."""
        order = self._follower.order
        profile = self.profile()
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "job": self.settings.job,
            "leader": self._conductor.status() if self._conductor is not None else None,
            "hosts": self._roll_call.status() if self.rank == 0 else None,
            "channel": self._channel.error or "ok",
            "order": msgspec.to_builtins(order) if order is not None else None,
            "plan": msgspec.to_builtins(order.entry) if order and order.entry else None,
            "profile": _profile_told(profile) if profile is not None else None,
            "iterations": self._meter.marks.count,
            "device": msgspec.to_builtins(self._meter.device.last),
            **self._follower.status(),
            "errors": dict(self._errors),
        }

    def run(self) -> None:
        """Measure, lead and follow until the world's end, or until told to stop."""
        self._meter.install()
        self._pace.install()
        while not self._stop.is_set() and not self._world_has_ended():
            self._attempt("measure", self._measure)
            self._attempt("lead", self._lead)
            self._attempt("follow", self._follow)
            self._stop.wait(self.settings.tick_s)
        self._attempt("revert", self._follower.revert)
        self._attempt("unhook", self._meter.remove)
        self._attempt("close", self._close)
        self._attempt("trace", self._write_trace)

    def _world_has_ended(self) -> bool:
        """Whether the script destroyed the process group that this agent was started for."""
        initialized = dist.is_initialized()
        self._saw_world |= initialized
        return self._saw_world and not initialized

    def _attempt(self, what: str, step: Callable[[], object]) -> None:
        """One step of a tick. An error is logged once, and the step is tried again next time."""
        try:
            step()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._warn(what, f"Crux can't {what}, training goes on: {reason}")
            _log.debug("details", exc_info=True)
            self._errors[what] = reason
        else:
            self._errors.pop(what, None)

    def _measure(self) -> None:
        """Drain the recorder, and answer a measurement that has seen enough."""
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
                about = f"a sample of {len(raw)} bytes is over {MAX_SAMPLE_BYTES}: left out"
                self._warn("sample", about)
        if self._unsent is not None and self._channel.put_sample(self._unsent):
            self._unsent = None

    def _lead(self) -> None:
        """On rank 0: have the job measured and planned, and publish what follows as an order."""
        self._roll_call.say()
        if self.rank != 0:
            return
        if self._conductor is None:
            # The store may be one that an earlier life of this job has used.
            earlier = self._channel.order()
            if self._channel.error is not None:
                return
            from crux_torch.runtime.join import make_conductor

            about = secrets.token_hex(8), self.host, self.world_size, _number_of(earlier) + 1
            marks = self._meter.marks
            made = make_conductor(self.settings, *about, self._pace, marks, self._warn)
            self._conductor, self._shared_store = made
        conductor = self._conductor
        self._attempt("roll call", lambda: self._roll_call.gather(conductor.topology))
        order = conductor.step(
            conductor.phase == "warming" and self._meter.is_warm(),
            conductor.phase == "running" and self._has_changed(),
            self._channel.collect,
            trains=self._meter.marks.count > 0,
        )
        if conductor.leader is not None:
            followed = self._follower.order
            planned = followed is not None and bool(followed.routes)
            conductor.leader.update(
                paths=self._path_reports.gather(planned),
                corrections_per_minute=(
                    self._pace.corrections_per_minute if self._pace.keeps else None
                ),
            )
        self._unpublished = order or self._unpublished
        if self._unpublished is not None and self._publish(self._unpublished):
            self._unpublished = None

    def _publish(self, order: Order) -> bool:
        raw = order.to_json()
        if len(raw) > MAX_RECORD_BYTES:
            self._warn("order", f"an order of {len(raw)} bytes: the ranks don't get the profile")
            raw = msgspec.structs.replace(order, profile=None).to_json()
        return self._channel.publish(raw)

    def _has_changed(self) -> bool:
        """Whether an iteration moves other amounts, or needs less time, than was measured."""
        now = time.monotonic()
        if now < self._drift_at_s:
            return False
        self._drift_at_s = now + DRIFT_POLL_S
        if now - self._measured_at_s >= REMEASURE_S and self._outgrew_pace():
            return True
        moved = self._meter.bytes_per_iteration(DRIFT_ITERATIONS)
        if moved is None:
            return False
        if self._bytes_then is None:
            self._bytes_then = moved
        changed = abs(moved - self._bytes_then) > DRIFT_SHARE * max(self._bytes_then, 1.0)
        return changed and now - self._measured_at_s >= REMEASURE_S

    def _outgrew_pace(self) -> bool:
        """Whether the grid of the plan is of an iteration that is not the job's any more."""
        assert self._conductor is not None
        if self._conductor.misses_pace:
            return True
        own_s, profile = self._pace.iteration_s, self.profile()
        if own_s is None or profile is None or not self._pace.keeps:
            return False
        return own_s < (1.0 - DRIFT_SHARE) * profile.period_s

    def _follow(self) -> None:
        """Look for an order and obey it; apply it to connections that were made since."""
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
            self._attempt("gate", lambda: self._follower.gate(self._meter.groups()))

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

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._channel.close)
            if self._shared_store is not None:
                stack.callback(self._shared_store.close)
            if self._conductor is not None:
                self._conductor.close()

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
    """The number of the order in ``raw``; 0 if it is none."""
    try:
        return Order.from_json(raw).number if raw is not None else 0
    except ValueError:
        return 0


def _profile_told(profile: JobProfile) -> dict[str, Any]:
    follows = ("intensity", "achieved_flops", "utilization")
    return {**msgspec.to_builtins(profile), **{name: getattr(profile, name) for name in follows}}
