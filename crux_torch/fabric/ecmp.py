"""Which of several equal-cost paths a hash takes: a CRC, XOR or Toeplitz over a 5-tuple."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from ipaddress import ip_address
from typing import Literal, get_args

from crux_torch.fabric.crc import CRCS
from crux_torch.fabric.path_map import ROCE_V2_PORT
from crux_torch.fabric.topology import Path, TopologyError

Algorithm = Literal[
    "crc16", "crc16-ccitt", "crc16-xmodem", "crc32", "crc32c", "crc32-bzip2", "xor", "toeplitz"
]
Field = Literal["src", "dst", "protocol", "src_port", "dst_port"]

UDP = 17

#: The key of Microsoft's "Verifying the RSS Hash Calculation", the default of most NICs.
RSS_KEY = bytes.fromhex(
    "6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa"
)


@dataclass(frozen=True, slots=True)
class FiveTuple:
    """What the packets of one flow have in common.

    Attributes:
        src: source address; a name that is no IP address stands for a made-up one.
        dst: destination address, likewise.
        src_port: 0 to 65535.
        dst_port: 0 to 65535.
        protocol: IP protocol number.
    """

    src: str
    dst: str
    src_port: int = 49152
    dst_port: int = ROCE_V2_PORT
    protocol: int = UDP

    def packed(self, field: Field) -> bytes:
        """One field as it stands in the packet."""
        if field in ("src", "dst"):
            return _address(getattr(self, field))
        return int(getattr(self, field)).to_bytes(1 if field == "protocol" else 2, "big")


@dataclass(frozen=True, slots=True)
class EcmpHash:
    """A switch's hash: the same flow always gets the same number.

    Attributes:
        algorithm: a CRC of 32 or 16 bits (:data:`~crux_torch.fabric.crc.CRCS`); ``xor``, of 16-bit
            words; or ``toeplitz``, as NICs do RSS.
        fields: what is hashed, in this order. Toeplitz's usual order has no protocol in it.
        seed: start value of a CRC and of XOR; of Toeplitz, 0 takes the usual key and any other
            value another key.
        key: of Toeplitz, in place of the one that ``seed`` picks; empty: none.
    """

    algorithm: Algorithm = "crc32"
    fields: tuple[Field, ...] = ("src", "dst", "src_port", "dst_port", "protocol")
    seed: int = 0
    key: bytes = b""

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            expected = ", ".join(get_args(Algorithm))
            raise TopologyError(f"hash {self.algorithm!r} is unknown; expected {expected}")
        unknown = set(self.fields) - {f.name for f in fields(FiveTuple)}
        if unknown or not self.fields:
            raise TopologyError(
                f"hash fields {self.fields!r}; expected some of {', '.join(get_args(Field))}"
            )
        if not 0 <= self.seed < 1 << 32:
            raise TopologyError(f"hash seed is {self.seed}; expected 0 to 2^32 - 1")
        if self.key and (self.algorithm != "toeplitz" or self.seed):
            raise TopologyError("a hash key is for toeplitz, in place of a seed")

    @property
    def bits(self) -> int:
        """Of a digest."""
        if self.algorithm in CRCS:
            return CRCS[self.algorithm].width
        return 16 if self.algorithm == "xor" else 32

    def digest(self, flow: FiveTuple) -> int:
        """The hash of ``flow``, an unsigned number of ``bits`` bits."""
        data = b"".join(flow.packed(field) for field in self.fields)
        if self.algorithm == "crc32":
            return zlib.crc32(data, self.seed)
        if self.algorithm in CRCS:
            return CRCS[self.algorithm].compute(data, self.seed)
        if self.algorithm == "xor":
            return _xor16(data, self.seed)
        return toeplitz(data, self.key or _toeplitz_key(self.seed))

    def choose(self, flow: FiveTuple, candidates: Sequence[Path]) -> int:
        """The index of the path that ``flow`` takes, one hash for the whole path."""
        return self.digest(flow) % len(candidates)

    def choose_by_hop(self, flow: FiveTuple, candidates: Sequence[Path]) -> int:
        """The index of the path that ``flow`` takes when every hop hashes for itself.

        All hops use this one hash, as switches of one make do: where fan-outs have a common
        divisor the later choices follow the first, and some paths are never taken (polarisation).
        """
        digest = self.digest(flow)
        left = list(range(len(candidates)))
        hop = 0
        while len(left) > 1:
            nexts = list(dict.fromkeys(candidates[i][hop] for i in left))
            taken = nexts[digest % len(nexts)]
            left = [i for i in left if candidates[i][hop] == taken]
            hop += 1
        return left[0]


def toeplitz(data: bytes, key: bytes = RSS_KEY) -> int:
    """The Toeplitz hash: XOR of the 32 bits of ``key`` at the place of each bit set in ``data``.

    Raises:
        TopologyError: ``key`` is too short for ``data``.
    """
    if len(key) < len(data) + 4:
        raise TopologyError(f"a Toeplitz key of {len(key)} bytes can't hash {len(data)} bytes")
    window = int.from_bytes(key, "big")
    top = 8 * len(key) - 32
    bits = int.from_bytes(data, "big")
    count = 8 * len(data)
    result = 0
    for i in range(count):
        if bits >> (count - 1 - i) & 1:
            result ^= window >> (top - i)
    return result & 0xFFFFFFFF


def _xor16(data: bytes, seed: int) -> int:
    value = (seed ^ seed >> 16) & 0xFFFF
    for i in range(0, len(data), 2):
        value ^= int.from_bytes(data[i : i + 2].ljust(2, b"\0"), "big")
    return value


@lru_cache(maxsize=256)
def _toeplitz_key(seed: int) -> bytes:
    return RSS_KEY if seed == 0 else random.Random(seed).randbytes(len(RSS_KEY))


@lru_cache(maxsize=1 << 16)
def _address(name: str) -> bytes:
    try:
        return ip_address(name).packed
    except ValueError:
        return zlib.crc32(name.encode()).to_bytes(4, "big")
