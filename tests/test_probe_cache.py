"""The cache of paths: what it keeps, and every reason for which an entry is not taken."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable

import msgspec
import pytest
from control_fakes import FakeClock, FaultyStore
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.control.memory_store import MemoryStore
from crux_torch.control.path_cache import PORTS_PER_PATH, PathCache, PathRecord
from crux_torch.control.registry import Registry
from crux_torch.fabric.path_map import Hops, PathMap

TO = ("10.1.0.2", "udp", 4791)


def found(ports: int = 6, **changes: object) -> PathMap:
    hops: dict[int, Hops] = {
        50000 + i: ((1, "10.0.0.1"), (2, f"10.100.{i % 2}.2")) for i in range(ports)
    }
    fields = {
        "source": "10.0.0.2",
        "destination": TO[0],
        "protocol": TO[1],
        "port": TO[2],
        "hops": hops,
        "confidence": 0.99,
    }
    return msgspec.convert(fields | changes, PathMap)


def cache(clock: Callable[[], float] | None = None, **options: float) -> PathCache:
    store = MemoryStore(FakeClock())
    return PathCache(Registry(store, "c"), "h0-0", clock=clock or FakeClock(), **options)


def test_an_entry_comes_back() -> None:
    paths = cache()
    assert paths.get(*TO) is None
    assert paths.put(found())
    record = paths.get(*TO)
    assert record is not None
    assert record.paths == found()
    assert record.host == "h0-0"
    assert paths.get("10.1.0.2", "tcp", 4791) is None
    assert paths.get("10.1.0.2", "udp", 4792) is None
    assert PathCache(paths.registry, "h0-1").get(*TO) is None


def test_names_with_any_character_have_keys_of_their_own() -> None:
    registry = Registry(MemoryStore(), "c")
    keys = {PathCache(registry, host).key(*TO) for host in ("a", "a/b", "a b", "a%2Fb", "ä")}
    assert len(keys) == 5
    assert all(key.startswith("crux/c/paths/") and key.count("/") == 6 for key in keys)


def test_an_old_entry_is_not_taken() -> None:
    clock = FakeClock()
    paths = cache(clock, ttl_s=100.0)
    paths.put(found())
    clock.advance(99)
    assert paths.get(*TO) is not None
    clock.advance(2)
    assert paths.get(*TO) is None


def test_an_entry_from_the_future_is_not_taken() -> None:
    clock = FakeClock()
    paths = cache(clock)
    paths.put(found())
    clock.advance(-59)
    assert paths.get(*TO) is not None, "clocks differ a little"
    clock.advance(-2)
    assert paths.get(*TO) is None


def test_the_lease_ends_with_the_age() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    paths = PathCache(Registry(store, "c"), "h0-0", ttl_s=100.0, clock=FakeClock())
    paths.put(found())
    clock.advance(101)
    assert store.get(paths.key(*TO)) is None


def test_another_topology_asks_for_another_search() -> None:
    paths = cache()
    paths.put(found())
    paths.registry.publish_topology(b"version: 1")
    assert paths.get(*TO) is None
    paths.put(found())
    assert paths.get(*TO) is not None
    paths.registry.publish_topology(b"version: 1 # changed")
    assert paths.get(*TO) is None


def test_another_source_address_asks_for_another_search() -> None:
    paths = cache()
    paths.put(found())
    assert paths.get(*TO, source="10.0.0.2") is not None
    assert paths.get(*TO, source="10.0.5.2") is None


def test_find_searches_once() -> None:
    paths, searches = cache(), []

    def search() -> PathMap:
        searches.append(1)
        return found()

    assert paths.find(*TO, search) == paths.find(*TO, search) == found()
    assert len(searches) == 1
    paths.forget(*TO)
    paths.find(*TO, search)
    assert len(searches) == 2


def test_a_connection_elsewhere_ends_an_entry() -> None:
    paths = cache()
    paths.put(found())
    assert paths.confirm(*TO, 50001, ((2, "10.100.1.2"),)) is True
    assert paths.confirm(*TO, 50001, ((1, "10.0.0.1"), (2, None))) is True
    assert paths.confirm(*TO, 50001, ((2, None),)) is None
    assert paths.confirm(*TO, 50001, ((3, "10.9.9.9"),)) is None
    assert paths.confirm(*TO, 60001, ((2, "10.100.1.2"),)) is None
    assert paths.get(*TO) is not None
    assert paths.confirm(*TO, 50001, ((2, "10.100.0.2"),)) is False
    assert paths.get(*TO) is None
    assert paths.confirm(*TO, 50001, ((2, "10.100.0.2"),)) is None


def test_many_ports_are_trimmed() -> None:
    paths = cache()
    assert paths.put(found(10_000))
    record = paths.get(*TO)
    assert record is not None
    assert [len(ports) for ports in record.paths.paths.values()] == [PORTS_PER_PATH] * 2
    assert record.paths.paths.keys() == found(10_000).paths.keys()


def test_a_map_of_no_use_is_not_cached() -> None:
    paths = cache()
    assert not paths.put(found(hops={}))
    assert not paths.put(found(repeated=6, changed=1))
    assert paths.get(*TO) is None


def test_a_map_that_is_still_too_large_is_not_cached(caplog: pytest.LogCaptureFixture) -> None:
    hops: dict[int, Hops] = {
        1 + i: tuple((t, f"2001:db8:1111:2222:3333:4444:{i:x}:{t:x}") for t in range(1, 21))
        for i in range(1300)
    }
    paths = cache()
    with caplog.at_level(logging.WARNING):
        assert not paths.put(found(hops=hops))
        assert not paths.put(found(hops=hops))
    assert len(caplog.records) == 1
    assert "over the limit" in caplog.text


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff\xfe", "invalid"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field"),
        (b"x" * (1 << 21), "limit"),
    ],
)
def test_foreign_bytes_are_ignored_with_one_warning(
    raw: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    paths = cache()
    paths.registry.store._entries.clear()  # type: ignore[attr-defined]
    if len(raw) <= 1 << 20:
        paths.registry.store.put(paths.key(*TO), raw)
    else:
        monster = raw
        paths.registry.store.get = lambda key: monster  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert paths.get(*TO) is None
        assert paths.get(*TO) is None
    assert len(caplog.records) == 1
    assert words in caplog.text
    assert paths.confirm(*TO, 50000, ((2, "10.100.0.2"),)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"host": "h9-9"},
        {"paths": {"destination": "10.1.0.99"}},
        {"paths": {"port": 5001}},
        {"paths": {"protocol": "tcp"}},
        {"paths": {"version": 2}},
        {"paths": {"source": "not an address"}},
        {"paths": {"hops": {"50000": [[2, "evil"]]}}},
        {"paths": {"hops": {"70000": [[2, "10.0.0.1"]]}}},
        {"more": 1},
    ],
)
def test_a_record_that_lies_is_ignored(change: dict[str, object]) -> None:
    paths = cache()
    record = PathRecord(host="h0-0", probed_at_s=1000.0, paths=found())
    good = json.loads(msgspec.json.encode(record))
    key = paths.key(*TO)
    paths.registry.store.put(key, json.dumps(good).encode())
    assert paths.get(*TO) is not None
    bad = {**good, **change}
    if isinstance(change.get("paths"), dict):
        bad["paths"] = {**good["paths"], **change["paths"]}  # type: ignore[dict-item]
    paths.registry.store.put(key, json.dumps(bad).encode())
    assert paths.get(*TO) is None


@given(st.binary(max_size=200))
def test_no_bytes_raise(raw: bytes) -> None:
    paths = cache()
    paths.registry.store.put(paths.key(*TO), raw)
    assert paths.get(*TO) is None


def test_a_store_that_fails_costs_a_search_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(MemoryStore(), random.Random(0))
    store.fail = 1.0
    paths = PathCache(Registry(store, "c"), "h0-0")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert paths.find(*TO, found) == found()
            assert paths.confirm(*TO, 50000, ((2, "10.100.0.2"),)) is None
            paths.forget(*TO)
    assert len(caplog.records) == 3, "one of each operation"
    store.fail = 0.0
    assert paths.find(*TO, found) == found()
    assert paths.get(*TO) is not None


@given(st.integers(0, 2**32))
def test_losing_the_store_at_any_time_loses_nothing(seed: int) -> None:
    store = FaultyStore(MemoryStore(), random.Random(seed))
    store.fail = store.lose = 0.3
    paths = PathCache(Registry(store, "c"), "h0-0")
    for _ in range(10):
        assert paths.find(*TO, found) == found()
        paths.confirm(*TO, 50000, ((2, "10.100.1.2"),))


def test_through_a_real_store() -> None:
    tcp_store = pytest.importorskip("crux_torch.control.tcp_store")
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = tcp_store.TcpStore("127.0.0.1", server.port, timeout_s=5.0)
    try:
        paths = PathCache(Registry(store, "c"), "h0-0", ttl_s=60.0, clock=time.time)
        assert paths.put(found())
        again = PathCache(Registry(store, "c"), "h0-0", ttl_s=60.0, clock=time.time)
        record = again.get(*TO)
        assert record is not None
        assert record.paths == found()
        assert again.confirm(*TO, 50001, ((2, "10.100.0.2"),)) is False
        assert paths.get(*TO) is None
    finally:
        store.close()
