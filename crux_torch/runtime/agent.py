"""The background thread of one rank: measures, talks to its leader, carries the orders out.

Fail open: an error here ends in the network's default behaviour and one warning, never in the
training thread. The thread holds no lock that training could want, and takes the GIL ten times a
second for well under a millisecond.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from crux_torch.apply.classes import TrafficClass
from crux_torch.apply.ownership import Ownership
from crux_torch.control.host import parse_endpoint
from crux_torch.control.job_channel import JobChannel
from crux_torch.control.leader import Leader
from crux_torch.control.planner import Planner
from crux_torch.control.records import JobRecord
from crux_torch.control.slots import ProfilingSlot
from crux_torch.control.tcp_store import TcpStore
from crux_torch.fabric.host import this_host
from crux_torch.fabric.loaders import load_topology
from crux_torch.fabric.peak import peak_flops
from crux_torch.profile.job_profile import JobProfile
from crux_torch.profile.trace import chrome_trace, write_trace
from crux_torch.profile.window import RecordWindow
from crux_torch.runtime.conductor import GRACE_S, Conductor, answer
from crux_torch.runtime.measurement import Meter
from crux_torch.runtime.order import Order
from crux_torch.settings import Settings

_log = logging.getLogger(__name__)

#: Seconds between two looks for an order, and for new sockets.
ORDER_POLL_S = 0.2
REFRESH_S = 1.0
#: Iterations over which a change of the job's traffic is looked for, and what counts as one.
DRIFT_ITERATIONS = 20
DRIFT_SHARE = 0.1
#: Seconds between two measurements at least.
REMEASURE_S = 60.0
#: Records that a trace holds at most.
TRACE_RECORDS = 1 << 18


class Agent:
    """One rank of one job, from the creation of its first process group to its exit.

    Construct it on the training thread: the channel looks at the job's store there, once.

    Args:
        settings: of this process.
        recorder: the process's recorder.
        ownership: knows the inner backends' sockets.
        store: the store of the job's first process group.
        rank, world_size: of this process in the job.
    """

    def __init__(
        self,
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
        self._recorder = recorder
        self._traffic_class = TrafficClass(ownership)
        self._channel = JobChannel(store, rank, world_size)
        self._meter = Meter(recorder, settings, rank, world_size, self.host)
        self._trace = RecordWindow(TRACE_RECORDS, max_age_s=1e9) if settings.trace else None
        self._conductor: Conductor | None = None
        self._shared_store: TcpStore | None = None
        self._order: Order | None = None
        self._heard_at_s = float("-inf")
        self._answered = 0
        self._order_at_s = self._refresh_at_s = float("-inf")
        self._measured_at_s = float("-inf")
        self._bytes_then: float | None = None
        self._stop = threading.Event()
        self._refresh = threading.Event()
        self._errors: dict[str, str] = {}
        self._saw_world = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="crux", daemon=True)

    def start(self) -> None:
        """Install the hooks and start the thread."""
        self._meter.install()
        self._thread.start()

    def group_was_made(self) -> None:
        """Mark the sockets of a new process group at the next tick."""
        self._refresh.set()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Take everything back: sockets, hooks, the job's record. Returns within ``timeout_s``."""
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._stop.set()
        self._meter.remove()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def profile(self) -> JobProfile | None:
        """The job's profile as this rank knows it."""
        if self._conductor is not None:
            return self._conductor.profile
        return self._order.profile if self._order is not None else None

    def status(self) -> dict[str, Any]:
        """Plain values; see :func:`crux_torch.status`."""
        report = self._traffic_class.status()
        order = self._order
        profile = self.profile()
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "job": self.settings.job,
            "leader": self._conductor.status() if self._conductor is not None else None,
            "channel": self._channel.error or "ok",
            "order": msgspec.to_builtins(order) if order is not None else None,
            "plan": msgspec.to_builtins(order.entry) if order and order.entry else None,
            "profile": msgspec.to_builtins(profile) if profile is not None else None,
            "iterations": self._meter.marks.count,
            "applied": {
                "level": report.level,
                "dscp": report.dscp,
                "marked": len(report.applied),
                "refused": [str(mark) for mark in report.refused],
                "error": report.error,
            },
            "errors": dict(self._errors),
        }

    def _run(self) -> None:
        while not self._stop.is_set() and not self._world_has_ended():
            self._attempt("measure", self._measure)
            self._attempt("lead", self._lead)
            self._attempt("follow", self._follow)
            self._stop.wait(self.settings.tick_s)
        self._attempt("revert", self._traffic_class.revert)
        self._attempt("close", self._close)
        self._attempt("trace", self._write_trace)

    def _world_has_ended(self) -> bool:
        """Whether the script destroyed the process group that this agent was started for."""
        initialized = dist.is_initialized()
        self._saw_world |= initialized
        return self._saw_world and not initialized

    def _attempt(self, what: str, step: Any) -> None:
        """One step of a tick: whatever goes wrong is said once and tried again next time."""
        try:
            step()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if self._errors.get(what) != reason:
                _log.warning("Crux can't %s, training goes on: %s", what, reason)
                _log.debug("details", exc_info=True)
            self._errors[what] = reason
        else:
            self._errors.pop(what, None)

    def _measure(self) -> None:
        records = self._meter.drain()
        if self._trace is not None:
            self._trace.append(records)
        if self._meter.running and self._meter.due():
            assert self._order is not None
            number = self._order.measurement
            self._channel.put_sample(answer(number, self._meter.finish()))
            self._answered = number
            self._measured_at_s = time.monotonic()
            self._bytes_then = None

    def _lead(self) -> None:
        if self.rank != 0:
            return
        if self._conductor is None:
            self._conductor = self._make_conductor()
        order = self._conductor.step(self._is_ready(), self._has_changed(), self._channel.collect)
        if order is not None:
            self._channel.publish(order.turn, order.to_json())

    def _follow(self) -> None:
        now = time.monotonic()
        if now >= self._order_at_s:
            self._order_at_s = now + ORDER_POLL_S
            decision = self._channel.decision()
            if decision is not None:
                self._obey(Order.from_json(decision.payload), now)
        if self._order is not None and now - self._heard_at_s >= self._order.valid_s:
            _log.warning("nothing heard from the job's leader: back to the network's default class")
            self._order = None
            self._traffic_class.revert()
        if self._refresh.is_set() or now >= self._refresh_at_s:
            self._refresh.clear()
            self._refresh_at_s = now + REFRESH_S
            self._traffic_class.refresh()

    def _obey(self, order: Order, now: float) -> None:
        before = self._order
        if before is not None and order.turn == before.turn:
            return
        self._order, self._heard_at_s = order, now
        if before is None or order.level != before.level:
            if order.level is None:
                self._traffic_class.revert()
            else:
                self._traffic_class.apply_level(order.level, self.settings.dscp_map)
        if order.measuring and order.measurement > self._answered and not self._meter.running:
            self._meter.begin()

    def _is_ready(self) -> bool:
        """Whether the first iterations, which differ from all later ones, are over."""
        if self._meter.marks.count >= self.settings.warmup_iterations:
            return True
        # A job without an optimizer is measured by its communication alone.
        records = self._meter.window.records()
        if self._meter.marks.count or not len(records):
            return False
        busy_s = (int(records["issue_ns"][-1]) - int(records["issue_ns"][0])) / 1e9
        return busy_s >= self.settings.profile_s

    def _has_changed(self) -> bool:
        """Whether an iteration moves other amounts than when the job was measured."""
        if time.monotonic() - self._measured_at_s < REMEASURE_S:
            return False
        marks = self._meter.marks.marks_ns()[-(DRIFT_ITERATIONS + 1) :]
        if len(marks) <= DRIFT_ITERATIONS:
            return False
        records = self._meter.window.records()
        issued = records["issue_ns"]
        if not len(issued) or int(issued[0]) > int(marks[0]):
            return False
        inside = (issued >= marks[0]) & (issued < marks[-1])
        moved = float(np.sum(records["bytes"][inside])) / DRIFT_ITERATIONS
        if self._bytes_then is None:
            self._bytes_then = moved
        return abs(moved - self._bytes_then) > DRIFT_SHARE * max(self._bytes_then, 1.0)

    def _make_conductor(self) -> Conductor:
        """The leader's parts; a store or topology that can't be used is left out with a warning."""
        settings = self.settings
        incarnation = secrets.token_hex(8)
        topology, topology_bytes = None, None
        if settings.topology:
            topology = load_topology(settings.topology)
            topology_bytes = Path(settings.topology).read_bytes()
        if settings.store == "none":
            return Conductor(settings, incarnation, None, None, topology)
        self._shared_store = TcpStore(*parse_endpoint(settings.store))
        record = JobRecord(
            job=settings.job,
            incarnation=incarnation,
            hosts=(self.host,),
            gpus=self.world_size,
            state="starting",
            peak_flops=self._peak_flops(),
        )
        leader = Leader(
            self._shared_store,
            settings.cluster,
            record,
            Planner(settings.policy, settings.plan_levels),
            policy=settings.policy,
            lease_s=settings.lease_s,
            plan_valid_s=settings.plan_valid_s,
        )
        if topology_bytes is not None:
            leader.publish_topology(topology_bytes)
        slot = ProfilingSlot(
            self._shared_store,
            settings.cluster,
            settings.job,
            incarnation,
            lease_s=settings.profile_s + 2 * GRACE_S,
        )
        return Conductor(settings, incarnation, leader, slot, topology)

    def _peak_flops(self) -> float:
        """FLOP/s that the job's devices could do at most; 0 where that is not known."""
        if self.settings.device_flops:
            return self.settings.device_flops * self.world_size
        host = this_host()
        if host.gpus:
            return (peak_flops(host.gpus[0].name) or 0.0) * self.world_size
        # Ranks on CPU share it: no rank can do more than the whole host.
        cpu = host.cpu.peak_flops if host.cpu is not None else None
        return (cpu or 0.0) * self.world_size

    def _close(self) -> None:
        if self._conductor is not None:
            self._conductor.close()
        if self._shared_store is not None:
            self._shared_store.close()
        self._channel.close()

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
