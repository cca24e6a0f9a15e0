"""The parser of captures, on its own: what it reads, and what it refuses."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.capture_file import ACKNOWLEDGE, CaptureError, Packet, frames, read_capture

HEADER = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 96, 1)


def roce_frame(
    *,
    tos: int = 0x68,
    port: int = 49441,
    opcode: int = 0x04,
    qpn: int = 0x123456,
    psn: int = 0xFFFFFE,
    ethertype: int = 0x0800,
    protocol: int = 17,
    destination_port: int = 4791,
    options: bytes = b"",
) -> bytes:
    transport = bytes([opcode, 0, 0xFF, 0xFF, 0]) + qpn.to_bytes(3, "big") + b"\0"
    transport += psn.to_bytes(3, "big")
    udp = struct.pack(">HHHH", port, destination_port, 8 + len(transport), 0) + transport
    ip = struct.pack(
        ">BBHHHBBH4s4s",
        0x40 | (5 + len(options) // 4),
        tos,
        20 + len(options) + len(udp),
        0,
        0,
        64,
        protocol,
        0,
        bytes([10, 77, 0, 1]),
        bytes([10, 77, 0, 2]),
    )
    return b"\0" * 12 + ethertype.to_bytes(2, "big") + ip + options + udp


def record(frame: bytes, seconds: int = 7, fraction: int = 500_000, order: str = "<") -> bytes:
    return struct.pack(f"{order}IIII", seconds, fraction, len(frame), len(frame) + 1000) + frame


def read(tmp_path: Path, data: bytes) -> list[Packet]:
    file = tmp_path / "some.pcap"
    file.write_bytes(data)
    return read_capture(file)


def test_every_field_of_a_packet_is_read(tmp_path: Path) -> None:
    (packet,) = read(tmp_path, HEADER + record(roce_frame()))
    assert packet == Packet(
        time_s=7.5,
        source="10.77.0.1",
        destination="10.77.0.2",
        tos=0x68,
        ttl=64,
        source_port=49441,
        opcode=4,
        qpn=0x123456,
        psn=0xFFFFFE,
    )
    assert packet.is_request


def test_options_of_ip_move_what_follows(tmp_path: Path) -> None:
    (packet,) = read(tmp_path, HEADER + record(roce_frame(options=b"\1" * 8)))
    assert (packet.source_port, packet.qpn) == (49441, 0x123456)


def test_answers_are_told_from_requests(tmp_path: Path) -> None:
    opcodes = (0x00, 0x0A, 0x0C, 0x0D, 0x10, ACKNOWLEDGE, 0x12, 0x13, 0x17)
    packets = read(tmp_path, HEADER + b"".join(record(roce_frame(opcode=o)) for o in opcodes))
    assert [p.is_request for p in packets] == [True] * 3 + [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    "frame",
    [
        roce_frame(ethertype=0x0806),
        roce_frame(protocol=6),
        roce_frame(destination_port=4792),
        roce_frame()[:50],
        b"",
    ],
    ids=["ARP", "TCP", "another port", "too short", "empty"],
)
def test_what_is_not_rocev2_is_passed_over(tmp_path: Path, frame: bytes) -> None:
    assert len(read(tmp_path, HEADER + record(frame) + record(roce_frame()))) == 1


def test_both_byte_orders_and_nanoseconds_are_read(tmp_path: Path) -> None:
    header = struct.pack(">IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 96, 1)
    (packet,) = read(tmp_path, header + record(roce_frame(), 3, 250_000_000, ">"))
    assert packet.time_s == 3.25


def test_a_capture_without_packets_is_empty(tmp_path: Path) -> None:
    assert read(tmp_path, HEADER) == []


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "0 bytes"),
        (HEADER[:23], "23 bytes"),
        (b"\x0a\x0d\x0d\x0a" + HEADER[4:], "magic"),
        (HEADER[:20] + struct.pack("<I", 113), "link type 113"),
        (HEADER + record(roce_frame())[:10], "byte 24: a record's header is cut off"),
        (HEADER + record(roce_frame())[:-1], "byte 40: a frame is cut off"),
        (HEADER + struct.pack("<IIII", 0, 0, 1 << 30, 1 << 30), "byte 24: a frame of"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, data: bytes, complaint: str) -> None:
    with pytest.raises(CaptureError, match=complaint):
        read(tmp_path, data)


@given(st.binary(max_size=300), st.booleans())
def test_garbage_raises_nothing_else(garbage: bytes, has_header: bool) -> None:
    with contextlib.suppress(CaptureError):
        list(frames((HEADER if has_header else b"") + garbage))


@given(st.binary(max_size=80))
def test_a_frame_of_garbage_raises_nothing(
    tmp_path_factory: pytest.TempPathFactory, frame: bytes
) -> None:
    folder = tmp_path_factory.mktemp("frames", numbered=True)
    read(folder, HEADER + record(roce_frame()[:14] + frame))
