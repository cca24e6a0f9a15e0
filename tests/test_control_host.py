"""Of all processes on a host exactly one hosts the store, and another one follows it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from control_fakes import Hosts, until
from loopback import free_port

from crux_torch.control.host import StoreHost, parse_endpoint
from crux_torch.control.tcp_store import TcpStore
from crux_torch.errors import SettingsError

BAD = "none 127.0.0.1:1 tcp://:1 tcp://h tcp://h:0 tcp://h:99999 tcp://h:1/x udp://h:1 tcp://u@h:1"


@pytest.mark.parametrize("endpoint", ["", *BAD.split(), "tcp://[::1"])
def test_an_endpoint_that_cannot_be_used_is_named(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="expected"):
        StoreHost(endpoint)


def test_endpoints() -> None:
    assert parse_endpoint("tcp://127.0.0.1:29410") == ("127.0.0.1", 29410)
    assert parse_endpoint("tcp://[::1]:5") == ("::1", 5)


def test_the_loopback_store_listens_on_loopback_only_and_serves() -> None:
    host = StoreHost(f"tcp://127.0.0.1:{free_port()}")
    host.start()
    host.start()
    until(lambda: host.state == "hosting", what="hosting")
    with socket.socket() as other:
        other.bind(("127.0.0.2", host.port))
        other.listen()  # fails if the server took every address
    store = TcpStore("127.0.0.1", host.port, timeout_s=5.0)
    store.put("k", b"v")
    assert store.get("k") == b"v"
    store.close()
    host.stop()
    assert host.state == "stopped"
    with socket.socket() as after:
        after.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        after.bind(("127.0.0.1", host.port))
        after.listen()


def test_racing_hosts_share_one_port_and_hand_it_on() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    hosts = [StoreHost(endpoint, poll_s=0.05) for _ in range(8)]
    start = threading.Barrier(8)

    def begin(host: StoreHost) -> None:
        start.wait()
        host.start()

    threads = [threading.Thread(target=begin, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    def roles() -> list[str]:
        return sorted(host.state for host in hosts)

    until(lambda: roles() == ["hosting"] + ["standby"] * 7, what="one host")
    for left in range(7, 0, -1):
        gone = next(host for host in hosts if host.state == "hosting")
        gone.stop()
        hosts.remove(gone)
        until(lambda n=left: roles() == ["hosting"] + ["standby"] * (n - 1), what="the next host")
    hosts[0].stop()


def test_a_port_that_something_else_holds_leaves_the_host_on_standby() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        host = StoreHost(f"tcp://127.0.0.1:{other.getsockname()[1]}", poll_s=0.05)
        host.start()
        until(lambda: host.state == "standby", what="standby")
    until(lambda: host.state == "hosting", what="hosting once it is free")
    host.stop()


def test_an_address_of_another_host_is_left_to_it() -> None:
    host = StoreHost("tcp://192.0.2.1:29410", poll_s=0.05)
    host.start()
    until(lambda: host.state == "remote", what="remote")
    host.stop()


def test_any_other_fault_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        calls.append(1)
        raise socket.gaierror(-2, "injected")

    monkeypatch.setattr(socket, "getaddrinfo", broken)
    host = StoreHost("tcp://nowhere.invalid:1", poll_s=0.01)
    host.start()
    until(lambda: len(calls) > 3, what="retries")
    host.stop()
    assert caplog.text.count("can't host the store") == 1


def test_a_store_beyond_loopback_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    host = StoreHost(f"tcp://0.0.0.0:{free_port()}")
    host.start()
    until(lambda: host.state == "hosting", what="hosting")
    host.stop()
    assert caplog.text.count("no authorization") == 1


@pytest.mark.slow
def test_a_killed_host_is_followed_by_another_process() -> None:
    with Hosts(3) as hosts:
        for left in (3, 2, 1):
            hosts.wait_for_roles(left)
            hosts.kill_hosting()
