"""Operations that wait on their streams for a link of the host, which another job holds."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from control_fakes import until
from cuda_rig import control
from torch._C import _distributed_c10d as c10d

from crux_torch import _C
from crux_torch.apply.semaphores import HostSemaphores, NamedLinks
from crux_torch.measure.records import GroupInfo
from on_rig.ranks import (
    FLAVOURS,
    SIZE,
    all_reduce,
    both,
    crux,
    fresh,
    ones,
    pair,
    synchronize,
    wait,
)

OWN_LEVEL, HIGHER, LOWER = 3, 6, 1
#: Seconds that an operation waits at most: longer than any test takes, and short.
LONG_S, SHORT_S = 600.0, 0.2
WRITES, WAITS = "cuStreamWriteValue32", "cuStreamWaitValue32"


def _other_job(pipe: Any) -> None:
    """A process of another job: it takes levels, is always on its link, and then no more."""
    gate = _C.link_gate()
    ticket, busy = 0, threading.Event()

    def come_and_go() -> None:
        while busy.is_set():
            gate.leave(gate.enter(0, 1))
            time.sleep(0.01)

    pipe.send(None)
    while (command := pipe.recv()) is not None:
        if command == "enter":
            ticket = gate.enter(0, 1)
            busy.set()
            threading.Thread(target=come_and_go).start()
        elif command == "leave":
            busy.clear()
            gate.leave(ticket)
        elif isinstance(command, int):
            gate.set_level(command)
        else:
            gate.retire()
            gate.cross(0, [gate.join(str(command), "test", "link", "other")])
        pipe.send(None)
    gate.retire()


class Other:
    """The other job."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_other_job, args=(theirs,))
        self.process.start()
        self._pipe.recv()

    def tell(self, command: str | int | Path) -> None:
        self._pipe.send(command)
        self._pipe.recv()

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.tell("enter")
        try:
            yield
        finally:
            if self.process.is_alive():
                self.tell("leave")

    def die(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join()


class Job:
    """This process's job: two ranks, whose groups cross the link."""

    def __init__(self, folder: str, flavour: str) -> None:
        self.gate = _C.link_gate()
        self.link = self.gate.join(folder, "test", "link", "own")
        self.gate.set_level(OWN_LEVEL)
        self.gate.set_wait_s(LONG_S)
        self.backends = [crux(inner) for inner in pair(flavour)]
        self.reduce_all()
        synchronize()
        for backend in self.backends:
            self.gate.cross(backend.group_index, [self.link])
        self.gate.install(True)
        self._waits = self.gate.waits
        control.clear()

    def waits(self) -> tuple[int, int]:
        """Operations that waited, and those whose wait ran out."""
        count, ran_out, *_ = self.gate.waits
        return count - self._waits[0], ran_out - self._waits[1]

    def on_link(self) -> int:
        """Operations that are in flight, or wait there."""
        return sum(h.operations for h in self.gate.holders(self.link) if h.same_job)

    def on_both(self, body: Callable[[int, Any], object]) -> None:
        both(lambda rank: body(rank, self.backends[rank]))

    def reduce_all(self) -> None:
        self.on_both(lambda rank, backend: wait(all_reduce(backend, ones(rank))))


@pytest.fixture(scope="module")
def others() -> Iterator[list[Other]]:
    """The other job's processes; all but the last are dead."""
    found = [Other()]
    yield found
    found[-1].end()


@pytest.fixture
def other(tmp_path: Path, others: list[Other]) -> Other:
    if not others[-1].process.is_alive():
        others.append(Other())
    others[-1].tell(tmp_path)
    others[-1].tell(HIGHER)
    return others[-1]


@pytest.fixture
def job(tmp_path: Path, flavour: str, other: Other) -> Iterator[Job]:
    with fresh():
        made = Job(str(tmp_path), flavour)
        yield made
        made.gate.set_wait_s(SHORT_S)
        made.gate.install(False)
        made.gate.retire()
        control.release()
        both(lambda rank: made.backends[rank].abort() if made.backends else None)


def ran() -> int:
    return sum(each["end_ns"] >= 0 for each in control.operations())


def all_kinds(rank: int, backend: Any) -> list[torch.Tensor]:
    """Results of operations of each kind, after they were waited for in one way or the other."""
    size, device = 64, f"cuda:{rank}"
    mine = torch.arange(size, device=device, dtype=torch.float32) + 100 * rank
    found = []
    for asynchronous in (True, False):
        reduced = mine.clone()
        work = all_reduce(backend, reduced, asynchronous=asynchronous)
        wait(work)
        found.append(reduced + 1)
        gathered = [torch.zeros_like(mine) for _ in range(SIZE)]
        options = c10d.AllgatherOptions()
        options.asyncOp = asynchronous
        wait(backend.allgather([gathered], [mine * 2], options))
        found += [each + 1 for each in gathered]
        scattered = torch.zeros(size, device=device)
        opts = c10d.ReduceScatterOptions()
        opts.asyncOp = asynchronous
        wait(backend.reduce_scatter([scattered], [[mine * 3, mine * 5]], opts))
        found.append(scattered + 1)
    backend._start_coalescing()
    parts = [mine.clone(), mine * 7]
    for part in parts:
        all_reduce(backend, part)
    wait(backend._end_coalescing())
    found += [part + 1 for part in parts]
    received = torch.zeros(size, device=device)
    backend._start_coalescing()
    backend.send([mine * 11], 1 - rank, 0)
    backend.recv([received], 1 - rank, 0)
    wait(backend._end_coalescing())
    found.append(received + 1)
    return found


@FLAVOURS
def test_what_is_held_gives_the_same_results(job: Job, other: Other) -> None:
    results: dict[tuple[str, int], list[torch.Tensor]] = {}

    def body(name: str, rank: int, backend: Any) -> None:
        results[name, rank] = [each.cpu() for each in all_kinds(rank, backend)]

    other.tell(LOWER)
    job.on_both(lambda rank, backend: body("free", rank, backend))
    assert control.calls("other").get(WAITS, 0) == 0, "nobody goes first"
    other.tell(HIGHER)
    job.gate.set_wait_s(SHORT_S)
    with other.inside():
        job.on_both(lambda rank, backend: body("held", rank, backend))
    assert control.calls("other")[WAITS] > 0
    assert job.waits()[0] > 0
    for rank in range(SIZE):
        for held, free in zip(results["held", rank], results["free", rank], strict=True):
            assert torch.equal(held, free)


@FLAVOURS
def test_the_stream_is_held_and_neither_the_host_nor_the_computation(
    job: Job, other: Other
) -> None:
    tensors, works, after = [ones(rank) for rank in range(SIZE)], [None] * SIZE, [0.0] * SIZE

    def body(rank: int, backend: Any) -> None:
        works[rank] = all_reduce(backend, tensors[rank])
        after[rank] = (ones(rank) + 1).sum().item()  # waits for this thread's stream

    with other.inside():
        job.on_both(body)
        until(lambda: job.on_link() == SIZE, what="two operations that wait")
        assert after == [2000.0] * SIZE
        assert ran() == 0
    both(lambda rank: wait(works[rank]))
    synchronize()
    assert [tensor[0].item() for tensor in tensors] == [SIZE] * SIZE
    until(lambda: job.on_link() == 0, what="the end of both")
    assert job.waits() == (SIZE, 0)


@FLAVOURS
def test_an_operation_is_in_flight_from_when_the_device_comes_to_it(job: Job, other: Other) -> None:
    """The other job is the lower one here, and may go on until then."""
    other.tell(LOWER)
    words = [ctypes.c_uint32(0) for _ in range(SIZE)]
    hold = ctypes.CDLL(None).cuStreamWaitValue32_v2
    hold.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def body(rank: int, backend: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        assert hold(stream, ctypes.addressof(words[rank]), 1, 0) == 0
        all_reduce(backend, ones(rank))

    control.inject("hold", "all_reduce", count=control.EVER)
    job.on_both(body)
    assert job.on_link() == 0
    words[0].value = 1
    until(lambda: job.on_link() == 1, what="the first rank's")
    words[1].value = 1
    until(lambda: job.on_link() == SIZE, what="the second rank's")
    control.release()
    until(lambda: job.on_link() == 0, what="the end of both")
    assert job.waits() == (0, 0)


@FLAVOURS
def test_what_follows_one_in_flight_can_still_be_held(job: Job, other: Other) -> None:
    control.inject("hold", "all_reduce", count=SIZE)
    job.on_both(lambda rank, backend: [all_reduce(backend, ones(rank)) for _ in range(2)])
    until(lambda: job.on_link() == SIZE, what="the first on each rank")
    with other.inside():
        control.release()
        until(lambda: ran() == SIZE, what="their end")
        until(lambda: job.on_link() == SIZE, what="the second, which wait")
        assert ran() == SIZE
    synchronize()
    assert ran() == 2 * SIZE
    assert job.waits() == (SIZE, 0)


@FLAVOURS
def test_a_wait_is_bounded(job: Job, other: Other) -> None:
    job.gate.set_wait_s(SHORT_S)
    with other.inside():
        job.on_both(lambda rank, backend: all_reduce(backend, ones(rank)))
        synchronize()
        assert ran() == SIZE
    waited, ran_out = job.waits()
    # The second rank's may find its job exempt.
    assert waited >= ran_out >= 1


@FLAVOURS
def test_what_never_ends_holds_up_its_own_lane_for_a_bounded_time(job: Job, other: Other) -> None:
    """The second one is behind it on the device, and in flight as well when the bound is over."""
    job.gate.set_wait_s(SHORT_S)
    control.inject("hold", "all_reduce", count=control.EVER)
    job.on_both(lambda rank, backend: [all_reduce(backend, ones(rank)) for _ in range(2)])
    until(lambda: job.on_link() == 2 * SIZE, what="the second on each rank")
    assert job.waits() == (0, 0)


@FLAVOURS
def test_the_death_of_a_holder_frees_the_waiters(job: Job, other: Other) -> None:
    other.tell("enter")
    job.on_both(lambda rank, backend: all_reduce(backend, ones(rank)))
    until(lambda: job.on_link() == SIZE, what="two operations that wait")
    assert ran() == 0
    other.die()
    synchronize()
    assert ran() == SIZE
    assert job.waits() == (SIZE, 0)


@FLAVOURS
@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_the_end_of_a_group_lets_go_of_what_it_held(job: Job, other: Other, end: str) -> None:
    with other.inside():
        job.on_both(lambda rank, backend: all_reduce(backend, ones(rank)))
        until(lambda: job.on_link() == SIZE, what="two operations that wait")
        if end == "abort":
            job.on_both(lambda rank, backend: backend.abort())
        job.backends.clear()
        gc.collect()
        until(lambda: job.on_link() == 0, what="the end of both")
        synchronize()
    assert job.waits()[1] == 0


@FLAVOURS
def test_a_block_is_held_as_one(job: Job, other: Other) -> None:
    def body(rank: int, backend: Any) -> None:
        backend._start_coalescing()
        for _ in range(3):
            all_reduce(backend, ones(rank))
        wait(backend._end_coalescing())

    with other.inside():
        job.on_both(body)
        until(lambda: job.on_link() == SIZE, what="two blocks that wait")
        assert ran() == 0
    synchronize()
    assert ran() == 3 * SIZE
    assert job.waits() == (SIZE, 0)


@FLAVOURS
@pytest.mark.parametrize(("call", "name"), [("write_value", WRITES), ("wait_value", WAITS)])
def test_a_device_that_refuses_holds_nothing_and_the_status_says_so(
    job: Job, other: Other, call: str, name: str, tmp_path: Path
) -> None:
    links = HostSemaphores(
        lambda: job.gate, lambda: NamedLinks(("link",)), "test", LONG_S, folder=lambda: tmp_path
    )
    links.follow("own", OWN_LEVEL)
    links.tick([GroupInfo("pair", (0, 1), 0)])
    with other.inside():
        control.inject("refuse", call, count=control.EVER)
        job.reduce_all()
        synchronize()
        assert ran() == SIZE
    assert job.waits() == (0, 0)
    assert links.status()["device_refuses"] == f"{name}_v2 fails with CUDA's error 801"
    control.release()
    job.gate.set_wait_s(SHORT_S)
    with other.inside():
        job.reduce_all()
    assert links.status()["device_refuses"] is None


@FLAVOURS
def test_nothing_is_put_into_a_graph(job: Job, other: Other) -> None:
    tensor, graph = ones(), torch.cuda.CUDAGraph()
    with other.inside():
        with torch.cuda.graph(graph):
            wait(all_reduce(job.backends[0], tensor))
        assert {WRITES, WAITS}.isdisjoint(control.calls())
        assert job.on_link() == 0
