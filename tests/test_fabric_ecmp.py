"""The switches' hash, and how it spreads flows over paths."""

from __future__ import annotations

import zlib

from crux_torch.fabric.ecmp import hashed_choice


def test_the_hash_is_zlibs_crc32_over_the_packet_bytes() -> None:
    v4 = bytes([10, 0, 0, 1, 10, 0, 0, 2, 0xC0, 1, 0x12, 0xB7, 17])
    assert hashed_choice("10.0.0.1", "10.0.0.2", 0xC001, 1 << 32) == zlib.crc32(v4)
    v6 = bytes(15) + b"\1" + bytes(15) + b"\2" + v4[8:]
    assert hashed_choice("::1", "::2", 0xC001, 1 << 32) == zlib.crc32(v6)


def test_source_ports_reach_every_path() -> None:
    ports = range(49152, 49152 + 1024)
    assert {hashed_choice("h0/nic0", "h2/nic0", port, 32) for port in ports} == set(range(32))
