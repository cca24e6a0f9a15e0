"""Turns one rank's records, iteration marks and device activity into a sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crux_torch.host.activity import OwnDevice
from crux_torch.measure.device import DeviceMeter
from crux_torch.measure.flops import FlopCount, FlopMeter, given_flops
from crux_torch.measure.iterations import IterationMarks, iteration_ends
from crux_torch.measure.records import GroupInfo, Records, RecordWindow, from_bytes
from crux_torch.measure.sample import RankSample, summarize
from crux_torch.settings import Settings

#: Records taken from the ring at a time.
DRAIN_RECORDS = 4096
#: Seconds from a change of class until every packet in flight carries it.
SETTLE_S = 0.2
#: Seconds without any record after which a job that iterates is taken to communicate nothing.
SILENCE_S = 3.0


class RankMeter:
    """Measures one rank.

    Thread safety: one background thread owns it. It shares the recorder and the marks with the
    training thread, which only adds to them.

    Between measurements the recorder keeps what is issued, not when it runs. That costs a fraction,
    and suffices to see that the job's traffic has changed. A trace needs everything.

    Args:
        recorder: the process's recorder (``crux_torch._C.Recorder``).
        device: the CUDA device that this rank trains on.
        marks: where iterations end; the training thread has hooked them to the optimizers.
    """

    def __init__(
        self,
        recorder: Any,
        settings: Settings,
        rank: int,
        world_size: int,
        host: str,
        device: OwnDevice,
        marks: IterationMarks,
    ) -> None:
        self._recorder = recorder
        self._settings = settings
        self._rank, self._world_size, self._host = rank, world_size, host
        self.window = RecordWindow()
        self.marks = marks
        self.flops = FlopMeter(self.marks)
        self.device = DeviceMeter(device, settings.device_flops)
        self._always_times = bool(settings.trace) or settings.timing == "always"
        self._unlisten: Callable[[], None] | None = None
        self._begin_ns = 0
        self._dropped_before = 0

    def install(self) -> None:
        """Begins to count FLOPs."""
        self._recorder.timing = self._always_times
        self.flops.install()
        if self._unlisten is None:
            self._unlisten = self.marks.add_listener(lambda mark_ns: self.device.look())

    def remove(self) -> None:
        """Removes the hooks, and leaves the recorder as it was found."""
        self._recorder.timing = True
        self.flops.remove()
        self.marks.remove()
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None

    def drain(self) -> Records:
        """Moves what the recorder holds into the window, and returns it."""
        parts = [from_bytes(self._recorder.drain(DRAIN_RECORDS))]
        while len(parts[-1]) == DRAIN_RECORDS:
            parts.append(from_bytes(self._recorder.drain(DRAIN_RECORDS)))
        records = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(records):
            self.window.append(records)
        return records

    def groups(self) -> Sequence[GroupInfo]:
        """Returns the recorder's table of process groups."""
        world = tuple(range(self._world_size))
        return [
            GroupInfo(
                name=group.name or f"group {index}",
                ranks=tuple(group.ranks) or (world if group.size == self._world_size else ()),
                my_rank=group.rank,
            )
            for index, group in enumerate(self._recorder.groups())
        ]

    def is_warm(self) -> bool:
        """Returns True once the first iterations are over, which differ from all later ones."""
        if self.marks.count >= self._settings.warmup_iterations:
            return True
        # A job without an optimizer is measured by its communication alone.
        records = self.window.records()
        if self.marks.count or not len(records):
            return False
        busy_s = (int(records["issue_ns"][-1]) - int(records["issue_ns"][0])) / 1e9
        return busy_s >= self._settings.profile_s

    def bytes_per_iteration(self, iterations: int) -> float | None:
        """Returns the mean payload of the last iterations; None until so many are known in full."""
        marks = self.marks.marks_ns()[-(iterations + 1) :]
        records = self.window.records()
        issued = records["issue_ns"]
        if len(marks) <= iterations or not len(issued) or int(issued[0]) > int(marks[0]):
            return None
        inside = (issued >= marks[0]) & (issued < marks[-1])
        return float(np.sum(records["bytes"][inside])) / iterations

    def begin(self) -> None:
        """Starts a measurement. What is issued after ``SETTLE_S`` counts."""
        self._recorder.timing = True
        self._begin_ns = time.monotonic_ns() + round(SETTLE_S * 1e9)
        self._dropped_before = self._recorder.dropped + self.window.dropped
        self.device.begin()

    def due(self) -> bool:
        """Returns True once the measurement has seen enough, or its time is up."""
        elapsed_s = (time.monotonic_ns() - self._begin_ns) / 1e9
        if elapsed_s >= self._settings.profile_s:
            return True
        iterations = self._settings.profile_iterations
        marks = self.marks.marks_ns(self._begin_ns)
        # Iterations lie between marks, and counting FLOPs may spoil one iteration.
        if len(marks) < iterations + 2:
            return False
        # The device ends an iteration after the host has marked it, and reports that even later.
        records = self.window.records()
        records = records[records["issue_ns"] >= self._begin_ns]
        if not len(records):
            return elapsed_s >= SILENCE_S
        return len(iteration_ends(marks, records).marks_ns) > iterations

    def give_up(self) -> None:
        """Ends the measurement and ignores what it saw."""
        self._recorder.timing = self._always_times

    def finish(self) -> RankSample | None:
        """Ends the measurement; returns None if it saw too little."""
        self._recorder.timing = self._always_times
        self.drain()
        self.window.forget_before(self._begin_ns)
        count = self.flops.count() or FlopCount({}, 0, 0, ())
        said = given_flops()
        replayed = ("CUDA graphs",) if self._recorder.captured else ()
        return summarize(
            self.window.records(),
            self.groups(),
            rank=self._rank,
            world_size=self._world_size,
            host=self._host,
            marks_ns=self.marks.marks_ns(self._begin_ns),
            flops=said if said is not None else count.flops or None,
            flops_given=said is not None,
            uncounted_ops=(*replayed, *count.uncounted_ops),
            device=self.device.finish(count.by_precision),
            lost=self._recorder.dropped + self.window.dropped - self._dropped_before,
        )
