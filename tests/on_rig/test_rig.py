"""The rig itself: what CUDA and NCCL promise, and where they break, torch's own code in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from control_fakes import until
from cuda_rig import control

from on_rig.ranks import (
    FLAVOURS,
    all_reduce,
    alone,
    both,
    fresh,
    make,
    ones,
    pair,
    sleep,
    synchronize,
)

#: Long against what this machine does meanwhile.
KERNEL_S = 0.1


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield


def events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]


def test_a_stream_runs_later_and_events_tell_when() -> None:
    before, after = events()
    begin = time.monotonic()
    before.record()
    sleep(KERNEL_S)
    after.record()
    assert time.monotonic() < begin + KERNEL_S
    assert not after.query()
    after.synchronize()
    assert KERNEL_S * 1e3 <= before.elapsed_time(after) < 1e3 * (time.monotonic() - begin)


def test_streams_wait_for_each_other_by_events_alone() -> None:
    side, tensor = torch.cuda.Stream(), torch.zeros(4, device="cuda")
    synchronize()
    with torch.cuda.stream(side):
        sleep(KERNEL_S)
        tensor.fill_(1.0)
    assert tensor.tolist() == [0.0] * 4
    torch.cuda.current_stream().wait_stream(side)
    assert tensor.tolist() == [1.0] * 4


def _values(device: str) -> list[torch.Tensor]:
    x = torch.arange(12.0, device=device).view(3, 4)
    out = torch.empty(0, device=device)
    torch.mul(x, 2, out=out)
    parameters = [torch.nn.Parameter(x.clone()) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    (parameters[0] @ parameters[1].T).square().mean().backward()
    optimizer.step()
    images = torch.arange(2 * 3 * 25.0, device=device).view(2, 3, 5, 5)
    convolved = torch.conv2d(images, torch.ones(4, 3, 3, 3, device=device))
    into = torch.zeros(3, 4, device=device)
    into[1:].add_(x[:2].t().contiguous().t())
    found = [x.T[1:], x.sum(0), out, *parameters, convolved, into, x > 3, x.topk(2).indices]
    return [*found, x.to(torch.bfloat16).softmax(-1), torch.cat([x, x]).unique()]


def test_operators_are_the_cpus() -> None:
    for expected, found in zip(_values("cpu"), _values("cuda"), strict=True):
        assert found.device.type == "cuda"
        assert torch.equal(found.cpu(), expected)


def test_a_kernel_that_has_no_operator_is_refused() -> None:
    inner = alone("legacy")
    inner._set_enable_nan_check(True)
    with pytest.raises(RuntimeError, match="not supported"):
        all_reduce(inner, ones())


def test_a_graph_runs_when_it_is_replayed() -> None:
    given, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.add_(1)
        doubled = given * 2
    assert given.tolist() == [0.0] * 3
    for _ in range(3):
        graph.replay()
    assert doubled.tolist() == [6.0] * 3


def captured(mode: str, meanwhile: Any) -> str:
    """What a capture fails with if another thread does ``meanwhile``; empty if it does not."""
    raised = []

    def body() -> None:
        try:
            meanwhile()
        except RuntimeError as error:
            raised.append(str(error))

    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
            ones()
    except RuntimeError as error:
        return str(error)
    finally:
        synchronize()
    assert not raised
    return ""


@pytest.mark.parametrize("what", ["query", "synchronize", "elsewhere"])
def test_another_thread_breaks_a_global_capture_and_no_other(what: str) -> None:
    event = torch.cuda.Event()
    event.record()
    synchronize()

    def meanwhile() -> None:
        if what == "elsewhere":
            torch.cuda.memory.caching_allocator_alloc(64 << 20)
        else:
            getattr(event, what)()

    assert captured("thread_local", meanwhile) == ""
    assert captured("relaxed", meanwhile) == ""
    assert "capture" in captured("global", meanwhile)


def capture_of(body: Callable[[], None]) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        body()


def test_a_capture_ends_with_all_its_streams_and_none_else() -> None:
    side, outside = torch.cuda.Stream(), torch.cuda.Event()
    outside.record(side)

    def leaves_a_stream() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sleep(0.001)

    with pytest.raises(RuntimeError, match="unjoined"):
        capture_of(leaves_a_stream)
    with pytest.raises(RuntimeError, match="captur"):
        capture_of(lambda: torch.cuda.current_stream().wait_event(outside))


def test_memory_is_limited_and_freeing_it_waits_for_the_device() -> None:
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")
    kept = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] <= free // 2
    del kept
    sleep(KERNEL_S)
    begin = time.monotonic()
    torch.cuda.empty_cache()
    assert time.monotonic() - begin > KERNEL_S / 2
    assert torch.cuda.mem_get_info()[0] >= free


@FLAVOURS
def test_a_communicator_waits_for_all_its_ranks(flavour: str) -> None:
    late, store, took = 0.5, dist.HashStore(), [0.0, 0.0]

    def body(rank: int) -> None:
        time.sleep(late * rank)
        begin = time.monotonic()
        inner = make(flavour, store, rank, 2)
        all_reduce(inner, ones(rank)).wait()
        took[rank] = time.monotonic() - begin
        synchronize()

    both(body)
    assert took[0] > late / 2
    first, second = (each for each in control.issued() if each["op"] == "init")
    assert {first["rank"], second["rank"]} == {0, 1}


@FLAVOURS
def test_a_communicator_takes_memory_and_may_get_none(flavour: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    inner = alone(flavour)
    all_reduce(inner, ones()).wait()
    assert torch.cuda.mem_get_info()[0] <= free - (64 << 20)
    inner.shutdown()
    assert torch.cuda.mem_get_info()[0] > free - (64 << 20)
    control.inject("error", "init")
    with pytest.raises(RuntimeError):
        all_reduce(alone(flavour), ones())


@FLAVOURS
def test_faults_meet_operations(flavour: str) -> None:
    inner = alone(flavour)
    control.inject("hold", "all_reduce")
    held = all_reduce(inner, ones())
    held.wait()
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    control.release()
    event.synchronize()
    until(lambda: bool(held.is_completed()), what="the end")
    control.inject("delay", "all_reduce", seconds=KERNEL_S)
    all_reduce(inner, ones()).wait()
    synchronize()
    *_, last = control.operations()
    assert last["end_ns"] - last["start_ns"] >= KERNEL_S * 1e9
    control.inject("refuse", "all_reduce")
    with pytest.raises(RuntimeError):
        all_reduce(inner, ones())


@FLAVOURS
def test_messages_and_collectives_between_ranks(flavour: str) -> None:
    inners = pair(flavour)
    got: list[Any] = [None, None]

    def body(rank: int) -> None:
        mine, other = ones(rank, 4) * (rank + 1), torch.zeros(4, device=f"cuda:{rank}")
        inners[rank]._start_coalescing()
        inners[rank].send([mine], 1 - rank, 0)
        inners[rank].recv([other], 1 - rank, 0)
        inners[rank]._end_coalescing().wait()
        rows = [torch.zeros(4, device=f"cuda:{rank}") for _ in range(2)]
        inners[rank].allgather([rows], [mine]).wait()
        got[rank] = other[0].item(), [row[0].item() for row in rows]

    both(body)
    assert got == [(2.0, [1.0, 2.0]), (1.0, [1.0, 2.0])]
