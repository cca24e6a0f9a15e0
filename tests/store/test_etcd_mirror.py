"""The mirror of an etcd under watches that do not keep etcd's promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_fakes import SPAWN, until
from etcd_server import Etcd, needs_etcd, wait_ready
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.store.endpoint import parse_etcd

KEYS = ("a", "b", "c")


class Model:
    """The keys of an etcd, all its events, and a mirror that takes some of them in."""

    def __init__(self) -> None:
        from crux_torch.store.etcd import EtcdContents, _Part
        from crux_torch.store.etcd_session import Session

        self.revision = 1
        self.held: dict[str, Any] = {}
        self.events: list[Any] = []
        self.reads = self.watch = 0
        address = parse_etcd("etcd://127.0.0.1:1")
        self.contents = EtcdContents(address)
        self.contents._parts = [_Part("", prefix=True)]
        self.session = Session(address, "127.0.0.1:1")
        self.session._kv = SimpleNamespace(Range=self.range)
        self.read()

    def range(self, request: Any, **_: Any) -> Any:
        self.reads += not request.keys_only
        kvs = [
            SimpleNamespace(**vars(kv))
            for kv in self.held.values()
            if kv.mod_revision >= request.min_mod_revision
        ]
        for kv in kvs:
            kv.value = b"" if request.keys_only else kv.value
        header = SimpleNamespace(revision=self.revision)
        return SimpleNamespace(header=header, kvs=kvs, more=False, count=len(self.held))

    def read(self) -> None:
        """As after every stream of watches that has ended."""
        self.contents._read_all(self.session)
        self.watch += 1
        self.contents._take(self.session, self.answer(created=True))

    def answer(self, *events: Any, created: bool = False) -> Any:
        return SimpleNamespace(
            watch_id=self.watch, created=created, canceled=False, cancel_reason="", events=events
        )

    def write(self, key: str, *, deletes: bool = False, lease: int = 7) -> None:
        """A value is the revision that wrote it."""
        before = self.held.get(key)
        if deletes and before is None:
            return
        self.revision += 1
        at = self.revision
        kv = SimpleNamespace(key=key.encode(), value=b"", mod_revision=at, lease=0)
        kv.create_revision = kv.version = 0
        if deletes:
            del self.held[key]
        else:
            kv.value, kv.lease = b"%d" % at, lease
            kv.create_revision = before.create_revision if before else at
            kv.version = before.version + 1 if before else 1
            self.held[key] = kv
        self.events.append(SimpleNamespace(type=int(deletes), DELETE=1, kv=kv))

    def deliver(self, *events: Any) -> None:
        """One answer of the watch."""
        from crux_torch.store.etcd import _Cancelled

        try:
            self.contents._take(self.session, self.answer(*events))
        except _Cancelled:
            self.read()

    def compare(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """As the store process does, with a pause in which the watch may tell more."""
        behind = self.contents._behind(self.session)
        meanwhile()
        if self.contents._still_has(behind):
            self.read()

    def shown(self) -> dict[str, bytes]:
        mirror = self.contents._mirror
        return {key: value for key in KEYS if (value := mirror.get(key)) is not None}

    def truth(self) -> dict[str, bytes]:
        return {key: kv.value for key, kv in self.held.items() if kv.lease}


WRITES = st.lists(st.tuples(st.sampled_from(KEYS), st.booleans(), st.sampled_from((0, 7))))


@settings(deadline=None)
@given(WRITES)
def _a_watch_that_keeps_its_promises_is_enough(writes: list[tuple[str, bool, int]]) -> None:
    model = Model()
    for key, deletes, lease in writes:
        told = len(model.events)
        model.write(key, deletes=deletes, lease=lease)
        model.deliver(*model.events[told:])
        assert model.shown() == model.truth()
        model.compare()
    assert model.reads == 1


@settings(deadline=None)
@given(WRITES, st.data())
def _events_late_or_again_do_not_mislead(
    writes: list[tuple[str, bool, int]], data: st.DataObject
) -> None:
    model = Model()
    for key, deletes, lease in writes:
        model.write(key, deletes=deletes, lease=lease)
    numbers = list(range(len(model.events)))
    again = [n for n in data.draw(st.lists(st.integers(0, 19), max_size=10)) if n in numbers]
    for number in data.draw(st.permutations(numbers + again)):
        before = model.shown()
        model.deliver(model.events[number])
        after = model.shown()
        assert all(int(after[key]) >= int(before[key]) for key in before.keys() & after.keys())
    assert model.shown() == model.truth()


@settings(deadline=None)
@given(WRITES, WRITES, st.sampled_from(KEYS))
def _a_gap_is_noticed_with_the_next_event_of_a_key_that_lost_one(
    writes: list[tuple[str, bool, int]], lost: list[tuple[str, bool, int]], key: str
) -> None:
    model = Model()
    for name, deletes, lease in (*((one, False, 7) for one in KEYS), *writes, (key, False, 7)):
        told = len(model.events)
        model.write(name, deletes=deletes, lease=lease)
        model.deliver(*model.events[told:])
    for name, deletes, lease in (*lost, (key, False, 7), (key, False, 7)):
        model.write(name, deletes=deletes, lease=lease)
    model.deliver(model.events[-1])
    assert model.shown() == model.truth()
    assert model.reads == 2


@settings(deadline=None)
@given(WRITES, WRITES, st.data())
def _a_comparison_finds_what_no_event_tells(
    writes: list[tuple[str, bool, int]], lost: list[tuple[str, bool, int]], data: st.DataObject
) -> None:
    model = Model()
    for n, (key, deletes, lease) in enumerate((*writes, *lost)):
        told = len(model.events)
        model.write(key, deletes=deletes, lease=lease)
        if n < len(writes) or data.draw(st.booleans()):
            model.deliver(*model.events[told:])
    model.compare()
    assert model.shown() == model.truth()


@settings(deadline=None)
@given(WRITES, WRITES)
def _a_watch_that_is_only_late_is_not_read_anew(
    writes: list[tuple[str, bool, int]], later: list[tuple[str, bool, int]]
) -> None:
    model = Model()
    for key, deletes, lease in writes:
        model.write(key, deletes=deletes, lease=lease)
    told = len(model.events)

    def meanwhile() -> None:
        for key, deletes, lease in later:
            model.write(key, deletes=deletes, lease=lease)
        model.deliver(*model.events[:told])

    model.compare(meanwhile)
    assert model.reads == 1


def _one_event_is_lost(endpoint: str) -> None:
    from crux_torch.store import etcd as module
    from crux_torch.store.frames import Changes, Done, Put, Read

    module.CHECK_S = 1.0
    lost: list[Any] = []

    class Losing(module.EtcdContents):
        def _take(self, session: Any, response: Any) -> None:
            if response.events and not lost:
                lost.append(response)
            else:
                super()._take(session, response)

    reader, writer = Losing(parse_etcd(endpoint)), module.EtcdContents(parse_etcd(endpoint))
    for contents in (reader, writer):
        contents.start()

    def seen() -> bytes | None:
        answer = reader.answer(Read("a", False, 0))
        return dict(answer.values)["a"] if isinstance(answer, Changes) else None

    assert writer.answer(Put("a", b"1", 60.0)) == Done(1)
    until(lambda: seen() == b"1")
    assert writer.answer(Put("a", b"2", 60.0)) == Done(1)
    until(lambda: bool(lost))
    until(lambda: seen() == b"2")


def _call(name: str, *args: str) -> None:
    globals()[name](*args)


def _run(check: Callable[..., None], *args: str) -> None:
    """In a process of its own: gRPC stays out of this one."""
    process = SPAWN.Process(target=_call, args=(check.__name__, *args), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "check",
    [
        _a_watch_that_keeps_its_promises_is_enough,
        _events_late_or_again_do_not_mislead,
        _a_gap_is_noticed_with_the_next_event_of_a_key_that_lost_one,
        _a_comparison_finds_what_no_event_tells,
        _a_watch_that_is_only_late_is_not_read_anew,
    ],
)
def test_what_a_watch_leaves_out_is_made_up_for(check: Callable[[], None]) -> None:
    pytest.importorskip("pyetcd", reason="it takes etcd-sdk-python")
    _run(check)


@needs_etcd
@pytest.mark.slow
def test_a_real_etcds_event_that_is_lost_is_found_missing(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        wait_ready(etcd)
        _run(_one_event_is_lost, f"etcd://{etcd.endpoints}/lost/")
