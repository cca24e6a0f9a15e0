"""The reader of captures: what it reads, and what it refuses."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import dpkt.ethernet
import dpkt.ip
import dpkt.pcap
import dpkt.udp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.rdma.capture_file import ACKNOWLEDGE, CaptureError, Packet, read_capture

HEADER = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 96, 1)


def roce_frame(opcode: int = 0x04, port: int = 4791, options: bytes = b"") -> bytes:
    transport = bytes([opcode, 0, 0xFF, 0xFF, 0, 0x12, 0x34, 0x56, 0, 0xFF, 0xFF, 0xFE])
    udp = dpkt.udp.UDP(sport=49441, dport=port, ulen=24, data=transport)
    ip = dpkt.ip.IP(tos=0x68, p=17, src=bytes([10, 77, 0, 1]), dst=bytes([10, 77, 0, 2]), data=udp)
    ip.opts, ip.hl = options, 5 + len(options) // 4
    ip.len = len(ip)
    return bytes(dpkt.ethernet.Ethernet(data=ip))


def record(frame: bytes) -> bytes:
    # Captures keep the first bytes of a longer frame.
    return struct.pack("<IIII", 7, 500_000, len(frame), len(frame) + 1000) + frame


def read(folder: Path, data: bytes) -> list[Packet]:
    file = folder / "some.pcap"
    file.write_bytes(data)
    return read_capture(file)


@pytest.mark.parametrize("options", [b"", b"\1" * 8])
def test_every_field_of_a_packet_is_read(tmp_path: Path, options: bytes) -> None:
    (packet,) = read(tmp_path, HEADER + record(roce_frame(options=options)))
    assert packet == Packet(7.5, "10.77.0.1", "10.77.0.2", 0x68, 64, 49441, 4, 0x123456, 0xFFFFFE)


def test_answers_are_told_from_requests(tmp_path: Path) -> None:
    opcodes = (0x00, 0x0A, 0x0C, 0x0D, 0x10, ACKNOWLEDGE, 0x12, 0x13, 0x17)
    packets = read(tmp_path, HEADER + b"".join(record(roce_frame(opcode)) for opcode in opcodes))
    assert [p.is_request for p in packets] == [True] * 3 + [False] * 4 + [True] * 2


@pytest.mark.parametrize("frame", [roce_frame(port=4792), roce_frame()[:50], b""])
def test_what_is_not_rocev2_is_skipped(tmp_path: Path, frame: bytes) -> None:
    assert len(read(tmp_path, HEADER + record(frame) + record(roce_frame()))) == 1


@pytest.mark.parametrize("data", [b"", b"\x0a\x0d\x0d\x0a" + HEADER, HEADER[:20] + b"\x71\0\0\0"])
def test_what_is_no_capture_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CaptureError):
        read(tmp_path, data)


@given(st.binary(max_size=300), st.booleans())
def test_garbage_raises_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, is_frame: bool
) -> None:
    data = HEADER + record(roce_frame()[:14] + garbage) if is_frame else HEADER + garbage
    with contextlib.suppress(CaptureError):
        read(tmp_path_factory.getbasetemp(), data)
