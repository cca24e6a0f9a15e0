"""The embedded store's server in a thread of the test, with a clock that the test may move."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crux_torch.errors import StoreError
from crux_torch.store import SharedStore
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import TcpConnector
from crux_torch.store.server import Server


class ServerThread:
    """Serves on a free port of loopback until the context ends."""

    def __init__(self, secret: bytes = b"", clock: Callable[[], float] | None = None) -> None:
        self.secret = secret
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.server = Server(secret, linger_s=float("inf"), clock=clock)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(self.server.run(self._listener))
        self._loop.run_forever()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(task)
        self._loop.close()

    def __enter__(self) -> ServerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._listener.close()

    def client(self, secret: bytes | None = None, **options: Any) -> StoreClient:
        known = self.secret if secret is None else secret
        return StoreClient(
            TcpConnector("127.0.0.1", self.port), known, **{"timeout_s": 60.0, **options}
        )


def works(store: SharedStore) -> bool:
    """Writes and reads a key; False if the store fails."""
    value = b"%d" % time.monotonic_ns()
    try:
        store.put("works", value)
        return store.get("works") == value
    except StoreError:
        return False


def secret_file(folder: Path, secret: str = "0123456789abcdef") -> str:
    path = folder / "secret"
    path.touch(mode=0o600)
    path.write_text(secret + "\n")
    return str(path)
