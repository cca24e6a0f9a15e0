"""RoCEv2 packets out of a file that tcpdump wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET, inet_ntop

import dpkt.ethernet
import dpkt.ip
import dpkt.pcap
import dpkt.udp

ROCE_PORT = 4791
ACKNOWLEDGE = 0x11
#: How many sequence numbers there are before they start again.
PSNS = 1 << 24
#: Opcodes of the reliable connection that answer a request: read responses, ACK, atomic response.
_ANSWERS = range(0x0D, 0x13)
#: Bytes of the base header, and of the headers behind it in requests to send or write, by opcode:
#: the address of a write stands in its first packet, immediate data in a message's last.
_BASE, _CHECKSUM = 12, 4
_ADDRESS, _IMMEDIATE = 16, 4
_EXTENDED = {
    **dict.fromkeys((0x00, 0x01, 0x02, 0x04, 0x07, 0x08), 0),
    **dict.fromkeys((0x03, 0x05, 0x09), _IMMEDIATE),
    **dict.fromkeys((0x06, 0x0A), _ADDRESS),
    0x0B: _ADDRESS + _IMMEDIATE,
}


class CaptureError(ValueError):
    """The file is no capture of Ethernet frames that can be read; the message says why."""


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
        payload_bytes: of a message to send or write; 0 for other requests and for answers.
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
    payload_bytes: int = 0

    @property
    def is_request(self) -> bool:
        return self.opcode not in _ANSWERS


def read_capture(file: Path) -> list[Packet]:
    """The RoCEv2 packets in ``file``, in the order in which they were captured.

    Raises:
        CaptureError: the file is no capture of Ethernet frames, or is cut off.
    """
    try:
        with file.open("rb") as opened:
            reader = dpkt.pcap.Reader(opened)
            if reader.datalink() != dpkt.pcap.DLT_EN10MB:
                raise CaptureError(f"{file}: link type {reader.datalink()}, not Ethernet")
            packets = [_packet(time_s, frame) for time_s, frame in reader]
    except (ValueError, dpkt.Error) as error:
        raise CaptureError(f"{file}: {error}") from error
    return [packet for packet in packets if packet is not None]


def _packet(time_s: float, frame: bytes) -> Packet | None:
    """None if the frame is not RoCEv2 over IPv4, or too short to tell."""
    try:
        ip = dpkt.ethernet.Ethernet(frame).data
    except dpkt.Error:
        return None
    udp = ip.data if isinstance(ip, dpkt.ip.IP) else None
    if not isinstance(udp, dpkt.udp.UDP) or udp.dport != ROCE_PORT:
        return None
    # The base transport header.
    transport = bytes(udp.data)
    if len(transport) < _BASE:
        return None
    payload = 0
    if (extended := _EXTENDED.get(transport[0])) is not None:
        # The capture may hold less of the packet than its header says.
        padding = transport[1] >> 4 & 3
        payload = max(0, udp.ulen - 8 - _BASE - extended - padding - _CHECKSUM)
    return Packet(
        time_s=float(time_s),
        source=inet_ntop(AF_INET, ip.src),
        destination=inet_ntop(AF_INET, ip.dst),
        tos=ip.tos,
        ttl=ip.ttl,
        source_port=udp.sport,
        opcode=transport[0],
        qpn=int.from_bytes(transport[5:8], "big"),
        psn=int.from_bytes(transport[9:12], "big"),
        payload_bytes=payload,
    )
