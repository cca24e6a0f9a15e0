"""The fakes keep the contracts of accelerators and of c10d, and tell who breaks them.

What a communicator must do for the backend over it is in test_nccl_contracts.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import fake_gpu
import pytest
import torch
import torch.distributed as dist
from fake_gpu.ranks import filled, fresh_device, make_backend, until

_ok, _reason = fake_gpu.available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _ok, reason=_reason)]

needs_hooks = pytest.mark.skipif(
    _ok and not fake_gpu.has_completion_hooks(), reason="this torch has no completion hooks"
)

DEFAULTS = {"legacy": False, "watchdog_period_s": 0.02, "timing": False, "strict_hooks": False}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh_device(**DEFAULTS):
        yield


def _single(**options: Any) -> Any:
    return make_backend(dist.HashStore(), 0, 1, **options)


def _sync_options(kind: Any) -> Any:
    options = kind()
    options.asyncOp = False
    return options


def _reached(event: torch.Event) -> bool:
    return bool(event.query())


# Handles.


def test_wait_blocks_the_current_stream_and_not_the_host() -> None:
    backend = _single()
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    let_go = threading.Timer(30.0, fake_gpu.release)
    let_go.start()
    work.wait()
    let_go.cancel()
    assert not work.is_completed(), "the host waited"
    event = torch.Event("fakegpu")
    event.record()
    assert not _reached(event), "the current stream does not wait"
    fake_gpu.release()
    event.synchronize()
    assert work.is_completed()


def test_operations_of_a_communicator_run_in_order() -> None:
    backend = _single()
    fake_gpu.inject("delay", seconds=0.05)
    first = backend.allreduce([filled()])
    backend.allreduce([filled()], _sync_options(dist.AllreduceOptions))
    torch.accelerator.synchronize()
    until(first.is_completed, "the first")
    one, two = fake_gpu.operations()
    assert one["stream"] != two["stream"]
    assert two["start_ns"] >= one["end_ns"], "the second overtook the first"


def test_a_duration_needs_the_end() -> None:
    fake_gpu.configure(timing=True)
    backend = _single()
    fake_gpu.inject("hold")
    fake_gpu.inject("delay", seconds=0.02)
    work = backend.allreduce([filled()])
    with pytest.raises(RuntimeError, match="has completed"):
        work._get_duration()
    fake_gpu.release()
    until(work.is_completed, "the end")
    (operation,) = fake_gpu.operations()
    assert work._get_duration() >= (operation["end_ns"] - operation["start_ns"]) / 1e6
    assert work._get_duration() >= 20.0


def _failed(backend: Any) -> bool:
    return bool(backend.get_error() != torch._C._distributed_c10d.ErrorType.SUCCESS)


# Completion hooks.


@needs_hooks
def test_a_completion_hook_fires_once_for_each_success() -> None:
    backend = _single()
    backend._enable_collectives_timing()
    log = backend.log_completions()
    works = [backend.allreduce([filled()]) for _ in range(5)]
    torch.accelerator.synchronize()
    keys = [fake_gpu.load().completion_key(work) for work in works]
    until(lambda: len(log.list()) >= 5, "the last report")
    backend.shutdown()
    assert [key for key, _, _ in log.list()] == keys, "reports and operations don't match"
    ends = [operation["end_ns"] for operation in fake_gpu.operations()]
    assert all(seen >= end for (_, _, seen), end in zip(log.list(), ends, strict=True))
    assert [ms for _, ms, _ in log.list()] == [work._get_duration() for work in works]


@needs_hooks
def test_a_completion_hook_does_not_fire_for_a_failure() -> None:
    backend = _single()
    log = backend.log_completions()
    fake_gpu.inject("error")
    work = backend.allreduce([filled()])
    until(lambda: _failed(backend), "the failure")
    assert not work.is_success()
    assert log.list() == [], "a failure was reported as a success"


# The device.


def test_a_capture_runs_nothing_until_it_is_replayed() -> None:
    backend = _single()
    tensor = filled(1.0)
    backend.allreduce([tensor]).wait()
    torch.accelerator.synchronize()
    with fake_gpu.capture() as graph:
        fake_gpu.add_(tensor, 1.0)
        backend.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0] * 4, "the capture ran"
    graph.replay()
    graph.replay()
    assert tensor.tolist() == [3.0] * 4
    assert fake_gpu.operations()[-1]["captured"]


# What tells on others.


@needs_hooks
def test_a_hook_that_takes_the_gil_is_found() -> None:
    fake_gpu.configure(strict_hooks=True)
    backend = _single()
    log = backend.log_completions()
    backend.allreduce([filled()])
    until(lambda: len(log.list()) == 1, "the report")
    assert fake_gpu.violations() == []
    backend.bad_hook("takes_gil")
    backend.allreduce([filled()])
    until(lambda: bool(fake_gpu.violations()), "the violation")
    backend.shutdown()
    assert {kind for kind, _ in fake_gpu.violations()} == {"hook_takes_gil"}


@needs_hooks
def test_a_hook_that_calls_back_is_found() -> None:
    backend = _single()
    backend.bad_hook("calls_back")
    backend.allreduce([filled()])
    until(lambda: bool(fake_gpu.violations()), "the violation")
    assert {kind for kind, _ in fake_gpu.violations()} == {"hook_calls_back"}


def test_timing_events_in_a_capture_are_found() -> None:
    plain, timing = torch.Event("fakegpu"), torch.Event("fakegpu", enable_timing=True)
    with fake_gpu.capture():
        plain.record()
    assert fake_gpu.violations() == []
    with fake_gpu.capture():
        timing.record()
    assert [kind for kind, _ in fake_gpu.violations()] == ["timing_event_in_capture"]


def _capture(*steps: Callable[[], Any]) -> None:
    with fake_gpu.capture():
        for step in steps:
            step()


def test_any_thread_that_queries_breaks_a_capture() -> None:
    backend = _single()
    work = backend.allreduce([filled()])
    torch.accelerator.synchronize()
    event = torch.Event("fakegpu")
    event.record()
    calls: list[Callable[[], Any]] = [event.query, work.is_completed, event.synchronize]
    for call in calls:
        fake_gpu.clear()
        refused: list[Exception] = []

        def other_thread(
            call: Callable[[], Any] = call, refused: list[Exception] = refused
        ) -> None:
            try:
                call()
            except RuntimeError as error:
                refused.append(error)

        thread = threading.Thread(target=other_thread)
        with pytest.raises(RuntimeError, match="the capture is invalid"):
            _capture(thread.start, thread.join)
        assert len(refused) == 1
        assert [kind for kind, _ in fake_gpu.violations()] == ["capture_unsafe_call"]


def test_the_watchdog_does_not_break_a_capture() -> None:
    fake_gpu.configure(watchdog_period_s=0.001)
    backend = _single()
    fake_gpu.inject("delay", seconds=0.02)
    backend.allreduce([filled()])
    with fake_gpu.capture():
        time.sleep(0.05)
    assert fake_gpu.violations() == []


def test_a_capture_refuses_what_graphs_refuse() -> None:
    outside = torch.Stream("fakegpu")
    event = torch.Event("fakegpu")
    with torch.fakegpu.stream(outside):
        fake_gpu.sleep(0.01)
        event.record()
    with pytest.raises(RuntimeError, match="outside of the capture"):
        _capture(event.wait)
    with pytest.raises(RuntimeError, match="the host waits"):
        _capture(torch.accelerator.synchronize)
    tensor = filled()
    fork = torch.Stream("fakegpu")
    begin = torch.Event("fakegpu")

    def fill_on_the_fork() -> None:
        with torch.fakegpu.stream(fork):
            fake_gpu.fill_(tensor, 1.0)

    with pytest.raises(RuntimeError, match="was not waited for"):
        _capture(begin.record, lambda: fork.wait_event(begin), fill_on_the_fork)


def test_freed_memory_is_kept_for_the_streams_that_were_recorded() -> None:
    stream = torch.Stream("fakegpu")
    for recorded in (True, False):
        fake_gpu.clear()
        tensor = filled()
        with torch.fakegpu.stream(stream):
            fake_gpu.sleep(0.03)
            fake_gpu.fill_(tensor, 1.0)
        if recorded:
            tensor.record_stream(stream)
        del tensor
        assert fake_gpu.drain()
        found = [kind for kind, _ in fake_gpu.violations()]
        assert found == ([] if recorded else ["use_after_free"])


# Operators.


def _values(device: str) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(6, 5, generator=generator).to(device)
    b = torch.randn(5, 4, generator=generator).to(device)
    index = torch.tensor([0, 3, 5]).to(device)
    weight = torch.randn(4, 5, generator=generator).to(device).requires_grad_()
    torch.nn.functional.linear(a, weight).relu().square().mean().backward()
    out = torch.empty(0, device=device)
    torch.mm(a, b, out=out)
    in_place = a.clone().t()[1:].mul_(2).add_(1)
    mask = a > 0
    pieces = torch.cat([a, a[index]], 0).chunk(3)
    complex_ = torch.complex(a, a + 1)
    state = torch.zeros(3, device=device)
    state.untyped_storage().resize_(0)
    state.untyped_storage().resize_(12)
    state.fill_(2)
    torch._foreach_add_([a, b], 1.0)
    return [
        a, b, out, in_place, mask, *pieces, complex_.conj().imag, weight.grad, state,
        a[mask], a.sort(-1)[0], a.unfold(0, 2, 1).sum(-1), a.to(torch.bfloat16).sum(),
        torch.where(mask, a, a.new_zeros(())), torch.arange(5, device=device) * 2,
        a.view(torch.int32), a.expand(2, 6, 5).sum(0),
        torch.full((2, 2), 3, device=device), a.max(0)[1], torch.nn.functional.softmax(a, -1),
    ]  # fmt: skip


def test_operators_are_the_cpu_s() -> None:
    for expected, found in zip(_values("cpu"), _values("fakegpu:1"), strict=True):
        assert found.device == torch.device("fakegpu", 1)
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)


def test_views_share_memory_and_devices_keep_their_tensors() -> None:
    tensor = torch.zeros(6, device="fakegpu:2")
    tensor.view(2, 3)[1].fill_(5)
    assert tensor.tolist() == [0, 0, 0, 5, 5, 5]
    assert (tensor + 1).device.index == 2
    assert tensor.to("fakegpu:3").device.index == 3
    assert torch.accelerator.current_accelerator() == torch.device("fakegpu")
    assert torch.accelerator.device_count() == 8


def test_events_tell_the_time_between_them() -> None:
    first, second = (torch.Event("fakegpu", enable_timing=True) for _ in range(2))
    backend = _single()
    fake_gpu.inject("hold")
    first.record()
    fake_gpu.sleep(0.03)
    backend.allreduce([filled()]).wait()
    second.record()
    with pytest.raises(RuntimeError, match=r"completed|not ready"):
        first.elapsed_time(second)
    fake_gpu.release()
    second.synchronize()
    assert first.elapsed_time(second) >= 30.0
    untimed = torch.Event("fakegpu")
    untimed.record()
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        first.elapsed_time(untimed)


def test_options_reach_the_communicator() -> None:
    options = fake_gpu.nccl_options(is_high_priority_stream=True)
    options.config.traffic_class = 104
    options._timeout = timedelta(seconds=7)
    backend = fake_gpu.load().Nccl(dist.HashStore(), 0, 1, options)
    assert backend.options.config.traffic_class == 104
    assert backend.options.is_high_priority_stream
    backend.allreduce([filled()])
    assert fake_gpu.operations()[0]["timeout_ms"] == 7000
    assert backend.counters == {"connect": 1}
