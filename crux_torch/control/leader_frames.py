"""Messages between a rank and the process that leads for it, in the store's frames."""

from __future__ import annotations

from typing import Any

import msgspec

from crux_torch.control.outcome import Outcome
from crux_torch.control.records import JobRecord

#: Of one frame. An answer holds what concerns one job only: its entry, routes and flows.
MAX_FRAME_BYTES = 8 << 20
#: Jobs that the status names, letters of one message for the log, and messages of one answer.
MAX_JOBS_TOLD, MAX_LETTERS, MAX_MESSAGES = 256, 1000, 32
#: Marks of iterations that one step tells.
MAX_MARKS = 1024


class Begin(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="begin"):
    """The first frame of a rank: arguments of :class:`~crux_torch.control.leader.Leader`.

    Attributes:
        store, store_secret, store_group: the settings of these names.
        guard: see :func:`~crux_torch.control.planner.compute_entries`.
        log_level: below it, messages need not be told.
    """

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
    """Do what is due.

    Attributes:
        record, changed: the record and the names of its fields that have changed; None: none has.
        marks_ns: ends of iterations since the last step.
        closes: whether it is the last one.
    """

    record: JobRecord | None = None
    changed: tuple[str, ...] = ()
    marks_ns: tuple[int, ...] = ()
    closes: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The answer to a step.

    Attributes:
        store_state: of the leader.
        outcome, status: None: as in the answer before.
        said: level and text of messages for the log.
    """

    store_state: str
    outcome: Outcome | None = None
    status: dict[str, Any] | None = None
    said: tuple[tuple[int, str], ...] = ()


begin_decoder = msgspec.msgpack.Decoder(Begin)
step_decoder = msgspec.msgpack.Decoder(Step)
answer_decoder = msgspec.msgpack.Decoder(Answer)
