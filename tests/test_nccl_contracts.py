"""The crux backend over NCCL does nothing that NCCL forbids, and the script sees what it would see.

On the fake accelerator and the fake NCCL. Every check of what is forbidden is run once more on a
backend that does it, and has to catch it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import fake_gpu
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_gpu.ranks import (
    filled,
    fresh_device,
    in_threads,
    make_backend,
    until,
)

from crux_torch import _C
from crux_torch.measure.record import RECORD

_ok, _reason = fake_gpu.available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _ok, reason=_reason)]

DEFAULTS = {"legacy": False, "watchdog_period_s": 0.005, "timing": False, "strict_hooks": False}
Wrap = Callable[[Any], Any]
FLAVOURS = pytest.mark.parametrize("legacy", [False, True], ids=["nccl2", "legacy"])


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh_device(**DEFAULTS):
        yield
    torch.accelerator.set_stream(torch.fakegpu.default_stream(0))


def crux(inner: Any) -> Any:
    """The backend under test over ``inner``, as crux_torch.c10d.backend makes it."""
    backend = _C.DelegatingBackend("nccl", inner.rank(), inner.size(), _C.process_recorder(1 << 14))
    backend.add_inner(fake_gpu.DEVICE, inner)
    return backend


def offender(kind: str) -> Wrap:
    """A backend that does what is forbidden."""
    return lambda inner: fake_gpu.build.offenders().Offender(kind, inner)


def plain(inner: Any) -> Any:
    return inner


def _single(wrap: Wrap, **options: Any) -> Any:
    return wrap(make_backend(dist.HashStore(), 0, 1, **options))


def _refuses(backend: Any) -> bool:
    try:
        backend.allreduce([filled()])
    except RuntimeError:
        return True
    return False


def _synchronous() -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


# What is forbidden.


def no_blocking_call_on_handles(wrap: Wrap) -> None:
    """synchronize() and getFuture() block the current stream: no way to measure."""
    backend = _single(wrap)
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    event = torch.Event("fakegpu")
    event.record()
    blocked = not event.query()
    fake_gpu.release()
    work.wait()
    torch.accelerator.synchronize()
    until(lambda: bool(work.is_completed()), "the end")
    assert not blocked, "the current stream waits though the script did not"
    assert [kind for kind, _ in fake_gpu.violations()] == []


def the_host_never_waits(wrap: Wrap) -> None:
    backend = _single(wrap)
    fake_gpu.inject("delay", seconds=0.02, count=3)
    for _ in range(3):
        fake_gpu.sleep(0.005)
        backend.allreduce([filled()]).wait()
    assert not [text for kind, text in fake_gpu.violations() if kind == "host_sync"]


def the_script_alone_waits_for_handles(wrap: Wrap) -> None:
    backend = _single(wrap)
    for _ in range(3):
        backend.allreduce([filled()])
    torch.accelerator.synchronize()
    gc.collect()
    waits = sum(count for (method, _), count in fake_gpu.calls().items() if method == "wait")
    assert waits == 0, "the script has waited for nothing"


def operations_are_issued_on_the_script_s_stream(wrap: Wrap) -> None:
    backend = _single(wrap)
    stream = torch.Stream("fakegpu")
    with torch.fakegpu.stream(stream):
        backend.allreduce([filled()]).wait()
        backend.allreduce([filled()], _synchronous())
        assert torch.accelerator.current_stream() == stream
    own, current = fake_gpu.operations()
    assert {own["current_stream"], current["current_stream"]} == {stream.stream_id}
    assert current["stream"] == stream.stream_id != own["stream"]


def captures_stay_whole(wrap: Wrap) -> None:
    """Within a capture no timing event, no query, no wait: the operation passes through."""
    backend = _single(wrap)
    tensor = filled(1.0)
    backend.allreduce([tensor]).wait()
    torch.accelerator.synchronize()
    fake_gpu.clear()
    with fake_gpu.capture() as graph:
        fake_gpu.add_(tensor, 1.0)
        backend.allreduce([tensor]).wait()
        backend.allreduce([tensor], _synchronous())
        time.sleep(0.02)
    graph.replay()
    assert tensor.tolist() == [2.0] * 4
    assert fake_gpu.violations() == []
    assert [operation["captured"] for operation in fake_gpu.operations()] == [True, True]


def memory_is_not_freed_under_an_operation(wrap: Wrap) -> None:
    backend = _single(wrap)
    fake_gpu.inject("delay", seconds=0.03)
    backend.allreduce([filled()])
    gc.collect()
    assert fake_gpu.drain()
    assert not [text for kind, text in fake_gpu.violations() if kind == "use_after_free"]


def tags_are_the_script_s(wrap: Wrap) -> None:
    def rank_main(rank: int, inner: Any) -> None:
        backend = wrap(inner)
        tensor = torch.zeros(2, device=f"fakegpu:{rank}")
        if rank == 0:
            backend.send([tensor], 1, 7).wait()
        else:
            backend.recv([tensor], 0, 9).wait()
        torch.accelerator.synchronize()

    in_threads(2, rank_main)
    tags = {operation["op"]: operation["tag"] for operation in fake_gpu.operations()}
    assert tags == {"SEND": 7, "RECV": 9}


#: What a backend must not do, and the kinds of offender that do it.
FORBIDDEN: dict[Callable[[Wrap], None], tuple[str, ...]] = {
    no_blocking_call_on_handles: ("synchronize", "get_future", "wait"),
    the_host_never_waits: ("host_sync",),
    the_script_alone_waits_for_handles: ("wait",),
    operations_are_issued_on_the_script_s_stream: ("other_stream",),
    captures_stay_whole: ("timing_event", "poll", "host_sync"),
    memory_is_not_freed_under_an_operation: ("frees_inputs",),
    tags_are_the_script_s: ("tag",),
}


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


@FLAVOURS
@pytest.mark.parametrize("check", FORBIDDEN, ids=_name)
def test_crux_does_nothing_forbidden(check: Callable[[Wrap], None], legacy: bool) -> None:
    if check is captures_stay_whole and not fake_gpu.tells_captures():
        pytest.skip("this torch's guards can't tell captures; CUDA is asked directly there")
    fake_gpu.configure(legacy=legacy, timing=legacy, strict_hooks=not legacy)
    check(plain)
    fake_gpu.clear()
    check(crux)
    assert [kind for kind, _ in fake_gpu.violations()] == []


@pytest.mark.parametrize(
    ("check", "kind"),
    [(check, kind) for check, kinds in FORBIDDEN.items() for kind in kinds],
    ids=_name,
)
def test_the_check_catches(check: Callable[[Wrap], None], kind: str) -> None:
    caught: list[BaseException] = []
    try:
        check(offender(kind))
    except (AssertionError, RuntimeError) as error:
        caught.append(error)
    assert caught, f"{check.__name__} did not notice {kind}"


@pytest.mark.parametrize(("wrap", "asks"), [(crux, False), (offender("result"), True)])
def test_a_blocks_handle_is_not_asked_for_outputs(wrap: Wrap, asks: bool) -> None:
    """ProcessGroupNCCL's keeps none, and dereferences a null pointer: that ends the process."""
    fake_gpu.configure(legacy=True, timing=True)
    backend = _single(wrap)
    backend.allreduce([filled()])
    assert fake_gpu.drain()
    fake_gpu.inject("delay", op="COALESCED", seconds=0.1)
    backend._start_coalescing()
    backend.allreduce([filled()])
    # The script drops it at once, and the device is still at it.
    backend._end_coalescing()
    assert fake_gpu.drain()
    assert fake_gpu.operations()[-1]["op"] == "COALESCED"
    assert ("null_result" in [kind for kind, _ in fake_gpu.violations()]) == asks


# What the script sees.


@FLAVOURS
def test_a_handle_ends_when_the_operation_does(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy)
    backend = _single(crux)
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    work.wait()
    assert not work.is_completed()
    event = torch.Event("fakegpu")
    event.record()
    assert not event.query(), "wait() does not block the current stream"
    fake_gpu.release()
    event.synchronize()
    assert work.is_completed()
    assert work.is_success()


@FLAVOURS
def test_order_and_inputs_are_the_script_s(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy)

    def rank_main(rank: int, inner: Any) -> list[float]:
        backend = crux(inner)
        tensor = torch.zeros(4, device=f"fakegpu:{rank}")
        works = []
        for step in range(20):
            fake_gpu.sleep(0.001 * rank)
            fake_gpu.add_(tensor, 1.0 + step + rank)
            works.append(backend.allreduce([tensor]))
            works[-1].wait()
        return tensor.tolist()

    expected = 0.0
    zero = one = 0.0
    for step in range(20):
        zero, one = zero + 1 + step, one + 2 + step
        zero = one = zero + one
        expected = zero
    assert in_threads(2, rank_main) == [[expected] * 4] * 2
    for rank in (0, 1):
        mine = [operation for operation in fake_gpu.operations() if operation["rank"] == rank]
        assert [operation["sequence"] for operation in mine] == list(range(1, 21))


@FLAVOURS
def test_synchronous_operations_have_the_handles_that_nccl_gives(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy)
    assert (_single(plain).allreduce([filled()], _synchronous()) is None) == legacy
    assert (_single(crux).allreduce([filled()], _synchronous()) is None) == legacy


@FLAVOURS
def test_errors_reach_the_script(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy)
    for wrap in (plain, crux):
        backend = _single(wrap)
        fake_gpu.inject("error")
        work = backend.allreduce([filled()])
        until(lambda work=work: bool(work.is_completed()), "the failure")
        assert not work.is_success()
        with pytest.raises(dist.DistBackendError, match="injected"):
            work.wait()
        until(lambda backend=backend: _refuses(backend), "the state")
        fake_gpu.inject("refuse")
        with pytest.raises(RuntimeError, match="refused"):
            _single(wrap).allreduce([filled()])


@FLAVOURS
def test_timeouts_are_nccl_s(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy)
    backend = _single(crux, timeout_s=0.05)
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    until(lambda: bool(work.is_completed()), "the timeout")
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError, match="timed out"):
        work.wait()


@FLAVOURS
def test_abort_frees_what_hangs(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy)
    backend = _single(crux)
    fake_gpu.inject("hold")
    work = backend.allreduce([filled()])
    work.wait()
    backend.abort()
    assert fake_gpu.drain(5)
    assert not work.is_success()
    with pytest.raises(RuntimeError):
        backend.allreduce([filled()])


@FLAVOURS
def test_groups_of_operations(legacy: bool) -> None:
    fake_gpu.configure(legacy=legacy)

    def rank_main(rank: int, inner: Any) -> list[Any]:
        backend = crux(inner)
        device = f"fakegpu:{rank}"
        mine, other = torch.full((2,), rank + 1.0, device=device), torch.zeros(2, device=device)
        backend._start_coalescing()
        backend.send([mine], 1 - rank, 0)
        backend.recv([other], 1 - rank, 0)
        backend._end_coalescing().wait()
        received = other.tolist()
        backend._start_coalescing()
        for tensor in (mine, other):
            backend.allreduce([tensor])
        backend._end_coalescing().wait()
        return [received, mine.tolist(), other.tolist()]

    zero, one = in_threads(2, rank_main)
    assert zero == [[2, 2], [3, 3], [3, 3]]
    assert one == [[1, 1], [3, 3], [3, 3]]
    ops = [operation["op"] for operation in fake_gpu.operations() if operation["rank"] == 0]
    assert ops == (["COALESCED"] * 2 if legacy else ["COALESCED", "ALLREDUCE", "ALLREDUCE"])


def test_halves_of_a_split_record_by_themselves() -> None:
    if not hasattr(torch._C._distributed_c10d.Backend, "split"):
        pytest.skip("this torch does not let Python split a backend by itself")

    def rank_main(rank: int, inner: Any) -> list[Any]:
        backend = crux(inner)
        store = dist.PrefixStore(f"half-{rank}", dist.HashStore())
        child = backend.split(store, [rank], fake_gpu.nccl_options())
        tensor = torch.full((2,), rank + 1.0, device=f"fakegpu:{rank}")
        child.allreduce([tensor]).wait()
        seen = [tensor.tolist(), type(child), child.group_index != backend.group_index]
        child.abort()
        return seen

    found = in_threads(2, rank_main)
    assert found == [[[rank + 1.0] * 2, _C.DelegatingBackend, True] for rank in (0, 1)]


def _records(group: int) -> np.ndarray:
    recorder = _C.process_recorder(1 << 14)
    records = np.frombuffer(recorder.drain(1 << 14), dtype=RECORD)
    return records[records["group"] == group]


def test_records_hold_the_device_s_durations_however_late_the_watchdog_is() -> None:
    if not fake_gpu.has_completion_hooks():
        pytest.skip("this torch has no completion hooks")
    fake_gpu.configure(watchdog_period_s=0.1)
    backend = _single(crux)
    _records(backend.group_index)
    for _ in range(3):
        fake_gpu.inject("delay", seconds=0.02)
        backend.allreduce([filled(n=1000)]).wait()
    torch.accelerator.synchronize()
    records, until = _records(backend.group_index), time.monotonic() + 30
    while len(records) < 3 and time.monotonic() < until:
        time.sleep(0.01)
        records = np.concatenate([records, _records(backend.group_index)])
    backend.shutdown()
    operations = fake_gpu.operations()
    assert len(records) == 3
    for record, operation in zip(records, operations, strict=True):
        assert record["bytes"] == 4000
        device_s = (operation["end_ns"] - operation["start_ns"]) / 1e9
        assert record["device_ns"] / 1e9 == pytest.approx(device_s, rel=0.1)
        assert record["device_ns"] >= 20e6
