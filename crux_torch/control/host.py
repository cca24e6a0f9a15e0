"""Hosts the embedded store: of all ``cruxrun`` on a host, the one that binds the port first.

When the hosting process ends, another one begins with an empty store. The owners of its content
write it again.
"""

from __future__ import annotations

import errno
import gc
import ipaddress
import logging
import socket
import threading
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

from torch._C._distributed_c10d import TCPStore

from crux_torch.errors import SettingsError
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

#: ``hosting``: this process does; ``standby``: another process of this host does; ``remote``: the
#: address is not this host's; ``failed``: the port can't be used for another reason; ``stopped``.
HostState = Literal["starting", "hosting", "standby", "remote", "failed", "stopped"]
_TAKEN: dict[int | None, HostState] = {errno.EADDRINUSE: "standby", errno.EADDRNOTAVAIL: "remote"}

POLL_S = 0.5
BACKLOG = 1024


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``; raises SettingsError for another form."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or not port or parts.scheme != "tcp":
        raise SettingsError(f"store {endpoint!r}: expected tcp://HOST:PORT or none")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise SettingsError(f"store {endpoint!r}: expected nothing after tcp://HOST:PORT")
    return host, port


class StoreHost:
    """Hosts the store at ``endpoint`` if that is an address of this host and no other process does.

    Runs in a daemon thread. Nothing raises after construction. ``poll_s`` is the time between two
    attempts to take the port.

    Raises:
        SettingsError: ``endpoint`` is not of that form.
    """

    def __init__(self, endpoint: str, *, poll_s: float = POLL_S) -> None:
        self.host, self.port = parse_endpoint(endpoint)
        self._poll_s = poll_s
        #: What this process does for the store now.
        self.state: HostState = "stopped"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._server: TCPStore | None = None
        self._warn = WarnOnce(_log)

    def start(self) -> None:
        """Begin, unless it runs already."""
        if self._thread is not None:
            return
        self._stop.clear()
        self.state = "starting"
        self._thread = threading.Thread(target=self._run, name="crux-store-host", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End hosting, so that another process may take over. Waits 5 s at most."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(5.0)
        self.state = "stopped"

    def _run(self) -> None:
        while not self._stop.is_set() and self._server is None:
            try:
                self._attempt()
            except Exception as error:
                self.state = _TAKEN.get(getattr(error, "errno", None), "failed")
                if self.state == "failed":
                    first = str(error).partition("\n")[0]
                    about = f"can't host the store at {self.host}:{self.port}: {first}"
                    self._warn("port" if isinstance(error, OSError) else "server", about)
            if self._server is None:
                self._stop.wait(self._poll_s)
        self._stop.wait()
        self._server = None
        # The server's socket closes with its last reference.
        gc.collect()

    def _attempt(self) -> None:
        listener = self._listen()
        address = listener.getsockname()[0]
        if not ipaddress.ip_address(address).is_loopback:
            self._warn(
                "trust",
                f"the store at {address}:{self.port} has no authorization: whoever reaches it can "
                "change priorities. Use it on trusted networks only",
            )
        # Left alone, a TCPStore listens on every interface, whatever its host name is. And for each
        # peer on an IPv6 socket it asks the DNS for a name, on its event loop's only thread.
        try:
            self._server = TCPStore(
                address,
                self.port,
                None,
                True,
                timedelta(seconds=5),
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
            )
            listener.detach()
        except Exception:
            listener.close()
            raise
        self.state = "hosting"
        _log.info("hosting the store at %s:%d", address, self.port)

    def _listen(self) -> socket.socket:
        family, *_, address = socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # It reuses the address: the connections of a host that died linger, and must not delay the
        # next host. Two sockets can be bound in this way, but only one of them can listen.
        is_v6 = family == socket.AF_INET6
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=is_v6)
