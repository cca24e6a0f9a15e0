"""The switch of inner backends, with all ranks of a group in one process, over Gloo."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from crux_torch import _C
from crux_torch.backend import inner_backends, register
from crux_torch.backend.handover import Groups, attempt
from crux_torch.backend.handover.attempt import GroupStatus

#: Seconds that anything here may take before the test fails.
LIMIT_S = 120.0


class Failing(Store):
    """A store that can be told to fail, and for which ranks."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.fails: Callable[[str, str], bool] = lambda call, key: False

    def _do(self, call: str, key: str, *args: Any) -> Any:
        if self.fails(call, key):
            raise RuntimeError(f"injected into {call}({key})")
        return getattr(self.inner, call)(key, *args)

    def set(self, key: str, value: Any) -> None:
        self._do("set", key, value)

    def get(self, key: str) -> bytes:
        return self._do("get", key)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        if any(self.fails("check", key) for key in keys):
            raise RuntimeError(f"injected into check({keys})")
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=20)) -> None:
        self.inner.wait(keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._do("compare_set", key, expected, desired)  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        return bool(self._do("delete_key", key))


class World:
    """Ranks of one group; each call of a collective is made by all of them."""

    def __init__(self, size: int, groups: Groups, timeout_s: float = 20.0) -> None:
        self.size, self.groups = size, groups
        self.shared = HashStore()
        self.stores = [Failing(self.shared) for _ in range(size)]
        self.backends: list[Any] = [None] * size
        born = groups.generation

        def make(rank: int) -> None:
            prefixed = PrefixStore("gloo/", self.shared)
            gloo = c10d.ProcessGroupGloo(prefixed, rank, size, timeout=timedelta(seconds=timeout_s))
            made = _C.DelegatingBackend("crux", rank, size, register.recorder())
            made.add_inner("cpu", gloo)
            self.backends[rank] = made

        with ranks_at_work(make, size):
            pass
        for made, store in zip(self.backends, self.stores, strict=True):
            groups.add(made, store, born)

    @property
    def switches(self) -> list[Any]:
        return [made.handovers[0] for made in self.backends]

    def inners(self) -> list[Any]:
        return [made.default_inner for made in self.backends]

    def all_reduce(self) -> None:
        tensors = [torch.full((8,), float(rank + 1)) for rank in range(self.size)]
        works = [b.allreduce([t]) for b, t in zip(self.backends, tensors, strict=True)]
        for work in works:
            work.wait()
        expected = self.size * (self.size + 1) / 2
        assert all(bool((t == expected).all()) for t in tensors)

    def send(self, source: int, target: int, value: float, tag: int = 0) -> Any:
        return self.backends[source].send([torch.tensor([value])], target, tag)

    def receive(self, source: int, target: int, tag: int = 0) -> float:
        tensor = torch.zeros(1)
        self.backends[target].recv([tensor], source, tag).wait()
        return float(tensor)

    def watch(self, stalls: threading.Event) -> None:
        """Set ``stalls`` once training has not moved for a while."""
        before = -1
        while before != (before := self.switches[0].collectives):
            time.sleep(0.3)
        stalls.set()

    def statuses(self) -> list[GroupStatus]:
        found = {status.group: status for status in self.groups.status()}
        return [found[made.group_index] for made in self.backends]

    def train_until(self, done: Callable[[], bool]) -> int:
        """All-reduce until ``done``; the number of them."""
        begin, steps = time.monotonic(), 0
        while not done():
            # The calls of one process's ranks follow each other: where one would wait for a
            # decision, so must those behind it, as they do in a job.
            self.all_reduce()
            steps += 1
            assert time.monotonic() - begin < LIMIT_S, self.statuses()
        return steps

    def switched(self, generation: int) -> Callable[[], bool]:
        return lambda: all(
            s.generation == generation and s.state == "idle" for s in self.statuses()
        )

    def failed(self) -> Callable[[], bool]:
        return lambda: all(s.state == "failed" for s in self.statuses())


@contextlib.contextmanager
def ranks_at_work(work: Callable[[int], None], size: int) -> Iterator[None]:
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert not errors, errors


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups(patience_s=5.0, hold_s=5.0)
    yield made
    made.stop()


@pytest.fixture
def world(groups: Groups) -> World:
    return World(3, groups)


def test_all_ranks_pass_to_new_connections(world: World, groups: Groups) -> None:
    first = [id(inner) for inner in world.inners()]
    before = world.inners()
    world.all_reduce()
    groups.request(1)
    world.train_until(world.switched(1))
    after = world.inners()
    assert not {id(inner) for inner in after} & set(first)
    assert len({status.switched_at for status in world.statuses()}) == 1
    assert all(status.created_ms is not None for status in world.statuses())
    # Whoever kept the old backend may still use it; the group does not.
    del before
    world.all_reduce()


@pytest.mark.slow
def test_many_switches_in_a_row(world: World, groups: Groups) -> None:
    for generation in range(1, 13):
        groups.request(generation)
        world.train_until(world.switched(generation))
    assert groups.wait(LIMIT_S)


def test_an_older_generation_changes_nothing(world: World, groups: Groups) -> None:
    groups.request(5)
    world.train_until(world.switched(5))
    inners = world.inners()
    groups.request(5)
    groups.request(3)
    assert groups.wait(LIMIT_S)
    assert [a is b for a, b in zip(inners, world.inners(), strict=True)] == [True] * 3


def test_a_group_at_rest_switches_at_once(world: World, groups: Groups) -> None:
    groups.request(1)
    assert groups.wait(LIMIT_S)
    assert world.switched(1)()
    assert {status.switched_at for status in world.statuses()} == {0}
    world.all_reduce()


def test_what_was_done_before_the_request_is_no_rate(world: World, groups: Groups) -> None:
    """Hundreds of collectives in a long life are few a second: the switch comes soon."""
    for _ in range(200):
        world.all_reduce()
    time.sleep(2.0)
    groups.request(1)
    while not world.switched(1)():
        world.all_reduce()
        assert world.switches[0].collectives < 300, world.statuses()
        time.sleep(0.02)
    at = {status.switched_at for status in world.statuses()}.pop()
    assert at is not None
    assert 200 <= at < 260


def test_a_group_made_after_the_request_keeps_its_connections(groups: Groups) -> None:
    older = World(2, groups)
    groups.request(1)
    assert groups.wait(LIMIT_S)
    newer = World(2, groups)
    inners = newer.inners()
    assert groups.wait(LIMIT_S)
    assert newer.switched(1)()
    assert [a is b for a, b in zip(inners, newer.inners(), strict=True)] == [True] * 2
    assert [status.switched_at for status in newer.statuses()] == [None, None]
    older.all_reduce()
    newer.all_reduce()


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "gloo2"])
def test_moved_queue_pairs_are_enough_for_each_of_nccls_backends(name: str, groups: Groups) -> None:
    """Whatever torch calls it."""
    inner = _C.DelegatingBackend(name, 0, 1, register.recorder())
    inner.add_inner("cpu", FakeProcessGroup._create_internal(0, 1))
    made = _C.DelegatingBackend("crux", 0, 1, register.recorder())
    made.add_inner("xpu", inner)
    groups.add(made, HashStore(), 0)
    groups.request(1, pairs_moved=True)
    assert groups.wait(LIMIT_S)
    (status,) = groups.status()
    assert status.state == ("idle" if name.startswith("nccl") else "failed")


def test_who_moved_queue_pairs_alone_still_switches_sockets(world: World, groups: Groups) -> None:
    groups.request(1, pairs_moved=True)
    world.train_until(world.switched(1))
    assert all(status.switched_at is not None for status in world.statuses())


def test_a_group_that_was_moved_as_it_is_keeps_its_connections(
    world: World, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    inners = world.inners()
    names = frozenset(inner.name() for inner in inners)
    monkeypatch.setattr(attempt, "ON_QUEUE_PAIRS", names)
    groups.request(1, pairs_moved=True)
    world.train_until(world.switched(1))
    assert [a is b for a, b in zip(inners, world.inners(), strict=True)] == [True] * 3
    groups.request(2)
    world.train_until(world.switched(2))
    assert [a is b for a, b in zip(inners, world.inners(), strict=True)] == [False] * 3


def test_messages_meet_whatever_the_ends_have_done(world: World, groups: Groups) -> None:
    sent = 0
    works = []
    for _ in range(4):
        works.append(world.send(0, 1, float(sent), tag=2))
        sent += 1
    assert world.receive(0, 1, tag=2) == 0.0
    groups.request(1)
    # Three messages lie in the old connections: until they are received these stay open.
    deadline = time.monotonic() + LIMIT_S
    while {status.state for status in world.statuses()} != {"decided", "closing"}:
        assert time.monotonic() < deadline, world.statuses()
        time.sleep(0.01)
    works.append(world.send(0, 1, float(sent), tag=2))
    # Its other key and the other direction were never used: new connections.
    works.append(world.send(1, 0, 7.0, tag=2))
    works.append(world.send(0, 1, 8.0, tag=3))
    assert world.receive(0, 1, tag=3) == 8.0
    assert world.receive(1, 0, tag=2) == 7.0
    for expected in range(1, 5):
        assert world.receive(0, 1, tag=2) == float(expected)
    for work in works:
        work.wait()
    assert groups.wait(LIMIT_S)
    assert world.switched(1)()


def test_transfers_stay_where_a_rank_receives_from_anybody(world: World, groups: Groups) -> None:
    tensor = torch.zeros(1)
    sending = world.send(1, 0, 3.0)
    world.backends[0].recv_anysource([tensor], 0).wait()
    sending.wait()
    assert float(tensor) == 3.0
    first = world.inners()
    for generation in (1, 2):
        groups.request(generation)
        world.train_until(world.switched(generation))
        assert all(status.transfers_stay for status in world.statuses())
    sending = world.send(2, 0, 4.0)
    world.backends[0].recv_anysource([tensor], 0).wait()
    sending.wait()
    assert float(tensor) == 4.0
    assert not any(a is b for a, b in zip(first, world.inners(), strict=True))


def test_a_group_on_a_device_does_not_keep_two_communicators(
    world: World, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "MAY_KEEP_TWO", frozenset())
    monkeypatch.setitem(inner_backends.MAKERS, "gloo", lambda *args: pytest.fail("made in vain"))
    sending = world.send(1, 0, 3.0)
    world.backends[0].recv_anysource([torch.zeros(1)], 0).wait()
    sending.wait()
    first = world.inners()
    groups.request(1)
    world.train_until(world.failed())
    assert all("point-to-point operations" in (s.error or "") for s in world.statuses())
    assert all(a is b for a, b in zip(first, world.inners(), strict=True))


def test_groups_on_a_device_make_their_communicators_in_turn(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "MAY_KEEP_TWO", frozenset())
    # The ranks of one process would wait for each other's turn, so each world has one.
    worlds = [World(1, groups) for _ in range(3)]
    making: list[Any] = []

    def make(current: Any, store: Any, timeout: timedelta, options: Any) -> Any:
        making.append(current)
        assert len(making) == 1
        time.sleep(0.05)
        made = inner_backends.like_gloo(current, store, timeout, options)
        making.remove(current)
        return made

    monkeypatch.setitem(inner_backends.MAKERS, "gloo", make)
    groups.request(1)
    with ranks_at_work(lambda i: worlds[i].train_until(worlds[i].switched(1)), len(worlds)):
        pass


def test_handles_stay_valid(world: World, groups: Groups) -> None:
    tensors = [torch.ones(4) for _ in range(3)]
    works = [b.allreduce([t]) for b, t in zip(world.backends, tensors, strict=True)]
    futures = [work.get_future() for work in works]
    receiving = torch.zeros(1)
    late = world.backends[2].recv([receiving], 1, 9)
    groups.request(1)
    sending = None

    def done() -> bool:
        nonlocal sending
        states = {status.state for status in world.statuses()}
        if sending is None and states <= {"decided", "closing", "idle"} and "decided" in states:
            sending = world.send(1, 2, 6.0, tag=9)
        return world.switched(1)()

    world.train_until(done)
    assert sending is not None
    sending.wait()
    late.wait()
    assert float(receiving) == 6.0
    for work, future in zip(works, futures, strict=True):
        assert work.is_completed()
        assert work.is_success()
        assert future.wait()[0].tolist() == [3.0] * 4


def test_what_was_set_holds_after_a_switch(world: World, groups: Groups) -> None:
    for made in world.backends:
        made._set_default_timeout(timedelta(seconds=17))
        made._set_group_uid("name") if hasattr(made, "_set_group_uid") else None
    world.all_reduce()
    numbers = [made._get_sequence_number_for_group() for made in world.backends]
    groups.request(1)
    steps = world.train_until(world.switched(1))
    for made, number in zip(world.backends, numbers, strict=True):
        assert made.options._timeout == timedelta(seconds=17)
        assert made._get_sequence_number_for_group() == number + steps
        assert made.default_inner.options._timeout == timedelta(seconds=17)
        assert made.name() == "crux"


def test_a_refused_operation_is_not_counted(world: World, groups: Groups) -> None:
    # Rank 0 alone makes a mistake, and goes on.
    with pytest.raises(RuntimeError):
        world.backends[0].allreduce([])
    assert len({s.collectives for s in world.switches}) == 1
    groups.request(1)
    world.train_until(world.switched(1))


def fail_for(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    def make(current: Any, *args: Any) -> Any:
        if current.rank() == rank:
            raise RuntimeError("no route to anywhere")
        return inner_backends.like_gloo(current, *args)

    monkeypatch.setitem(inner_backends.MAKERS, "gloo", make)


def test_all_stay_where_one_can_not_make_its_backend(
    world: World, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.patience_s = 2.0
    inners = world.inners()
    fail_for(monkeypatch, 1)
    groups.request(1)
    world.train_until(world.failed())
    assert all("no " in (status.error or "") for status in world.statuses()), world.statuses()
    assert [a is b for a, b in zip(inners, world.inners(), strict=True)] == [True] * 3
    monkeypatch.undo()
    groups.request(2)
    world.train_until(world.switched(2))


def test_all_stay_where_one_does_not_answer(
    world: World, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.patience_s = 0.3
    silent = world.stores[2]
    silent.fails = lambda call, key: "handover" in key
    groups.request(1)
    world.train_until(world.failed())
    errors = [status.error or "" for status in world.statuses()]
    assert errors[0] == errors[1] == "rank 2 said nothing in time"
    assert "can't be reached" in errors[2]
    silent.fails = lambda call, key: False
    groups.request(2)
    world.train_until(world.switched(2))


@pytest.mark.parametrize("call", ["set", "check", "compare_set"])
def test_all_stay_where_the_store_fails_before_the_decision(
    call: str, world: World, groups: Groups
) -> None:
    groups.hold_s = 0.9
    for store in world.stores:
        store.fails = lambda did, key: did == call and "hold" in key
    groups.request(1)
    world.train_until(world.failed())
    world.all_reduce()
    for store in world.stores:
        store.fails = lambda did, key: False
    groups.request(2)
    world.train_until(world.switched(2))


def test_a_short_failure_of_the_store_is_survived(world: World, groups: Groups) -> None:
    left = [5] * 3

    def failing(rank: int) -> Callable[[str, str], bool]:
        def fails(call: str, key: str) -> bool:
            left[rank] -= "handover" in key
            return 0 <= left[rank] < 5

        return fails

    for rank, store in enumerate(world.stores):
        store.fails = failing(rank)
    groups.request(1)
    world.train_until(world.switched(1))
    assert all(n < 0 for n in left)


def test_a_rank_that_skips_a_generation_keeps_nobody_waiting(groups: Groups) -> None:
    world = World(2, groups)
    groups.patience_s = 25.0
    entered = threading.Event()
    world.stores[1].fails = lambda call, key: not entered.is_set() and "handover/1/" in key
    groups.request(1)
    time.sleep(0.1)
    groups.request(2)
    entered.set()
    begin = time.monotonic()
    world.train_until(world.switched(2))
    assert time.monotonic() - begin < 20.0


def test_who_is_ahead_waits_and_nobody_parts(world: World, groups: Groups) -> None:
    """Rank 2's background is slow to say how far it goes: training reaches the hold point."""
    groups.hold_s = 20.0
    training_waits = threading.Event()
    world.stores[2].fails = lambda call, key: "hold/2" in key and not training_waits.is_set()
    groups.request(1)

    stalled = threading.Thread(target=world.watch, args=(training_waits,))
    with torch.profiler.profile() as profiler:
        stalled.start()
        world.train_until(world.switched(1))
    stalled.join(LIMIT_S)
    assert training_waits.is_set()
    held = sum(status.held for status in world.statuses())
    assert held >= 1
    waits = [e.name for e in profiler.events()].count("crux: wait for the handover")
    assert waits == held
    assert max(status.held_ms for status in world.statuses()) > 0.0


@pytest.mark.parametrize("state", ["making", "agreeing", "decided"])
def test_a_group_may_end_at_any_point(
    state: str, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(2, groups)
    if state == "making":

        def make(current: Any, store: Any, timeout: timedelta, options: Any) -> Any:
            store.wait(["never"], timeout)

        monkeypatch.setitem(inner_backends.MAKERS, "gloo", make)
    elif state == "agreeing":
        for store in world.stores:
            store.fails = lambda call, key: "hold" in key
    else:
        # One message that is never received keeps the old connections.
        world.send(0, 1, 1.0)
    groups.request(1)
    deadline = time.monotonic() + LIMIT_S
    while state not in {status.state for status in world.statuses()}:
        assert time.monotonic() < deadline, world.statuses()
        time.sleep(0.005)
    world.backends.clear()
    assert groups.wait(LIMIT_S)
    assert groups.status() == []


def test_who_waits_is_let_go_at_the_end(groups: Groups) -> None:
    world = World(2, groups)
    switches = world.switches
    next_inner = [FakeProcessGroup._create_internal(rank, 2) for rank in range(2)]
    hold = switches[0].arm(next_inner[0], 0, timedelta(seconds=LIMIT_S))
    assert hold[0] == 0
    waiting: list[Any] = []
    thread = threading.Thread(
        target=lambda: waiting.append(world.backends[0].allreduce([torch.ones(1)]))
    )
    thread.start()
    time.sleep(0.1)
    assert not waiting
    world.backends[0].shutdown()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    waited, seconds = switches[0].waits
    assert waited == 1
    assert seconds >= 0.05
    world.backends[1].allreduce([torch.ones(1)]).wait()
    waiting[0].wait()


def test_an_inner_backend_of_another_kind(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Crux can't make stays; what it is taught to make is switched, on a device too."""
    made = _C.DelegatingBackend("crux", 0, 1, register.recorder())
    monkeypatch.setattr(attempt, "MAY_KEEP_TWO", frozenset())
    made.add_inner("cpu", FakeProcessGroup._create_internal(0, 1))
    groups.add(made, HashStore(), 0)
    groups.request(1)
    assert groups.wait(LIMIT_S)
    (status,) = groups.status()
    assert status.state == "failed"
    assert "'fake' can't be made anew" in (status.error or "")

    def make(current: Any, *args: Any) -> Any:
        return FakeProcessGroup._create_internal(current.rank(), current.size())

    monkeypatch.setitem(inner_backends.MAKERS, "fake", make)
    first = made.default_inner
    groups.request(2)
    deadline = time.monotonic() + LIMIT_S
    while groups.status()[0].generation != 2:
        made.barrier()
        assert time.monotonic() < deadline, groups.status()
    assert made.default_inner is not first


def test_generations_begin_anew_with_another_world(groups: Groups) -> None:
    world = World(2, groups)
    groups.request(9)
    world.train_until(world.switched(9))
    world.backends.clear()
    del world
    assert groups.status() == []
    world = World(2, groups)
    groups.request(1)
    world.train_until(world.switched(1))
