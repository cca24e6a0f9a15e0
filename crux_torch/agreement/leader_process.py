"""A leader that leaves what is large in the store to a process of its own.

The process reads, parses and plans for one job, with the lowest priority, and ends with its rank:

    python -m crux_torch.agreement.leader_process --fd N --parent PID STORE

The rank starts it once the store holds more than a rank should parse. Both talk in the store's
frames over the socket that the process inherits.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from crux_torch.agreement.inputs import agreed
from crux_torch.agreement.leader import Leader
from crux_torch.agreement.outcome import Booked, Outcome
from crux_torch.agreement.planner import entries_of_agreed_levels
from crux_torch.agreement.records import JobRecord
from crux_torch.errors import CruxError, StoreError
from crux_torch.logs import WarnOnce
from crux_torch.schedule.model import Memory
from crux_torch.store.endpoint import ProcessConnector, open_store
from crux_torch.store.frames import ChildSocket, FrameSocket, pack, unpack

_log = logging.getLogger(__name__)

MODULE = "crux_torch.agreement.leader_process"
#: Bytes of one frame. An answer holds what concerns one job only: its entry, routes and flows.
MAX_FRAME_BYTES = 8 << 20
#: Jobs that the status names, letters of one message for the log, and messages of one answer.
MAX_JOBS_TOLD, MAX_LETTERS, MAX_MESSAGES = 256, 1000, 32
#: Marks of iterations in one step.
MAX_MARKS = 1024
#: Seconds that the process may take to start, and for one step, before it is ended: on a busy
#: machine it hardly runs, and its work so far must not be lost again and again.
START_S = 600.0
BUDGET_S = 120.0
#: Seconds for one frame to come, as the rank sees it, and as the process does.
FRAME_S, SEND_S = 2.0, 30.0
#: Seconds that the process has to withdraw the job's record at the end.
CLOSE_S = 2.0
#: Pauses before it is started again, each twice as long as the one before, until it has worked for
#: a while.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 300.0
WELL_AFTER_S = 600.0
#: Seconds between two answers with the status.
STATUS_S = 1.0
#: Address space of the process. What the store can hold takes less.
MAX_MEMORY_BYTES = 16 << 30
_PR_SET_PDEATHSIG = 1


class Begin(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="begin"):
    """The first frame of a rank: settings, and arguments of its leader and planner."""

    store: str
    store_secret: str
    store_group: str
    cluster: str
    record: JobRecord
    published: bytes | None
    policy: str
    max_slowdown: float
    guard: bool
    lease_s: float
    plan_valid_s: float
    log_level: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A rank's request to do what is due.

    Attributes:
        record, changed: the record and the names of its fields that have changed; None: none has.
        marks_ns: ends of iterations since the last step.
        fragment: what the job saw of the network, if that has changed.
        closes: True in the last one.
    """

    record: JobRecord | None = None
    changed: tuple[str, ...] = ()
    marks_ns: tuple[int, ...] = ()
    fragment: bytes | None = None
    closes: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The answer to a step.

    Attributes:
        outcome, status: None: as in the answer before.
        messages: level and text of messages for the log.
    """

    store_state: str
    outcome: Outcome | None = None
    status: dict[str, Any] | None = None
    messages: tuple[tuple[int, str], ...] = ()


begin_decoder = msgspec.msgpack.Decoder(Begin)
step_decoder = msgspec.msgpack.Decoder(Step)
answer_decoder = msgspec.msgpack.Decoder(Answer)


class LeaderApart:
    """Leads through a process. No call waits for the process, :meth:`close` aside.

    Args:
        outcome: holds until the process says more, for ``begin.plan_valid_s`` at most.
        iteration_ends: see :class:`~crux_torch.agreement.trials.Trials`.
    """

    def __init__(
        self,
        begin: Begin,
        starter: ProcessConnector,
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
        self._fragment: bytes | None = None
        self._sent_fragment: bytes | None = None
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
        # The operator's word holds until something else is heard.
        last = self._outcome
        return Outcome(keeps_level=last.keeps_level, observes=last.observes, network=last.network)

    def update(self, **changes: Any) -> None:
        """Publish other values of these fields of the record."""
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._changed.update(changes)

    def tell_network(self, fragment: bytes | None) -> None:
        """Publish what this job saw of the network; None: nothing more."""
        self._fragment = fragment

    def status(self) -> dict[str, Any]:
        """Return the leader's last status."""
        known = self._status or {"state": "waiting", "job": self.record.job}
        return {**known, "store": self.store_state}

    def tick(self) -> None:
        """Take in the process's answer, and send it the changes; raises nothing."""
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
            self._marked_ns, self._sent_fragment = 0, None  # it knows of none yet
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
        fragment = self._fragment if self._fragment != self._sent_fragment else None
        self._sent_fragment = self._fragment
        step = Step(self.record if changed else None, changed, marks, fragment)
        frames.send(pack(step), time.monotonic() + FRAME_S)
        self._asked_at_s = now_s

    def _take(self, answer: Answer, now_s: float) -> None:
        self._heard_at_s = now_s
        self.store_state = answer.store_state
        if answer.outcome is not None:
            self._outcome = answer.outcome
        if answer.status is not None:
            self._status = answer.status
        for level, text in answer.messages:
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


class _Messages(logging.Handler):
    """Keeps messages for the rank's log."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: deque[tuple[int, str]] = deque(maxlen=MAX_MESSAGES)

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.levelno, record.getMessage()[:MAX_LETTERS]))

    def take(self) -> tuple[tuple[int, str], ...]:
        """Return the messages since the last call."""
        return tuple(self.kept.popleft() for _ in range(len(self.kept)))


class Leading:
    """The process's leader, and the outcome that its rank has heard last."""

    def __init__(self, begin: Begin, messages: _Messages) -> None:
        self._messages = messages
        self._marks: deque[int] = deque(maxlen=4 * MAX_MARKS)
        self._store = open_store(begin.store, begin.store_secret, begin.store_group)
        self._sent = Outcome()
        self._status_at_s = float("-inf")
        compute = partial(
            entries_of_agreed_levels,
            max_slowdown=begin.max_slowdown,
            guard=begin.guard,
            memory=Memory(),
        )
        self._leader = Leader(
            self._store,
            begin.cluster,
            begin.record,
            compute,
            published=begin.published,
            policy=begin.policy,
            agree=agreed,
            max_slowdown=begin.max_slowdown,
            iteration_ends=lambda since_ns: [m for m in self._marks if m >= since_ns],
            in_thread=True,
            lease_s=begin.lease_s,
            plan_valid_s=begin.plan_valid_s,
        )

    def step(self, step: Step) -> Answer:
        """Do what is due; return the news."""
        leader = self._leader
        self._marks.extend(step.marks_ns)
        if step.record is not None:
            leader.update(**{name: getattr(step.record, name) for name in step.changed})
        if step.fragment is not None:
            leader.tell_network(step.fragment)
        if step.closes:
            leader.close()
            self._store.close()
        else:
            leader.tick()
        outcome, now_s, status = leader.outcome, time.monotonic(), None
        if now_s - self._status_at_s >= STATUS_S:
            self._status_at_s, status = now_s, leader.status()
            status["jobs"] = status["jobs"][:MAX_JOBS_TOLD]
        news, self._sent = outcome if outcome != self._sent else None, outcome
        return Answer(leader.store_state[:MAX_LETTERS], news, status, self._messages.take())


def serve(connected: socket.socket, parent: int) -> None:
    """Answer until the rank is gone."""
    frames = ChildSocket(connected, parent, SEND_S)
    begin = unpack(frames.next_frame(MAX_FRAME_BYTES), begin_decoder)
    messages = _Messages()
    log = logging.getLogger("crux_torch")
    log.addHandler(messages)
    log.propagate = False
    log.setLevel(begin.log_level)
    try:
        leading = Leading(begin, messages)
    except CruxError as error:
        frames.next_frame(MAX_FRAME_BYTES)
        frames.answer(pack(Answer(str(error)[:MAX_LETTERS])))
        return
    while True:
        step = unpack(frames.next_frame(MAX_FRAME_BYTES), step_decoder)
        answer = leading.step(step)
        raw = pack(answer)
        if len(raw) > MAX_FRAME_BYTES and answer.outcome is not None:
            less = Outcome(answer.outcome.epoch, booked=Booked(unsure=True))
            raw = pack(Answer(f"an outcome of {len(raw)} bytes is over the limit", less))
        frames.answer(raw)
        if step.closes:
            return


def stand_back(parent: int) -> None:
    """Take the lowest priority and bounded memory, and end with ``parent``.

    Raises:
        ProcessLookupError: it is gone already.
    """
    os.nice(19)
    with contextlib.suppress(OSError):
        # Where the kernel shares the cores among sessions, priorities count within one only.
        Path("/proc/self/autogroup").write_text("19")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    # Also in the middle of a long computation.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError


def main() -> None:
    """The command of the module."""
    parser = argparse.ArgumentParser(prog="crux-lead")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("store", help="for whoever lists processes")
    args = parser.parse_args()
    connected = socket.socket(fileno=args.fd)
    try:
        stand_back(args.parent)
        serve(connected, args.parent)
    except (EOFError, OSError, ValueError):
        pass
    finally:
        # Threads that plan, or look up a name, need not end first.
        os._exit(0)


if __name__ == "__main__":
    main()
