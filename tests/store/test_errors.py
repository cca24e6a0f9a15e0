"""Each way in which a store fails, with a real server: its cause, and the remedy of that cause."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from control_fakes import until
from loopback import free_port
from store_server import ServerThread, secret_file

from crux_torch.cli import main as cli
from crux_torch.cli.doctor import process as doctor
from crux_torch.errors import Cause, SettingsError, StoreError
from crux_torch.settings import Settings
from crux_torch.store import contents
from crux_torch.store.endpoint import START_S, looked_into, open_store
from crux_torch.store.frames import PROTOCOL_VERSION, Challenge, Welcome, pack
from crux_torch.store.host import StoreHost

SECRET, OTHER = b"0123456789abcdef", "another secret of 16"
Case = Callable[[ExitStack, Path], tuple[str, str]]


def peers(stack: ExitStack, answer: Callable[[socket.socket], object]) -> str:
    """A server on loopback that meets each of its clients with ``answer``."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    kept: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                kept.append(listener.accept()[0])
                with contextlib.suppress(OSError):
                    answer(kept[-1])

    threading.Thread(target=serve, daemon=True).start()
    stack.callback(lambda: [each.close() for each in kept])
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def real(stack: ExitStack, secret: bytes = b"") -> str:
    return f"tcp://127.0.0.1:{stack.enter_context(ServerThread(secret)).port}"


def http_server(stack: ExitStack, _: Path) -> tuple[str, str]:
    """One that waits for the end of a line."""

    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return f"tcp://127.0.0.1:{server.server_port}", ""


def strict_http_server(stack: ExitStack, _: Path) -> tuple[str, str]:
    return peers(stack, lambda p: p.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")), ""


def wrong_secret(stack: ExitStack, folder: Path) -> tuple[str, str]:
    return real(stack, SECRET), secret_file(folder, OTHER)


def no_secret(stack: ExitStack, _: Path) -> tuple[str, str]:
    return real(stack, SECRET), ""


def needless_secret(stack: ExitStack, folder: Path) -> tuple[str, str]:
    return real(stack), secret_file(folder)


def a_liar(stack: ExitStack, folder: Path) -> tuple[str, str]:
    """A server that lets everyone in, and can't prove that it knows the secret."""

    def answer(peer: socket.socket) -> None:
        peer.sendall(pack(Challenge(PROTOCOL_VERSION, b"n" * 32, True)))
        peer.sendall(pack(Welcome(b"d" * 32, "life")))

    return peers(stack, answer), secret_file(folder)


def another_version(stack: ExitStack, _: Path) -> tuple[str, str]:
    hello = pack(Challenge(PROTOCOL_VERSION + 1, b"n" * 32, False))
    return peers(stack, lambda p: p.sendall(hello)), ""


def nobody(_: ExitStack, __: Path) -> tuple[str, str]:
    return f"tcp://127.0.0.1:{free_port()}", ""


def nobody_on_this_host(_: ExitStack, folder: Path) -> tuple[str, str]:
    return f"unix://{folder}/store", ""


def a_dead_socket(stack: ExitStack, folder: Path) -> tuple[str, str]:
    left = stack.enter_context(socket.socket(socket.AF_UNIX))
    left.bind(str(folder / "store"))
    return f"unix://{folder}/store", ""


def an_open_folder(_: ExitStack, folder: Path) -> tuple[str, str]:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    return f"unix://{folder}/open/store", ""


def no_such_name(_: ExitStack, __: Path) -> tuple[str, str]:
    return "tcp://no-such-host.invalid:1", ""


def a_port_that_drops_all(stack: ExitStack, _: Path) -> tuple[str, str]:
    """Its queue of connections is full, so the kernel answers none."""
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    for _n in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}", ""


def silence(stack: ExitStack, _: Path) -> tuple[str, str]:
    return peers(stack, lambda peer: None), ""


def junk(stack: ExitStack, _: Path) -> tuple[str, str]:
    return peers(stack, lambda peer: peer.sendall(b"\0\0\0\x05junk!")), ""


def a_huge_frame(stack: ExitStack, _: Path) -> tuple[str, str]:
    return peers(stack, lambda peer: peer.sendall(b"\xc0\0\0\0" + b"x" * 99)), ""


def the_end(stack: ExitStack, _: Path) -> tuple[str, str]:
    return peers(stack, lambda peer: peer.shutdown(socket.SHUT_RDWR)), ""


def an_etcd_that_is_away(_: ExitStack, __: Path) -> tuple[str, str]:
    return f"etcd://127.0.0.1:{free_port()}", ""


CASES: dict[Case, Cause] = {
    http_server: Cause.HTTP,
    strict_http_server: Cause.HTTP,
    wrong_secret: Cause.WRONG_SECRET,
    no_secret: Cause.NEEDS_SECRET,
    needless_secret: Cause.HAS_NO_SECRET,
    a_liar: Cause.UNPROVEN,
    another_version: Cause.VERSION,
    nobody: Cause.ABSENT,
    nobody_on_this_host: Cause.ABSENT,
    a_dead_socket: Cause.ABSENT,
    an_open_folder: Cause.FOLDER,
    no_such_name: Cause.NAME,
    a_port_that_drops_all: Cause.UNREACHABLE,
    silence: Cause.SILENT,
    junk: Cause.STRANGER,
    a_huge_frame: Cause.STRANGER,
    the_end: Cause.STRANGER,
    an_etcd_that_is_away: Cause.ETCD_AWAY,
}
#: Those that take as long as a client, or the look for an HTTP server, waits.
LONG = {http_server, a_port_that_drops_all, silence, an_etcd_that_is_away}
#: What the doctor takes for passing: a job may start, and find the store later.
PASSING = {Cause.ABSENT, Cause.UNREACHABLE, Cause.SILENT, Cause.ETCD_AWAY}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crux_torch.report.cluster_status.TIMEOUT_S", 1.0)
    monkeypatch.setattr("crux_torch.cli.doctor.process.STORE_TIMEOUT_S", 1.0)
    for name in [name for name in os.environ if name.startswith("CRUX_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, id=each.__name__, marks=[pytest.mark.slow] if each in LONG else [])
        for each in CASES
    ],
)
def test_each_failure_has_the_remedy_of_its_own_cause(case: Case, tmp_path: Path) -> None:
    if case is an_etcd_that_is_away:
        pytest.importorskip("pyetcd")
    with ExitStack() as stack:
        endpoint, secret = case(stack, tmp_path)
        client = open_store(endpoint, secret, timeout_s=1.0, load_s=60.0)
        stack.callback(client.close)
        with pytest.raises(StoreError) as caught:
            client.get("k")
        error = looked_into(caught.value, endpoint)
        assert error.cause is CASES[case], error
        # As long as the client does not try again, it says the same.
        with pytest.raises(StoreError) as again:
            client.get("k")
        assert again.value.cause is caught.value.cause
        assert endpoint.removeprefix("unix://") in str(error)
        only_its_remedy(CASES[case], str(error.with_remedy))
        env = {"CRUX_STORE": endpoint, "CRUX_STORE_SECRET": secret}
        shown = CliRunner(env=env).invoke(cli.main, ["status"], prog_name="crux")
        assert shown.exit_code == 1
        only_its_remedy(CASES[case], shown.output)
        check = doctor.store(Settings.from_env(env))
        assert check.state == ("missing" if CASES[case] in PASSING else "broken")
        assert check.remedy == CASES[case].value


def only_its_remedy(cause: Cause, text: str) -> None:
    shown = " ".join(text.split()).lower()
    assert {each for each in Cause if each.value.lower() in shown} == {cause}, text


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.chmod(0o644), "chmod 600"),
        (lambda file: file.write_text("short"), "has 5 bytes"),
        (lambda file: file.unlink(), "No such file"),
    ],
)
def test_a_secret_that_can_not_be_used_has_its_own_remedy_and_no_other(
    spoil: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    file = Path(secret_file(tmp_path))
    spoil(file)
    with ServerThread(SECRET) as server:
        endpoint = f"tcp://127.0.0.1:{server.port}"
        with pytest.raises(SettingsError, match=words):
            open_store(endpoint, str(file))
        env = {"CRUX_STORE": endpoint, "CRUX_STORE_SECRET": str(file)}
        shown = CliRunner(env=env).invoke(cli.main, ["status"], prog_name="crux").output
        assert words in shown
        assert not [each for each in Cause if each.value.lower() in shown.lower()]


@pytest.mark.slow
def test_the_doctor_approves_who_has_the_secret(tmp_path: Path) -> None:
    with ServerThread(SECRET) as server:
        env = {
            "CRUX_STORE": f"tcp://127.0.0.1:{server.port}",
            "CRUX_STORE_SECRET": secret_file(tmp_path, SECRET.decode()),
        }
        told = CliRunner(env=env).invoke(cli.main, ["doctor", "--json"], prog_name="crux").output
        (check,) = (each for each in msgspec.json.decode(told) if each["part"] == "store")
        assert (check["state"], check["remedy"]) == ("ok", "")


def test_what_fails_once_a_client_has_greeted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(contents, "CLIENT_KEYS", 1)
    endpoint = f"unix://{tmp_path}/store"
    with ServerThread() as server:
        client = server.client(timeout_s=5.0)
        client.put("k", b"v")
        assert cause_of(lambda: client.put("l", b"v")) is Cause.LIMIT
        client.close()
        assert cause_of(lambda: client.get("k")) is Cause.BUSY
    host = StoreHost(endpoint, poll_s=60.0)
    host.start()
    until(lambda: host.pid is not None, what="a server")
    client = open_store(endpoint, timeout_s=0.3)
    until(lambda: cause_of(lambda: client.put("k", b"v")) is None, what="an answer")
    assert host.pid is not None
    os.kill(host.pid, signal.SIGSTOP)
    assert cause_of(lambda: client.get("k")) is Cause.SILENT
    os.kill(host.pid, signal.SIGCONT)
    until(lambda: cause_of(lambda: client.put("k", b"v")) is None, what="an answer")
    os.kill(host.pid, signal.SIGKILL)
    # Whether the end is noticed before, or while, it is asked, depends on the moment.
    assert cause_of(lambda: client.put("k", b"v")) in (Cause.CUT, Cause.ABSENT)
    host.stop()
    client.close()


def cause_of(call: Callable[[], object]) -> Cause | None:
    try:
        call()
    except StoreError as error:
        return error.cause
    return None


def test_beyond_loopback_a_host_says_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    host = StoreHost(f"tcp://0.0.0.0:{free_port()}", poll_s=0.05)
    host.start()
    until(lambda: host.state == "failed", what="failed")
    host.stop()
    only_its_remedy(Cause.LOOPBACK, caplog.text)


def test_an_etcd_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyetcd.py").write_text("raise ModuleNotFoundError('no', name='pyetcd')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    client = open_store(f"etcd://127.0.0.1:{free_port()}", load_s=START_S)
    with pytest.raises(StoreError, match="pip install") as caught:
        client.get("k")
    client.close()
    assert caught.value.cause is Cause.ETCD_PACKAGE


def test_every_cause_is_met_here() -> None:
    met = {*CASES.values(), Cause.LIMIT, Cause.BUSY, Cause.CUT, Cause.LOOPBACK, Cause.ETCD_PACKAGE}
    # Another user's server: test_private.py; a login, and a role: test_etcd.py.
    elsewhere = {Cause.FOREIGN, Cause.ETCD_LOGIN, Cause.ROLE}
    assert set(Cause) - met - elsewhere == {Cause.OTHER}
