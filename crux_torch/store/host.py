"""Keeps the embedded store's server running: each ``cruxrun`` of its host does, as long as it runs.

Whoever binds the port first, or locks the Unix socket, starts the server, a process of its own, and
hands it the socket. The server outlives its starter while others use it. If it dies, its place is
free, and another one begins with an empty store. The owners of its content write it again.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Literal

from crux_torch.errors import Cause, StoreError
from crux_torch.logs import WarnOnce
from crux_torch.settings import Settings
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import open_store, parse_endpoint, sharing, start_child
from crux_torch.store.frames import mark, read_secret
from crux_torch.store.server import BACKLOG, LINGER_S
from crux_torch.store.unix_place import UNIX, listening, parse_unix

_log = logging.getLogger(__name__)

#: ``hosting``: this process started the server; ``standby``: another process of this host did;
#: ``remote``: the address is another host's; ``failed``: the place can't be used.
HostState = Literal["starting", "hosting", "standby", "remote", "failed", "stopped"]
_TAKEN: dict[int | None, HostState] = {errno.EADDRINUSE: "standby", errno.EADDRNOTAVAIL: "remote"}

POLL_S = 0.5
CALL_S = 2.0
#: Seconds without an answer from the process at the place until a warning.
PATIENCE_S = 15.0
#: Clients that the embedded store bears: benchmarks/control.py, docs/operate/store.md.
BEARABLE_CLIENTS = 1000


def host_of(settings: Settings) -> StoreHost | None:
    """Returns a host of the embedded store; None if the settings name no such store.

    Raises:
        SettingsError: a setting can't be used.
    """
    if not settings.store.startswith(("tcp:", UNIX)):
        return None
    if shared := sharing(settings.store, settings.store_secret, settings.store_group):
        _log.warning("%s", shared)
    return StoreHost(settings.store, settings.store_secret, settings.store_group)


class StoreHost:
    """Keeps the server at ``endpoint`` running, if that is an address of this host.

    Runs in a daemon thread. Nothing raises after construction.

    Args:
        endpoint, secret, group: the settings ``store``, ``store_secret`` and ``store_group``.
        poll_s: period of looking at the server.
        linger_s: time without a client after which a server that this process started ends.
        module, arguments: the server's: the store, or another one that speaks its frames.
        dscp: DSCP value of what the server sends, 0 to 63.

    Raises:
        SettingsError: a setting can't be used.
    """

    def __init__(
        self,
        endpoint: str,
        secret: str = "",
        group: str = "",
        *,
        poll_s: float = POLL_S,
        linger_s: float = LINGER_S,
        module: str = "crux_torch.store.server",
        arguments: Sequence[str] = (),
        dscp: int = 0,
    ) -> None:
        self._dscp = dscp
        self._module, self._arguments = module, tuple(arguments)
        is_local = endpoint.startswith(UNIX)
        self._place = parse_unix(endpoint, group) if is_local else None
        self._address = None if is_local else parse_endpoint(endpoint)
        self._has_secret = bool(read_secret(secret))
        self._secret = os.path.abspath(secret) if secret else ""
        self._poll_s, self._linger_s = poll_s, linger_s
        #: Present role of this process.
        self.state: HostState = "stopped"
        self._endpoint, self._group = endpoint, group
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._unanswered_s = 0.0
        self._warn = WarnOnce(_log)

    @property
    def pid(self) -> int | None:
        """Process ID of the server that this process started; None if there is none."""
        server = self._server
        return None if server is None else server.pid

    def start(self) -> None:
        """Begin, unless it runs already."""
        if self._thread is not None:
            return
        self._stop.clear()
        self.state = "starting"
        self._thread = threading.Thread(target=self._run, name="crux-store-host", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the server to the others; it ends if there are none. Waits 5 s at most."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(5.0)
        self.state = "stopped"

    def _run(self) -> None:
        # Its connection keeps the server alive.
        client = open_store(self._endpoint, self._secret, self._group, timeout_s=CALL_S)
        while not self._stop.is_set():
            if self._server is not None and self._server.poll() is not None:
                self._server = None
            if self._server is None:
                try:
                    self._attempt()
                except Exception as error:
                    self.state = _TAKEN.get(getattr(error, "errno", None), "failed")
                    if self.state == "failed":
                        reason = error.with_remedy if isinstance(error, StoreError) else str(error)
                        message = (
                            f"can't host the store {self._endpoint}: " + reason.partition("\n")[0]
                        )
                        self._warn("port" if isinstance(error, OSError) else "server", message)
            if self.state in ("hosting", "standby"):
                self._use(client)
            self._stop.wait(self._poll_s)
        client.close()

    def _use(self, client: StoreClient) -> None:
        try:
            count = client.clients()
            if count > BEARABLE_CLIENTS:
                self._warn(
                    "crowd",
                    f"{count} clients use the store {self._endpoint}, which bears "
                    f"{BEARABLE_CLIENTS}: plans come late. Use an etcd (docs/operate/store.md)",
                )
            self._unanswered_s = 0.0
            self._warn.forget("answer")
        except StoreError as error:
            self._unanswered_s += self._poll_s
            if self._unanswered_s >= PATIENCE_S:
                self._warn("answer", f"going on without the shared store: {error.with_remedy}")

    def _attempt(self) -> None:
        if self._place is not None:
            with listening(self._place, BACKLOG) as (listener, lock, path):
                group = self._place.group
                more = [f"--path={path}", *([] if group is None else [f"--group={group}"])]
                self._begin(listener, *more, kept=(lock,))
            return
        with self._listen() as listener:
            address = listener.getsockname()[0]
            if not (self._has_secret or ipaddress.ip_address(address).is_loopback):
                raise StoreError(
                    f"{address} is not loopback, and whoever reaches it could change priorities",
                    Cause.LOOPBACK,
                )
            self._begin(listener)

    def _begin(self, listener: socket.socket, *more: str, kept: Sequence[int] = ()) -> None:
        fd = listener.fileno()
        common = (f"--linger-s={self._linger_s}", f"--secret={self._secret}")
        self._server = start_child(self._module, *common, *more, *self._arguments, fd=fd, kept=kept)
        self.state = "hosting"
        _log.info("the store %s is process %d", self._endpoint, self._server.pid)

    def _listen(self) -> socket.socket:
        assert self._address is not None
        family, *_, address = socket.getaddrinfo(
            *self._address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # It reuses the address: the connections of a server that died linger, and must not delay
        # the next. Two sockets can be bound in this way, but only one of them can listen.
        is_v6 = family == socket.AF_INET6
        listener = socket.create_server(
            address, family=family, backlog=BACKLOG, dualstack_ipv6=is_v6
        )
        if self._dscp:
            mark(listener, self._dscp)
        return listener
