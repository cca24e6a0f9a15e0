"""A link between a job and one member of its etcd, which can be slow or cut in one direction."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Literal

Direction = Literal["there", "back"]
CHUNK_BYTES = 4096


class Link:
    """Carries TCP connections to the port :attr:`to` of this host; its own is :attr:`port`.

    What is under way in a direction that is cut waits, as TCP sends it again after a cut. A new
    connection is accepted, but nothing of it arrives.
    """

    def __init__(self, to: int) -> None:
        self.to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        #: Seconds that each 4 KiB take in each direction.
        self.delay_s = 0.0
        self._open = {"there": threading.Event(), "back": threading.Event()}
        self.heal()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, direction: Direction) -> None:
        self._open[direction].clear()

    def heal(self) -> None:
        self.delay_s = 0.0
        for each in self._open.values():
            each.set()

    def close(self) -> None:
        """Connections that it carries end with their ends."""
        self.heal()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                near.close()
                continue
            ends: tuple[tuple[socket.socket, socket.socket, Direction], ...] = (
                (near, far, "there"),
                (far, near, "back"),
            )
            for each in ends:
                threading.Thread(target=self._carry, args=each, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                time.sleep(self.delay_s)
                self._open[direction].wait()
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
