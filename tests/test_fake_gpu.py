"""The fakes keep the contracts of accelerators and of c10d, and each check catches who breaks it.

A contract is a function that raises AssertionError where it does not hold. It is run against the
fake as it is, and against the fake with that contract broken on purpose.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import fake_gpu
import pytest
import torch
import torch.distributed as dist
from fake_gpu.ranks import filled, fresh_device, in_threads, make_backend, until

_ok, _reason = fake_gpu.available()
pytestmark = pytest.mark.skipif(not _ok, reason=_reason)

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


# Contracts of handles.


def wait_blocks_the_current_stream_and_not_the_host() -> None:
    backend = _single()
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    let_go = threading.Timer(1.0, fake_gpu.release)
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


def get_future_blocks_the_current_stream() -> None:
    backend = _single()
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    work.get_future()
    event = torch.Event("fakegpu")
    event.record()
    assert not _reached(event), "the current stream does not wait"
    fake_gpu.release()
    event.synchronize()


def a_handle_is_complete_when_the_operation_has_ended() -> None:
    backend = _single()
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    assert not work.is_completed(), "complete before the end"
    fake_gpu.release()
    until(work.is_completed, "the end")
    assert work.is_success()


def an_end_that_comes_late_is_seen_late() -> None:
    backend = _single()
    fake_gpu.inject("late", seconds=0.05)
    work = backend.allreduce([filled()])
    assert not work.is_completed(), "complete before the end"
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed()
    (operation,) = fake_gpu.operations()
    assert operation["end_ns"] - operation["start_ns"] >= 50e6


def an_operation_sees_what_was_put_on_the_current_stream_before() -> None:
    backend = _single()
    source, target = filled(1.0), filled(0.0)
    fake_gpu.sleep(0.05)
    fake_gpu.fill_(source, 7.0)
    backend.allgather([[target]], [source]).wait()
    assert target.tolist() == [7.0] * 4, "the operation ran before its inputs were there"


def operations_of_a_communicator_run_in_order() -> None:
    backend = _single()
    fake_gpu.inject("delay", seconds=0.05)
    first = backend.allreduce([filled()])
    backend.allreduce([filled()], _sync_options(dist.AllreduceOptions))
    torch.accelerator.synchronize()
    until(first.is_completed, "the first")
    one, two = fake_gpu.operations()
    assert one["stream"] != two["stream"]
    assert two["start_ns"] >= one["end_ns"], "the second overtook the first"


def synchronous_operations_run_on_the_current_stream() -> None:
    backend = _single()
    stream = torch.Stream("fakegpu")
    with torch.fakegpu.stream(stream):
        backend.allreduce([filled()])
        backend.allreduce([filled()], _sync_options(dist.AllreduceOptions))
    own, current = fake_gpu.operations()
    assert own["stream"] != stream.stream_id, "an asynchronous one blocks the current stream"
    assert current["stream"] == stream.stream_id, "a synchronous one is not on the current stream"
    assert own["current_stream"] == current["current_stream"] == stream.stream_id


def issuing_leaves_the_current_stream() -> None:
    backend = _single()
    before = torch.accelerator.current_stream()
    backend.allreduce([filled()])
    after = torch.accelerator.current_stream()
    torch.accelerator.set_stream(before)
    assert before == after, "the current stream is another one"


def a_duration_needs_timing() -> None:
    backend = _single()
    work = backend.allreduce([filled()])
    until(work.is_completed, "the end")
    with pytest.raises(RuntimeError, match="timing was enabled"):
        work._get_duration()


def a_duration_needs_the_end() -> None:
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


def tensors_live_as_long_as_the_operation() -> None:
    backend = _single()
    fake_gpu.inject("delay", seconds=0.05)
    backend.allreduce([filled()])
    gc.collect()
    assert fake_gpu.drain()
    assert fake_gpu.violations() == []


# Contracts of failure.


def what_takes_too_long_times_out() -> None:
    backend = _single(timeout_s=0.05)
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    deadline = time.monotonic() + 1
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert work.is_completed(), "no timeout"
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError, match="timed out"):
        work.wait()
    with pytest.raises(dist.DistBackendError):
        backend.allreduce([filled()])


def abort_ends_what_runs() -> None:
    backend = _single()
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    backend.abort()
    assert fake_gpu.drain(1), "the stream is stuck"
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError):
        work.wait()
    with pytest.raises(RuntimeError, match="abort"):
        backend.allreduce([filled()])


def an_error_on_the_device_fails_the_handle_and_what_follows() -> None:
    backend = _single()
    fake_gpu.inject("error")
    work = backend.allreduce([filled()])
    until(work.is_completed, "the failure")
    assert not work.is_success(), "the failure is not seen"
    with pytest.raises(dist.DistBackendError, match="injected"):
        work.wait()
    until(lambda: _refuses(backend), "the communicator's failure")


def _refuses(backend: Any) -> bool:
    try:
        backend.allreduce([filled()])
    except dist.DistBackendError:
        return True
    return False


def _failed(backend: Any) -> bool:
    return bool(backend.get_error() != torch._C._distributed_c10d.ErrorType.SUCCESS)


def ranks_of_a_split_agree_by_color() -> None:
    def rank_main(rank: int, backend: Any) -> list[float]:
        store = dist.PrefixStore(f"child{rank}", dist.HashStore())
        child = backend.split(store, [rank], fake_gpu.nccl_options())
        tensor = torch.full((2,), rank + 1.0, device=f"fakegpu:{rank}")
        child.allreduce([tensor]).wait()
        value = tensor.tolist()
        child.abort()
        return value

    try:
        values = in_threads(2, rank_main)
    except RuntimeError as error:
        raise AssertionError("the halves are one group") from error
    assert values == [[1.0, 1.0], [2.0, 2.0]]


# Contracts of completion hooks.


def a_completion_hook_fires_once_for_each_success() -> None:
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


def no_two_operations_have_one_key() -> None:
    backend = _single()
    works = [backend.allreduce([filled()]) for _ in range(5)]
    keys = {fake_gpu.load().completion_key(work) for work in works}
    assert len(keys) == 5, "a key is used again"


def a_completion_hook_does_not_fire_for_a_failure() -> None:
    backend = _single()
    log = backend.log_completions()
    fake_gpu.inject("error")
    work = backend.allreduce([filled()])
    until(lambda: _failed(backend), "the failure")
    assert not work.is_success()
    assert log.list() == [], "a failure was reported as a success"


# Contracts of the device.


def streams_are_queues() -> None:
    tensor = filled(0.0)
    fake_gpu.sleep(0.02)
    fake_gpu.fill_(tensor, 3.0)
    fake_gpu.add_(tensor, 1.0)
    event = torch.Event("fakegpu")
    event.record()
    assert not _reached(event), "the event is reached before what was put there before it"
    assert tensor.tolist() == [4.0] * 4
    assert _reached(event)


def a_stream_that_waits_for_an_event_runs_after_it() -> None:
    tensor = filled(0.0)
    first, second = torch.Stream("fakegpu"), torch.Stream("fakegpu")
    event = torch.Event("fakegpu")
    with torch.fakegpu.stream(first):
        fake_gpu.sleep(0.05)
        fake_gpu.fill_(tensor, 1.0)
        event.record()
    with torch.fakegpu.stream(second):
        second.wait_event(event)
        fake_gpu.add_(tensor, 1.0)
        torch.accelerator.synchronize()
    assert tensor.tolist() == [2.0] * 4, "the second stream did not wait"


def a_capture_runs_nothing_until_it_is_replayed() -> None:
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


HOOKED = (
    a_completion_hook_fires_once_for_each_success,
    no_two_operations_have_one_key,
    a_completion_hook_does_not_fire_for_a_failure,
)
#: A contract, and what breaks it.
CONTRACTS: dict[Callable[[], None], tuple[str, ...]] = {
    wait_blocks_the_current_stream_and_not_the_host: ("wait_does_not_block", "wait_blocks_host"),
    get_future_blocks_the_current_stream: ("future_does_not_block",),
    a_handle_is_complete_when_the_operation_has_ended: ("complete_at_once",),
    an_end_that_comes_late_is_seen_late: ("complete_at_once",),
    an_operation_sees_what_was_put_on_the_current_stream_before: ("inputs_not_awaited",),
    operations_of_a_communicator_run_in_order: ("out_of_order",),
    synchronous_operations_run_on_the_current_stream: ("sync_on_own_stream",),
    issuing_leaves_the_current_stream: ("wrong_stream",),
    a_duration_needs_timing: ("duration_without_timing",),
    a_duration_needs_the_end: ("duration_before_the_end",),
    tensors_live_as_long_as_the_operation: ("inputs_dropped",),
    what_takes_too_long_times_out: ("timeout_ignored",),
    abort_ends_what_runs: ("abort_is_ignored",),
    an_error_on_the_device_fails_the_handle_and_what_follows: ("errors_are_lost",),
    ranks_of_a_split_agree_by_color: ("split_ignores_color",),
    a_completion_hook_fires_once_for_each_success: ("hook_fires_twice",),
    no_two_operations_have_one_key: ("keys_used_again",),
    a_completion_hook_does_not_fire_for_a_failure: ("hook_on_failure",),
    streams_are_queues: ("events_are_reached_at_once",),
    a_stream_that_waits_for_an_event_runs_after_it: ("events_are_reached_at_once",),
    a_capture_runs_nothing_until_it_is_replayed: ("captures_run",),
}
BROKEN = [(contract, name) for contract, names in CONTRACTS.items() for name in names]


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


def _needs_hooks(contract: Callable[[], None]) -> None:
    if contract in HOOKED and not fake_gpu.has_completion_hooks():
        pytest.skip("this torch has no completion hooks")


@pytest.mark.parametrize("contract", CONTRACTS, ids=_name)
def test_the_fake_keeps(contract: Callable[[], None]) -> None:
    _needs_hooks(contract)
    contract()


@pytest.mark.parametrize(("contract", "mutant"), BROKEN, ids=_name)
def test_the_check_catches(contract: Callable[[], None], mutant: str) -> None:
    _needs_hooks(contract)
    caught: list[BaseException] = []
    with fake_gpu.mutants(mutant):
        try:
            contract()
        except (AssertionError, pytest.fail.Exception) as error:
            caught.append(error)
        finally:
            fake_gpu.release()
            torch.accelerator.set_stream(torch.fakegpu.default_stream(0))
    assert caught, f"{contract.__name__} did not notice {mutant}"


# What tells on others.


def test_a_hook_that_takes_the_gil_is_found() -> None:
    if not fake_gpu.has_completion_hooks():
        pytest.skip("this torch has no completion hooks")
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


def test_a_hook_that_calls_back_is_found() -> None:
    if not fake_gpu.has_completion_hooks():
        pytest.skip("this torch has no completion hooks")
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
    image = torch.randn(1, 2, 8, 8, generator=generator).to(device)
    kernel = torch.randn(3, 2, 3, 3, generator=generator).to(device)
    return [
        a, b, out, in_place, mask, *pieces, complex_.conj().imag, weight.grad, state,
        a[mask], a.sort(-1)[0], a.unfold(0, 2, 1).sum(-1), a.to(torch.bfloat16).sum(),
        torch.where(mask, a, a.new_zeros(())), torch.arange(5, device=device) * 2,
        torch.nn.functional.conv2d(image, kernel), a.view(torch.int32), a.expand(2, 6, 5).sum(0),
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
    first.record()
    fake_gpu.sleep(0.03)
    second.record()
    with pytest.raises(RuntimeError, match=r"completed|not ready"):
        first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) >= 30.0
    untimed = torch.Event("fakegpu")
    untimed.record()
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        first.elapsed_time(untimed)


# Collectives and flavours.


def _collectives(rank: int, backend: Any) -> list[Any]:
    device = f"fakegpu:{rank}"

    def mine(n: int) -> torch.Tensor:
        return torch.arange(float(n), device=device) + 10 * rank

    size = backend.size()
    reduced, average, at_root, spread = mine(3), mine(3), mine(3), mine(3)
    average_options, root_one = dist.AllreduceOptions(), dist.BroadcastOptions()
    average_options.reduceOp = dist.ReduceOp.AVG
    root_one.rootRank = 1
    gathered = [torch.zeros(2, device=device) for _ in range(size)]
    flat = torch.zeros(2 * size, device=device)
    part, part_flat = torch.zeros(2, device=device), torch.zeros(2, device=device)
    swapped = torch.zeros(size, device=device)
    listed = [torch.zeros(1, device=device) for _ in range(size)]
    works = [
        backend.allreduce([reduced]),
        backend.allreduce([average], average_options),
        backend.reduce([at_root], dist.ReduceOptions()),
        backend.broadcast([spread], root_one),
        backend.allgather([gathered], [mine(2)]),
        backend._allgather_base(flat, mine(2)),
        backend.reduce_scatter([part], [[mine(2) for _ in range(size)]]),
        backend._reduce_scatter_base(part_flat, mine(2 * size)),
        backend.alltoall_base(swapped, mine(size), [], []),
        backend.alltoall(listed, [mine(1) for _ in range(size)]),
        backend.barrier(),
    ]
    for work in works:
        work.wait()
    tensors = [
        reduced,
        average,
        at_root,
        spread,
        *gathered,
        flat,
        part,
        part_flat,
        swapped,
        *listed,
    ]
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("legacy", [False, True], ids=["nccl2", "legacy"])
def test_collectives_of_ranks_that_are_threads(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy)
    zero, one = in_threads(2, _collectives)
    assert zero == [
        [10, 12, 14], [5, 6, 7], [10, 12, 14], [10, 11, 12], [0, 1], [10, 11], [0, 1, 10, 11],
        [10, 12], [10, 12], [0, 10], [0], [10],
    ]  # fmt: skip
    assert one == [
        [10, 12, 14], [5, 6, 7], [10, 11, 12], [10, 11, 12], [0, 1], [10, 11], [0, 1, 10, 11],
        [10, 12], [14, 16], [1, 11], [0], [10],
    ]  # fmt: skip


def test_transfers_of_a_group_run_together_and_tags_mean_nothing() -> None:
    def rank_main(rank: int, backend: Any) -> list[float]:
        device = f"fakegpu:{rank}"
        mine, other = (torch.full((2,), float(v), device=device) for v in (rank, -1))
        backend._start_coalescing()
        backend.send([mine], 1 - rank, 3 + rank)
        backend.recv([other], 1 - rank, 5)
        backend._end_coalescing().wait()
        return other.tolist()

    assert in_threads(2, rank_main) == [[1.0, 1.0], [0.0, 0.0]]
    assert {operation["op"] for operation in fake_gpu.operations()} == {"COALESCED"}


@pytest.mark.parametrize("legacy", [False, True], ids=["nccl2", "legacy"])
def test_a_group_is_one_operation_or_several(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy, timing=True)
    backend = _single()
    tensors = [filled(float(i)) for i in range(3)]
    backend._start_coalescing()
    for tensor in tensors:
        backend.allreduce([tensor])
    work = backend._end_coalescing()
    work.wait()
    torch.accelerator.synchronize()
    operations = fake_gpu.operations()
    assert len(operations) == (1 if legacy else 3)
    span = operations[-1]["end_ns"] - operations[0]["start_ns"]
    assert work._get_duration() >= span / 1e6


def test_the_legacy_class_gives_no_handle_of_what_is_synchronous() -> None:
    for legacy in (True, False):
        fake_gpu.configure(legacy=legacy)
        work = _single().allreduce([filled()], _sync_options(dist.AllreduceOptions))
        assert (work is None) == legacy


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
