"""Bounded calls on the c10d store of a job.

c10d's own timeout does not bound a call. A server that is stopped, or whose event loop waits for a
reverse DNS look-up (c10d makes one for each connection that it accepts), can hold ``get`` for any
time. So a thread of the connection makes every call, and the caller waits for a bounded time.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import queue
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from crux_torch.errors import StoreError, first_line
from crux_torch.threads import call_in_thread

T = TypeVar("T")

#: Threads that may hang in c10d at once. At this number, calls fail until one ends.
MAX_ABANDONED = 4
#: Seconds after which an unfinished connect in the background is given up.
CONNECT_PATIENCE_S = 30.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
#: Seconds that a call of a client with the process's shared connection may take.
SHARED_CALL_S = 2.0
#: Seconds between two looks of a :class:`Rendezvous` for a key.
POLL_S = 0.002


class JobStore:
    """A client of a job's store: no call waits for a key or for the training thread.

    On a TCPStore it has another connection than the training thread's, which may be busy waiting
    for a key. Every other store is called directly, and not bounded.

    Thread safety: any thread may call any method; calls over one connection take turns.

    Args:
        store: as a process group has it, prefixes included. A TCPStore is not kept, so that its
            server can end with the group.
        timeout_s: seconds that one call may take; a call that must connect first, twice as long.
            None: share one connection with the other such clients of this process, because each
            connection costs the server a reverse DNS look-up.
    """

    def __init__(
        self,
        store: Store,
        *,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from crux_torch import _C

        base = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        self._address = (base.host, base.port) if isinstance(base, TCPStore) else None
        self._prefix = _C.store_prefix(store) if self._address else ""
        self._direct: Store | None = None if self._address else store
        self._own: TcpClient | None = None
        if self._address is not None and timeout_s is not None:
            self._own = TcpClient(*self._address, timeout_s, clock)

    def set(self, key: str, value: str | bytes) -> None:
        """Puts a value; raises StoreError, as the methods below do."""
        self._call(lambda store, prefix: store.set(prefix + key, value))

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is there."""
        return bytes(self._call(lambda store, prefix: store.get(prefix + key)))

    def find(self, key: str) -> bytes | None:
        """Returns the value of a key, None if it is not there."""

        def find(store: Any, prefix: str) -> bytes | None:
            # get() would wait for an absent key.
            return bytes(store.get(prefix + key)) if store.check([prefix + key]) else None

        return self._call(find)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all keys are there."""
        return bool(self._call(lambda store, prefix: store.check([prefix + k for k in keys])))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Puts ``desired`` if the value is ``expected`` (empty: none); returns the new value."""
        return bytes(
            self._call(lambda store, prefix: store.compare_set(prefix + key, expected, desired))
        )

    def delete_key(self, key: str) -> None:
        """Deletes a key, if it is there."""
        self._call(lambda store, prefix: store.delete_key(prefix + key))

    def native(self, prefix: str, timeout: timedelta) -> Store:
        """Returns what is under ``prefix``, by c10d's own classes; raises RuntimeError."""
        if self._address is None:
            return PrefixStore(prefix.rstrip("/"), cast(Store, self._direct))
        host, port = self._address
        client = TCPStore(host, port, is_master=False, timeout=timeout)
        return PrefixStore((self._prefix + prefix).rstrip("/"), client)

    def close(self) -> None:
        """Ends this client's own connection; later calls raise."""
        self._direct = None
        if self._own is not None:
            self._own.close()

    def _call(self, operation: Callable[[Any, str], T]) -> T:
        try:
            if self._address is not None:
                client = self._own or _shared_client(self._address)
                return client.call(lambda store: operation(store, self._prefix))
            if self._direct is None:
                raise StoreError("the store's client is closed")
            return operation(self._direct, "")
        except RuntimeError as error:
            raise StoreError(first_line(error)) from error


class Rendezvous(Store):
    """A part of a job's store over which the ranks of a new inner backend meet.

    Keep it for as long as the backend lives, because c10d does not keep its Python part.

    Args:
        prefix: of its keys.
        ended: tells whether to stop waiting.
    """

    def __init__(self, store: JobStore, prefix: str, ended: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._prefix, self._ended = store, prefix, ended
        self._written: list[str] = []

    def set(self, key: str, value: Any) -> None:
        """See ``torch.distributed.Store``, here and below."""
        self._written.append(key)
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._prefix + key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if self._ended():
                raise RuntimeError("the process group has ended")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"no peer within {timeout.total_seconds():g} s: {keys[0]}")
            time.sleep(POLL_S)

    def native(self, timeout: timedelta) -> Store:
        """Returns the same keys in c10d's own classes, which a backend's C++ threads may wait on.

        Raises:
            RuntimeError: no connection.
        """
        return self._store.native(self._prefix, timeout)

    def forget(self) -> None:
        """Deletes what was written here; raises StoreError."""
        for key in self._written:
            self._store.delete_key(self._prefix + key)
        self._written.clear()


class TcpClient:
    """Calls on a TCPStore, each bounded; reconnects with exponential backoff and jitter.

    Thread safety: any thread may call any method; calls take turns.
    """

    def __init__(
        self, host: str, port: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host, self._port = host, port
        self._timeout_s, self._clock = timeout_s, clock
        self._where = f"store tcp://{host}:{port}"
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
        """Returns the result of ``operation`` on the connected client.

        Raises:
            StoreError: no connection (at once while backing off), no answer in time, or an error of
                c10d; ``operation`` may still run to its end.
        """
        if not self._lock.acquire(timeout=2 * self._timeout_s):
            raise StoreError(f"{self._where}: another thread's call still waits")
        try:
            if self._closed:
                raise StoreError(f"{self._where}: closed")
            answer = self._connected().submit(operation)
            if not concurrent.futures.wait([answer], self._timeout_s).done:
                raise self._fail(f"no answer within {self._timeout_s} s")
            if (error := answer.exception()) is not None:
                raise self._fail(first_line(error)) from error
            self._failures = 0
            return answer.result()
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the connection; later calls raise."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.stop()
            concurrent.futures.wait([connection.ended], self._timeout_s)

    def _connected(self) -> _Connection:
        if self._connection is not None and self._connection.peer_closed():
            self._drop()
        now = self._clock()
        if now < self._retry_at_s:
            wait_s = self._retry_at_s - now
            raise StoreError(f"{self._where}: {self._reason}; next attempt in {wait_s:.2f} s")
        if self._connection is None:
            self._abandoned = [c for c in self._abandoned if not c.ended.done()]
            if len(self._abandoned) >= MAX_ABANDONED:
                raise StoreError(f"{self._where}: {MAX_ABANDONED} calls hang")
            self._connection = _Connection(self._host, self._port, self._timeout_s)
            self._connect_began_s = now
        connection = self._connection
        if not connection.ready.wait(self._timeout_s):
            if now - self._connect_began_s > CONNECT_PATIENCE_S:
                raise self._fail(f"no connection within {CONNECT_PATIENCE_S} s")
            raise self._back_off("still connecting")
        if connection.error is not None:
            raise self._fail(first_line(connection.error)) from connection.error
        return connection

    def _fail(self, reason: str) -> StoreError:
        self._drop()
        return self._back_off(reason)

    def _back_off(self, reason: str) -> StoreError:
        pause_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._retry_at_s = self._clock() + pause_s * self._random.uniform(0.5, 1.0)
        self._reason = reason
        return StoreError(f"{self._where}: {reason}")

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.stop()
            self._abandoned.append(connection)


class _Connection:
    """One connection, which only its own thread uses."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.ready = threading.Event()
        self.error: Exception | None = None
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._canary: socket.socket | None = None
        self.ended = call_in_thread(self._serve, "crux-store")
        _connections.add(self)

    def submit(self, operation: Callable[[Any], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._calls.put((operation, answer))
        return answer

    def stop(self) -> None:
        self._calls.put(None)

    def peer_closed(self) -> bool:
        """Returns True if the server is known to be gone."""
        if self._canary is None:
            return False
        try:
            return self._canary.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _serve(self) -> None:
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
            while (item := self._calls.get()) is not None:
                operation, answer = item
                try:
                    answer.set_result(operation(client))
                except Exception as error:
                    answer.set_exception(error)


_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
_shared_lock = threading.Lock()
_shared: dict[tuple[str, int], TcpClient] = {}


def _shared_client(address: tuple[str, int]) -> TcpClient:
    with _shared_lock:
        if address not in _shared:
            _shared[address] = TcpClient(*address, SHARED_CALL_S)
        return _shared[address]


def close_shared() -> None:
    """Ends the connections that clients share; later calls connect again."""
    with _shared_lock:
        clients = list(_shared.values())
        _shared.clear()
    for client in clients:
        client.close()


@atexit.register
def _stop_connections() -> None:
    # If a thread returned from C++ into a finished interpreter, it would abort the process.
    connections = [c for c in _connections if not c.ended.done()]
    for connection in connections:
        connection.stop()
    concurrent.futures.wait([c.ended for c in connections], 0.5)
