"""Hash functions that switches choose among equal-cost paths by, without their seeds.

Flows are vectors over GF(2), and a :class:`Sample` has the next hops of some. All functions
are linear over GF(2): the hash of a message is XORed with a constant if the seed, or a field that
stays the same, changes. So a seed of 0 stands for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from ipaddress import ip_address
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: The key of Microsoft's RSS specification, and the repeated one under which both directions of a
#: connection have one hash (Woo and Park, "Scalable TCP Session Monitoring", 2012).
_MICROSOFT_KEY = bytes.fromhex(
    "6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa"
)
_SYMMETRIC_KEY = bytes.fromhex("6d5a") * 20


_Hash = Callable[[bytes], int]


class Flow(NamedTuple):
    """The 5-tuple of a packet, with addresses of one IP version.

    Attributes:
        protocol: IP's number: 6 for TCP, 17 for UDP.
    """

    src: str
    dst: str
    src_port: int
    dst_port: int
    protocol: int

    @property
    def message(self) -> bytes:
        """Its bits as one message of 13 bytes (IPv4) or 37 (IPv6), fields in their order here."""
        ends = self.src_port.to_bytes(2, "big") + self.dst_port.to_bytes(2, "big")
        return _packed(self.src) + _packed(self.dst) + ends + bytes([self.protocol])


@lru_cache(maxsize=1 << 16)
def _packed(address: str) -> bytes:
    return ip_address(address).packed


def _fields(message: bytes) -> dict[str, bytes]:
    size = (len(message) - 5) // 2
    src, dst = message[:size], message[size : 2 * size]
    src_port, dst_port, protocol = message[-5:-3], message[-3:-1], message[-1:]
    return {
        "src": src,
        "dst": dst,
        "sport": src_port,
        "dport": dst_port,
        "proto": protocol,
        "src^dst": _xor(src, dst),
        "sport^dport": _xor(src_port, dst_port),
    }


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


#: Fields that enter a hash, in the order in which they do; the likeliest first.
_ORDERS = tuple(
    tuple(order.split())
    for order in (
        "src dst sport dport proto",
        "src dst proto sport dport",
        "proto src dst sport dport",
        "sport dport src dst proto",
        "proto sport dport src dst",
        "dst src dport sport proto",
        "dport sport dst src proto",
        "src dst sport dport",
        "sport dport src dst",
        "dst src dport sport",
        "src sport dst dport",
        "src sport dst dport proto",
        "src^dst sport^dport proto",
        "src^dst sport^dport",
        "src dst",
        "dst src",
        "sport dport",
        "sport",
    )
)
_RSS_ORDERS = (("src", "dst", "sport", "dport"), ("src", "dst"))


def _crc(polynomial: int, width: int, reflected: bool) -> Callable[[bytes], int]:
    """A CRC that starts at 0, by a table of the remainders of each byte."""
    mask, top = (1 << width) - 1, width - 1
    table = []
    flipped = int(f"{polynomial:0{width}b}"[::-1], 2)
    for byte in range(256):
        rest = byte if reflected else byte << (width - 8)
        for _ in range(8):
            if reflected:
                rest = rest >> 1 ^ (flipped if rest & 1 else 0)
            else:
                rest = (rest << 1 & mask) ^ (polynomial if rest >> top else 0)
        table.append(rest)

    def remainder(message: bytes) -> int:
        rest = 0
        for byte in message:
            if reflected:
                rest = rest >> 8 ^ table[(rest ^ byte) & 0xFF]
            else:
                rest = (rest << 8 & mask) ^ table[rest >> (width - 8) ^ byte]
        return rest

    return remainder


def _fold(width: int) -> Callable[[bytes], int]:
    """XOR of the words of a message; the last one ends where the message does."""
    size = width // 8

    def folded(message: bytes) -> int:
        padded = message.rjust(-(-len(message) // size) * size, b"\0")
        total = 0
        for start in range(0, len(padded), size):
            total ^= int.from_bytes(padded[start : start + size], "big")
        return total

    return folded


def _toeplitz(key: bytes) -> Callable[[bytes], int]:
    bits, length = int.from_bytes(key, "big"), 8 * len(key)

    def hashed(message: bytes) -> int:
        total = 0
        for place, bit in enumerate(f"{int.from_bytes(message, 'big'):0{8 * len(message)}b}"):
            if bit == "1":
                total ^= bits >> (length - 32 - place) & 0xFFFFFFFF
        return total

    return hashed


class _Algorithm(NamedTuple):
    name: str
    width: int
    of: Callable[[bytes], int]
    orders: tuple[tuple[str, ...], ...] = _ORDERS


def _algorithms() -> tuple[_Algorithm, ...]:
    wide = (
        ("CRC-32 (IEEE)", 0x04C11DB7, True),
        ("CRC-32C (Castagnoli)", 0x1EDC6F41, True),
        ("CRC-32K (Koopman)", 0x741B8CD7, True),
        ("CRC-32/BZIP2 (IEEE, high bit first)", 0x04C11DB7, False),
        ("CRC-32Q", 0x814141AB, False),
    )
    narrow = (
        ("CRC-16/ARC (IBM)", 0x8005, True),
        ("CRC-16 (CCITT)", 0x1021, False),
        ("CRC-16/KERMIT (CCITT, low bit first)", 0x1021, True),
        ("CRC-16/BUYPASS (IBM, high bit first)", 0x8005, False),
        ("CRC-16/DNP", 0x3D65, True),
        ("CRC-16/T10-DIF", 0x8BB7, False),
    )
    crc32 = {name: _crc(polynomial, 32, low_first) for name, polynomial, low_first in wide}
    parts: dict[str, Callable[[_Hash], _Hash]] = {
        "low half of": lambda whole: lambda message: whole(message) & 0xFFFF,
        "high half of": lambda whole: lambda message: whole(message) >> 16,
        "folded": lambda whole: lambda message: (whole(message) >> 16 ^ whole(message)) & 0xFFFF,
    }
    return (
        *(_Algorithm(name, 32, whole) for name, whole in crc32.items()),
        *(_Algorithm(name, 16, _crc(poly, 16, low_first)) for name, poly, low_first in narrow),
        *(_Algorithm(f"XOR of {width} bits", width, _fold(width)) for width in (8, 16, 32)),
        _Algorithm("Toeplitz (Microsoft's key)", 32, _toeplitz(_MICROSOFT_KEY), _RSS_ORDERS),
        _Algorithm("Toeplitz (symmetric key)", 32, _toeplitz(_SYMMETRIC_KEY), _RSS_ORDERS),
        *(
            _Algorithm(f"{part} {name}", 16, of(crc32[name]))
            for name in ("CRC-32 (IEEE)", "CRC-32C (Castagnoli)")
            for part, of in parts.items()
        ),
    )


@dataclass(frozen=True)
class Family:
    """A hash function over some fields in some order, with any seed.

    Attributes:
        algorithm: its name.
        fields: that enter it, in their order.
        width: bits of its result.
    """

    algorithm: str
    fields: tuple[str, ...]
    width: int
    _of: Callable[[bytes], int]

    @cached_property
    def name(self) -> str:
        return f"{self.algorithm} over {' '.join(self.fields)}"

    def linear(self, message: bytes) -> int:
        """Returns the hash of a flow's message with a seed of 0."""
        given = _fields(message)
        return self._of(b"".join(given[name] for name in self.fields))

    def rows(self, basis: Sequence[bytes]) -> tuple[int, ...]:
        """Returns each bit of the hash, lowest first, as the set of ``basis`` vectors that flip it.

        Bit j of an entry stands for the j-th message of ``basis``.
        """
        columns = [self.linear(message) for message in basis]
        return tuple(
            sum((column >> bit & 1) << j for j, column in enumerate(columns))
            for bit in range(self.width)
        )


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Returns every family that is tried, the likeliest first."""
    return tuple(
        Family(algorithm.name, order, algorithm.width, algorithm.of)
        for algorithm in _algorithms()
        for order in algorithm.orders
    )


Ints = npt.NDArray[np.int64]


class Span:
    """A basis of vectors over GF(2), taken from those that are added."""

    def __init__(self) -> None:
        self.basis: list[int] = []
        self._rows: dict[int, tuple[int, int]] = {}

    def add(self, vector: int) -> bool:
        """Add ``vector`` to the basis. Returns True if it was independent."""
        rest, combination = self._reduced(vector)
        if rest:
            self._rows[rest.bit_length()] = (rest, combination ^ 1 << len(self.basis))
            self.basis.append(vector)
        return bool(rest)

    def coordinates(self, vector: int) -> int | None:
        """Returns the basis vectors whose sum is ``vector``, as bits; None if it is outside."""
        rest, combination = self._reduced(vector)
        return None if rest else combination

    def _reduced(self, vector: int) -> tuple[int, int]:
        combination = 0
        while vector and (row := self._rows.get(vector.bit_length())):
            vector ^= row[0]
            combination ^= row[1]
        return vector, combination


@dataclass(frozen=True)
class Sample:
    """Flows as vectors over GF(2), relative to one of them, and the next hop of each.

    Attributes:
        origin, size: a flow's message as a number, and its bytes.
        span: what the differences of the flows span; it knows flows outside of this sample, too.
        vectors: coordinates of each flow's difference to ``origin``.
        hops: number of each flow's next hop.
    """

    origin: int
    size: int
    span: Span
    vectors: tuple[int, ...]
    hops: tuple[int, ...]

    @classmethod
    def of(cls, flows: Sequence[Flow], hops: Sequence[int]) -> Sample:
        """Returns the sample of ``flows``, one at least, of one IP version."""
        messages = [int.from_bytes(flow.message, "big") for flow in flows]
        span = Span()
        for message in messages:
            span.add(message ^ messages[0])
        vectors = [span.coordinates(message ^ messages[0]) or 0 for message in messages]
        return cls(messages[0], len(flows[0].message), span, tuple(vectors), tuple(hops))

    def __len__(self) -> int:
        return len(self.hops)

    @property
    def dimension(self) -> int:
        """Independent bits in which the flows differ."""
        return len(self.span.basis)

    def without(self, held_out: Collection[int]) -> Sample:
        """Returns the sample without the flows of these numbers."""
        kept = sorted(set(range(len(self))) - set(held_out))
        vectors, hops = tuple(self.vectors[j] for j in kept), tuple(self.hops[j] for j in kept)
        return Sample(self.origin, self.size, self.span, vectors, hops)

    def bits(self, functionals: Sequence[int]) -> Ints:
        """Returns the value of each functional (column) for each flow (row)."""
        values: Ints = self._flows @ _bits(functionals, self.dimension).T & 1
        return values

    @cached_property
    def _flows(self) -> Ints:
        return _bits(self.vectors, self.dimension)


def _bits(vectors: Sequence[int], dimension: int) -> Ints:
    rows = [[vector >> j & 1 for j in range(dimension)] for vector in vectors]
    return np.array(rows, dtype=np.int64).reshape(len(vectors), dimension)


def label_of(functionals: Sequence[int], vector: int) -> int:
    """Returns the values of ``functionals`` on a vector, the first as the lowest bit."""
    return sum(((f & vector).bit_count() & 1) << bit for bit, f in enumerate(functionals))


def constant_within(sample: Sample, chosen: Sequence[int]) -> list[int]:
    """Returns functionals with one value for each next hop, and several in all, on ``chosen``."""
    first: dict[int, int] = {}
    rows: dict[int, int] = {}
    for j in chosen:
        difference = sample.vectors[j] ^ first.setdefault(sample.hops[j], sample.vectors[j])
        for pivot, row in rows.items():
            if difference >> pivot & 1:
                difference ^= row
        if difference:
            pivot = difference.bit_length() - 1
            rows = {p: r ^ difference if r >> pivot & 1 else r for p, r in rows.items()}
            rows[pivot] = difference
    values, found = Span(), []
    origin = sample.vectors[chosen[0]]
    for free in range(sample.dimension):
        if free in rows:
            continue
        functional = 1 << free | sum(1 << pivot for pivot, row in rows.items() if row >> free & 1)
        value = [label_of([functional], sample.vectors[j] ^ origin) for j in chosen]
        if values.add(sum(bit << place for place, bit in enumerate(value))):
            found.append(functional)
    return found


def reduced(vectors: Sequence[int]) -> tuple[int, ...]:
    """Returns the reduced basis of what ``vectors`` span: equal spans have equal ones."""
    rows: list[int] = []
    for vector in vectors:
        for row in rows:
            vector = min(vector, vector ^ row)
        if vector:
            top = 1 << vector.bit_length() - 1
            rows = [row ^ vector if row & top else row for row in rows]
            rows.append(vector)
            rows.sort(reverse=True)
    return tuple(rows)
