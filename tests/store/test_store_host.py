"""Of all processes on a host exactly one hosts the store, and another one follows it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from control_fakes import Hosts, until
from loopback import free_port
from store_server import secret_file

from crux_torch.errors import SettingsError, StoreError
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import open_store, parse_endpoint
from crux_torch.store.host import StoreHost

BAD = "none 127.0.0.1:1 tcp://:1 tcp://h tcp://h:0 tcp://h:99999 tcp://h:1/x udp://h:1 tcp://u@h:1"


@pytest.mark.parametrize("endpoint", ["", *BAD.split(), "tcp://[::1"])
def test_an_endpoint_that_cannot_be_used_is_named(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="expected"):
        StoreHost(endpoint)


def test_endpoints() -> None:
    assert parse_endpoint("tcp://127.0.0.1:29410") == ("127.0.0.1", 29410)
    assert parse_endpoint("tcp://[::1]:5") == ("::1", 5)


def test_the_loopback_store_listens_on_loopback_only_and_serves() -> None:
    port = free_port()
    host = StoreHost(f"tcp://127.0.0.1:{port}", linger_s=0.5)
    host.start()
    host.start()
    until(lambda: host.state == "hosting", what="hosting")
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))
        other.listen()  # fails if the server took every address
    store = open_store(f"tcp://127.0.0.1:{port}", timeout_s=60.0)
    store.put("k", b"v")
    host.stop()
    assert host.state == "stopped"
    assert store.get("k") == b"v"
    store.close()
    until(lambda: is_free(port), what="the end of a server that nobody uses")


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_racing_hosts_start_one_server_and_replace_one_that_dies(kind: str, tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"unix://{tmp_path}/store"
    hosts = [StoreHost(endpoint, poll_s=0.05, linger_s=0.5) for _ in range(6)]
    start = threading.Barrier(6)

    def begin(host: StoreHost) -> None:
        start.wait()
        host.start()

    threads = [threading.Thread(target=begin, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for left in (6, 5, 4):
        store = open_store(endpoint, timeout_s=60.0)
        until(lambda: [h.state for h in hosts].count("hosting") == 1, what="one server")
        until(lambda n=left, s=store: clients(s) == n + 1, what="all to use it")
        assert sorted(host.state for host in hosts) == ["hosting"] + ["standby"] * (left - 1)
        store.put("k", b"v")
        starter = next(host for host in hosts if host.state == "hosting")
        pid = starter.pid
        assert pid is not None
        # Its starter ends, and the server goes on.
        starter.stop()
        hosts.remove(starter)
        assert store.get("k") == b"v"
        store.close()
        os.kill(pid, signal.SIGKILL)
    for host in hosts:
        host.stop()


def clients(store: StoreClient) -> int | None:
    try:
        return store.clients()
    except StoreError:
        return None


@pytest.mark.slow
def test_a_server_outlives_who_started_it_and_ends_unused() -> None:
    """And no pipe of whoever started it stays open with it."""
    port = free_port()
    code = (
        "import sys, time; from crux_torch.store.host import StoreHost\n"
        f"host = StoreHost('tcp://127.0.0.1:{port}', linger_s=5.0); host.start()\n"
        "while host.state != 'hosting': time.sleep(0.01)\n"
        "print(host.pid, flush=True); host.stop()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout)
    store = open_store(f"tcp://127.0.0.1:{port}", timeout_s=60.0)
    store.put("k", b"v")
    assert os.getsid(pid) == pid, "a terminal's Ctrl-Z and Ctrl-C don't reach it"
    until(lambda: clients(store) == 1, what="its starter to be gone")
    assert store.get("k") == b"v"
    store.close()
    until(lambda: is_free(port), what="its end")


def test_a_port_that_something_else_holds_leaves_the_host_on_standby() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        host = StoreHost(f"tcp://127.0.0.1:{other.getsockname()[1]}", poll_s=0.05, linger_s=0.5)
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


def test_more_clients_than_the_store_bears_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("crux_torch.store.host.BEARABLE_CLIENTS", 2)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    host = StoreHost(endpoint, poll_s=0.02, linger_s=0.5)
    host.start()
    stores = [open_store(endpoint, timeout_s=60.0) for _ in range(2)]
    for n, store in enumerate(stores):
        assert "which bears" not in caplog.text
        until(lambda s=store: clients(s) is not None, what="an answer")
        until(lambda n=n, s=store: clients(s) == n + 2, what="all of them")
    until(lambda: caplog.text.count("3 clients use the store") == 1, what="the warning")
    host.stop()
    assert caplog.text.count("which bears") == 1
    for store in stores:
        store.close()


def test_beyond_loopback_a_store_with_a_secret_serves(tmp_path: Path) -> None:
    endpoint = f"tcp://0.0.0.0:{free_port()}"
    secret = secret_file(tmp_path)
    host = StoreHost(endpoint, secret, poll_s=0.05, linger_s=0.5)
    host.start()
    until(lambda: host.state == "hosting", what="hosting")
    store = open_store(endpoint, secret, timeout_s=60.0)
    store.put("k", b"v")
    store.close()
    host.stop()


@pytest.mark.slow
def test_a_killed_host_is_followed_by_another_process() -> None:
    with Hosts(3) as hosts:
        for left in (3, 2, 1):
            hosts.wait_for_roles(left)
            hosts.kill_hosting()
