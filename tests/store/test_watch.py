"""An etcd's watch that does not keep its promises: changes lost, told twice, or out of order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from control_fakes import until
from etcd_server import Etcd, needs_etcd

from crux_torch.errors import StoreError
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import open_store

pytestmark = [needs_etcd, pytest.mark.slow]

RANGE = "/etcdserverpb.KV/Range"
#: Seconds after which a lost change is made up for at the latest, on a busy machine.
BOUND_S = 120.0


@pytest.fixture
def proxy(etcd: Etcd) -> Iterator[Any]:
    from watch_proxy import WatchProxy

    proxy = WatchProxy(etcd.endpoints)
    yield proxy
    proxy.close()


@pytest.fixture
def stores(
    etcd: Etcd, proxy: Any, request: pytest.FixtureRequest
) -> Iterator[tuple[StoreClient, StoreClient]]:
    """One that writes straight to the etcd, and one that reads through the proxy."""
    place = f"{abs(hash(request.node.name))}"
    pair = tuple(
        open_store(f"etcd://{to}/{place}", timeout_s=10.0)
        for to in (etcd.endpoints, f"127.0.0.1:{proxy.port}")
    )
    for store in pair:
        until(lambda s=store: view(s) is not None, what="an answer")
    yield pair
    for store in pair:
        store.close()


def view(store: StoreClient) -> dict[str, bytes] | None:
    try:
        return dict(store.list("k/"))
    except StoreError:
        return None


def put(store: StoreClient, key: str, value: bytes) -> None:
    insist(lambda: store.put(key, value, lease_s=300.0))


def delete(store: StoreClient, key: str) -> None:
    insist(lambda: store.delete(key))


def insist(write: Callable[[], object]) -> None:
    """Write though a busy machine may refuse it at first."""

    def done() -> bool:
        try:
            write()
        except StoreError:
            return False
        return True

    until(done, what="a write")


def lose(_answer: Any) -> list[Any]:
    return []


def test_a_change_that_the_watch_loses_is_seen_though_nothing_else_changes(
    stores: tuple[StoreClient, StoreClient], proxy: Any
) -> None:
    writing, reading = stores
    for key in ("k/stays", "k/changes", "k/goes"):
        put(writing, key, b"old")
    until(lambda: len(view(reading) or ()) == 3, what="all keys")
    proxy.fault = lose
    put(writing, "k/changes", b"new")
    put(writing, "k/comes", b"new")
    delete(writing, "k/goes")
    until(lambda: proxy.broken > 0, what="a lost change")
    expected = {"k/stays": b"old", "k/changes": b"new", "k/comes": b"new"}
    until(lambda: view(reading) == expected, BOUND_S, "what the watch did not tell")


@pytest.mark.parametrize("lost", ["change", "arrival", "end"])
def test_a_change_that_is_lost_among_others_is_seen(
    stores: tuple[StoreClient, StoreClient], proxy: Any, lost: str
) -> None:
    writing, reading = stores
    for key in ("k/a", "k/b"):
        put(writing, key, b"old")
    until(lambda: len(view(reading) or ()) == 2, what="all keys")
    proxy.fault = lose
    if lost == "end":
        delete(writing, "k/a")
    else:
        put(writing, "k/a" if lost == "change" else "k/c", b"new")
    until(lambda: proxy.broken > 0, what="a lost change")
    proxy.fault = lambda answer: [answer]
    put(writing, "k/b", b"later")
    expected = {"k/a": b"old", "k/b": b"later"}
    if lost == "end":
        del expected["k/a"]
    else:
        expected["k/a" if lost == "change" else "k/c"] = b"new"
    until(lambda: view(reading) == expected, BOUND_S, "what the watch did not tell")


def test_changes_lost_twice_and_out_of_order_mislead_nobody_for_long(
    stores: tuple[StoreClient, StoreClient], proxy: Any
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    writing, reading = stores
    kept: list[Any] = []

    def fault(answer: Any) -> list[Any]:
        fate = draw.randrange(4)
        if fate == 0:
            kept.append(answer)  # late, or lost
            return []
        late = [kept.pop(draw.randrange(len(kept)))] if kept and fate == 1 else []
        return [answer, *late, *([answer] if fate == 2 else [])]

    proxy.fault = fault
    numbers: dict[str, int] = {}
    for n in range(1, 201):
        key = f"k/{draw.randrange(8)}"
        if draw.random() < 0.2:
            delete(writing, key)
        else:
            put(writing, key, b"%d" % n)
        time.sleep(0.02)  # else one answer tells many changes
        if n % 5 == 0 and (found := view(reading)) is not None:
            for name, value in found.items():
                # What it says of a key gets no older.
                assert int(value) >= numbers.get(name, 0), name
                numbers[name] = int(value)
    expected: dict[str, bytes] = {}
    until(lambda: bool(expected.update(view(writing) or {}) or expected), what="an answer")
    assert proxy.broken > 10
    until(lambda: view(reading) == expected, BOUND_S, "what the etcd holds")


def test_a_watch_that_tells_all_is_enough_and_a_look_whether_it_does_costs_little(
    stores: tuple[StoreClient, StoreClient], proxy: Any
) -> None:
    writing, reading = stores
    for n in range(100):
        put(writing, f"k/{n}", b"v" * 1000)
    until(lambda: len(view(reading) or ()) == 100, what="all keys")
    before, began_s = proxy.asked[RANGE], time.monotonic()
    while time.monotonic() < began_s + 12.0:
        put(writing, "k/1", b"%d" % time.monotonic_ns())
        view(reading)
        time.sleep(0.2)
    passed_s = time.monotonic() - began_s
    # Looks, and no reading of all keys, which are four pages.
    asked = proxy.asked[RANGE] - before
    assert 1 <= asked <= 3 * (passed_s / 5.0 + 1)
    assert proxy.asked["/etcdserverpb.Watch/Watch"] == 1
