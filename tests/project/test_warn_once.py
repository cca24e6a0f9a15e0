"""What strangers put into messages, and how many they cause, stays harmless in a job's log."""

from __future__ import annotations

import logging

import pytest
from control_fakes import FakeClock, MemoryStore, record
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.agreement.registry import Registry
from crux_torch.logs import BURST, MAX_CHARACTERS, PAUSE_S, WarnOnce, one_line

LOG = logging.getLogger("test_warn_once")


@given(st.text(max_size=3 * MAX_CHARACTERS))
def test_any_text_becomes_one_printable_line(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown) <= MAX_CHARACTERS + 3
    if text.isprintable() and len(text) <= MAX_CHARACTERS:
        assert shown == text


def test_a_key_can_neither_forge_a_message_nor_reach_the_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    registry = Registry(store, "c")
    registry.publish_job(record("good"), 6.0)
    store.write("crux/c/jobs/\x1b[2Jevil\n[crux] WARNING all is lost\r\u202e", b"junk")
    assert [r.job for r in registry.look().jobs] == ["good"]
    [said] = [r.getMessage() for r in caplog.records]
    assert said.isprintable()
    assert r"\x1b[2Jevil\n[crux] WARNING all is lost\r\u202e" in said


def test_many_messages_are_cut_to_one_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    warn = WarnOnce(LOG, clock=clock)
    for n in range(10 * BURST):
        warn(f"key {n % 3 if n % 2 else n}", "bad")
        warn.forget(f"key {n % 3}")
    assert len(caplog.records) == BURST
    assert caplog.records[-1].getMessage() == "bad; more such warnings follow one a minute"
    caplog.clear()
    clock.advance(2.5 * PAUSE_S)
    for n in range(10 * BURST):
        warn(f"another {n}", "bad")
    assert len(caplog.records) == 2
