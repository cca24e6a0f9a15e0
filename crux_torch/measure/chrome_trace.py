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

from crux_torch.files import write_file
from crux_torch.measure.iterations import Ints, iteration_ends
from crux_torch.measure.records import OPS, STATUSES, GroupInfo, Records
from crux_torch.measure.timeline import intervals

#: c10d's names of the operations that torch-tb-profiler's Distributed view knows; the others
#: appear under the recorder's own names.
_C10D_NAME = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), "all_reduce"),
    **dict.fromkeys(("allgather", "allgather_single", "allgather_coalesced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_coalesced"), "reduce_scatter"),
}
#: Tracks of the trace. Chrome's format wants the events of one track nested or apart, so
#: collectives in flight together get tracks of their own, from here on.
_STEP_TRACK = 1
_STEP_NAME = {"name": "steps"}
_HOST_TRACK = 100
_DEVICE_TRACK = 1000

Span = tuple[int, int]


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

    def add(name: str, category: str, span: Span, pid: int, track: int, args: Any) -> None:
        times = {"ts": (span[0] + clock_offset_ns) / 1e3, "dur": (span[1] - span[0]) / 1e3}
        common = {"name": name, "cat": category, "pid": pid, "tid": track}
        events.append({"ph": "X", **common, **times, "args": args})

    begin, end = intervals(records)
    ended = (records["end_ns"] >= 0) & (end >= begin)
    finished = np.flatnonzero(ended & (records["status"] == STATUSES.index("ok")))
    order = finished[np.argsort(begin[finished], kind="stable")]
    records, begin, end = records[order], begin[order], end[order]
    for number, span in enumerate(_steps(begin, end, iteration_ends(marks_ns, records).ends_ns)):
        track = _STEP_TRACK + number % 2
        add(f"ProfilerStep#{number}", "user_annotation", span, pid, track, {})
    host, device = _Lanes(_HOST_TRACK), _Lanes(_DEVICE_TRACK)
    for index, record in enumerate(records):
        base = {"External id": index + 1, "correlation": index + 1}
        op = OPS[record["op"]] if record["op"] < len(OPS) else OPS[0]
        name = _C10D_NAME.get(op, op)
        span = (int(begin[index]), int(end[index]))
        args = base | _arguments(record, groups)
        add(f"{backend}:{name}", "cpu_op", span, pid, host.place(*span), args)
        if record["device_ns"] >= 0:
            args = base | {"device": 0, "stream": 0}
            add(f"ncclDevKernel_{name}", "kernel", span, 0, device.place(*span), args)
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": backend, "rank": rank, "world_size": world_size},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


def write_trace(folder: str | os.PathLike[str], host: str, trace: dict[str, Any]) -> Path:
    """Write this process's ``trace`` into ``folder``, complete or not at all; return its path.

    Raises:
        OSError: the folder can't be made or written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # torch-tb-profiler reads host and process from the name.
    worker = re.sub(r"[^A-Za-z0-9.-]", "-", host)
    path = target / f"{worker}_{os.getpid()}.pt.trace.json"
    write_file(path, msgspec.json.encode(trace))
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


def _steps(begin: Ints, end: Ints, ends_ns: Ints) -> list[Span]:
    """Begin and end of every iteration; each lasts until what began in it has ended.

    Every collective must lie within a step, or the Distributed view drops it.
    """
    if not len(begin):
        return []
    inner = ends_ns[(ends_ns > begin[0]) & (ends_ns <= begin[-1])]
    opens = np.concatenate((begin[:1], inner))
    closes = np.concatenate((inner, end.max(keepdims=True)))
    spans = []
    for opened, closed in zip(opens, closes, strict=True):
        inside = (begin >= opened) & (begin < closed)
        spans.append((int(opened), max(int(closed), int(end[inside].max(initial=0)))))
    return spans


def _arguments(record: Any, groups: Sequence[GroupInfo]) -> dict[str, Any]:
    index = int(record["group"])
    return {
        # The view multiplies dimensions by the type's size; a payload in bytes has one of each.
        "Input Dims": [[int(record["bytes"])]],
        "Input type": ["unsigned char"],
        "Process Group Name": groups[index].name if index < len(groups) else str(index),
        "Process Group Ranks": list(groups[index].ranks) if index < len(groups) else [],
        "Group size": int(record["world_size"]),
        "Sequence": int(record["sequence"]),
        "Peer": int(record["peer"]),
        "Issued before (us)": max(0, int(record["start_ns"]) - int(record["issue_ns"])) / 1e3,
    }
