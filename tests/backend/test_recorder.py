"""The recorder as Python sees it: one true record for each operation, and nothing else changed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drained import drain
from on_threads import both
from programs import python
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg

from crux_torch.measure import records as rec
from crux_torch.measure.records import Flag

_C = pytest.importorskip("crux_torch._C")

RANK, SIZE = 1, 4
#: Bytes of one ``tensor()``.
NBYTES = 24


def tensor(n: int = 6) -> torch.Tensor:
    return torch.ones(n, dtype=torch.float32)


@pytest.fixture
def recorder() -> Iterator[Any]:
    """The recorder of this process, empty and enabled."""
    recorder = _C.process_recorder(65536)
    recorder.enabled = True
    recorder.drain(1 << 30)
    yield recorder
    recorder.enabled = recorder.timing = True
    recorder.drain(1 << 30)


def fake_backend(**options: Any) -> Any:
    """A backend that moves nothing and succeeds at once."""
    fake_options = fake_pg.FakeProcessGroup.Options()
    for name, value in options.items():
        setattr(fake_options, name, value)
    return fake_pg.FakeProcessGroup._create_internal(RANK, SIZE, fake_options)


def fake_group(recorder: Any, **options: Any) -> tuple[Any, Any]:
    """A process group whose CPU operations go through a recording backend to a fake one."""
    backend = _C.DelegatingBackend("fake", RANK, SIZE, recorder)
    backend.add_inner("cpu", fake_backend(**options))
    group = c10d.ProcessGroup(dist.HashStore(), RANK, SIZE)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.CUSTOM, backend)
    return group, backend


@pytest.fixture
def fake(recorder: Any) -> tuple[Any, Any]:
    return fake_group(recorder)


def gloo_pair(
    recorder: Any | None, timeout: timedelta = timedelta(seconds=30)
) -> tuple[list[Any], list[Any]]:
    """The two ranks of a gloo group, both in this process; plain without a recorder."""
    store = dist.HashStore()
    inners: list[Any] = [None, None]

    def make(rank: int) -> None:
        inners[rank] = c10d.ProcessGroupGloo(store, rank, 2, timeout)

    both(make)
    if recorder is None:
        return inners, inners
    backends = [_C.DelegatingBackend("gloo", rank, 2, recorder) for rank in range(2)]
    for backend, inner in zip(backends, inners, strict=True):
        backend.add_inner("cpu", inner)
    return backends, inners


def test_numpy_and_cpp_agree_on_the_record() -> None:
    assert rec.RECORD.itemsize == _C.RECORD_BYTES == 64
    assert rec.OPS == _C.OPS
    offsets = {name: field[1] for name, field in (rec.RECORD.fields or {}).items()}
    assert sorted(offsets.values()) == [0, 8, 16, 24, 32, 40, 48, 52, 56, 60, 61, 62, 63]


def test_one_recorder_a_process_whatever_capacity_is_asked_for_later(recorder: Any) -> None:
    again = _C.process_recorder(2)
    assert again.capacity == recorder.capacity
    recorder.enabled = False
    assert not again.enabled


def test_bytes_that_are_no_records_are_refused() -> None:
    with pytest.raises(ValueError):
        rec.from_bytes(bytes(65))
    assert len(rec.from_bytes(b"")) == 0


def lists(count: int, n: int = 6) -> list[torch.Tensor]:
    return [tensor(n) for _ in range(count)]


def root(options: Any, rank: int) -> Any:
    options.rootRank = rank
    return options


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (5,), check_invariants=True)


@dataclass(frozen=True)
class Case:
    """An operation's call, and its bytes and peer by the convention of
    docs/understand/measuring.md."""

    op: str
    call: Callable[[Any], Any]
    nbytes: int = NBYTES
    peer: int = -1


WHOLE = SIZE * NBYTES
CASES = {
    "allreduce": Case("allreduce", lambda g: g.allreduce([tensor()])),
    "sparse": Case("allreduce", lambda g: g.allreduce([sparse()]), 2 * 8 + 2 * 4),
    "allreduce_coalesced": Case(
        "allreduce_coalesced", lambda g: g.allreduce_coalesced([tensor(), tensor(2)]), NBYTES + 8
    ),
    "broadcast": Case(
        "broadcast", lambda g: g.broadcast([tensor()], root(dist.BroadcastOptions(), 3)), peer=3
    ),
    "reduce": Case("reduce", lambda g: g.reduce([tensor()], root(dist.ReduceOptions(), 2)), peer=2),
    "allgather": Case("allgather", lambda g: g.allgather([lists(SIZE)], [tensor()]), WHOLE),
    "allgather_single": Case(
        "allgather_single", lambda g: g._allgather_base(tensor(SIZE * 6), tensor()), WHOLE
    ),
    "allgather_coalesced": Case(
        "allgather_coalesced",
        lambda g: g.allgather_coalesced([lists(2) for _ in range(SIZE)], lists(2)),
        2 * WHOLE,
    ),
    "allgather_into_tensor_coalesced": Case(
        "allgather_coalesced",
        lambda g: g.allgather_into_tensor_coalesced(lists(2, SIZE * 6), lists(2)),
        2 * WHOLE,
    ),
    "gather at the root": Case(
        "gather",
        lambda g: g.gather([lists(SIZE)], [tensor()], root(dist.GatherOptions(), RANK)),
        WHOLE,
        RANK,
    ),
    "gather elsewhere": Case(
        "gather", lambda g: g.gather([], [tensor()], root(dist.GatherOptions(), 0)), WHOLE, 0
    ),
    "scatter at the root": Case(
        "scatter",
        lambda g: g.scatter([tensor()], [lists(SIZE)], root(dist.ScatterOptions(), RANK)),
        WHOLE,
        RANK,
    ),
    "scatter elsewhere": Case(
        "scatter", lambda g: g.scatter([tensor()], [], root(dist.ScatterOptions(), 0)), WHOLE, 0
    ),
    "reduce_scatter": Case(
        "reduce_scatter", lambda g: g.reduce_scatter([tensor()], [lists(SIZE)]), WHOLE
    ),
    "reduce_scatter_single": Case(
        "reduce_scatter_single", lambda g: g._reduce_scatter_base(tensor(), tensor(SIZE * 6)), WHOLE
    ),
    "reduce_scatter_tensor_coalesced": Case(
        "reduce_scatter_coalesced",
        lambda g: g.reduce_scatter_tensor_coalesced(lists(2), lists(2, SIZE * 6)),
        2 * WHOLE,
    ),
    "alltoall": Case("alltoall", lambda g: g.alltoall(lists(SIZE), lists(SIZE)), WHOLE),
    "alltoall_single": Case(
        "alltoall_single",
        lambda g: g.alltoall_base(tensor(8), tensor(12), [2] * SIZE, [3] * SIZE),
        48,
    ),
    "send": Case("send", lambda g: g.send([tensor()], 3, 0), peer=3),
    "recv": Case("recv", lambda g: g.recv([tensor()], 2, 0), peer=2),
    "recv from anyone": Case("recv", lambda g: g.recv_anysource([tensor()], 0)),
    "barrier": Case("barrier", lambda g: g.barrier(), 0),
}
#: Gloo tells nobody when these end, so that wait() is their end.
END_AT_WAIT = {
    "send",
    "recv",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_coalesced",
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_leaves_one_true_record(name: str, fake: Any, recorder: Any) -> None:
    group, backend = fake
    case = CASES[name]
    before, counted = time.monotonic_ns(), recorder.recorded
    work = case.call(group)
    work.wait()
    work.wait()
    del work
    (row,) = drain(recorder, 1)
    assert recorder.recorded == counted + 1
    into = "allgather_into_tensor_coalesced"
    flags = rec.Flag.END_AT_WAIT if case.op in END_AT_WAIT or name == into else 0
    told = {field: row[field].item() for field in rec.RECORD.names if not field.endswith("_ns")}
    assert told == {
        "sequence": 0,
        "bytes": case.nbytes,
        "group": backend.group_index,
        "world_size": SIZE,
        "peer": case.peer,
        "op": rec.OP_NUMBER[case.op],
        "device": 0,
        "status": rec.STATUSES.index("ok"),
        "flags": flags,
    }
    assert row["start_ns"] == row["issue_ns"]
    assert row["device_ns"] == -1
    assert before <= row["issue_ns"] <= row["end_ns"] <= time.monotonic_ns()


def test_every_operation_has_a_case() -> None:
    untested = set(_C.OPS) - {case.op for case in CASES.values()}
    # Only sparse CUDA tensors reach the first; coalescing has its own test.
    assert untested == {"unknown", "allreduce_sparse", "coalesced"}


def test_collectives_and_transfers_are_counted_apart_and_by_group(fake: Any, recorder: Any) -> None:
    group, backend = fake
    other, other_backend = fake_group(recorder)
    assert other_backend.group_index == backend.group_index + 1
    for g in (group, group, other, group):
        g.allreduce([tensor()]).wait()
        g.send([tensor()], 0, 0).wait()
    for name in ("allreduce", "send"):
        CASES[name].call(group).wait()
    records = drain(recorder, 10)
    for op in ("allreduce", "send"):
        rows = records[records["op"] == rec.OP_NUMBER[op]]
        mine = rows[rows["group"] == backend.group_index]
        assert mine["sequence"].tolist() == [0, 1, 2, 3]
        assert rows[rows["group"] == other_backend.group_index]["sequence"].tolist() == [0]


def test_the_table_of_groups_knows_each_backend(fake: Any, recorder: Any) -> None:
    group = recorder.groups()[fake[1].group_index]
    assert (group.rank, group.size, group.ranks) == (RANK, SIZE, [])


def test_a_handle_nobody_waits_for_is_incomplete(fake: Any, recorder: Any) -> None:
    work = fake[0].send([tensor()], 0, 0)
    assert recorder.drain(1) == b""
    del work
    (row,) = drain(recorder, 1)
    assert rec.STATUSES[row["status"]] == "incomplete"
    assert row["end_ns"] == -1


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="torch 2.11's fake work is never complete"
)
def test_asking_whether_it_is_complete_ends_a_record(fake: Any, recorder: Any) -> None:
    work = fake[0].recv([tensor()], 0, 0)
    assert work.is_completed()
    (row,) = drain(recorder, 1)
    assert rec.STATUSES[row["status"]] == "ok"
    assert row["end_ns"] >= row["issue_ns"]
    work.wait()
    assert recorder.drain(1) == b""


def test_a_disabled_recorder_records_nothing(fake: Any, recorder: Any) -> None:
    group, _ = fake
    recorder.enabled = False
    counted = recorder.recorded + recorder.dropped
    for case in CASES.values():
        case.call(group).wait()
    assert recorder.recorded + recorder.dropped == counted
    recorder.enabled = True
    group.allreduce([tensor()]).wait()
    # Operations that were not recorded are not counted either.
    assert drain(recorder, 1)["sequence"].tolist() == [0]


def test_without_timing_an_operation_is_recorded_as_it_is_issued(fake: Any, recorder: Any) -> None:
    group, _ = fake
    recorder.timing = False
    for name, case in CASES.items():
        work = case.call(group)
        # Nobody waited, and nothing is done with the handle.
        (row,) = drain(recorder, 1)
        assert (rec.OPS[row["op"]], row["bytes"], row["peer"]) == (
            case.op,
            case.nbytes,
            case.peer,
        ), name
        assert row["flags"] & Flag.UNTIMED, name
        assert row["issue_ns"] == row["start_ns"] > 0, name
        assert row["end_ns"] == row["device_ns"] == -1, name
        assert rec.STATUSES[row["status"]] == "ok", name
        work.wait()
        assert recorder.drain(1) == b"", name
    recorder.timing = True
    group.allreduce([tensor()]).wait()
    (row,) = drain(recorder, 1)
    assert not row["flags"] & Flag.UNTIMED
    assert row["end_ns"] >= row["issue_ns"]
    # The numbers went on.
    transfers = sum(case.op in ("send", "recv") for case in CASES.values())
    assert row["sequence"] == len(CASES) - transfers


@pytest.mark.parametrize("switch", ["timing", "enabled"])
def test_what_was_issued_before_it_was_switched_off_is_recorded_in_full(
    switch: str, fake: Any, recorder: Any
) -> None:
    work = fake[0].send([tensor()], 0, 0)
    setattr(recorder, switch, False)
    work.wait()
    (row,) = drain(recorder, 1)
    assert row["op"] == rec.OP_NUMBER["send"]
    assert not row["flags"] & Flag.UNTIMED
    assert row["end_ns"] >= row["issue_ns"]


def error_of(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        call()
    # What follows is the C++ backtrace.
    return type(caught.value), str(caught.value).split("\nException raised from")[0]


@pytest.mark.parametrize("timing", [True, False])
def test_a_refused_call_is_recorded_as_failed_and_raised_unchanged(
    timing: bool, recorder: Any
) -> None:
    recorder.timing = timing
    plain = fake_backend(error_on_collective=True)
    group, _ = fake_group(recorder, error_on_collective=True)
    expected = error_of(lambda: plain.allreduce([tensor()]))
    assert error_of(lambda: group.allreduce([tensor()])) == expected
    (row,) = drain(recorder, 1)
    assert rec.STATUSES[row["status"]] == "failed"
    assert row["op"] == rec.OP_NUMBER["allreduce"]
    assert row["bytes"] == NBYTES
    assert row["end_ns"] >= row["issue_ns"]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
class TestGloo:
    """Real transfers between two ranks in one process."""

    def test_results_are_right_and_times_are_ordered(self, recorder: Any) -> None:
        backends, _ = gloo_pair(recorder)
        results: list[list[torch.Tensor]] = [[], []]
        before = time.monotonic_ns()

        def body(rank: int) -> None:
            backend = backends[rank]
            for n in (1, 1000, 100000):
                t = tensor(n) * (rank + 1)
                backend.allreduce([t]).wait()
                results[rank].append(t)
            t = tensor(50) * rank
            (backend.send([t], 1, 5) if rank == 0 else backend.recv([t], 0, 5)).wait()
            results[rank].append(t)

        both(body)
        records = drain(recorder, 8)
        for rank in range(2):
            assert all(torch.equal(t, torch.full_like(t, 3)) for t in results[rank][:3])
            assert torch.equal(results[rank][3], torch.zeros(50))
            mine = records[records["group"] == backends[rank].group_index]
            reduced = mine[mine["op"] == rec.OP_NUMBER["allreduce"]]
            assert reduced["bytes"].tolist() == [4, 4000, 400000]
            assert reduced["sequence"].tolist() == [0, 1, 2]
            assert (reduced["issue_ns"][1:] >= reduced["issue_ns"][:-1]).all()
            (transfer,) = mine[mine["op"] == rec.OP_NUMBER[("send", "recv")[rank]]]
            assert (transfer["sequence"], transfer["peer"]) == (0, 1 - rank)
            assert transfer["flags"] == rec.Flag.END_AT_WAIT
        assert (records["issue_ns"] >= before).all()
        assert (records["issue_ns"] == records["start_ns"]).all()
        assert (records["end_ns"] > records["issue_ns"]).all()
        assert (records["status"] == rec.STATUSES.index("ok")).all()

    def test_a_collective_ends_when_the_last_rank_has_come(self, recorder: Any) -> None:
        backends, _ = gloo_pair(recorder)

        def body(rank: int) -> None:
            if rank == 1:
                time.sleep(0.3)
            backends[rank].allreduce([tensor()]).wait()

        both(body)
        records = np.sort(drain(recorder, 2), order="issue_ns")
        assert records["group"].tolist() == [b.group_index for b in backends]
        # The early rank's record lasts until the late one has called.
        assert records["end_ns"][0] >= records["issue_ns"][1]

    def test_what_gloo_refuses_is_raised_unchanged(self, recorder: Any) -> None:
        options = root(dist.BroadcastOptions(), 9)
        errors = []
        for recording in (None, recorder):
            backends, _ = gloo_pair(recording)
            errors.append(error_of(lambda b=backends[0]: b.broadcast([tensor()], options)))
        assert errors[0] == errors[1]
        assert "invalid root rank: 9" in errors[0][1]
        (row,) = drain(recorder, 1)
        assert (row["peer"], rec.STATUSES[row["status"]]) == (9, "failed")

    @pytest.mark.parametrize("op", ["allreduce", "recv"])
    def test_a_timeout_is_recorded_as_failed(self, op: str, recorder: Any) -> None:
        calls: dict[str, Callable[[Any], Any]] = {
            "allreduce": lambda b: b.allreduce([tensor()]),
            "recv": lambda b: b.recv([tensor()], 1, 0),
        }
        backends, _ = gloo_pair(recorder, timedelta(milliseconds=200))
        kind, message = error_of(lambda: calls[op](backends[0]).wait())
        assert kind is RuntimeError
        assert "imed out" in message
        (row,) = drain(recorder, 1)
        assert (rec.OPS[row["op"]], rec.STATUSES[row["status"]]) == (op, "failed")
        assert row["end_ns"] > row["issue_ns"]

    def test_the_monitored_barrier_is_a_barrier(self, recorder: Any) -> None:
        backends, _ = gloo_pair(recorder)
        for enabled, count in ((True, 2), (False, 0)):
            recorder.enabled = enabled
            both(lambda rank: backends[rank].monitored_barrier(timedelta(seconds=30), True))
            records = drain(recorder, count)
            assert records["op"].tolist() == [rec.OP_NUMBER["barrier"]] * count
            assert (records["end_ns"] >= records["issue_ns"]).all()


OVERFLOW = """
import json, torch
from datetime import timedelta
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import ProcessGroupGloo
from crux_torch import _C
from crux_torch.backend import register
recorder = register.recorder()
group = _C.DelegatingBackend("gloo", 0, 1, recorder)
group.add_inner("cpu", ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=30)))
totals = []
for i in range(100):
    t = torch.full((4,), float(i))
    group.allreduce([t]).wait()
    totals.append(t.sum().item())
group.shutdown()
del group
print(json.dumps({
    "capacity": recorder.capacity,
    "totals": totals,
    "recorded": recorder.recorded,
    "dropped": recorder.dropped,
    "records": recorder.drain(1 << 30).hex(),
}))
"""


def test_a_full_ring_drops_new_records_and_blocks_nobody() -> None:
    told = json.loads(python(OVERFLOW, CRUX_TUNING="records=8").splitlines()[-1])
    assert told["capacity"] == 8
    assert told["totals"] == [4.0 * i for i in range(100)]
    assert told["recorded"] + told["dropped"] == 100
    assert told["recorded"] == 8
    records = rec.from_bytes(bytes.fromhex(told["records"]))
    assert len(set(records["sequence"].tolist())) == 8
    assert (records["status"] == rec.STATUSES.index("ok")).all()


def test_many_threads_issue_while_one_drains(fake: Any, recorder: Any) -> None:
    group, _ = fake
    threads_count, each = 4, 250
    counted = recorder.recorded + recorder.dropped

    def issue() -> None:
        for _ in range(each):
            group.allreduce([tensor()]).wait()

    threads = [threading.Thread(target=issue, daemon=True) for _ in range(threads_count)]
    for thread in threads:
        thread.start()
    raw = b""
    while any(thread.is_alive() for thread in threads):
        raw += recorder.drain(16)
    records = rec.from_bytes(raw + recorder.drain(1 << 30))
    assert recorder.recorded + recorder.dropped == counted + threads_count * each
    assert sorted(records["sequence"].tolist()) == list(range(threads_count * each))
