"""The setting ``CRUX_STORE``: where a store is, and the client to open for it."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from crux_torch.errors import Cause, SettingsError, StoreError
from crux_torch.files import read_file
from crux_torch.store import MAX_STORE_BYTES
from crux_torch.store.client import Connector, StoreClient
from crux_torch.store.frames import HTTP, READY, read_secret
from crux_torch.store.unix_place import UNIX, UnixConnector, parse_unix
from crux_torch.threads import call_in_thread

_log = logging.getLogger(__name__)

ETCD = "etcd://"
#: Load tables of a host's own links: beside its user's store.
OWN_TABLES = f"{UNIX}tables"
#: Seconds that a call to an etcd may take: more than the store process waits.
ETCD_CALL_S = 2.0
#: Seconds for which an HTTP server is asked, twice.
HTTP_S = 1.0
#: Seconds for which a command waits for its store process to load, on a busy machine.
LOAD_S = 60.0
#: Seconds after which a store process that is not ready is given up.
START_S = 60.0
MAX_REASON_BYTES = 1000
#: Certificates, a key, or a name and a password.
MAX_FILE_BYTES = 1 << 20
_FILES = ("ca", "cert", "key", "auth")
_FORM = "etcd://HOST:PORT[,HOST:PORT…][/PREFIX][?ca=FILE&cert=FILE&key=FILE&auth=FILE]"
_ENDPOINT = re.compile(r"(?P<host>[\w.-]+|\[[\da-fA-F:.]+\]):(?P<port>\d{1,5})")
#: Variables that would load torch, or our libraries, into a store process.
_UNFIT_VARIABLES = ("LD_PRELOAD", "CRUX_ATTACH")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Address of an etcd: ``CRUX_STORE=etcd://...`` taken apart.

    Attributes:
        endpoints: ``HOST:PORT`` of each member.
        prefix: prefix of every key.
        ca: file with the certificates that sign the members'; empty: no TLS.
        cert, key: files with this client's certificate and its key; empty: none.
        auth: file with ``USER:PASSWORD``; empty: none.
    """

    endpoints: tuple[str, ...]
    prefix: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    auth: str = ""

    @property
    def is_bare(self) -> bool:
        """True if it goes over a network without TLS."""
        hosts = (endpoint.rpartition(":")[0] for endpoint in self.endpoints)
        return not self.ca and not all(
            host in ("localhost", "[::1]") or host.startswith("127.") for host in hosts
        )

    def read(self, file: str) -> bytes | None:
        """Returns the content of a file; None for an empty name; raises SettingsError."""
        if not file:
            return None
        try:
            return read_file(file, MAX_FILE_BYTES)
        except OSError as error:
            raise SettingsError(f"CRUX_STORE names {file!r}: {error.strerror}") from None


def parse_etcd(url: str) -> EtcdAddress:
    """Returns the address in ``url``; raises SettingsError for another form."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    members, _, prefix = place.partition("/")
    found = [_ENDPOINT.fullmatch(member) for member in members.split(",")]
    good = all(match is not None and 0 < int(match["port"]) < 65536 for match in found)
    if scheme != "etcd" or not good or "#" in url:
        raise SettingsError(f"store {url!r}: expected {_FORM}")
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError:
        raise SettingsError(f"store {url!r}: expected {_FORM}") from None
    files = dict(pairs)
    if not files.keys() <= set(_FILES) or len(files) < len(pairs):
        raise SettingsError(f"store {url!r}: expected each of {', '.join(_FILES)} once at most")
    if ("cert" in files) != ("key" in files) or ("cert" in files and "ca" not in files):
        raise SettingsError(f"store {url!r}: cert and key belong together, and need ca")
    prefix = unquote(prefix).strip("/")
    return EtcdAddress(
        tuple(members.split(",")), prefix and prefix + "/", **{k: v for k, v in files.items() if v}
    )


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns host and port of ``tcp://HOST:PORT``; raises SettingsError for another form."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or not port or parts.scheme != "tcp":
        raise SettingsError(f"store {endpoint!r}: expected tcp://HOST:PORT, unix: or none")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise SettingsError(f"store {endpoint!r}: expected nothing after tcp://HOST:PORT")
    return host, port


def open_store(
    endpoint: str,
    secret: str = "",
    group: str = "",
    *,
    timeout_s: float = 0.5,
    load_s: float = 0.0,
    limit_bytes: int = MAX_STORE_BYTES,
    clock: Callable[[], float] = time.monotonic,
) -> StoreClient:
    """Returns a client of the store at ``endpoint``; it connects with its first call.

    Args:
        endpoint, secret, group: the settings ``store``, ``store_secret`` and ``store_group``.
        timeout_s, limit_bytes, clock: see :class:`~crux_torch.store.client.StoreClient`.
        load_s: see :class:`~crux_torch.store.endpoint.ProcessConnector`.

    Raises:
        SettingsError: one of them can't be used.
    """
    if endpoint.startswith(ETCD):
        address = parse_etcd(endpoint)
        if address.is_bare:
            _log.warning("%s goes over a network without TLS: name its ca", endpoint)
        connector: Connector = ProcessConnector(endpoint, load_s)
        timeout_s = max(timeout_s, ETCD_CALL_S)
        return StoreClient(connector, timeout_s=timeout_s, limit_bytes=limit_bytes, clock=clock)
    connector = embedded(endpoint, group)
    held = read_secret(secret)
    return StoreClient(connector, held, timeout_s=timeout_s, limit_bytes=limit_bytes, clock=clock)


def embedded(endpoint: str, group: str = "") -> Connector:
    """Returns the connector to our own server at ``endpoint``; raises SettingsError."""
    if endpoint.startswith(UNIX):
        return UnixConnector(parse_unix(endpoint, group))
    return TcpConnector(*parse_endpoint(endpoint))


def server_addresses(endpoint: str) -> tuple[tuple[str, int], ...]:
    """Returns host and port of each server of the store; raises SettingsError."""
    if endpoint == "none" or endpoint.startswith(UNIX):
        return ()
    if not endpoint.startswith(ETCD):
        return (parse_endpoint(endpoint),)
    members = (each.rpartition(":") for each in parse_etcd(endpoint).endpoints)
    return tuple((host.strip("[]"), int(port)) for host, _, port in members)


def sharing(endpoint: str, secret: str, group: str) -> str:
    """Returns a warning that other users may use the store; empty if only this user may."""
    if endpoint.startswith(UNIX):
        return f"the store {endpoint} is shared with all users of group {group}" if group else ""
    # Beyond loopback there is no store without a secret.
    if not secret and endpoint.startswith("tcp:") and _is_loopback(parse_endpoint(endpoint)[0]):
        return (
            f"any user of the host of {endpoint} can read and write this store: use "
            f"CRUX_STORE={UNIX}, or set CRUX_STORE_SECRET (docs/operate/store.md)"
        )
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def looked_into(error: StoreError, endpoint: str) -> StoreError:
    """Returns ``error``, or a better one if an HTTP server has the store's port; takes a second."""
    if error.cause not in (Cause.SILENT, Cause.STRANGER) or not endpoint.startswith("tcp:"):
        return error
    host, port = parse_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), HTTP_S) as asking:
            asking.settimeout(HTTP_S)
            asking.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            if asking.recv(len(b"HTTP/"), socket.MSG_WAITALL) != b"HTTP/":
                return error
    except OSError:
        return error
    return StoreError(f"store {endpoint}: {HTTP}", Cause.HTTP)


class TcpConnector:
    """Connects to the server at ``host:port``.

    A thread looks names up, because nothing bounds the time that it takes.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self.where = f"store tcp://{host}:{port}"
        self._looked_up: Future[list[tuple[Any, ...]]] | None = None

    def connect(self, timeout_s: float) -> socket.socket:
        """Returns a new connection; raises OSError, also while the name is looked up."""
        until_s = time.monotonic() + timeout_s
        if self._looked_up is None:
            look_up = partial(socket.getaddrinfo, *self._address, type=socket.SOCK_STREAM)
            self._looked_up = call_in_thread(look_up, "crux-names")
        pending = self._looked_up
        try:
            found = pending.result(timeout_s)
        except FutureTimeoutError:
            raise StoreError(f"{self._address[0]!r} is still looked up", Cause.NAME) from None
        finally:
            if pending.done():
                # Each attempt to connect looks anew: another host may have the name by then.
                self._looked_up = None
        failure: OSError | None = None
        for family, kind, protocol, _, address in found:
            connected = socket.socket(family, kind, protocol)
            try:
                connected.settimeout(max(0.001, until_s - time.monotonic()))
                connected.connect(address)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                failure = error
                connected.close()
            else:
                return connected
        raise failure or StoreError(f"{self._address[0]!r} has no address", Cause.NAME)

    def close(self) -> None:
        """Nothing is left over."""


def start_child(
    module: str, *arguments: str, fd: int, kept: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``python -m module --fd FD`` without torch, keeping ``fd`` and ``kept`` open."""
    env = {name: text for name, text in os.environ.items() if name not in _UNFIT_VARIABLES}
    # It finds the same packages from any folder.
    path = os.pathsep.join(str(Path(folder or ".").resolve()) for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", module, f"--fd={fd}", *arguments],
        env={**env, "PYTHONPATH": path},
        # Neither the terminal's signals nor its parent's pipes are its own.
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(fd, *kept),
    )


class ProcessConnector:
    """Starts the store process of an etcd, and starts it again when it has died.

    Args:
        url: first argument of the process: the store's address.
        load_s: shortest wait of a call for a new process to load. A command has that time; a leader
            does other things meanwhile.
        module: the process's module.
        start_s: time after which a process that is not ready is given up.
    """

    def __init__(
        self,
        url: str,
        load_s: float = 0.0,
        module: str = "crux_torch.store.etcd_process",
        start_s: float = START_S,
    ) -> None:
        self._url, self._module, self._start_s = url, module, start_s
        self._load_s = load_s
        self.where = f"store {url.partition('?')[0]}"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._began_s = 0.0

    @property
    def pid(self) -> int | None:
        """Process ID; None if there is none."""
        return None if self._process is None else self._process.pid

    def connect(self, timeout_s: float) -> socket.socket:
        """Returns the socket to a process that is ready.

        Raises:
            StoreError: it is not ready in time; the next call waits on.
        """
        if self._socket is None:
            self.close()
            self._start()
        connected = self._socket
        assert connected is not None
        if not select.select([connected], [], [], max(timeout_s, self._load_s))[0]:
            if time.monotonic() - self._began_s > self._start_s:
                self.close()
            raise StoreError("the store process is starting", Cause.BUSY)
        first = connected.recv(1)
        if first != READY:
            reason = connected.recv(MAX_REASON_BYTES).decode(errors="replace") if first else ""
            self.close()
            if reason:
                raise StoreError(reason, Cause.ETCD_PACKAGE)
            raise StoreError("the store process has died", Cause.CUT)
        self._socket = None
        return connected

    def close(self) -> None:
        """End the process."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        ours, its = socket.socketpair()
        with its:
            arguments = (f"--parent={os.getpid()}", self._url)
            self._process = start_child(self._module, *arguments, fd=its.fileno())
        self._socket = ours
        self._began_s = time.monotonic()
