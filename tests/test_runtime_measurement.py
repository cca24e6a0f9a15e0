"""When the recorder times: only while a rank measures, unless all is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from crux_torch.runtime.measurement import Meter
from crux_torch.settings import Settings


class Recorder(SimpleNamespace):
    """A recorder that holds nothing, as it is found: it times."""

    def __init__(self) -> None:
        super().__init__(timing=True, dropped=0)

    def drain(self, most: int) -> bytes:
        return b""

    def groups(self) -> list[Any]:
        return []


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def meter_of(recorder: Recorder, settings: Settings) -> Iterator[Meter]:
    meter = Meter(recorder, settings, 0, 1, "here")
    try:
        meter.install()
        yield meter
    finally:
        meter.remove()


@pytest.fixture
def meter(recorder: Recorder) -> Iterator[Meter]:
    yield from meter_of(recorder, Settings())


def test_only_a_measurement_times(recorder: Recorder, meter: Meter) -> None:
    assert recorder.timing is False
    for _ in range(2):
        meter.begin()
        assert recorder.timing is True
        meter.drain()
        assert meter.finish() is None
        assert recorder.timing is False
    meter.remove()
    assert recorder.timing is True


def test_a_measurement_that_is_given_up_times_no_longer(recorder: Recorder, meter: Meter) -> None:
    meter.begin()
    meter.give_up()
    assert recorder.timing is False


@pytest.mark.parametrize("settings", [Settings(timing="always"), Settings(trace="folder")])
def test_all_is_timed_where_that_is_wanted(recorder: Recorder, settings: Settings) -> None:
    for meter in meter_of(recorder, settings):
        assert recorder.timing is True
        meter.begin()
        meter.finish()
        assert recorder.timing is True
        meter.begin()
        meter.give_up()
        assert recorder.timing is True
