"""Addresses as numbers: their order, and the two ends of a cable."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from ipaddress import ip_address

#: Host part of a /30.
_LAST_BITS = 3


def ipv4(address: str) -> bytes | None:
    """Returns the bytes of an IPv4 address; None for anything else.

    A network has many addresses, and ``ip_address()`` takes ten times as long.
    """
    try:
        return socket.inet_pton(socket.AF_INET, address)
    except (OSError, ValueError):
        return None


def address_order(address: str) -> tuple[int, int]:
    """Returns the key that sorts addresses by number, IPv4 first."""
    if found := ipv4(address):
        return 4, int.from_bytes(found, "big")
    parsed = ip_address(address)
    return parsed.version, int(parsed)


def cable_mates(keys: Iterable[str]) -> dict[str, str]:
    """Returns the other end of the cable for each address that has one in its /31, /30 or /24.

    The /30 counts only if nobody has its first and last address, and the /24 (of IPv6: the /64)
    only if it has no third address.
    """
    at: dict[tuple[int, int], str] = {}
    for key in keys:
        with contextlib.suppress(ValueError):
            at[address_order(key)] = key
    wide: dict[tuple[int, int], list[str]] = {}
    for (version, number), key in at.items():
        wide.setdefault((version, number >> (8 if version == 4 else 64)), []).append(key)
    mates: dict[str, str] = {}
    for (version, number), key in at.items():
        block = [(version, (number & ~_LAST_BITS) + i) in at for i in range(4)]
        other = number ^ 1 if block[0] or block[3] else number ^ _LAST_BITS
        mate = at.get((version, other))
        if mate is None:
            alone = wide[version, number >> (8 if version == 4 else 64)]
            mate = next((k for k in alone if k != key), None) if len(alone) == 2 else None
        if mate is not None:
            mates[key] = mate
    return mates
