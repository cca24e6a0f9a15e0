"""Starts a process that speaks frames with this one, and starts it again when it has died."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time

from crux_torch.errors import Cause, StoreError
from crux_torch.store.child import start_child
from crux_torch.store.etcd_process import READY

MODULE = "crux_torch.store.etcd_process"
START_S = 60.0
MAX_REASON_BYTES = 1000


class ProcessConnector:
    """Connects to a process of its own for the store at ``url``: the store process of an etcd.

    Args:
        module: of the process, if it is another one.
        start_s: seconds after which a process that is not ready is given up.
        load_s: seconds for which a call waits at least until a new process has loaded its code. A
            command has that time; a leader does other things meanwhile.
    """

    def __init__(
        self, url: str, load_s: float = 0.0, module: str = MODULE, start_s: float = START_S
    ) -> None:
        self._url, self._module, self._start_s = url, module, start_s
        self._load_s = load_s
        self.where = f"store {url.partition('?')[0]}"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._began_s = 0.0

    @property
    def pid(self) -> int | None:
        """The process; None if there is none."""
        return None if self._process is None else self._process.pid

    def connect(self, timeout_s: float) -> socket.socket:
        """The socket to a process that is ready.

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
            about = (f"--parent={os.getpid()}", self._url)
            self._process = start_child(self._module, *about, fd=its.fileno())
        self._socket = ours
        self._began_s = time.monotonic()
