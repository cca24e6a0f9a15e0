"""Which of several equal-cost paths ECMP picks for a flow: CRC32 over its 5-tuple."""

from __future__ import annotations

import zlib
from functools import lru_cache
from ipaddress import ip_address

#: Destination port of RoCEv2 (IBTA, annex A17). The source port is free and picks the path.
ROCE_V2_PORT = 4791
_UDP = 17


def hashed_choice(src: str, dst: str, src_port: int, candidates: int) -> int:
    """The index of the candidate that a RoCEv2 flow takes: one hash for the whole path.

    Args:
        src, dst: addresses. A name that is no IP address stands for a made-up address.
        candidates: how many equal-cost paths there are, 1 or more.
    """
    ports = src_port.to_bytes(2, "big") + ROCE_V2_PORT.to_bytes(2, "big")
    return zlib.crc32(_address(src) + _address(dst) + ports + bytes([_UDP])) % candidates


@lru_cache(maxsize=1 << 16)
def _address(name: str) -> bytes:
    try:
        return ip_address(name).packed
    except ValueError:
        return zlib.crc32(name.encode()).to_bytes(4, "big")
