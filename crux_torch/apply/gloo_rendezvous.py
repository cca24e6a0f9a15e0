"""Reads from a group's rendezvous store where gloo's ranks listen.

Every rank of a gloo group writes its listener's address under ``<device>/<rank>`` for the others
to connect to. The value is a host name and an address, each after its length as a 64-bit integer;
the address begins with a ``struct sockaddr_storage``.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

from crux_torch.apply.sockets import Endpoint, endpoint

MAX_DEVICES = 16
#: A value holds a number for each rank, so the cost of reading all grows with the cube of the size.
MAX_RANKS = 128
_MAX_HOST_BYTES = 1024
_LENGTH = struct.Struct("=Q")


class Store(Protocol):
    """What is needed of a ``torch.distributed.Store``; neither call waits for a key."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


def published_listener(value: bytes) -> Endpoint | None:
    """The endpoint in one rank's value, or None where it is not of the known format."""
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


def listeners_of(store: Store, rank: int) -> list[Endpoint]:
    """Where ``rank`` listens, one endpoint for each device; empty where nothing is known of it.

    Raises:
        RuntimeError: the store can't be reached.
    """
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
    """Ports of the TCP stores beneath ``store``, unwrapping prefixes."""
    ports = set()
    for _ in range(16):
        port = getattr(store, "port", None)
        if isinstance(port, int):
            ports.add(port)
        store = getattr(store, "underlying_store", None)
        if store is None:
            break
    return ports
