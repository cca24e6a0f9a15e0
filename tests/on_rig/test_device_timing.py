"""Times of a device's operations: what the records say against what NCCL's kernels did, and that
neither the host, nor a stream, nor a capture notices."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from control_fakes import until
from cuda_rig import control
from drained import drain

from crux_torch import _C
from crux_torch.measure import records as rec
from crux_torch.measure import timeline
from crux_torch.measure.records import Flag, GroupInfo
from crux_torch.measure.sample import summarize
from on_rig.ranks import (
    FLAVOURS,
    SIZE,
    all_reduce,
    alone,
    both,
    crux,
    fresh,
    ones,
    pair,
    sleep,
    synchronize,
    wait,
)

#: What an injected delay makes an operation take; long against what this machine does meanwhile.
KERNEL_S = 0.08


@pytest.fixture
def recorder() -> Iterator[Any]:
    made = _C.process_recorder(65536)
    with fresh():
        synchronize()
        made.enabled = made.timing = True
        made.drain(1 << 30)
        yield made
    synchronize()
    made.enabled = made.timing = True


def wrapped(flavour: str) -> list[Any]:
    """The two ranks behind recording backends."""
    return [crux(inner) for inner in pair(flavour)]


def connected(recorder: Any, flavour: str) -> list[Any]:
    """The same, after their first operation."""
    backends = wrapped(flavour)
    both(lambda rank: wait(all_reduce(backends[rank], ones(rank))))
    drain(recorder, SIZE)
    control.clear()
    return backends


def slow_down(seconds: float = KERNEL_S) -> None:
    """Every all-reduce takes so much longer from now on."""
    control.inject("delay", "all_reduce", seconds, control.EVER)


def hold() -> None:
    """No all-reduce ends from now on until ``control.release()``."""
    control.inject("hold", "all_reduce", count=control.EVER)


def of_rank(records: rec.Records, backend: Any) -> rec.Records:
    mine = records[records["group"] == backend.group_index]
    return mine[np.argsort(mine["sequence"], kind="stable")]


def truth(rank: int, op: str = "all_reduce") -> list[dict[str, Any]]:
    return [each for each in control.operations() if (each["rank"], each["op"]) == (rank, op)]


def begins_ns(records: rec.Records) -> Any:
    return records["end_ns"] - records["device_ns"]


def check_against(records: rec.Records, operations: list[dict[str, Any]]) -> None:
    """Durations contain what the kernels took, and places are within a part of an operation."""
    assert len(records) == len(operations)
    took = np.array([op["end_ns"] - op["start_ns"] for op in operations])
    assert (records["device_ns"] > 0.999 * took).all()
    assert np.median(records["device_ns"] / took) < 1.02
    assert (records["flags"] & Flag.DEVICE_CLOCK != 0).all()
    # A busy host learns late how the device's clock stands.
    ends = np.array([op["end_ns"] for op in operations])
    assert np.median(np.abs(records["end_ns"] - ends)) < 0.5 * took.min()


@FLAVOURS
def test_durations_and_places_are_the_devices(recorder: Any, flavour: str) -> None:
    """Also where the backend reports as late as nccl2's watchdog, up to a second."""
    backends = connected(recorder, flavour)
    slow_down()

    def body(rank: int) -> None:
        tensor = ones(rank)
        for number in range(6):
            sleep(KERNEL_S / 3)
            wait(all_reduce(backends[rank], tensor, asynchronous=number % 2 == 0))

    both(body)
    records = drain(recorder, 6 * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        check_against(mine, truth(rank))
        synchronous = mine["flags"] & Flag.SYNCHRONOUS != 0
        assert synchronous.tolist() == [number % 2 == 1 for number in range(6)]
        # The host was done long before the device: places are the device's, not the host's.
        assert mine["issue_ns"].max() < mine["start_ns"][2:].min()


@FLAVOURS
def test_what_queues_up_begins_when_the_one_before_has_ended(recorder: Any, flavour: str) -> None:
    backends = connected(recorder, flavour)
    slow_down()

    def body(rank: int) -> None:
        for work in [all_reduce(backends[rank], ones(rank)) for _ in range(5)]:
            wait(work)

    both(body)
    records = drain(recorder, 5 * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        check_against(mine, truth(rank))
        assert (begins_ns(mine)[1:] == mine["end_ns"][:-1]).all()
        # Computation came to all of them at once, and waits from there.
        reached = timeline.reaches(mine).ready_ns
        spans = timeline.stretches(begins_ns(mine), mine["end_ns"], reached)
        assert (spans.end_ns - spans.wait_ns).sum() > 0.9 * mine["device_ns"].sum()


@FLAVOURS
def test_a_block_and_its_parts_have_the_blocks_times(recorder: Any, flavour: str) -> None:
    backends = connected(recorder, flavour)
    control.inject("delay", "all_reduce", KERNEL_S, SIZE)

    def body(rank: int) -> None:
        backends[rank]._start_coalescing()
        for n in (10, 20):
            all_reduce(backends[rank], ones(rank, n))
        # Dropped at once, with the device still at it. ProcessGroupNCCL's handle of a block has no
        # outputs: whoever asks for them ends the process.
        backends[rank]._end_coalescing()

    both(body)
    synchronize()
    records = drain(recorder, 3 * SIZE)
    for backend in backends:
        *parts, whole = of_rank(records, backend)
        assert rec.OPS[whole["op"]] == "coalesced"
        assert whole["device_ns"] > 0.9e9 * KERNEL_S
        assert [part["bytes"] for part in parts] == [40, 80]
        for part in parts:
            assert part["flags"] & Flag.COALESCED
            for field in ("start_ns", "end_ns", "device_ns"):
                assert part[field] == whole[field]


@FLAVOURS
def test_without_timing_nothing_is_asked_of_the_device(recorder: Any, flavour: str) -> None:
    recorder.timing = False
    backends = wrapped(flavour)

    def untimed(rank: int) -> None:
        work = all_reduce(backends[rank], ones(rank))
        all_reduce(backends[rank], ones(rank), asynchronous=False)
        backends[rank]._start_coalescing()
        all_reduce(backends[rank], ones(rank))
        wait(backends[rank]._end_coalescing())
        # NCCL's events are made without timing until somebody wants times.
        with pytest.raises(RuntimeError, match="timing"):
            work._get_duration()

    both(untimed)
    assert all("timing events" not in control.calls(thread) for thread in ("first", "other"))
    records = drain(recorder, 4 * SIZE)
    assert (records["flags"] & Flag.UNTIMED != 0).all()
    assert (records["end_ns"] == -1).all()
    assert (records["device_ns"] == -1).all()
    assert (records["issue_ns"] == records["start_ns"]).all()
    assert sum(flags & Flag.COALESCED != 0 for flags in records["flags"]) == SIZE

    recorder.timing = True
    control.clear()
    slow_down()
    both(lambda rank: [wait(all_reduce(backends[rank], ones(rank))) for _ in range(4)])
    records = drain(recorder, 4 * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        assert mine["sequence"].tolist() == list(range(4, 8))
        # Nothing was known of what ran before the first one.
        check_against(mine[1:], truth(rank)[1:])


@FLAVOURS
def test_a_block_is_timed_as_it_was_begun(recorder: Any, flavour: str) -> None:
    backends, turn = wrapped(flavour), Barrier(SIZE)

    def body(rank: int) -> None:
        for begins in (True, False):
            turn.wait()
            recorder.timing = begins
            turn.wait()
            backends[rank]._start_coalescing()
            all_reduce(backends[rank], ones(rank, 10))
            turn.wait()
            recorder.timing = not begins
            turn.wait()
            all_reduce(backends[rank], ones(rank, 20))
            wait(backends[rank]._end_coalescing())

    both(body)
    records = drain(recorder, 6 * SIZE)
    for backend in backends:
        mine = of_rank(records, backend)
        assert [flags & Flag.UNTIMED != 0 for flags in mine["flags"]] == 3 * [False] + 3 * [True]
        assert (mine["device_ns"][:3] > 0).all()
        assert (mine["device_ns"][3:] == -1).all()


@FLAVOURS
def test_all_to_all_and_transfers_are_timed(recorder: Any, flavour: str) -> None:
    backends = connected(recorder, flavour)

    def body(rank: int) -> None:
        backend, peer = backends[rank], 1 - rank
        for _ in range(2):
            wait(backend.alltoall_base(ones(rank), ones(rank), [], []))
            tensor = ones(rank)
            wait(backend.send([tensor], peer, 0) if rank == 0 else backend.recv([tensor], peer, 0))
        wait(backend.reduce_scatter([ones(rank, 10)], [[ones(rank, 10)] * SIZE]))

    both(body)
    records = drain(recorder, 5 * SIZE)
    for backend in backends:
        mine = of_rank(records, backend)
        assert (mine["device_ns"] > 0).all()
        assert (begins_ns(mine) >= mine["start_ns"]).all()
        collectives = mine[~np.isin(mine["op"], [rec.OP_NUMBER["send"], rec.OP_NUMBER["recv"]])]
        assert (begins_ns(collectives)[1:] >= collectives["end_ns"][:-1]).all()


@FLAVOURS
def test_neither_the_host_nor_a_stream_waits_for_it(recorder: Any, flavour: str) -> None:
    """As often as on the stock backend; and handles, refusals and errors are the stock ones."""

    def waits(backend: Any) -> tuple[Any, ...]:
        wait(all_reduce(backend, ones()))
        torch.cuda.synchronize()
        control.clear()
        # Where an operation has ended already, torch makes no stream wait for it.
        hold()
        works = [all_reduce(backend, ones()) for _ in range(4)]
        handle = all_reduce(backend, ones(), asynchronous=False)
        works[0].wait()
        backend._start_coalescing()
        all_reduce(backend, ones())
        backend._end_coalescing().wait()
        calls = control.calls()
        control.release()
        torch.cuda.synchronize()
        hold()
        held, event = all_reduce(backend, ones()), torch.cuda.Event()
        event.record()
        event.synchronize()
        control.release()
        until(lambda: bool(held.is_completed()), what="the end")
        control.inject("refuse", "all_reduce")
        with pytest.raises(RuntimeError) as refused:
            all_reduce(backend, ones())
        names = (*control.WAITS, "cudaStreamWaitEvent")
        return [calls.get(name, 0) for name in names], handle is None, str(refused.value)

    stock, ours = waits(alone(flavour)), waits(crux(alone(flavour)))
    assert ours[:2] == stock[:2]
    assert ours[2].splitlines()[0] == stock[2].splitlines()[0]
    # Blocks have a record of their own.
    drain(recorder, 10)


@FLAVOURS
def test_a_capture_is_left_alone_and_counted(recorder: Any, flavour: str) -> None:
    """In the strictest mode, while the thread that watches the device has something to watch."""
    watched, captured = crux(alone(flavour)), crux(alone(flavour))
    for backend in (watched, captured):
        wait(all_reduce(backend, ones()))
    drain(recorder, 2)
    hold()
    work, before = all_reduce(watched, ones()), recorder.captured
    tensor, side, graph = torch.zeros(4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
        tensor += 1
        wait(all_reduce(captured, tensor))
        all_reduce(captured, tensor, asynchronous=False)
        time.sleep(0.1)
        graph.capture_end()
    assert recorder.captured - before == 2
    assert recorder.drain(1 << 30) == b""
    control.release()
    work.wait()
    graph.replay()
    assert tensor.tolist() == [1.0] * 4
    assert (drain(recorder, 1)["device_ns"] > 0).all()
    # The graph runs what it was captured on: no other communicator may take its place.
    assert "graph" in captured.handovers[0].refusal


def nobody_asks() -> bool:
    control.clear()
    time.sleep(0.1)
    return "cudaEventQuery" not in control.calls("other")


@FLAVOURS
def test_operations_in_flight_at_the_end_are_recorded_as_such(recorder: Any, flavour: str) -> None:
    backends = connected(recorder, flavour)
    hold()
    works = []
    both(lambda rank: works.append(all_reduce(backends[rank], ones(rank))))
    assert recorder.drain(1 << 30) == b""
    both(lambda rank: backends[rank].abort())
    # ProcessGroupNCCL's handles ask their communicator, also one that was destroyed meanwhile.
    if flavour == "legacy":
        until(nobody_asks, what="the end of questions")
    backends.clear()
    works.clear()
    gc.collect()
    records = drain(recorder, SIZE)
    assert (records["device_ns"] == -1).all()
    ends = {rec.STATUSES.index(name) for name in ("failed", "incomplete")}
    assert set(records["status"]) <= ends


def test_a_shutdown_waits_for_the_last_times(recorder: Any) -> None:
    backends = connected(recorder, "legacy")
    slow_down()
    both(lambda rank: (all_reduce(backends[rank], ones(rank)), backends[rank].shutdown())[1])
    assert (drain(recorder, SIZE)["device_ns"] > 0.9e9 * KERNEL_S).all()


def forked(body: Callable[[], bool]) -> bool:
    """Whether ``body`` ends and is true in a fork of this process."""
    for _ in range(5):
        began, begins = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os.write(begins, b"1")
            os._exit(0 if body() else 1)
        # CPython 3.11 hangs in the fork itself if another thread has its list of threads locked.
        started = select.select([began], [], [], 20)[0]
        if not started:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(began)
        os.close(begins)
        if started:
            return status == 0
    return False


@FLAVOURS
def test_a_forked_process_leaves_the_parents_device_alone(recorder: Any, flavour: str) -> None:
    backends = connected(recorder, flavour)
    slow_down()
    both(lambda rank: all_reduce(backends[rank], ones(rank)) and None)

    # In the child no thread of the parent runs: whoever waits for one waits for ever.
    def body() -> bool:
        recorder.drain(1 << 30)
        return backends[0].handovers[0].collectives == 2

    assert forked(body)
    assert (drain(recorder, SIZE)["device_ns"] > 0).all()


@FLAVOURS
def test_times_go_on_across_a_switch(recorder: Any, flavour: str) -> None:
    """What is issued on the next communicator begins behind the last of this one."""
    backends, nexts = connected(recorder, flavour), pair(flavour)
    switches, each = [backend.handovers[0] for backend in backends], 8
    slow_down()

    def body(rank: int) -> None:
        for _ in range(each):
            wait(all_reduce(backends[rank], ones(rank)))

    both(body)
    holds = [s.arm(n, 2, timedelta(seconds=20)) for s, n in zip(switches, nexts, strict=True)]
    assert holds[0] == holds[1]
    assert all(switch.decide(holds[0]) for switch in switches)
    both(body)
    assert all(switch.finish() for switch in switches)
    synchronize()
    for switch in switches:
        switch.release()
    nexts.clear()
    records = drain(recorder, 2 * each * SIZE)
    for rank, backend in enumerate(backends):
        mine, done = of_rank(records, backend), truth(rank)
        assert mine["sequence"].tolist() == list(range(1, 1 + 2 * each))
        assert (mine["status"] == rec.STATUSES.index("ok")).all()
        assert (np.diff(mine["end_ns"]) > 0).all()
        took = np.array([op["end_ns"] - op["start_ns"] for op in done])
        assert np.median(mine["device_ns"] / took) < 1.02
        assert len({op["communicator"] for op in done}) == 2
        assert all(a["end_ns"] <= b["start_ns"] for a, b in itertools.pairwise(done))


@FLAVOURS
def test_exposed_time_is_what_the_compute_stream_waited(recorder: Any, flavour: str) -> None:
    backends = connected(recorder, flavour)
    # Long against what other work on the machine adds to a wait.
    kernel_s, iterations = 0.03, 12
    slow_down(kernel_s)
    waits: list[list[Any]] = [[], []]

    def event() -> Any:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def body(rank: int) -> None:
        buckets = [ones(rank, 1000 + n) for n in range(3)]
        for _ in range(iterations):
            # As DDP: the first bucket leaves within backward, the last when it ends.
            sleep(kernel_s)
            works = [all_reduce(backends[rank], buckets[0])]
            sleep(kernel_s / 2)
            works += [all_reduce(backends[rank], bucket) for bucket in buckets[1:]]
            before = event()
            for work in works:
                wait(work)
            waits[rank].append((before, event()))
            all_reduce(backends[rank], buckets[0], asynchronous=False)

    both(body)
    synchronize()
    records = drain(recorder, 4 * iterations * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        groups = [GroupInfo("world", (0, 1), rank)] * (backend.group_index + 1)
        summary = summarize(mine, groups, rank=rank, world_size=SIZE, host="host")
        line = timeline.describe(
            *timeline.intervals(mine),
            mine["bytes"].astype(np.int64),
            np.array([mine["end_ns"][3], mine["end_ns"][-1]], dtype=np.int64),
            timeline.reaches(mine),
        )
        assert summary is not None
        assert line is not None
        waited_s = sum(a.elapsed_time(b) for a, b in waits[rank][1:]) / 1e3
        waited_s += mine["device_ns"][7::4].sum() / 1e9
        assert line.exposed_s == pytest.approx(waited_s, rel=0.3)
        assert summary.exposed_s == pytest.approx(waited_s / (iterations - 1), rel=0.3)


@FLAVOURS
def test_iterations_are_the_devices_where_the_host_is_ahead(recorder: Any, flavour: str) -> None:
    backends = connected(recorder, flavour)
    slow_down(0.005)
    iterations, every = 25, 5
    marks: list[list[int]] = [[], []]
    steps: list[list[Any]] = [[], []]

    def body(rank: int) -> None:
        buckets = [ones(rank, 1000 + n) for n in range(2)]
        for number in range(iterations):
            # As DDP: the first bucket leaves within backward, the second when it ends.
            sleep(0.03)
            works = [all_reduce(backends[rank], buckets[0])]
            sleep(0.002)
            works.append(all_reduce(backends[rank], buckets[1]))
            for work in works:
                wait(work)
            steps[rank].append(torch.cuda.Event(enable_timing=True))
            steps[rank][-1].record()
            marks[rank].append(time.monotonic_ns())
            if number % every == every - 1:
                steps[rank][-1].synchronize()

    both(body)
    synchronize()
    records = drain(recorder, 2 * iterations * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        groups = [GroupInfo("world", (0, 1), rank)] * (backend.group_index + 1)
        found = summarize(
            mine, groups, rank=rank, world_size=SIZE, host="host", marks_ns=marks[rank]
        )
        assert found is not None
        first, last = steps[rank][0], steps[rank][-2]
        period_s = first.elapsed_time(last) / 1e3 / (iterations - 2)
        assert np.median(np.diff(marks[rank])) < 0.5e9 * period_s, "the host is not ahead"
        assert found.iterations == iterations - 2
        iterations_s = np.diff(found.transfers.bounds) / 1e9
        assert iterations_s.mean() == pytest.approx(period_s, rel=0.1)
        # Kernels and the second operation; where this machine is held up, that is a pause.
        assert 0.98 * 0.04 < found.period_s < 1.1 * period_s
        assert sum(row.bytes for row in found.traffic) == found.iterations * 4 * (1000 + 1001)
        # They queue up, and the stream waits from where it came to the second.
        waited = (mine["end_ns"] - mine["start_ns"])[3:-2:2]
        assert 0.9 * waited.min() < 1e9 * found.exposed_s < 1.1 * waited.max()


def in_use(rank: int) -> int:
    """Bytes, once Python has dropped what no operation needs."""
    gc.collect()
    return torch.cuda.memory_allocated(rank)


def test_handles_keep_no_memory_that_the_script_gave_back(recorder: Any) -> None:
    backends = connected(recorder, "legacy")
    before = [in_use(rank) for rank in range(SIZE)]

    def is_back(rank: int) -> bool:
        return in_use(rank) == before[rank]

    def becomes_as_before() -> None:
        for rank in range(SIZE):
            until(functools.partial(is_back, rank), what="the memory")

    both(lambda rank: wait(all_reduce(backends[rank], ones(rank))))
    assert (drain(recorder, SIZE)["device_ns"] > 0).all()
    becomes_as_before()
    hold()
    both(lambda rank: wait(all_reduce(backends[rank], ones(rank, 20 << 20))))
    # 80 MB each, of an operation that has not even begun: recorded without its time.
    records = drain(recorder, SIZE)
    assert (records["device_ns"] == -1).all()
    assert (records["status"] == rec.STATUSES.index("ok")).all()
    control.release()
    synchronize()
    becomes_as_before()


def test_handles_that_never_end_are_not_watched_for_ever(recorder: Any) -> None:
    backends = connected(recorder, "legacy")
    hold()
    watched, extra = 8192, 50

    def body(rank: int) -> None:
        tensor = ones(rank, 1)
        for _ in range(watched + extra):
            all_reduce(backends[rank], tensor)

    both(body)
    records = drain(recorder, extra * SIZE)
    assert (records["device_ns"] == -1).all()
    for backend in backends:
        assert of_rank(records, backend)["sequence"].tolist() == list(range(1, extra + 1))
    # Not aborted: on a busy machine a thread of ProcessGroupNCCL, with so many aborted operations
    # before it, ends the process when the group goes.
    control.release()
    drain(recorder, watched * SIZE)


@FLAVOURS
def test_a_passage_is_left_when_the_device_is_done(
    recorder: Any, flavour: str, tmp_path: Path
) -> None:
    backends = connected(recorder, flavour)
    gate = _C.link_gate()
    link = gate.join(str(tmp_path), "test", "link", "job")
    for backend in backends:
        gate.cross(backend.group_index, [link])
    gate.set_level(1)
    gate.install(True)

    def passing() -> int:
        return sum(holder.operations for holder in gate.holders(link))

    def reduce_all(rank: int) -> None:
        wait(all_reduce(backends[rank], ones(rank)))

    def block(rank: int) -> None:
        backends[rank]._start_coalescing()
        reduce_all(rank)
        reduce_all(rank)
        backends[rank]._end_coalescing()
        backends[rank].barrier()

    def settles(body: Callable[[int], None]) -> None:
        """``body`` passes once on each rank until the device has done it."""
        hold()
        both(body)
        until(lambda: passing() == SIZE, what="the device to come to both")
        control.release()

    try:
        settles(reduce_all)
        until(lambda: passing() == 0, what="the end of an operation")
        # A block passes once; a barrier doesn't.
        settles(block)
        until(lambda: passing() == 0, what="the end of a block")
        # Neither recording nor success is needed for it.
        recorder.enabled = False
        both(reduce_all)
        until(lambda: passing() == 0, what="the end of what is not recorded")
        control.inject("refuse", "all_reduce")
        with pytest.raises(RuntimeError):
            all_reduce(backends[0], ones(0))
        until(lambda: passing() == 0, what="the end of what was refused")
        # The end of the group ends what will never end.
        hold()
        both(reduce_all)
        until(lambda: passing() == SIZE, what="the device to come to both")
        both(lambda rank: backends[rank].abort())
        backends.clear()
        gc.collect()
        until(lambda: passing() == 0, what="the end of the group")
    finally:
        gate.install(False)
        gate.retire()
