"""Leads for one job, apart from its ranks: reads, parses and plans what is large in the store.

    python -m crux_torch.control.leader_process --fd N --parent PID STORE

A rank starts it when the store holds more than a rank should parse, and tells it over the socket
that it inherits what to do. It has the lowest priority, and ends with the rank.
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
from functools import partial
from pathlib import Path

from crux_torch.control.agreed_marks import agreed
from crux_torch.control.leader import Leader
from crux_torch.control.leader_frames import (
    MAX_FRAME_BYTES,
    MAX_JOBS_TOLD,
    MAX_LETTERS,
    MAX_MARKS,
    MAX_MESSAGES,
    Answer,
    Begin,
    Step,
    begin_decoder,
    step_decoder,
)
from crux_torch.control.outcome import Booked, Outcome
from crux_torch.control.planner import entries_of_agreed_levels
from crux_torch.errors import CruxError
from crux_torch.store.endpoint import open_store
from crux_torch.store.etcd_process import READY
from crux_torch.store.frame_socket import FrameSocket
from crux_torch.store.frames import pack, unpack

_log = logging.getLogger("crux_torch")

#: Seconds between two looks whether the rank still lives, and for one frame to be sent.
PARENT_POLL_S = 1.0
SEND_S = 30.0
#: Seconds between two answers with the status.
STATUS_S = 1.0
#: Address space of the process. What the store can hold takes less.
MAX_MEMORY_BYTES = 16 << 30
_PR_SET_PDEATHSIG = 1


class _Messages(logging.Handler):
    """Keeps what is to be said in the rank's log."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: deque[tuple[int, str]] = deque(maxlen=MAX_MESSAGES)

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.levelno, record.getMessage()[:MAX_LETTERS]))

    def take(self) -> tuple[tuple[int, str], ...]:
        """Returns the messages since the last call."""
        return tuple(self.kept.popleft() for _ in range(len(self.kept)))


class Leading:
    """The leader, and what its rank has heard of it."""

    def __init__(self, begin: Begin, messages: _Messages) -> None:
        self._messages = messages
        self._marks: deque[int] = deque(maxlen=4 * MAX_MARKS)
        self._store = open_store(begin.store, begin.store_secret, begin.store_group)
        self._told = Outcome()
        self._status_at_s = float("-inf")
        compute = partial(
            entries_of_agreed_levels,
            max_slowdown=begin.max_slowdown,
            guard=begin.guard,
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
        """Do what is due, and say what is new."""
        leader = self._leader
        self._marks.extend(step.marks_ns)
        if step.record is not None:
            leader.update(**{name: getattr(step.record, name) for name in step.changed})
        if step.closes:
            leader.close()
            self._store.close()
        else:
            leader.tick()
        outcome, now_s, status = leader.outcome, time.monotonic(), None
        if now_s - self._status_at_s >= STATUS_S:
            self._status_at_s, status = now_s, leader.status()
            status["jobs"] = status["jobs"][:MAX_JOBS_TOLD]
        news, self._told = outcome if outcome != self._told else None, outcome
        return Answer(leader.store_state[:MAX_LETTERS], news, status, self._messages.take())


def serve(connected: socket.socket, parent: int) -> None:
    """Answer until the rank is gone."""
    frames = FrameSocket(connected)
    frames.send(READY, time.monotonic() + SEND_S)

    def next_frame() -> bytes:
        while not select.select([connected], [], [], PARENT_POLL_S)[0]:
            if os.getppid() != parent:
                raise EOFError
        return frames.receive(MAX_FRAME_BYTES, time.monotonic() + SEND_S)

    begin = unpack(next_frame(), begin_decoder)
    messages = _Messages()
    _log.addHandler(messages)
    _log.propagate = False
    _log.setLevel(begin.log_level)
    try:
        leading = Leading(begin, messages)
    except CruxError as error:
        next_frame()
        frames.send(pack(Answer(str(error)[:MAX_LETTERS])), time.monotonic() + SEND_S)
        return
    while True:
        step = unpack(next_frame(), step_decoder)
        answer = leading.step(step)
        raw = pack(answer)
        if len(raw) > MAX_FRAME_BYTES and answer.outcome is not None:
            less = Outcome(answer.outcome.epoch, booked=Booked(unsure=True))
            raw = pack(Answer(f"an outcome of {len(raw)} bytes is over the limit", less))
        frames.send(raw, time.monotonic() + SEND_S)
        if step.closes:
            return


def stand_back(parent: int) -> None:
    """Take nothing that a rank may want: the lowest priority, bounded memory; end with ``parent``.

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
