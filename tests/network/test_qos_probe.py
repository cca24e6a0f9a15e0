"""Probes of classes over loopback, where nothing changes a mark; and ends that misbehave."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import free_port

from crux_torch.network.probe import qos_listener, qos_probe
from crux_torch.network.probe.packets import ProbeError
from crux_torch.network.probe.qos_listener import (
    ANSWER,
    ARRIVAL,
    HELLO,
    LOAD,
    MAGIC,
    PROBE,
    PROBE_FORMAT,
    Arrival,
    arrivals_from,
    dropped,
    listen,
)
from crux_torch.network.probe.qos_marks import Quote, changed_between, lost_between, parse_quote
from crux_torch.network.probe.qos_probe import LEAD_S, PROBE_S, Effort, QosReport, check
from crux_torch.network.probe.qos_verdicts import judge

DSCP_OF = {0: 0, 1: 10, 3: 46}
#: Time with load in a turn.
LOADED_S = LEAD_S + PROBE_S
#: Ends a listener that a test has left waiting.
LIMIT_S = 60.0


@pytest.fixture
def session() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two connections of a peer that sends its own datagrams: TCP, and UDP."""
    with listening(1) as (port, _), udp() as probes, greeted(port, 7, probes) as control:
        yield control, probes


def udp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


@contextmanager
def listening(sessions: int) -> Iterator[tuple[int, list[int]]]:
    """A listener in a thread: its port, and the sessions that it served once it has ended."""
    port, ready, served = free_port(), threading.Event(), []
    thread = threading.Thread(
        target=lambda: served.append(listen(port, LIMIT_S, sessions, ready.set))
    )
    thread.start()
    assert ready.wait(LIMIT_S)
    yield port, served
    thread.join(LIMIT_S)


def greeted(port: int, nonce: int, probes: socket.socket) -> socket.socket:
    """A session of a peer that sends its own datagrams."""
    probes.bind(("127.0.0.1", 0))
    probes.connect(("127.0.0.1", port))
    control = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    control.sendall(HELLO.pack(MAGIC, nonce, probes.getsockname()[1]))
    assert control.recv(1) == b"+"
    return control


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_every_mark_arrives_over_loopback(address: str) -> None:
    with listening(1) as (port, served):
        found = check(address, DSCP_OF, 0, Effort(1.0, 300.0, 2e6), port=port)
    assert served == [1]
    assert [one.dscp for one in found.levels] == list(DSCP_OF.values())
    for one in found.levels:
        assert one.mark == "kept"
        assert set(one.seen) == {one.dscp}
    assert 0.0 < found.sent_bps <= 2e6
    # As `crux qos check --json` on another host, and `crux doctor`, read it.
    assert msgspec.json.decode(msgspec.json.encode(found), type=QosReport).source == address


def test_nobody_listens() -> None:
    with pytest.raises(ProbeError, match="run `crux qos listen` there"):
        check("127.0.0.1", DSCP_OF, 0, Effort(), port=free_port())


def test_only_probes_of_the_session_count(session: tuple[socket.socket, socket.socket]) -> None:
    control, probes = session
    probes.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 46 << 2 | 1)
    junk = (b"", PROBE, LOAD + bytes(60), b"x" * 1400, PROBE_FORMAT.pack(PROBE, 8, 1))
    for datagram in (*junk, PROBE_FORMAT.pack(PROBE, 7, 5)):
        probes.send(datagram)
    found: list[Arrival] = []
    while not found:
        found, _ = arrivals_from(control)
    (one,) = found
    assert (one.number, one.traffic_class >> 2) == (5, 46)
    assert arrivals_from(control)[0] == []


def test_a_session_has_a_bound(
    monkeypatch: pytest.MonkeyPatch, session: tuple[socket.socket, socket.socket]
) -> None:
    monkeypatch.setattr(qos_listener, "MAX_PROBES", 13)
    control, probes = session
    for number in range(20):
        probes.send(PROBE_FORMAT.pack(PROBE, 7, number))
    found: list[Arrival] = []
    while len(found) < 13:
        found += arrivals_from(control)[0]
    assert [one.number for one in found] == list(range(13))
    assert arrivals_from(control)[0] == []


def test_packets_that_a_slow_host_dropped(tmp_path: Path) -> None:
    assert dropped(tmp_path, tmp_path) == 0
    for interface, counts in (("eth0", {"missed": 5, "fifo": 7, "crc": 1000}), ("lo", {"over": 1})):
        folder = tmp_path / "class/net" / interface / "statistics"
        folder.mkdir(parents=True)
        for name, count in counts.items():
            (folder / f"rx_{name}_errors").write_text(f"{count}\n")
    (folder / "rx_missed_errors").write_text("?")
    (tmp_path / "net").mkdir()
    (tmp_path / "net/softnet_stat").write_text("0000ff 00000010 00\n0000ff 00000001 00\n")
    assert dropped(tmp_path, tmp_path) == 5 + 7 + 1 + 16 + 1
    assert dropped() >= 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.005, 0.2])
def test_a_far_end_that_drops_the_load(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells of a share of the packets of 1 MB/s that are sent until each answer."""
    told = itertools.count()
    monkeypatch.setattr(
        qos_listener, "dropped", lambda: int(share * next(told) * 1e6 / 8900 * LOADED_S)
    )
    judged = []
    monkeypatch.setattr(
        qos_probe, "judge", lambda *given, choked: judged.append(choked) or judge(*given)
    )
    with listening(1) as (port, _):
        check("127.0.0.1", DSCP_OF, 0, Effort(1.0, 300.0, 8e6), port=port)
    assert judged == [share > qos_probe.CHOKED]


def test_a_listener_outlives_those_who_speak_something_else() -> None:
    with listening(1) as (port, served):
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"x", b"", HELLO.pack(MAGIC, 1, 0)):
            with socket.create_connection(("127.0.0.1", port), LIMIT_S) as stranger:
                stranger.sendall(said)
        with udp() as probes:
            greeted(port, 1, probes).close()
    assert served == [1]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"-",
        b"+",
        b"+" + ANSWER.pack(1 << 31, 0),
        b"+" + ANSWER.pack(2, 0) + bytes(ARRIVAL.size),
    ],
)
def test_a_far_end_that_says_something_else(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(HELLO.size)
                peer.sendall(answer)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass

        thread = threading.Thread(target=speak)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(ProbeError, match="no check with 127"):
            check("127.0.0.1", {0: 0}, 0, Effort(1.0, 10.0), port=port)
        thread.join(LIMIT_S)


def ipv4_answer(tos: int, ports: tuple[int, int], length: int, options: int = 0) -> bytes:
    """A router's answer that quotes a datagram to 10.1.0.2."""
    quoted = bytes((0x45 + options, tos)) + bytes(7) + b"\x11" + bytes(6)
    quoted += bytes((10, 1, 0, 2)) + bytes(4 * options) + struct.pack("!4H", *ports, length, 0)
    return b"\x45\xc0" + bytes(18) + b"\x0b\x00" + bytes(6) + quoted


def test_the_quoted_header_is_read() -> None:
    for options in (0, 3):
        quote = parse_quote(ipv4_answer(40, (1000, 29414), 80, options), 4)
        assert quote == Quote(40, "10.1.0.2", (1000, 29414), 80)
    header = b"\x6b\x80\x00\x00\x00\x00\x11\x01" + bytes(16) + socket.inet_pton(10, "fd00::2")
    quoted = header + struct.pack("!4H", 1000, 29414, 80, 0)
    assert parse_quote(b"\x03\x00" + bytes(6) + quoted, 6) == Quote(
        0xB8, "fd00::2", (1000, 29414), 80
    )


@given(st.binary(max_size=120), st.sampled_from([4, 6]), st.integers(0, 60))
def test_no_bytes_break_the_reader(noise: bytes, version: int, cut: int) -> None:
    whole = ipv4_answer(40, (1, 2), 3)
    for packet in (noise, whole[:cut], whole[:cut] + noise, whole[:28] + noise):
        quote = parse_quote(packet, version)
        assert quote is None or 0 <= quote.traffic_class < 256


def test_the_place_where_a_mark_changes() -> None:
    def place(*seen: int) -> tuple[str, str]:
        quotes = {ttl: (f"r{ttl}", dscp) for ttl, dscp in enumerate(seen, 1) if dscp >= 0}
        return changed_between(10, quotes, "here", "there")

    assert place(0, 0, 0) == ("here", "r1")
    assert place(10, 0, 0) == ("r1", "r2")
    assert place(10, 10, 10) == ("r3", "there")
    assert place(10, -1, 0) == ("r1", "r3")
    assert place(10, 0, 10) == ("r1", "r2")
    assert place() == ("here", "there")


def test_the_place_where_a_class_gets_lost() -> None:
    others = {1: ("r1", 0), 3: ("r3", 0), 4: ("r4", 0)}

    def place(*answered: int) -> tuple[str, str]:
        quotes = {ttl: (f"r{ttl}", 10) for ttl in answered}
        return lost_between(quotes, others, "here", "there")

    assert place() == ("here", "r1")
    assert place(1) == ("r1", "r3")
    assert place(1, 3, 4) == ("r4", "there")
    assert lost_between({}, {}, "here", "there") == ("here", "there")
