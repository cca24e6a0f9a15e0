"""RoCEv2 packets out of a file that tcpdump wrote."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

ROCE_PORT = 4791
ACKNOWLEDGE = 0x11
#: How many sequence numbers there are before they start again.
PSNS = 1 << 24
#: Opcodes of the reliable connection that answer a request: read responses, ACK, atomic's answer.
_ANSWERS = range(0x0D, 0x13)

#: First four bytes as the writer's byte order leaves them, and how many ticks one second has.
_MAGIC = {
    b"\xd4\xc3\xb2\xa1": ("<", 1_000_000),
    b"\xa1\xb2\xc3\xd4": (">", 1_000_000),
    b"\x4d\x3c\xb2\xa1": ("<", 1_000_000_000),
    b"\xa1\xb2\x3c\x4d": (">", 1_000_000_000),
}
_ETHERNET = 1
_MAX_CAPTURED_BYTES = 1 << 18
_ETHERTYPE_IPV4 = 0x0800
_UDP = 17


class CaptureError(ValueError):
    """This is no capture that can be read: at which byte, and what is wrong there."""


@dataclass(frozen=True)
class Packet:
    """What the tests look at of one RoCEv2 packet.

    Attributes:
        time_s: when it was captured: see ``Step.contains``.
        source: IPv4 address.
        destination: IPv4 address.
        tos: the byte of DSCP and ECN.
        ttl: hops that were left.
        source_port: of UDP; what ECMP hashes.
        opcode: of the base transport header.
        qpn: the queue pair it is for.
        psn: its sequence number.
    """

    time_s: float
    source: str
    destination: str
    tos: int
    ttl: int
    source_port: int
    opcode: int
    qpn: int
    psn: int

    @property
    def is_request(self) -> bool:
        return self.opcode not in _ANSWERS


def read_capture(file: Path) -> list[Packet]:
    """The RoCEv2 packets in ``file``, in the order in which they were captured.

    Raises:
        CaptureError: the file is no capture of Ethernet frames, or is cut off.
    """
    packets = (_packet(time_s, frame) for time_s, frame in frames(file.read_bytes()))
    return [packet for packet in packets if packet is not None]


def frames(data: bytes) -> Iterator[tuple[float, bytes]]:
    """Time of capture and bytes of every frame, as many as were kept of it.

    Raises:
        CaptureError: as for ``read_capture``.
    """
    if len(data) < 24:
        raise CaptureError(f"{len(data)} bytes; a capture's header has 24")
    if data[:4] not in _MAGIC:
        raise CaptureError(f"byte 0: {data[:4].hex()} is no magic number of a capture")
    order, ticks = _MAGIC[data[:4]]
    (link_type,) = struct.unpack_from(f"{order}I", data, 20)
    if link_type != _ETHERNET:
        raise CaptureError(f"byte 20: link type {link_type}; only Ethernet (1) is read")
    record = struct.Struct(f"{order}IIII")
    at = 24
    while at < len(data):
        if len(data) - at < record.size:
            raise CaptureError(f"byte {at}: a record's header is cut off")
        seconds, fraction, kept, _ = record.unpack_from(data, at)
        if kept > _MAX_CAPTURED_BYTES:
            raise CaptureError(f"byte {at}: a frame of {kept} bytes")
        start, at = at + record.size, at + record.size + kept
        if at > len(data):
            raise CaptureError(f"byte {start}: a frame is cut off")
        yield seconds + fraction / ticks, data[start:at]


def _packet(time_s: float, frame: bytes) -> Packet | None:
    """``None`` for what is not RoCEv2 over IPv4, or is too short to tell."""
    if len(frame) < 34 or int.from_bytes(frame[12:14], "big") != _ETHERTYPE_IPV4:
        return None
    ip = frame[14:]
    header_bytes = (ip[0] & 0xF) * 4
    if ip[0] >> 4 != 4 or header_bytes < 20 or ip[9] != _UDP:
        return None
    udp = ip[header_bytes:]
    # 8 bytes of UDP and the 12 of the base transport header.
    if len(udp) < 20 or int.from_bytes(udp[2:4], "big") != ROCE_PORT:
        return None
    transport = udp[8:]
    return Packet(
        time_s=time_s,
        source=str(IPv4Address(ip[12:16])),
        destination=str(IPv4Address(ip[16:20])),
        tos=ip[1],
        ttl=ip[8],
        source_port=int.from_bytes(udp[0:2], "big"),
        opcode=transport[0],
        qpn=int.from_bytes(transport[5:8], "big"),
        psn=int.from_bytes(transport[9:12], "big"),
    )
