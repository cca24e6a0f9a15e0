"""A store with jobs, for the commands that read one."""

from __future__ import annotations

from collections.abc import Iterator

import heavy3
import pytest
from store_server import ServerThread

from crux_torch.agreement.registry import Registry
from crux_torch.store.endpoint import open_store


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A store with heavy-3's jobs, all on one spine."""
    with ServerThread() as server:
        where = f"tcp://127.0.0.1:{server.port}"
        store = open_store(where, "", timeout_s=10.0)
        heavy3.fill(Registry(store, "lab"))
        yield where
        store.close()
