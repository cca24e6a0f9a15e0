"""Chrome trace of one rank's collectives: for Perfetto, and torch-tb-profiler's views."""

from __future__ import annotations

import heapq
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from crux_torch.measure.group import GroupInfo
from crux_torch.measure.iteration_ends import Ints, iteration_ends
from crux_torch.measure.record import OPS, STATUSES, Records
from crux_torch.measure.timeline import intervals

#: c10d's names of the operations that torch-tb-profiler's Distributed view knows; the others
#: appear under the recorder's own names.
_C10D_NAME = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
#: Tracks of the trace. Chrome's format wants the events of one track nested or apart, so
#: collectives in flight together get tracks of their own, from here on.
_STEP_TRACK = 1
_STEP_NAME = {"name": "steps"}
_HOST_TRACK = 100
_DEVICE_TRACK = 1000


def chrome_trace(
    records: Records,
    groups: Sequence[GroupInfo],
    *,
    rank: int,
    world_size: int,
    backend: str,
    marks_ns: ArrayLike | None = None,
    clock_offset_ns: int | None = None,
) -> dict[str, Any]:
    """The trace as an object that JSON can hold.

    Args:
        records: in any order; of a window that is bounded, hence no bound here.
        groups: the recorder's table.
        rank, world_size: of the whole job.
        backend: ``nccl`` or ``gloo``: the library that the events are attributed to.
        marks_ns: iteration marks of the host; without them all records are one step.
        clock_offset_ns: what to add to CLOCK_MONOTONIC to get Unix time, so that the traces of
            several hosts lie one above the other; default: this host's, now.
    """
    if clock_offset_ns is None:
        clock_offset_ns = time.time_ns() - time.monotonic_ns()
    pid = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": _STEP_TRACK, "args": _STEP_NAME},
    ]
    begin, end = intervals(records)
    ended = (records["end_ns"] >= 0) & (end >= begin)
    finished = np.flatnonzero(ended & (records["status"] == STATUSES.index("ok")))
    order = finished[np.argsort(begin[finished], kind="stable")]
    records, begin, end = records[order], begin[order], end[order]
    ends_ns = iteration_ends(marks_ns, records).ends_ns
    events += _steps(begin, end, ends_ns, clock_offset_ns, pid)
    lanes = {_HOST_TRACK: _Lanes(_HOST_TRACK), _DEVICE_TRACK: _Lanes(_DEVICE_TRACK)}
    for index, record in enumerate(records):
        on_device = record["device_ns"] >= 0
        base = {"External id": index + 1, "correlation": index + 1}
        name = _event_name(record, backend)
        span = (int(begin[index]), int(end[index]))
        args = base | _arguments(record, groups)
        track = lanes[_HOST_TRACK].place(*span)
        events.append(_event(name, "cpu_op", span, clock_offset_ns, pid, track, args))
        if on_device:
            kernel = base | {"device": 0, "stream": 0}
            track = lanes[_DEVICE_TRACK].place(*span)
            what = f"ncclDevKernel_{name.partition(':')[2]}"
            events.append(_event(what, "kernel", span, clock_offset_ns, 0, track, kernel))
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": backend, "rank": rank, "world_size": world_size},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


def write_trace(folder: str | os.PathLike[str], host: str, trace: dict[str, Any]) -> Path:
    """Write this process's ``trace`` into ``folder``, complete or not at all.

    Returns:
        The path of the file.

    Raises:
        OSError: the folder can't be made or written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # torch-tb-profiler reads host and process from the name.
    worker = re.sub(r"[^A-Za-z0-9.-]", "-", host)
    path = target / f"{worker}_{os.getpid()}.pt.trace.json"
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(trace))
    partial.replace(path)
    return path


class _Lanes:
    """Tracks such that no two events of one overlap; the lowest free one is taken."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._busy: list[tuple[int, int]] = []
        self._free: list[int] = []
        self._count = 0

    def place(self, begin: int, end: int) -> int:
        while self._busy and self._busy[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if not self._free:
            self._free = [self._base + self._count]
            self._count += 1
        lane = heapq.heappop(self._free)
        heapq.heappush(self._busy, (end, lane))
        return lane


def _steps(
    begin: np.ndarray, end: np.ndarray, ends_ns: Ints, offset_ns: int, pid: int
) -> list[dict[str, Any]]:
    """``ProfilerStep#N`` of every iteration; each lasts until what began in it has ended.

    Every collective must lie within a step, or the Distributed view drops it.
    """
    if not len(begin):
        return []
    inner = ends_ns[(ends_ns > begin[0]) & (ends_ns <= begin[-1])]
    opens = np.concatenate((begin[:1], inner))
    closes = np.concatenate((inner, end.max(keepdims=True)))
    events = []
    for number, (opened, closed) in enumerate(zip(opens, closes, strict=True)):
        inside = (begin >= opened) & (begin < closed)
        last = max(int(closed), int(end[inside].max(initial=0)))
        name = f"ProfilerStep#{number}"
        span = (int(opened), last)
        events.append(
            _event(name, "user_annotation", span, offset_ns, pid, _STEP_TRACK + number % 2, {})
        )
    return events


def _event(
    name: str,
    category: str,
    span: tuple[int, int],
    offset_ns: int,
    pid: int,
    track: int,
    args: dict[str, Any],
) -> dict[str, Any]:
    begin, end = span
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": track,
        "ts": (begin + offset_ns) / 1e3,
        "dur": (end - begin) / 1e3,
        "args": args,
    }


def _event_name(record: Any, backend: str) -> str:
    op = OPS[record["op"]] if record["op"] < len(OPS) else OPS[0]
    return f"{backend}:{_C10D_NAME.get(op, op)}"


def _arguments(record: Any, groups: Sequence[GroupInfo]) -> dict[str, Any]:
    index = int(record["group"])
    return {
        # The view multiplies dimensions by the type's size; a payload in bytes has one of each.
        "Input Dims": [[int(record["bytes"])]],
        "Input type": ["unsigned char"],
        "Process Group Name": groups[index].name if index < len(groups) else str(index),
        "Group size": int(record["world_size"]),
        "Sequence": int(record["sequence"]),
        "Peer": int(record["peer"]),
        "Issued before (us)": max(0, int(record["start_ns"]) - int(record["issue_ns"])) / 1e3,
    }
