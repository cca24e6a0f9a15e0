"""The process that speaks to an etcd is killed again and again, amid what it does."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
from control_fakes import until
from etcd_server import Etcd, needs_etcd, wait_ready

from crux_torch.errors import StoreError
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import ProcessConnector, open_store

SEED = int(os.environ.get("CRUX_SOAK_SEED", "1"))
KILLS = 40
#: Longer than a swap takes.
WITHIN_S = 0.02


def read(store: StoreClient) -> int:
    """The counter, as soon as a process answers."""
    found: list[int] = []

    def answered() -> bool:
        try:
            found.append(int(store.get("counter") or b"0"))
        except StoreError:
            return False
        return True

    until(answered, what="a process that answers")
    return found[0]


@needs_etcd
@pytest.mark.full
def test_a_swap_counts_once_or_not_at_all_whenever_the_process_dies(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    with Etcd(tmp_path) as etcd:
        wait_ready(etcd)
        store = open_store(f"etcd://{etcd.endpoints}/counter", timeout_s=10.0)
        lost = unknown = 0
        try:
            for _ in range(KILLS):
                value = read(store)
                connector = store._connector
                assert isinstance(connector, ProcessConnector)
                assert connector.pid is not None
                kill = threading.Timer(
                    rng.uniform(0.0, WITHIN_S), os.kill, (connector.pid, signal.SIGKILL)
                )
                kill.start()
                while True:
                    expected = str(value).encode() if value else None
                    try:
                        swapped = store.compare_and_swap(
                            "counter", expected, str(value + 1).encode(), 600.0
                        )
                    except StoreError:
                        break
                    assert swapped, f"seed {SEED}: nobody else writes"
                    value += 1
                    assert read(store) == value, f"seed {SEED}"
                    if not kill.is_alive():
                        break  # it died while it was read, and reading tries again
                kill.join()
                after = read(store)
                assert after in (value, value + 1), f"seed {SEED}"
                lost, unknown = lost + (after == value), unknown + 1
        finally:
            store.close()
    print(f"seed {SEED}: {unknown} swaps without an answer, of which {lost} were not made")
