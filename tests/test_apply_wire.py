"""The class of a job's packets on the wire: two ranks in two network namespaces, joined by a veth.

Run as a program it is one of the two ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.slow

LEVEL = 5
PORT = 29555
ADDRESSES = {"ipv4": ("10.99.0.1", "10.99.0.2"), "ipv6": ("fd99::1", "fd99::2")}
TIMEOUT = datetime.timedelta(seconds=60)
ETH_P_ALL = 3


class Capture:
    """Classes of the TCP packets that cross an interface, by phase and unordered pair of ports."""

    def __init__(self, interface: str) -> None:
        self.phase = ""
        self.seen: dict[str, dict[tuple[int, ...], set[int]]] = {}
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
        self._socket.bind((interface, ETH_P_ALL))
        self._socket.settimeout(0.2)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self, phase: str) -> None:
        """Records under ``phase`` from now on, past what is still queued from before."""
        time.sleep(0.3)
        self.seen[phase] = defaultdict(set)
        self.phase = phase

    def pause(self) -> None:
        self.phase = ""

    def end(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                packet = self._socket.recv(256)
                phase = self.phase
                if phase and len(packet) > 44:
                    self._note(phase, packet)

    def _note(self, phase: str, packet: bytes) -> None:
        if packet[0] >> 4 == 4 and packet[9] == socket.IPPROTO_TCP:
            tos, offset = packet[1], (packet[0] & 15) * 4
        elif packet[0] >> 4 == 6 and packet[6] == socket.IPPROTO_TCP:
            tos, offset = (struct.unpack_from("!H", packet)[0] >> 4) & 0xFF, 40
        else:
            return
        ports = tuple(sorted(struct.unpack_from("!HH", packet, offset)))
        self.seen[phase][ports].add(tos & 0xFC)


def rank_main(rank: int, family: str) -> dict[str, Any]:
    """Exchanges data over gloo and over a connection of its own, unmarked, marked, reverted."""
    import torch
    import torch.distributed as dist

    from crux_torch.apply.classes import TrafficClass
    from crux_torch.c10d.ownership import Ownership
    from crux_torch.settings import CLASS_SELECTORS

    here, there = ADDRESSES[family][rank], ADDRESSES[family][0]
    store = dist.TCPStore(there, PORT, 2, rank == 0, TIMEOUT)
    user = _user_connection(rank, there)
    prefixed = dist.PrefixStore("group", store)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
    ownership = Ownership()
    with ownership.watching(prefixed, rank, 2):
        inner = dist.ProcessGroupGloo(prefixed, rank, 2, options)
    [own] = ownership.owned()
    assert own.peer is not None
    traffic_class = TrafficClass(ownership)
    capture = Capture("veth") if rank == 0 else None
    for phase in ("before", "marked", "reverted"):
        if phase == "marked":
            traffic_class.apply_level(LEVEL, CLASS_SELECTORS)
        if phase == "reverted":
            traffic_class.revert()
        inner.barrier().wait()
        if capture is not None:
            capture.begin(phase)
        inner.barrier().wait()
        for _ in range(20):
            inner.allreduce([torch.ones(20000)]).wait()
            user.sendall(bytes(1000))
            received = 0
            while received < 1000:
                received += len(user.recv(1000))
            store.add("count", 1)
        if capture is not None:
            capture.pause()
        inner.barrier().wait()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < 2:
        time.sleep(0.01)
    if capture is None:
        return {}
    capture.end()
    return {
        "gloo": sorted((own.local[1], own.peer[1])),
        "user": sorted((user.getsockname()[1], user.getpeername()[1])),
        "seen": {
            phase: [(list(ports), sorted(classes)) for ports, classes in by_ports.items()]
            for phase, by_ports in capture.seen.items()
        },
    }


def _user_connection(rank: int, there: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    if rank == 0:
        with socket.create_server((there, PORT + 1), family=family) as listener:
            listener.settimeout(60)
            connection = listener.accept()[0]
    else:
        for _ in range(600):
            try:
                connection = socket.create_connection((there, PORT + 1), timeout=60)
                break
            except OSError:
                time.sleep(0.1)
    connection.settimeout(60)
    return connection


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a veth pair, each end named ``veth``."""
    names = (f"cruxwire{os.getpid()}a", f"cruxwire{os.getpid()}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip(*f"-n {names[0]} link add veth type veth peer veth netns {names[1]}".split())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
        for name, v4, v6 in zip(names, ADDRESSES["ipv4"], ADDRESSES["ipv6"], strict=True):
            ip("-n", name, "addr", "add", f"{v4}/24", "dev", "veth")
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("-n", name, "addr", "add", f"{v6}/64", "dev", "veth", "nodad")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "veth", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_packets_carry_the_class_while_it_is_applied(family):
    with two_namespaces() as names:
        if family == "ipv6":
            shown = subprocess.run(
                ["ip", "-n", names[0], "-6", "addr", "show", "dev", "veth"],
                capture_output=True,
                timeout=20,
            )
            if ADDRESSES[family][0].encode() not in shown.stdout:
                pytest.skip("no IPv6 in this kernel's namespaces")
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, str(rank), family],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank, name in enumerate(names)
        ]
        try:
            outputs = [rank.communicate(timeout=150) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, (_, stderr) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, stderr.decode()
    result = json.loads(outputs[0][0].decode().splitlines()[-1])
    seen = {
        phase: {tuple(ports): set(classes) for ports, classes in entries}
        for phase, entries in result["seen"].items()
    }
    gloo, user = tuple(result["gloo"]), tuple(result["user"])
    assert seen["before"][gloo] == {0}
    assert seen["marked"][gloo] == {8 * LEVEL << 2}
    assert seen["reverted"][gloo] == {0}
    for phase in seen.values():
        assert phase[user] == {0}
        others = {ports: classes for ports, classes in phase.items() if ports != gloo}
        assert len(others) >= 2, "the store's packets were not captured"
        assert set().union(*others.values()) == {0}


if __name__ == "__main__":
    print(json.dumps(rank_main(int(sys.argv[1]), sys.argv[2])))
