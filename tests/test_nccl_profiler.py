"""The NCCL profiler plugin from Python, and in the real libnccl as far as that goes without a GPU.

What the plugin counts is tested in ``tests/cpp/nccl_profiler_test.cc``.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nccl_wheel
import pytest

from crux_torch import runtime
from crux_torch.apply import nccl_profiler
from crux_torch.apply.nccl_profiler import (
    LIBRARY,
    VARIABLE,
    NcclProfiler,
    NcclProfilerError,
    NetworkUse,
)
from crux_torch.settings import Settings
from cruxrun import preload

built = pytest.mark.skipif(not LIBRARY.is_file(), reason="the plugin is not built")
in_wheel = pytest.mark.skipif(nccl_wheel.library() is None, reason="torch brought no libnccl")
START_S = 120.0

_INIT = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
)
_START = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_STOP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class _Table(ctypes.Structure):
    """``ncclProfiler_v5_t``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", _INIT),
        ("start", _START),
        ("stop", _STOP),
        ("record", _RECORD),
        ("finalize", _STOP),
    )


class _Description(ctypes.Structure):
    """As much of ``ncclProfilerEventDescr_v5_t`` as a proxy's events have."""

    _fields_ = (
        ("type", ctypes.c_uint64),
        ("parent", ctypes.c_void_p),
        ("rank", ctypes.c_int64),  # an int, and what aligns the union after it
        ("pid", ctypes.c_int),
        ("channel", ctypes.c_uint8),
        ("peer", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("chunk_bytes", ctypes.c_int),
        ("is_send", ctypes.c_int),
        ("room", ctypes.c_uint64 * 12),
    )


class FakeNccl:
    """Loads the plugin and calls it as NCCL's proxy does."""

    def __init__(self, plugin: Path) -> None:
        self._library = ctypes.CDLL(str(plugin))
        self.table = _Table.in_dll(self._library, "ncclProfiler_v5")

    def communicator(self, number: int, name: str, rank: int = 0, ranks: int = 2) -> Any:
        context, mask = ctypes.c_void_p(), ctypes.c_int()
        told = (number, ctypes.byref(mask), name.encode(), ranks, ranks, rank, None)
        assert self.table.init(ctypes.byref(context), *told) == 0
        return context

    def _start(self, context: Any, kind: int, parent: Any = None) -> Any:
        handle = ctypes.c_void_p()
        event = _Description(type=kind, parent=parent, pid=os.getpid(), is_send=1)
        assert self.table.start(context, ctypes.byref(handle), ctypes.byref(event)) == 0
        return handle

    def send(self, context: Any, sizes: list[int], seconds: float = 0.0) -> None:
        self._start(context, 1 << 1)
        operation = self._start(context, 1 << 3)
        for size in sizes:
            step = self._start(context, 1 << 4, operation)
            self.table.record(step, 9, ctypes.byref(ctypes.c_size_t(size)))
            time.sleep(seconds)
            self.table.stop(step)
        self.table.stop(operation)

    def end(self, context: Any) -> None:
        self.table.finalize(context)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A copy, since what is loaded once stays and goes on counting."""
    if not LIBRARY.is_file():
        pytest.skip("the plugin is not built")
    return Path(shutil.copy(LIBRARY, tmp_path))


def test_it_is_only_found_where_nccl_has_loaded_it(plugin: Path) -> None:
    assert NcclProfiler.loaded(plugin) is None
    FakeNccl(plugin)
    found = NcclProfiler.loaded(plugin)
    assert found is not None
    assert found.communicators() == []
    assert found.totals() == found.forwarded() == NetworkUse()


def test_each_communicator_is_told(plugin: Path) -> None:
    nccl = FakeNccl(plugin)
    first = nccl.communicator(0xFFFFFFFFFFFFFFFE, "dp é", rank=1, ranks=16)
    second = nccl.communicator(7, "")
    nccl.send(first, [1 << 20, 5])
    nccl.send(second, [100])
    nccl.end(second)
    profiler = NcclProfiler.loaded(plugin)
    assert profiler is not None
    one, two = profiler.communicators()
    assert (one.id, one.name, one.rank, one.ranks, one.nodes) == (2**64 - 2, "dp é", 1, 16, 16)
    assert (one.ended, two.ended) == (False, True)
    assert (one.use.collectives, one.use.sends, one.use.sent_bytes) == (1, 2, (1 << 20) + 5)
    assert (two.use.sent_bytes, profiler.totals().sent_bytes) == (100, (1 << 20) + 105)


def test_time_is_that_with_a_send_in_the_networks_hands(plugin: Path) -> None:
    nccl = FakeNccl(plugin)
    context = nccl.communicator(1, "timed")
    profiler = NcclProfiler.loaded(plugin)
    assert profiler is not None
    before = profiler.totals()
    began = time.perf_counter()
    # Two proxies at once: the time in which either sends.
    threads = [threading.Thread(target=nccl.send, args=(context, [10] * 4, 0.01)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed = time.perf_counter() - began
    use = profiler.totals().since(before)
    assert 0.04 <= use.sending_s <= passed
    assert (use.sends, use.sent_bytes) == (8, 80)


def test_a_library_that_is_no_such_plugin_is_said(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler")
    for text, message in (
        ('extern "C" int crux_nccl_profiler_abi() { return 99; }', "version 99"),
        ("int nothing;", "no such plugin"),
    ):
        other = tmp_path / f"other{len(text)}.so"
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(other)]
        subprocess.run(command, input=text, text=True, check=True)
        ctypes.CDLL(str(other))
        with pytest.raises(NcclProfilerError, match=message):
            NcclProfiler.loaded(other)


def wanted(env: Mapping[str, str], **settings: Any) -> dict[str, str]:
    return preload.environment(Settings(transport=False, **settings), env)


@built
def test_cruxrun_names_the_plugin_where_it_is_asked_for() -> None:
    assert wanted({}) == {}
    assert wanted({}, nccl_profiler=True) == {VARIABLE: str(LIBRARY)}
    again = {VARIABLE: str(LIBRARY)}
    assert wanted(again, nccl_profiler=True) == again


@pytest.mark.parametrize("source", ["environment", "file"])
def test_a_plugin_that_the_user_chose_stays_and_that_is_said(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = {VARIABLE: "inspector"}
    if source == "file":
        conf = tmp_path / "nccl.conf"
        conf.write_text(f"{VARIABLE}=inspector\n")
        env = {"NCCL_CONF_FILE": str(conf)}
    assert wanted(env, nccl_profiler=True) == {}
    (record,) = caplog.records
    assert f"{VARIABLE}=inspector" in record.getMessage()
    assert record.levelname == "WARNING"


def test_what_nccl_would_not_load_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_profiler, "LIBRARY", tmp_path / "absent.so")
    with pytest.raises(NcclProfilerError, match="is not there"):
        nccl_profiler.environment({})
    folder = tmp_path / ("d" * 200) / ("e" * 60)
    folder.mkdir(parents=True)
    long = folder / "plugin.so"
    long.touch()
    monkeypatch.setattr(nccl_profiler, "LIBRARY", long)
    with pytest.raises(NcclProfilerError, match="254 bytes"):
        nccl_profiler.environment({})


def test_status_says_why_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_profiler.NcclProfiler, "loaded", lambda: None)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert nccl_profiler.status(wanted=False) is None
    shown = nccl_profiler.status(wanted=True)
    assert shown is not None
    assert shown["loaded"] is False
    assert shown["why_not"]
    monkeypatch.setenv("CRUX_NCCL_PROFILER", "1")
    assert runtime.status()["nccl_network"]["loaded"] is False


def test_status_shows_each_communicator(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = FakeNccl(plugin)
    nccl.send(nccl.communicator(5, "shown"), [42])
    found = NcclProfiler.loaded(plugin)
    monkeypatch.setattr(nccl_profiler.NcclProfiler, "loaded", lambda: found)
    shown = json.loads(json.dumps(runtime.status()["nccl_network"]))
    assert shown["loaded"] is True
    assert shown["totals"]["sent_bytes"] == shown["totals"]["sends"] * 42 == 42
    (one,) = shown["communicators"]
    assert (one["name"], one["use"]["sent_bytes"]) == ("shown", 42)


def in_nccl(*arguments: str, **env: str) -> Any:
    """What ``nccl_wheel.py`` printed; NCCL itself may write to stdout, too."""
    done = subprocess.run(
        [sys.executable, nccl_wheel.__file__, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@built
@in_wheel
def test_the_real_nccl_loads_it_and_tells_it_of_a_transfer() -> None:
    found = nccl_wheel.library()
    assert found is not None
    if "_Z22ncclProfilerPluginInitP8ncclComm" not in nccl_wheel.symbols(found):
        pytest.skip("this libnccl's own functions can't be called: its symbols were stripped")
    told = in_nccl("profiler", **{VARIABLE: str(LIBRARY)})
    assert (told["before"], told["init"], told["loaded"]) == (False, 0, True)
    assert told["mask"] == 0b11110
    # The size is what NCCL's record says, which is filled with one byte.
    size = 0x1818181818181818
    assert (told["sends"], told["sent_bytes"]) == (1, size)
    assert (told["receives"], told["received_bytes"], told["untracked"]) == (1, size, 0)
    assert (told["opened"], told["ended"]) == ([False], [True])
    assert told["kept_bytes"] == size


@in_wheel
def test_the_real_nccl_loads_nothing_else_under_its_name() -> None:
    found = nccl_wheel.library()
    assert found is not None
    if "_Z22ncclProfilerPluginInitP8ncclComm" not in nccl_wheel.symbols(found):
        pytest.skip("this libnccl's own functions can't be called: its symbols were stripped")
    assert in_nccl("profiler", **{VARIABLE: "none"})["loaded"] is False
