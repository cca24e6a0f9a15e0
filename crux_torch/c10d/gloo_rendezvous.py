"""Reads where gloo's ranks listen from a group's rendezvous store.

Every rank writes its listener's address under ``<device>/<rank>``: a host name and a ``struct
sockaddr_storage``, each after its length as a 64-bit integer.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

from crux_torch.c10d.sockets import Endpoint, endpoint

MAX_DEVICES = 16
#: Each value holds a number for each rank, so all ranks' reading grows with the cube of the size.
MAX_RANKS = 128
_MAX_HOST_BYTES = 1024
_LENGTH = struct.Struct("=Q")


class ReadableStore(Protocol):
    """What is needed of a ``torch.distributed.Store``; neither call waits for a key."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


def published_listener(value: bytes) -> Endpoint | None:
    """The endpoint in one rank's value; None if the format is not the known one."""
    try:
        (host_bytes,) = _LENGTH.unpack_from(value)
        if host_bytes > _MAX_HOST_BYTES:
            return None
        offset = 2 * _LENGTH.size + host_bytes
        (family,) = struct.unpack_from("=H", value, offset)
        (port,) = struct.unpack_from("!H", value, offset + 2)
        if family == socket.AF_INET:
            (packed,) = struct.unpack_from("4s", value, offset + 4)
        elif family == socket.AF_INET6:
            (packed,) = struct.unpack_from("16s", value, offset + 8)
        else:
            return None
        return endpoint((socket.inet_ntop(family, packed), port))
    except (struct.error, ValueError):
        return None


def listeners_of(store: ReadableStore, rank: int) -> list[Endpoint]:
    """Where ``rank`` has published that it listens, for each device; raises what the store does."""
    found = []
    for device in range(MAX_DEVICES):
        key = f"{device}/{rank}"
        if not store.check([key]):
            break
        listener = published_listener(bytes(store.get(key)))
        if listener is not None:
            found.append(listener)
    return found


def store_ports(store: object) -> set[int]:
    """Ports of the TCP stores below ``store`` and its prefixes."""
    ports = set()
    for _ in range(16):
        port = getattr(store, "port", None)
        if isinstance(port, int):
            ports.add(port)
        store = getattr(store, "underlying_store", None)
        if store is None:
            break
    return ports
