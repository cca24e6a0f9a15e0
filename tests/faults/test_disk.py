"""The disk of an etcd is full, or slow. Nothing that it confirmed is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_fakes import until
from etcd_server import Etcd, needs_etcd, wait_ready

from crux_torch.errors import StoreError
from crux_torch.store import MAX_VALUE_BYTES
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import open_store

pytestmark = [needs_etcd, pytest.mark.full]

#: What etcd takes before it stores anything, and some more.
DISK_BYTES = 200 << 20
LEASE_S = 600.0
#: What a slow disk takes for each sync; a write takes two of them where its lease is new.
SYNC_S = 0.4
SLOW_FOR_S = 20.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={DISK_BYTES}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"a disk of a bounded size: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def opened(etcd: Etcd) -> Iterator[StoreClient]:
    store = open_store(f"etcd://{etcd.endpoints}/disk", timeout_s=10.0)
    try:
        yield store
    finally:
        store.close()


def put(store: StoreClient, key: str, value: bytes) -> bool:
    try:
        store.put(key, value, LEASE_S)
    except StoreError:
        return False
    return True


def is_traced(pid: str) -> bool:
    """True if a tracer is on each thread of the process."""
    threads = Path("/proc", pid, "task").glob("*/status")
    return all("TracerPid:\t0\n" not in status.read_text() for status in threads)


def content(store: StoreClient) -> dict[str, bytes]:
    found: list[dict[str, bytes]] = []

    def listed() -> bool:
        with contextlib.suppress(StoreError):
            found.append(store.list(""))
        return bool(found)

    until(listed, what="an answer")
    return found[0]


def test_after_a_full_disk_all_is_there_that_was_confirmed(disk: Path) -> None:
    with Etcd(disk) as etcd:
        wait_ready(etcd)
        with opened(etcd) as store:
            until(lambda: put(store, "first", b"1"), what="a write")
            with (disk / "filler").open("wb") as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(1 << 20))
                    filler.flush()
            confirmed = {"first": b"1"}
            # What is reserved already is used up first.
            refused = 0
            for n in range(1000):
                key, value = f"k{n % 8}", os.urandom(MAX_VALUE_BYTES // 2)
                if put(store, key, value):
                    confirmed[key] = value
                    refused = 0
                else:
                    # Without an answer it may have been made.
                    confirmed.pop(key, None)
                    refused += 1
                if refused == 20:
                    break
            assert refused == 20, "the disk is not full"
            (disk / "filler").unlink()
            etcd.restart(0)
            wait_ready(etcd)
            until(lambda: put(store, "last", b"1"), what="a write")
            after = content(store)
    assert after["last"] == b"1"
    assert confirmed.items() <= after.items()


def test_a_slow_disk_delays_and_loses_nothing(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("a slow disk: it takes strace")
    with Etcd(tmp_path, syncs=True) as etcd:
        wait_ready(etcd)
        with opened(etcd) as store:
            until(lambda: put(store, "k", b"0"), what="a write")
            inject = f"inject=fdatasync,fsync:delay_enter={int(SYNC_S * 1e6)}"
            pid = str(etcd.processes[0].pid)
            slow = subprocess.Popen(
                ["strace", "-f", "-qq", "-o", "/dev/null", "-e", inject, "-p", pid]
            )
            try:
                until(lambda: is_traced(pid), what="strace on each thread")
                confirmed, tried, began_s = 0, 0, time.monotonic()
                while time.monotonic() < began_s + SLOW_FOR_S:
                    tried += 1
                    if put(store, "k", str(tried).encode()):
                        confirmed = tried
            finally:
                # It leaves the process as it was.
                slow.send_signal(signal.SIGINT)
                slow.wait()
            print(f"{tried} writes, the last confirmed one was the {confirmed}th")
            assert tried < SLOW_FOR_S / SYNC_S + 2, "the disk was not slow"
            seen = int(content(store)["k"])
            assert confirmed <= seen <= tried
            until(lambda: put(store, "k", b"last"), what="a write")
            assert content(store)["k"] == b"last"
