"""The rank's side of a leader that runs in a process of its own."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from crux_torch.control.leader_frames import (
    MAX_FRAME_BYTES,
    MAX_MARKS,
    Answer,
    Begin,
    Step,
    answer_decoder,
)
from crux_torch.control.outcome import Outcome
from crux_torch.control.records import JobRecord
from crux_torch.errors import StoreError
from crux_torch.store.frame_socket import FrameSocket
from crux_torch.store.frames import pack, unpack
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

MODULE = "crux_torch.control.leader_process"
#: Seconds that the process may take to start, and for one step, before it is ended: on a busy
#: machine it hardly runs, and what it has done so far must not be lost again and again.
START_S = 600.0
BUDGET_S = 120.0
#: Seconds for one frame to come.
FRAME_S = 2.0
#: Seconds that the process has to withdraw the job's record at the end.
CLOSE_S = 2.0
#: Pauses before it is started again, each twice as long as the one before, until it has worked for
#: a while.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 300.0
WELL_AFTER_S = 600.0


class Starter(Protocol):
    """Starts the process: :class:`~crux_torch.store.process_connector.ProcessConnector`."""

    @property
    def pid(self) -> int | None:
        """The process; None if there is none."""

    def connect(self, timeout_s: float) -> Any:
        """The socket to it; raises StoreError while it is not ready."""

    def close(self) -> None:
        """End it."""


class LeaderApart:
    """Leads through a process. No call waits for what the process does, :meth:`close` aside.

    Args:
        begin: how to lead.
        starter: of the process.
        outcome: what held until now: it holds for ``begin.plan_valid_s`` at most.
        iteration_ends: see :class:`~crux_torch.control.trials.Trials`.
    """

    def __init__(
        self,
        begin: Begin,
        starter: Starter,
        outcome: Outcome,
        iteration_ends: Callable[[int], Iterable[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record: JobRecord = begin.record
        self.store_state = "ok"
        self._begin, self._starter, self._ends = begin, starter, iteration_ends
        self._clock = clock
        self._warn = WarnOnce(_log)
        self._frames: FrameSocket | None = None
        self._socket: Any = None
        self._changed: set[str] = set()
        self._marked_ns = 0
        self._asked_at_s: float | None = None
        self._outcome, self._status = outcome, dict[str, Any]()
        self._heard_at_s = clock()
        self._failures, self._began_s, self._retry_at_s = 0, clock(), float("-inf")
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process; None if there is none now."""
        return self._starter.pid

    @property
    def outcome(self) -> Outcome:
        """The plan's outcome for this job now."""
        fresh = self._clock() - self._heard_at_s < self._begin.plan_valid_s
        if fresh and not self._closed:
            return self._outcome
        # What the operator said holds until something else is heard.
        told = self._outcome
        return Outcome(keeps_level=told.keeps_level, observes=told.observes, network=told.network)

    def update(self, **changes: Any) -> None:
        """Publish other values of these fields of the record."""
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._changed.update(changes)

    def status(self) -> dict[str, Any]:
        """The leader's last status, see :meth:`crux_torch.control.leader.Leader.status`."""
        known = self._status or {"state": "waiting", "job": self.record.job}
        return {**known, "store": self.store_state}

    def tick(self) -> None:
        """Take in what the process says, and tell it what is new; raises nothing."""
        if self._closed or self._clock() < self._retry_at_s:
            return
        try:
            self._step()
        except Exception as error:
            self._failed(str(error) or type(error).__name__)

    def close(self) -> None:
        """Have the job's record removed, and end the process. Waits for a bounded time."""
        if self._closed:
            return
        self._closed = True
        until_s = time.monotonic() + CLOSE_S
        try:
            if self._frames is not None:
                if self._asked_at_s is not None:
                    self._frames.receive(MAX_FRAME_BYTES, until_s)
                self._frames.send(pack(Step(closes=True)), until_s)
                self._frames.receive(MAX_FRAME_BYTES, until_s)
        except (OSError, EOFError, ValueError) as error:
            _log.debug("the record of %r ends with its lease: %s", self.record.job, error)
        finally:
            self._end()

    def _step(self) -> None:
        now_s = self._clock()
        frames = self._frames
        if frames is None:
            try:
                self._socket = self._starter.connect(0.0)
            except StoreError:
                if self._starter.pid is None:
                    raise
                return  # it is starting
            frames = self._frames = FrameSocket(self._socket)
            self._began_s = now_s
            self._changed.clear()
            self._marked_ns = 0  # it knows of none yet
            begin = msgspec.structs.replace(self._begin, record=self.record)
            frames.send(pack(begin), time.monotonic() + FRAME_S)
        if self._asked_at_s is not None:
            if not select.select([self._socket], [], [], 0.0)[0]:
                if now_s - self._asked_at_s > BUDGET_S:
                    raise StoreError(f"it took more than {BUDGET_S:g} s for one step")
                return
            raw = frames.receive(MAX_FRAME_BYTES, time.monotonic() + FRAME_S)
            self._asked_at_s = None
            self._take(unpack(raw, answer_decoder), now_s)
        changed, self._changed = tuple(self._changed), set()
        marks = tuple(int(m) for m in self._ends(self._marked_ns + 1))[-MAX_MARKS:]
        self._marked_ns = marks[-1] if marks else self._marked_ns
        step = Step(self.record if changed else None, changed, marks)
        frames.send(pack(step), time.monotonic() + FRAME_S)
        self._asked_at_s = now_s

    def _take(self, answer: Answer, now_s: float) -> None:
        self._heard_at_s = now_s
        self.store_state = answer.store_state
        if answer.outcome is not None:
            self._outcome = answer.outcome
        if answer.status is not None:
            self._status = answer.status
        for level, text in answer.said:
            if level >= logging.WARNING:
                self._warn(text, text)
            else:
                _log.log(level, "%s", text)

    def _failed(self, reason: str) -> None:
        now_s = self._clock()
        if self._frames is not None and now_s - self._began_s > WELL_AFTER_S:
            self._failures = 0
        self._end()
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._retry_at_s = now_s + pause_s
        self.store_state = f"the process that plans has failed: {reason}"
        self._warn(
            "process",
            "the store holds more than this rank parses itself, and the process that does it has "
            f"failed: {reason}. This job goes on without a plan; it is tried again",
        )

    def _end(self) -> None:
        if self._frames is not None:
            self._frames.close()
        self._frames = self._socket = self._asked_at_s = None
        self._starter.close()
