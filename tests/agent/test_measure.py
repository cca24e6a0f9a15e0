"""When the recorder times: only while a rank measures, unless all is wanted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import crux_torch
from crux_torch.agent import rank_meter
from crux_torch.agent.rank_meter import RankMeter
from crux_torch.host.activity import OwnDevice
from crux_torch.measure.flops import FlopCount
from crux_torch.measure.iterations import IterationMarks
from crux_torch.measure.records import RECORD, Flag
from crux_torch.settings import Settings


class Recorder(SimpleNamespace):
    """A recorder that holds nothing, as it is found: it times."""

    def __init__(self) -> None:
        super().__init__(timing=True, dropped=0, captured=0, held=b"")

    def drain(self, most: int) -> bytes:
        taken, self.held = self.held, b""
        return taken

    def groups(self) -> list[Any]:
        return []


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@contextlib.contextmanager
def meter_of(recorder: Recorder, settings: Settings) -> Iterator[RankMeter]:
    marks = IterationMarks()
    marks.install()
    meter = RankMeter(recorder, settings, 0, 1, "here", OwnDevice(), marks)
    try:
        meter.install()
        yield meter
    finally:
        meter.remove()


@pytest.fixture
def meter(recorder: Recorder) -> Iterator[RankMeter]:
    with meter_of(recorder, Settings()) as made:
        yield made


def test_only_a_measurement_times(recorder: Recorder, meter: RankMeter) -> None:
    assert recorder.timing is False
    for _ in range(2):
        meter.begin()
        assert recorder.timing is True
        meter.drain()
        assert meter.finish() is None
        assert recorder.timing is False
    meter.remove()
    assert recorder.timing is True


def test_a_measurement_that_is_given_up_times_no_longer(
    recorder: Recorder, meter: RankMeter
) -> None:
    meter.begin()
    meter.give_up()
    assert recorder.timing is False


@pytest.mark.parametrize("settings", [Settings(timing="always"), Settings(trace="folder")])
def test_all_is_timed_where_that_is_wanted(recorder: Recorder, settings: Settings) -> None:
    with meter_of(recorder, settings) as meter:
        assert recorder.timing is True
        meter.begin()
        meter.finish()
        assert recorder.timing is True
        meter.begin()
        meter.give_up()
        assert recorder.timing is True


def of_device(issued_ns: Sequence[int]) -> bytes:
    """All-reduces that a device has done, one for each."""
    records = np.zeros(len(issued_ns), dtype=RECORD)
    records["issue_ns"] = issued_ns
    records["start_ns"] = records["issue_ns"] + 10**9
    records["end_ns"], records["device_ns"] = records["start_ns"] + 10**6, 10**6
    records["flags"] = Flag.DEVICE_CLOCK
    return records.tobytes()


def test_a_measurement_ends_by_what_is_recorded_not_by_what_is_issued(
    recorder: Recorder, meter: RankMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Settings().profile_iterations
    meter.begin()
    begin_ns = time.monotonic_ns() + 10**9
    marks = begin_ns + np.arange(wanted + 2) * 10**7
    monkeypatch.setattr(meter.marks, "marks_ns", lambda since_ns=0: marks)
    monkeypatch.setattr(rank_meter.time, "monotonic_ns", lambda: int(marks[-1]))
    issued = [begin_ns - 10**6, *(marks + 10**6).tolist()]
    # The host has issued all; of that the device has done two.
    recorder.held = of_device(issued[:2])
    meter.drain()
    assert not meter.due()
    recorder.held = of_device(issued[2:-3])
    meter.drain()
    assert not meter.due()
    recorder.held = of_device(issued[-3:])
    meter.drain()
    assert meter.due()


def test_the_scripts_flops_go_before_the_count(
    meter: RankMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(
        rank_meter,
        "summarize",
        lambda *a, **given: said.append((given["flops"], given["flops_given"])),
    )
    monkeypatch.setattr(meter.flops, "count", lambda: FlopCount({"fp32": 5.0}, 1, 0, ()))
    try:
        for flops in (7e12, 0):
            crux_torch.count_flops(flops)
            meter.finish()
    finally:
        crux_torch.count_flops(0)
    assert said == [(7e12, True), (5.0, False)]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="FLOPs"):
            crux_torch.count_flops(wrong)


def test_a_measurement_of_a_job_without_communication_ends(
    meter: RankMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter.begin()
    begin_ns = time.monotonic_ns()
    monkeypatch.setattr(meter.marks, "marks_ns", lambda since_ns=0: np.arange(99) + begin_ns)
    for elapsed_s, due in ((1.0, False), (rank_meter.SILENCE_S + 1.0, True)):
        now_ns = begin_ns + round(elapsed_s * 1e9)
        monkeypatch.setattr(rank_meter.time, "monotonic_ns", lambda now_ns=now_ns: now_ns)
        assert meter.due() is due
