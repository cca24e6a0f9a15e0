"""A client of one c10d TCPStore whose calls always end.

c10d's own timeout does not bound a call. A server that is stopped, or whose event loop waits for a
reverse DNS look-up (c10d makes one for each connection that it accepts), can hold ``get`` for any
time. So a thread of the connection makes every call, and the caller waits for a bounded time.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import TCPStore

from crux_torch.errors import StoreError

T = TypeVar("T")

#: Threads that may hang in c10d at once. At this number, calls fail until one ends.
MAX_ABANDONED = 4
#: Seconds after which an unfinished connect in the background is given up.
CONNECT_PATIENCE_S = 30.0
FIRST_BACKOFF_S = 0.05


class _Call:
    def __init__(self, operation: Callable[[Any], Any]) -> None:
        self.operation = operation
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None


class _Connection(threading.Thread):
    """One connection, which only this thread touches."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        super().__init__(name="crux-store", daemon=True)
        self.ready = threading.Event()
        self.error: Exception | None = None
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._canary: socket.socket | None = None

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                # c10d prints a stack trace for a port where nobody listens, so look first. The
                # socket stays open: its end shows that the server died before c10d notices.
                canary = socket.create_connection((self._host, self._port), self._timeout_s)
                stack.enter_context(canary).setblocking(False)
                self._canary = canary
                timeout = timedelta(seconds=self._timeout_s)
                client = TCPStore(
                    self._host, self._port, None, False, timeout, wait_for_workers=False
                )
            except Exception as error:
                self.error = error
                return
            finally:
                self.ready.set()
            while (call := self.calls.get()) is not None:
                try:
                    call.result = call.operation(client)
                except Exception as error:
                    call.error = error
                call.done.set()

    def peer_closed(self) -> bool:
        """Whether the server is known to be gone."""
        if self._canary is None:
            return False
        try:
            return self._canary.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def stop(self) -> None:
        self.calls.put(None)


_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()


def _stop_connections() -> None:
    # If a thread returned from C++ into a finished interpreter, it would abort the process.
    connections = [c for c in _connections if c.is_alive()]
    for connection in connections:
        connection.stop()
    deadline = time.monotonic() + 0.5
    for connection in connections:
        connection.join(max(0.0, deadline - time.monotonic()))


atexit.register(_stop_connections)


class TcpClient:
    """Calls on a TCPStore, each bounded; reconnects with exponential backoff and jitter.

    Safe to use from several threads, which take turns.

    Args:
        timeout_s: seconds that one call may take; a call that must connect first, twice as long.
        max_backoff_s: longest pause between two attempts to connect.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 0.5,
        max_backoff_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.port = host, port
        self._timeout_s = timeout_s
        self._max_backoff_s = max_backoff_s
        self._clock = clock
        self._lock = threading.Lock()
        self._random = random.Random()
        self._connection: _Connection | None = None
        self._connect_began_s = 0.0
        self._abandoned: list[_Connection] = []
        self._failures = 0
        self._retry_at_s = float("-inf")
        self._reason = ""
        self._closed = False

    def call(self, operation: Callable[[TCPStore], T]) -> T:
        """The result of ``operation`` on the connected client.

        Raises:
            StoreError: no connection (at once while backing off), no answer in time, or an error of
                c10d; ``operation`` may still run to its end.
        """
        if not self._lock.acquire(timeout=2 * self._timeout_s):
            raise StoreError(f"{self._where}: another thread's call still waits")
        try:
            if self._closed:
                raise StoreError(f"{self._where}: closed")
            connection = self._connected()
            call = _Call(operation)
            connection.calls.put(call)
            if not call.done.wait(self._timeout_s):
                raise self._fail(f"no answer within {self._timeout_s} s")
            if call.error is not None:
                raise self._fail(_first_line(call.error)) from call.error
            self._failures = 0
            result: T = call.result
            return result
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the connection; later calls raise."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.stop()
            connection.join(self._timeout_s)

    @property
    def _where(self) -> str:
        return f"store tcp://{self.host}:{self.port}"

    def _connected(self) -> _Connection:
        if self._connection is not None and self._connection.peer_closed():
            self._drop()
        now = self._clock()
        if now < self._retry_at_s:
            wait_s = self._retry_at_s - now
            raise StoreError(f"{self._where}: {self._reason}; next attempt in {wait_s:.2f} s")
        if self._connection is None:
            self._abandoned = [c for c in self._abandoned if c.is_alive()]
            if len(self._abandoned) >= MAX_ABANDONED:
                raise StoreError(f"{self._where}: {MAX_ABANDONED} calls hang")
            self._connection = _Connection(self.host, self.port, self._timeout_s)
            self._connect_began_s = now
            _connections.add(self._connection)
            self._connection.start()
        connection = self._connection
        if not connection.ready.wait(self._timeout_s):
            if now - self._connect_began_s > CONNECT_PATIENCE_S:
                raise self._fail(f"no connection within {CONNECT_PATIENCE_S} s")
            raise self._back_off("still connecting")
        if connection.error is not None:
            raise self._fail(_first_line(connection.error)) from connection.error
        return connection

    def _fail(self, reason: str) -> StoreError:
        self._drop()
        return self._back_off(reason)

    def _back_off(self, reason: str) -> StoreError:
        pause_s = min(self._max_backoff_s, FIRST_BACKOFF_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._retry_at_s = self._clock() + pause_s * self._random.uniform(0.5, 1.0)
        self._reason = reason
        return StoreError(f"{self._where}: {reason}")

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.stop()
            self._abandoned.append(connection)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
