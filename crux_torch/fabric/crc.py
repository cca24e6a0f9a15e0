"""Cyclic redundancy checks by their parameters, as switches use them to spread flows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Crc:
    """One CRC of the Rocksoft model (R. Williams, "A painless guide to CRC", 1993).

    Attributes:
        width: bits of the result, 8 or more.
        polynomial: without its highest term.
        initial: of the register.
        reflected: bits of bytes and result in reverse.
        final: XORed to the result.
    """

    width: int
    polynomial: int
    initial: int
    reflected: bool
    final: int

    def compute(self, data: bytes, seed: int = 0) -> int:
        """The CRC of ``data``; ``seed`` is XORed to the register's initial value."""
        table = _table(self)
        mask = (1 << self.width) - 1
        if self.reflected:
            register = (_reverse(self.initial, self.width) ^ seed) & mask
            for byte in data:
                register = table[(register ^ byte) & 0xFF] ^ register >> 8
        else:
            register = (self.initial ^ seed) & mask
            top = self.width - 8
            for byte in data:
                register = (table[register >> top ^ byte] ^ register << 8) & mask
        return register ^ self.final


#: By the names of the catalogue of parametrised CRC algorithms: CRC-16/ARC (BISYNC),
#: CRC-16/IBM-3740 (CCITT), CRC-16/XMODEM, CRC-32/ISO-HDLC (Ethernet, zlib), CRC-32C, CRC-32/BZIP2.
CRCS = {
    "crc16": Crc(16, 0x8005, 0, True, 0),
    "crc16-ccitt": Crc(16, 0x1021, 0xFFFF, False, 0),
    "crc16-xmodem": Crc(16, 0x1021, 0, False, 0),
    "crc32": Crc(32, 0x04C11DB7, 0xFFFFFFFF, True, 0xFFFFFFFF),
    "crc32c": Crc(32, 0x1EDC6F41, 0xFFFFFFFF, True, 0xFFFFFFFF),
    "crc32-bzip2": Crc(32, 0x04C11DB7, 0xFFFFFFFF, False, 0xFFFFFFFF),
}


@lru_cache(maxsize=32)
def _table(crc: Crc) -> tuple[int, ...]:
    mask = (1 << crc.width) - 1
    table = []
    for byte in range(256):
        value = _reverse(byte, 8) if crc.reflected else byte
        value <<= crc.width - 8
        for _ in range(8):
            high = value >> (crc.width - 1)
            value = (value << 1 ^ (crc.polynomial if high else 0)) & mask
        table.append(_reverse(value, crc.width) if crc.reflected else value)
    return tuple(table)


def _reverse(value: int, width: int) -> int:
    return int(f"{value:0{width}b}"[::-1], 2)
