"""A process group's store for the background: no call waits for a key or for the training thread.

On a TCPStore all groups of the process share one extra connection. More connections would each cost
the server a reverse DNS look-up, and the training thread's own may be busy waiting for a key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_c10d import Store as C10dStore

from crux_torch.c10d.tcp_client import TcpClient
from crux_torch.errors import StoreError

#: Seconds that one call may take.
CALL_S = 2.0
#: Seconds between two looks for a key.
POLL_S = 0.002

T = TypeVar("T")

_lock = threading.Lock()
_clients: dict[tuple[str, int], TcpClient] = {}


def close_clients() -> None:
    """End the connections; later calls connect again."""
    with _lock:
        clients = list(_clients.values())
        _clients.clear()
    for client in clients:
        client.close()


class GroupStore:
    """Calls on a group's store, each bounded where the store is a TCPStore.

    Args:
        store: of the group, prefixes included. A TCPStore is not kept, so that its server can end
            with the group.
    """

    def __init__(self, store: Any) -> None:
        from crux_torch import _C

        base = store
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        self._address = (base.host, base.port) if isinstance(base, TCPStore) else None
        self._prefix = _C.store_prefix(store) if self._address else ""
        self._shared = None if self._address else store

    def native(self, prefix: str, timeout: timedelta) -> C10dStore:
        """What is under ``prefix``, by c10d's own classes; raises RuntimeError."""
        if self._address is None:
            return PrefixStore(prefix.rstrip("/"), cast(C10dStore, self._shared))
        host, port = self._address
        client = TCPStore(host, port, is_master=False, timeout=timeout)
        return PrefixStore((self._prefix + prefix).rstrip("/"), client)

    def set(self, key: str, value: str | bytes) -> None:
        """Put ``value``; raises StoreError, as the methods below do."""
        self._call(lambda store, prefix: store.set(prefix + key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._call(lambda store, prefix: store.get(prefix + key)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._call(lambda store, prefix: store.check([prefix + k for k in keys])))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """The value, once ``desired`` is put if it was ``expected``: empty where there is none."""
        return bytes(
            self._call(lambda store, prefix: store.compare_set(prefix + key, expected, desired))
        )

    def delete_key(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._call(lambda store, prefix: store.delete_key(prefix + key))

    def _call(self, operation: Callable[[Any, str], T]) -> T:
        try:
            if self._address is None:
                return operation(self._shared, "")
            with _lock:
                client = _clients.get(self._address)
                if client is None:
                    client = _clients[self._address] = TcpClient(*self._address, timeout_s=CALL_S)
            return client.call(lambda store: operation(store, self._prefix))
        except RuntimeError as error:
            raise StoreError(str(error).partition("\n")[0]) from error


class Rendezvous(C10dStore):
    """The store over which an inner backend meets its peers: a part of the group's store.

    Keep it for as long as the backend lives, because c10d does not keep its Python part.

    Its keys begin with ``prefix``. It stops waiting once ``ended`` says so.
    """

    def __init__(self, store: GroupStore, prefix: str, ended: Callable[[], bool]) -> None:
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

    def native(self, timeout: timedelta) -> C10dStore:
        """The same keys in c10d's own classes, which a backend's C++ threads may keep and wait on.

        Raises:
            RuntimeError: no connection.
        """
        return self._store.native(self._prefix, timeout)

    def forget(self) -> None:
        """Delete what was written here; raises StoreError."""
        for key in self._written:
            self._store.delete_key(self._prefix + key)
        self._written.clear()
