"""An etcd for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from etcd_server import Etcd, wait_ready


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        wait_ready(etcd)
        yield etcd
