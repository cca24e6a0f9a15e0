"""TCP connections of another process, seen through descriptors borrowed from it (pidfd_getfd)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

_SYS_PIDFD_GETFD = 438  # the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)

# struct tcp_info: 8 one-byte fields, 24 of four bytes, two pacing rates, then these two.
_BYTES_ACKED = struct.Struct("=Q")
_BYTES_ACKED_AT = 120


def connections(pid: int, without_ports: Iterable[int] = ()) -> list[socket.socket]:
    """The connected TCP sockets of process ``pid``, but those with one of these ports at an end.

    Each once: the transport library keeps a second descriptor of some. The caller closes them;
    they share their state with the process's own descriptors.

    Raises:
        OSError: the process is gone, or may not be looked into.
    """
    skipped = set(without_ports)
    found = []
    seen: set[str] = set()
    pidfd = os.pidfd_open(pid)
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{entry}")
                if not link.startswith("socket:") or link in seen:
                    continue
                seen.add(link)
                borrowed = _borrow(pidfd, int(entry))
                if _is_connection(borrowed, skipped):
                    found.append(borrowed)
                else:
                    borrowed.close()
    finally:
        os.close(pidfd)
    return found


@contextlib.contextmanager
def busiest(pid: int) -> Iterator[socket.socket]:
    """The connection of process ``pid`` that has sent most: the one that carries gradients."""
    opened = connections(pid)
    try:
        yield max(opened, key=bytes_acked)
    finally:
        for each in opened:
            each.close()


def bytes_acked(connection: socket.socket) -> int:
    """Bytes that the other end has acknowledged since the connection was made."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(_BYTES_ACKED.unpack_from(info, _BYTES_ACKED_AT)[0])


def dscp(connection: socket.socket) -> int:
    """The DSCP value that the connection's packets carry."""
    return connection.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) >> 2


def _borrow(pidfd: int, fd: int) -> socket.socket:
    number = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
    if number < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"pidfd_getfd: {os.strerror(code)}")
    return socket.socket(fileno=number)


def _is_connection(candidate: socket.socket, skipped: set[int]) -> bool:
    if candidate.type != socket.SOCK_STREAM:
        return False
    if candidate.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        ports = {candidate.getsockname()[1], candidate.getpeername()[1]}
    except OSError:
        return False
    return not ports & skipped


class Sampler:
    """Watches how many bytes each job's connections move, every ``interval_s`` seconds.

    Args:
        watched: for each name, the processes whose sent bytes are added up.
    """

    def __init__(self, watched: Mapping[str, Sequence[int]], interval_s: float = 0.01) -> None:
        self._interval_s = interval_s
        self._sockets = {
            n: [s for pid in pids for s in connections(pid)] for n, pids in watched.items()
        }
        self.samples: dict[str, list[tuple[float, int]]] = {name: [] for name in watched}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for opened in self._sockets.values():
            for each in opened:
                each.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            for name, opened in self._sockets.items():
                self.samples[name].append((time.monotonic(), sum(map(bytes_acked, opened))))


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, ()))
    for each in found:
        found.extend(children.get(each, ()))
    return found
