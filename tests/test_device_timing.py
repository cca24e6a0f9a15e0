"""Times of a device's operations, over the fake accelerator: what the records say against what its
streams did, and that nothing else changes for it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fake_gpu
import numpy as np
import on_threads
import pytest
import torch
import torch.distributed as dist
from drained import DEADLINE_S, drain

from crux_torch.measure import record as rec
from crux_torch.measure import timeline
from crux_torch.measure.record import Flag, GroupInfo
from crux_torch.measure.sample import summarize

_C = pytest.importorskip("crux_torch._C")

available, why_not = fake_gpu.available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not available, reason=why_not)]

SIZE = 2
#: What an injected delay makes an operation take; long against what this machine does meanwhile.
KERNEL_S = 0.08


@pytest.fixture
def recorder() -> Iterator[Any]:
    recorder = _C.process_recorder(65536)
    recorder.enabled = True
    fake_gpu.load()
    fake_gpu.drain()
    recorder.drain(1 << 30)
    fake_gpu.clear()
    yield recorder
    fake_gpu.release()
    fake_gpu.drain()
    fake_gpu.configure(legacy=False, watchdog_period_s=0.02, timing=False)
    recorder.enabled = recorder.timing = True
    recorder.drain(1 << 30)


@pytest.fixture(params=["hooks", "polled"])
def kind(request: pytest.FixtureRequest) -> str:
    """Who tells durations: completion hooks, as nccl2 has them, or handles that are asked."""
    if request.param == "hooks" and not fake_gpu.has_completion_hooks():
        pytest.skip("this torch has no completion hooks")
    return str(request.param)


def both(body: Callable[[int], object]) -> None:
    """``body(rank)`` on a thread for each rank, on its own device; raises what either raised."""

    def on_its_device(rank: int) -> None:
        fake_gpu.load().set_device(rank)
        body(rank)

    on_threads.both(on_its_device)


def make_inners(**settings: Any) -> list[Any]:
    """The fake NCCL's two ranks, in this process."""
    native = fake_gpu.load()
    fake_gpu.configure(**settings)
    store = dist.HashStore()
    inners: list[Any] = [None] * SIZE

    def make(rank: int) -> None:
        inners[rank] = native.Nccl(store, rank, SIZE, fake_gpu.nccl_options())

    both(make)
    return inners


def make_pair(recorder: Any, kind: str, watchdog_period_s: float = 0.05) -> list[Any]:
    """The two ranks behind recording backends."""
    settings = {"legacy": kind == "polled", "watchdog_period_s": watchdog_period_s}
    backends = []
    for rank, inner in enumerate(make_inners(**settings)):
        backend = _C.DelegatingBackend("nccl", rank, SIZE, recorder)
        backend.add_inner(fake_gpu.DEVICE, inner)
        backends.append(backend)
    return backends


def connected_pair(recorder: Any, kind: str) -> list[Any]:
    """The same, after their first operation."""
    backends = make_pair(recorder, kind)
    both(lambda rank: wait(allreduce(backends[rank], ones(rank))))
    drain(recorder, SIZE)
    return backends


def slow_down(seconds: float) -> None:
    """Every all-reduce takes so much longer from now on."""
    fake_gpu.inject("delay", op="ALLREDUCE", seconds=seconds, count=1 << 20)


def hold() -> None:
    """No all-reduce ends from now on until ``fake_gpu.release()``."""
    fake_gpu.inject("hold", op="ALLREDUCE", count=1 << 20)


def ones(rank: int, n: int = 1000) -> torch.Tensor:
    return torch.ones(n, device=f"{fake_gpu.DEVICE}:{rank}")


def options(cls: Any, *, asynchronous: bool) -> Any:
    made = cls()
    made.asyncOp = asynchronous
    return made


def allreduce(backend: Any, tensor: torch.Tensor, *, asynchronous: bool = True) -> Any:
    return backend.allreduce([tensor], options(dist.AllreduceOptions, asynchronous=asynchronous))


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def of_rank(records: rec.Records, backend: Any) -> rec.Records:
    mine = records[records["group"] == backend.group_index]
    return mine[np.argsort(mine["sequence"], kind="stable")]


def truth(rank: int) -> list[dict[str, Any]]:
    return [op for op in fake_gpu.operations() if op["rank"] == rank]


def check_against(records: rec.Records, operations: list[dict[str, Any]]) -> None:
    """Durations are within 2% of what the device took, places within a part of an operation."""
    assert len(records) == len(operations)
    took = np.array([op["end_ns"] - op["start_ns"] for op in operations])
    assert np.abs(records["device_ns"] / took - 1).max() < 0.02
    assert (records["flags"] & Flag.DEVICE_CLOCK != 0).all()
    ends = np.array([op["end_ns"] for op in operations])
    # A busy host learns late how the device's clock stands.
    assert np.abs(records["end_ns"] - ends).max() < 0.5 * took.min()


def test_durations_and_places_are_the_devices(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)
    slow_down(KERNEL_S)

    def body(rank: int) -> None:
        tensor = ones(rank)
        for number in range(6):
            fake_gpu.sleep(KERNEL_S / 3)
            wait(allreduce(backends[rank], tensor, asynchronous=number % 2 == 0))

    both(body)
    records = drain(recorder, 6 * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        # The first connects the communicator, on a stream of which the mark knows nothing.
        check_against(mine[1:], truth(rank)[1:])
        synchronous = mine["flags"] & Flag.SYNCHRONOUS != 0
        assert synchronous.tolist() == [number % 2 == 1 for number in range(6)]
        # The host was done long before the device: places are the device's, not the host's.
        assert mine["issue_ns"].max() < mine["start_ns"][2:].min()
    assert fake_gpu.violations() == []


def test_what_queues_up_begins_when_the_one_before_has_ended(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)
    slow_down(KERNEL_S)

    def body(rank: int) -> None:
        tensor = ones(rank)
        wait(allreduce(backends[rank], tensor))
        works = [allreduce(backends[rank], tensor) for _ in range(5)]
        for work in works:
            wait(work)

    both(body)
    records = drain(recorder, 6 * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)[1:]
        check_against(mine, truth(rank)[1:])
        begin = mine["end_ns"] - mine["device_ns"]
        assert (begin[1:] == mine["end_ns"][:-1]).all()
        # Computation came to all of them at once, and waits from there.
        spans = timeline.stretches(begin, mine["end_ns"], timeline.reaches(mine).ready_ns)
        waited = spans.end_ns - spans.wait_ns
        assert waited.sum() > 0.9 * mine["device_ns"].sum()
    assert fake_gpu.violations() == []


def test_a_late_report_changes_no_time(recorder: Any) -> None:
    if not fake_gpu.has_completion_hooks():
        pytest.skip("this torch has no completion hooks")
    backends = make_pair(recorder, "hooks", watchdog_period_s=1.0)
    slow_down(KERNEL_S)

    def body(rank: int) -> None:
        tensor = ones(rank)
        for _ in range(4):
            wait(allreduce(backends[rank], tensor))

    both(body)
    assert fake_gpu.drain()
    for rank, backend in enumerate(backends):
        assert len(truth(rank)) == 4, backend
    records = drain(recorder, 4 * SIZE)
    for rank, backend in enumerate(backends):
        check_against(of_rank(records, backend)[1:], truth(rank)[1:])


def test_a_block_and_its_parts_have_the_blocks_times(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)

    def body(rank: int) -> None:
        wait(allreduce(backends[rank], ones(rank)))
        backends[rank]._start_coalescing()
        for n in (10, 20):
            allreduce(backends[rank], ones(rank, n))
        wait(backends[rank]._end_coalescing())

    both(body)
    records = drain(recorder, 4 * SIZE)
    for backend in backends:
        _, *parts, whole = of_rank(records, backend)
        assert rec.OPS[whole["op"]] == "coalesced"
        assert whole["device_ns"] > 0
        assert [part["bytes"] for part in parts] == [40, 80]
        for part in parts:
            assert part["flags"] & Flag.COALESCED
            for field in ("start_ns", "end_ns", "device_ns"):
                assert part[field] == whole[field]
    assert fake_gpu.violations() == []


def test_without_timing_nothing_is_asked_of_the_device(recorder: Any, kind: str) -> None:
    recorder.timing = False
    backends = make_pair(recorder, kind)
    slow_down(KERNEL_S)

    def untimed(rank: int) -> None:
        tensor = ones(rank)
        work = allreduce(backends[rank], tensor)
        allreduce(backends[rank], tensor, asynchronous=False)
        backends[rank]._start_coalescing()
        allreduce(backends[rank], tensor)
        wait(backends[rank]._end_coalescing())
        # NCCL's events are made without timing until somebody wants times.
        with pytest.raises(RuntimeError, match="timing"):
            work._get_duration()

    events = fake_gpu.load().timing_events()
    both(untimed)
    assert fake_gpu.load().timing_events() == events
    records = drain(recorder, 4 * SIZE)
    assert (records["flags"] & Flag.UNTIMED != 0).all()
    assert (records["end_ns"] == -1).all()
    assert (records["device_ns"] == -1).all()
    assert (records["issue_ns"] == records["start_ns"]).all()
    assert sum(flags & Flag.COALESCED != 0 for flags in records["flags"]) == SIZE

    recorder.timing = True
    numbered = [len(truth(rank)) for rank in range(SIZE)]

    def timed(rank: int) -> None:
        tensor = ones(rank)
        for _ in range(4):
            wait(allreduce(backends[rank], tensor))

    both(timed)
    records = drain(recorder, 4 * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        assert (mine["sequence"] == np.arange(4, 8)).all()
        check_against(mine[1:], truth(rank)[numbered[rank] :][1:])
    assert fake_gpu.violations() == []


def test_a_block_is_timed_as_it_was_begun(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)

    def body(rank: int) -> None:
        backend = backends[rank]
        for begins in (True, False):
            turn.wait()
            recorder.timing = begins
            turn.wait()
            backend._start_coalescing()
            allreduce(backend, ones(rank, 10))
            turn.wait()
            recorder.timing = not begins
            turn.wait()
            allreduce(backend, ones(rank, 20))
            wait(backend._end_coalescing())

    turn = threading.Barrier(SIZE)
    both(body)
    records = drain(recorder, 6 * SIZE)
    for backend in backends:
        mine = of_rank(records, backend)
        assert [flags & Flag.UNTIMED != 0 for flags in mine["flags"]] == 3 * [False] + 3 * [True]
        assert (mine["device_ns"][:3] > 0).all()
        assert (mine["device_ns"][3:] == -1).all()


def test_all_to_all_and_transfers_are_timed(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)

    def body(rank: int) -> None:
        backend, peer = backends[rank], 1 - rank
        wait(allreduce(backend, ones(rank)))
        for _ in range(2):
            wait(backend.alltoall_base(ones(rank), ones(rank), [], []))
            tensor = ones(rank)
            wait(backend.send([tensor], peer, 0) if rank == 0 else backend.recv([tensor], peer, 0))
        wait(backend.reduce_scatter([ones(rank, 10)], [[ones(rank, 10)] * SIZE]))

    both(body)
    records = drain(recorder, 6 * SIZE)
    for backend in backends:
        mine = of_rank(records, backend)
        assert (mine["device_ns"] > 0).all()
        begin = mine["end_ns"] - mine["device_ns"]
        assert (begin >= mine["start_ns"]).all()
        collectives = mine[~np.isin(mine["op"], [rec.OP_NUMBER["send"], rec.OP_NUMBER["recv"]])]
        begin = collectives["end_ns"] - collectives["device_ns"]
        assert (begin[1:] >= collectives["end_ns"][:-1]).all()
    assert fake_gpu.violations() == []


def test_what_is_captured_passes_through_and_is_counted(recorder: Any, kind: str) -> None:
    if not fake_gpu.tells_captures():
        pytest.skip("this torch's guards can't tell captures; CUDA is asked directly there")
    backends = make_pair(recorder, kind)
    tensors = [ones(rank) for rank in range(SIZE)]
    graphs: list[Any] = [None] * SIZE
    before = recorder.captured
    in_capture = threading.Barrier(SIZE)

    def capture(rank: int) -> None:
        wait(allreduce(backends[rank], tensors[rank]))
        fake_gpu.load().drain(10.0)
        in_capture.wait(300)
        with fake_gpu.capture() as graphs[rank]:
            for _ in range(3):
                wait(allreduce(backends[rank], tensors[rank]))
            # The thread that watches the device looks at it meanwhile.
            time.sleep(0.05)
            in_capture.wait(300)

    both(capture)
    assert recorder.captured - before == 3 * SIZE
    assert len(drain(recorder, SIZE)) == SIZE

    def replay(rank: int) -> None:
        graphs[rank].replay()
        wait(allreduce(backends[rank], tensors[rank]))

    both(replay)
    records = drain(recorder, SIZE)
    assert (records["device_ns"] > 0).all()
    assert fake_gpu.drain()
    # Doubled by each of five.
    assert all(t.cpu().unique().tolist() == [float(2**5)] for t in tensors)
    assert fake_gpu.violations() == []
    # The graph runs what it was captured on: no other communicator may take its place.
    assert all("graph" in backend.switches[0].refusal for backend in backends)


def test_operations_in_flight_at_the_end_are_recorded_as_such(recorder: Any, kind: str) -> None:
    backends = connected_pair(recorder, kind)
    hold()
    both(lambda rank: allreduce(backends[rank], ones(rank)) and None)
    assert recorder.drain(1 << 30) == b""
    both(lambda rank: backends[rank].abort())
    backends.clear()
    gc.collect()
    fake_gpu.release()
    records = drain(recorder, SIZE)
    assert (records["device_ns"] == -1).all()
    assert set(records["status"]) <= {
        rec.STATUSES.index("failed"),
        rec.STATUSES.index("incomplete"),
    }


def asked() -> int:
    """How often this extension asked handles whether they have ended."""
    return sum(n for (method, who), n in fake_gpu.calls().items() if "_C" in who)


def test_a_communicator_that_ends_is_not_asked_any_more(recorder: Any) -> None:
    # ProcessGroupNCCL's handles ask their communicator, also one that was destroyed meanwhile.
    backends = connected_pair(recorder, "polled")
    hold()
    works: list[Any] = [None] * SIZE

    def body(rank: int) -> None:
        works[rank] = allreduce(backends[rank], ones(rank))

    both(body)
    time.sleep(0.05)
    assert asked() > 0
    for backend in backends:
        backend.abort()
    before = asked()
    time.sleep(0.05)
    assert asked() == before, fake_gpu.calls()
    assert (drain(recorder, SIZE)["status"] == rec.STATUSES.index("incomplete")).all()


def test_a_shutdown_waits_for_the_last_times(recorder: Any) -> None:
    backends = connected_pair(recorder, "polled")
    slow_down(KERNEL_S)
    both(lambda rank: (allreduce(backends[rank], ones(rank)), backends[rank].shutdown())[1])
    records = drain(recorder, SIZE)
    assert (records["device_ns"] > 0.9e9 * KERNEL_S).all()


def test_a_forked_process_leaves_the_parents_device_alone(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)
    slow_down(0.2)
    both(lambda rank: allreduce(backends[rank], ones(rank)) and None)
    # In the child no thread of the parent runs: whoever waits for one waits for ever.
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        recorder.drain(1 << 30)
        assert backends[0].switches[0].collectives == 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (drain(recorder, SIZE)["device_ns"] > 0).all()


def test_times_go_on_across_a_switch(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)
    slow_down(KERNEL_S)
    nexts = make_inners()
    switches = [backend.switches[0] for backend in backends]
    each = 8

    def body(rank: int) -> None:
        tensor = ones(rank)
        for _ in range(each):
            wait(allreduce(backends[rank], tensor))

    both(body)
    holds = [s.arm(n, 2, timedelta(seconds=20)) for s, n in zip(switches, nexts, strict=True)]
    assert holds[0] == holds[1]
    assert all(s.decide(holds[0]) for s in switches)
    both(body)
    assert all(s.finish() for s in switches)
    assert fake_gpu.drain()
    for switch in switches:
        switch.release()
    nexts.clear()
    records = drain(recorder, 2 * each * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        assert mine["sequence"].tolist() == list(range(2 * each))
        assert (mine["status"] == rec.STATUSES.index("ok")).all()
        took = np.array([op["end_ns"] - op["start_ns"] for op in truth(rank)])
        assert np.abs(mine["device_ns"] / took - 1).max() < 0.02
        assert (np.diff(mine["end_ns"]) > 0).all()
    # Once: what is issued on the next communicator must begin behind the last of this one.
    assert [kind for kind, _ in fake_gpu.violations()] == ["work_synchronize"] * SIZE


def test_exposed_time_is_what_the_compute_stream_waited(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)
    slow_down(0.01)
    iterations = 12
    waits: list[list[Any]] = [[], []]

    def event() -> Any:
        made = torch.Event(fake_gpu.DEVICE, enable_timing=True)
        made.record()
        return made

    def body(rank: int) -> None:
        buckets = [ones(rank, 1000 + n) for n in range(3)]
        for _ in range(iterations):
            # As DDP: the first bucket leaves within backward, the last when it ends.
            fake_gpu.sleep(0.01)
            works = [allreduce(backends[rank], buckets[0])]
            fake_gpu.sleep(0.005)
            works += [allreduce(backends[rank], bucket) for bucket in buckets[1:]]
            before = event()
            for work in works:
                wait(work)
            waits[rank].append((before, event()))
            allreduce(backends[rank], buckets[0], asynchronous=False)

    both(body)
    assert fake_gpu.drain()
    records = drain(recorder, 4 * iterations * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        summary = summarize(
            mine, [GroupInfo("world", (0, 1), rank)], rank=rank, world_size=SIZE, host="host"
        )
        assert summary is not None
        line = timeline.describe(
            *timeline.intervals(mine),
            mine["bytes"].astype(np.int64),
            np.array([mine["end_ns"][3], mine["end_ns"][-1]], dtype=np.int64),
            timeline.reaches(mine),
        )
        assert line is not None
        waited_s = sum(a.elapsed_time(b) for a, b in waits[rank][1:]) / 1e3
        waited_s += mine["device_ns"][7::4].sum() / 1e9
        assert line.exposed_s == pytest.approx(waited_s, rel=0.2)
        assert summary.exposed_s == pytest.approx(waited_s / (iterations - 1), rel=0.2)


def test_iterations_are_the_devices_where_the_host_is_ahead(recorder: Any, kind: str) -> None:
    backends = make_pair(recorder, kind)
    slow_down(0.005)
    iterations, every = 25, 5
    marks: list[list[int]] = [[], []]
    steps: list[list[Any]] = [[], []]

    def body(rank: int) -> None:
        buckets = [ones(rank, 1000 + n) for n in range(2)]
        for number in range(iterations):
            # As DDP: the first bucket leaves within backward, the second when it ends.
            fake_gpu.sleep(0.03)
            works = [allreduce(backends[rank], buckets[0])]
            fake_gpu.sleep(0.002)
            works.append(allreduce(backends[rank], buckets[1]))
            for work in works:
                wait(work)
            steps[rank].append(torch.Event(fake_gpu.DEVICE, enable_timing=True))
            steps[rank][-1].record()
            marks[rank].append(time.monotonic_ns())
            if number % every == every - 1:
                steps[rank][-1].synchronize()

    both(body)
    assert fake_gpu.drain()
    records = drain(recorder, 2 * iterations * SIZE)
    for rank, backend in enumerate(backends):
        mine = of_rank(records, backend)
        found = summarize(
            mine,
            [GroupInfo("world", (0, 1), rank)] * (backend.group_index + 1),
            rank=rank,
            world_size=SIZE,
            host="host",
            marks_ns=marks[rank],
        )
        assert found is not None
        first, last = steps[rank][0], steps[rank][-2]
        period_s = first.elapsed_time(last) / 1e3 / (iterations - 2)
        assert np.median(np.diff(marks[rank])) < 0.5e9 * period_s, "the host is not ahead"
        assert found.iterations == iterations - 2
        iterations_s = np.diff(found.transfers.bounds) / 1e9
        assert iterations_s.mean() == pytest.approx(period_s, rel=0.02)
        # Kernels and the second operation; where this machine is held up, that is a pause.
        assert 0.98 * 0.04 < found.period_s < 1.02 * period_s
        assert sum(row.bytes for row in found.traffic) == found.iterations * 4 * (1000 + 1001)
        # They queue up, and the stream waits from where it came to the second.
        waited = (mine["end_ns"] - mine["start_ns"])[3:-2:2]
        assert found.exposed_s == pytest.approx(waited.mean() / 1e9, rel=0.2)


def memory_in_use() -> list[int]:
    """Bytes of each device."""
    return [fake_gpu.load().memory_in_use(rank)[0] for rank in range(SIZE)]


def becomes(wanted: list[int]) -> bool:
    """Whether as much memory is in use again, once Python has dropped what no operation does."""
    deadline = time.monotonic() + DEADLINE_S
    while memory_in_use() != wanted and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
    return memory_in_use() == wanted


def test_handles_are_kept_no_longer_than_the_device_takes(recorder: Any) -> None:
    backends = connected_pair(recorder, "polled")
    gc.collect()
    before = memory_in_use()
    both(lambda rank: wait(allreduce(backends[rank], ones(rank))))
    assert (drain(recorder, SIZE)["device_ns"] > 0).all()
    assert becomes(before)


def test_memory_that_the_script_gave_back_is_not_kept_for_a_time(recorder: Any) -> None:
    backends = connected_pair(recorder, "polled")
    gc.collect()
    before = memory_in_use()
    hold()
    both(lambda rank: wait(allreduce(backends[rank], ones(rank, 20 << 20))))
    # 80 MB each, of an operation that has not even begun: recorded without its time.
    records = drain(recorder, SIZE)
    assert (records["device_ns"] == -1).all()
    assert (records["status"] == rec.STATUSES.index("ok")).all()
    assert becomes(before)
    fake_gpu.release()


def test_handles_that_never_end_are_not_watched_for_ever(recorder: Any) -> None:
    backends = connected_pair(recorder, "polled")
    hold()
    watched, extra = 8192, 50

    def body(rank: int) -> None:
        tensor = ones(rank, 1)
        for _ in range(watched + extra):
            allreduce(backends[rank], tensor)

    both(body)
    records = drain(recorder, extra * SIZE)
    assert (records["device_ns"] == -1).all()
    for backend in backends:
        assert of_rank(records, backend)["sequence"].tolist() == list(range(1, extra + 1))
        backend.abort()
    drain(recorder, watched * SIZE)


def test_a_passage_is_left_when_the_device_is_done(
    recorder: Any, kind: str, tmp_path: Path
) -> None:
    # The watchdog would report too late.
    backends = make_pair(recorder, kind, watchdog_period_s=300.0)
    both(lambda rank: wait(allreduce(backends[rank], ones(rank))))
    gate = _C.link_gate()
    link = gate.join(str(tmp_path), "test", "link", "job")
    for backend in backends:
        gate.cross(backend.group_index, [link])
    gate.set_level(1)
    gate.install(True)

    def passing() -> int:
        return sum(holder.operations for holder in gate.holders(link))

    def settles(count: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while passing() != count and time.monotonic() < deadline:
            time.sleep(0.001)
        return passing() == count

    try:
        hold()
        both(lambda rank: allreduce(backends[rank], ones(rank)) and None)
        assert passing() == SIZE
        fake_gpu.release()
        assert settles(0, 60.0)

        # A block passes once; a receive and a barrier don't.
        fake_gpu.inject("hold", count=1 << 20)

        def block(rank: int) -> None:
            backends[rank]._start_coalescing()
            for _ in range(3):
                allreduce(backends[rank], ones(rank))
            backends[rank]._end_coalescing()
            if rank == 0:
                backends[rank].recv([ones(rank)], 1, 0)

        both(block)
        assert passing() == SIZE
        fake_gpu.release()
        both(lambda rank: backends[1].send([ones(1)], 0, 0) and None if rank == 1 else None)
        assert settles(0, 60.0)

        # Neither recording nor success is needed for it.
        recorder.enabled = False
        both(lambda rank: wait(allreduce(backends[rank], ones(rank))))
        assert settles(0, 60.0)
        fake_gpu.inject("refuse", op="ALLREDUCE", count=1, rank=0)
        with pytest.raises(RuntimeError):
            allreduce(backends[0], ones(0))
        assert settles(0, 60.0)

        # The end of the group ends what will never end.
        hold()
        both(lambda rank: allreduce(backends[rank], ones(rank)) and None)
        assert passing() == SIZE
        both(lambda rank: backends[rank].abort())
        backends.clear()
        gc.collect()
        assert settles(0, 60.0)
    finally:
        gate.install(False)
        gate.retire()
        fake_gpu.release()
