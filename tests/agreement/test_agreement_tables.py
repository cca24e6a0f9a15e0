"""The service of the load tables: a process of its own, what it books, and what becomes of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from control_fakes import FakeClock, until
from loopback import free_port

from crux_torch.agreement import load_tables
from crux_torch.agreement.load_tables import (
    Feedback,
    FetchFeedback,
    TablesClient,
    TablesService,
    UpdateSchedule,
)
from crux_torch.errors import StoreError
from crux_torch.network.loaders import dump_yaml, parse_yaml
from crux_torch.network.topology import TopologyError
from crux_torch.schedule.papers.mlcc import SLOTS
from crux_torch.store.contents import Client
from crux_torch.store.endpoint import TcpConnector
from crux_torch.store.frames import Count, Done, Refused
from crux_torch.store.host import StoreHost
from lab import sockets

TOPOLOGY = """
version: 1
hosts: {a: {}, b: {}}
switches: {s: tor}
links: [{between: [a, s], capacity_Bps: 1e9}, {between: [b, s], capacity_Bps: 1e9}]
addresses: {a: [10.0.0.1]}
tables: HOST
"""
LINKS = {"l": 10.0, "m": 5.0}


@pytest.fixture
def service() -> TablesService:
    return TablesService(FakeClock(100.0), slot_s=1.0)


def ask(service: TablesService, request: object) -> object:
    return service.answer(request, Client(0.0))  # type: ignore[arg-type]


def test_flows_that_depend_on_each_other_are_told(service: TablesService) -> None:
    push = UpdateSchedule("w>s", {"l": 10.0}, 100, (4.0,), 0.0, "j", {}, "w", "s", 7.0)
    assert ask(service, push) == Done(1)
    told = ask(service, FetchFeedback("s>w", {"m": 5.0}, "j", "s", "w"))
    assert isinstance(told, Feedback)
    assert (told.into, told.out) == ({"w": 7.0}, {"s": 7.0})
    # Another worker's push shares the link with the first one; another job's finds it booked.
    for asked, load_Bps in (("j", 5.0), ("k", 4.0)):
        other = ask(service, FetchFeedback("v>s", {"l": 10.0}, asked, "v", "s"))
        assert isinstance(other, Feedback)
        assert other.loads_Bps[0][0] == load_Bps
    assert ask(service, FetchFeedback("s>w", {"m": 5.0})) == Feedback(
        100, 0.0, 1.0, ((0.0,) * SLOTS,)
    )


def test_what_one_books_another_is_told(service: TablesService) -> None:
    assert ask(service, UpdateSchedule("a", LINKS, 100, (4.0, 1.0), 0.0, "a", {})) == Done(1)
    service._clock.now = 101.25
    told = ask(service, FetchFeedback("b", {"m": 5.0}))
    assert told == Feedback(101, 0.25, 1.0, ((1.0, *(0.0,) * (SLOTS - 1)),))
    assert ask(service, UpdateSchedule("b", LINKS, 101, (4.5,), 0.0, "b", {})) == Done(0)
    assert ask(service, UpdateSchedule("b", LINKS, 101, (4.0,), 0.0, "b", {})) == Done(1)


def test_what_a_silent_host_has_booked_ends(service: TablesService) -> None:
    ask(service, UpdateSchedule("a", LINKS, 100, (4.0,) * SLOTS, 0.0, "a", {}))
    service._clock.now += SLOTS
    (loads, _) = ask(service, FetchFeedback("b", LINKS)).loads_Bps
    assert set(loads) == {0.0}
    service._clock.now += SLOTS
    service.expire()
    assert len(service._tables) == 0


@pytest.mark.parametrize("slot", [90, 101, 2**50])
def test_a_slot_that_is_not_of_now_is_refused(service: TablesService, slot: int) -> None:
    assert isinstance(ask(service, UpdateSchedule("a", LINKS, slot, (4.0,), 0.0, "a", {})), Refused)
    assert isinstance(ask(service, Count()), Refused)


def test_full_tables_refuse_flows_that_are_new_only(
    service: TablesService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crux_torch.agreement.load_tables.MAX_FLOWS", 1)
    assert ask(service, UpdateSchedule("a", LINKS, 100, (4.0,), 0.0, "a", {})) == Done(1)
    assert isinstance(ask(service, UpdateSchedule("b", LINKS, 100, (1.0,), 0.0, "b", {})), Refused)
    assert ask(service, UpdateSchedule("a", LINKS, 100, (3.0,), 0.0, "a", {})) == Done(1)
    assert ask(service, UpdateSchedule("a", LINKS, 100, (), 0.0, "a", {})) == Done(1)


def test_counters_show_foreign_flows(service: TablesService) -> None:
    for _ in range(5):
        now = service._clock.now
        counters = {"l": 6.0 * now}
        ask(service, UpdateSchedule("a", {"l": 10.0}, int(now), (3.0,), 3.0 * now, "a", counters))
        service._clock.now += 1.0
    (loads,) = ask(service, FetchFeedback("a", {"l": 10.0})).loads_Bps
    assert loads == (pytest.approx(4.5),) * SLOTS


def test_the_topology_names_the_host_of_the_tables() -> None:
    topology = parse_yaml(TOPOLOGY.replace("HOST", "a"))
    assert topology.tables == "a"
    assert parse_yaml(dump_yaml(topology)).tables == "a"
    for host in "bsx":
        with pytest.raises(TopologyError, match=f"tables: '{host}'; expected a host that has"):
            parse_yaml(TOPOLOGY.replace("HOST", host))


@pytest.fixture
def port() -> Iterator[int]:
    port = free_port()
    host = StoreHost(
        f"tcp://127.0.0.1:{port}",
        poll_s=0.05,
        linger_s=1.0,
        module="crux_torch.agreement.load_tables",
        arguments=("--slot-s=0.05",),
        dscp=46,
    )
    host.start()
    until(lambda: host.state == "hosting", 20.0)
    port_of_host[port] = host
    yield port
    host.stop()


port_of_host: dict[int, StoreHost] = {}


def reached(client: TablesClient) -> Feedback | None:
    try:
        return client.fetch_feedback("a", LINKS)
    except StoreError:
        return None


@pytest.mark.slow
def test_a_real_process_that_is_killed_is_missed_within_a_bound_and_comes_back(port: int) -> None:
    client, other = (TablesClient(TcpConnector("127.0.0.1", port)) for _ in range(2))
    until(lambda: reached(client) is not None, 20.0)
    seen = client.fetch_feedback("a", LINKS)
    assert seen.slot_s == 0.05
    assert client.update_schedule(
        UpdateSchedule("a", LINKS, seen.slot, (5.0,) * SLOTS, 1.0, "a", {"l": 3.0})
    )
    until(lambda: reached(other) is not None, 20.0)
    assert max(other.fetch_feedback("b", LINKS).loads_Bps[0]) == 5.0
    os.kill(port_of_host[port].pid, signal.SIGKILL)
    until(lambda: reached(client) is None, 20.0)
    with pytest.raises(StoreError, match="load tables at"):
        client.fetch_feedback("a", LINKS)
    # Its next life knows nothing, and is told again.
    until(lambda: reached(client) is not None, 30.0)
    client.close()
    other.close()


@pytest.mark.slow
def test_both_ends_send_with_the_class_that_they_are_told(port: int) -> None:
    # Otherwise they would wait in the queues that the tables are about.
    client = TablesClient(TcpConnector("127.0.0.1", port), dscp=26)
    until(lambda: reached(client) is not None, 20.0)

    def classes(pid: int) -> set[int]:
        opened = sockets.connections(pid)
        found = {sockets.dscp(c) for c in opened if c.getpeername()[0] == "127.0.0.1"}
        for each in opened:
            each.close()
        return found

    assert classes(port_of_host[port].pid) == {46}
    assert 26 in classes(os.getpid())
    client.close()


@pytest.mark.slow
def test_without_a_class_no_option_is_set(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a class was set")

    monkeypatch.setattr(load_tables, "mark", never)
    client = TablesClient(TcpConnector("127.0.0.1", port))
    until(lambda: reached(client) is not None, 20.0)
    client.close()


@pytest.mark.slow
def test_a_process_that_stands_still_delays_nobody_beyond_the_bound(port: int) -> None:
    client = TablesClient(TcpConnector("127.0.0.1", port))
    until(lambda: reached(client) is not None, 20.0)
    pid = port_of_host[port].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StoreError, match="no answer within"):
            client.fetch_feedback("a", LINKS)
        first_s = time.monotonic() - began
        again = time.monotonic()
        with pytest.raises(StoreError, match="not due yet"):
            client.fetch_feedback("a", LINKS)
        # The second attempt does not wait at all.
        assert time.monotonic() - again < first_s
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: reached(client) is not None, 20.0)
    client.close()
