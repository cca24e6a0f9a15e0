"""Probing on loopback, one hop, without privileges: sockets, errors, the command."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click
import msgspec
import pytest
from click.testing import CliRunner
from descriptors import open_descriptors
from hypothesis import given
from hypothesis import strategies as st
from loopback import free_port, has_ipv6

from crux_torch.cli import main as cli
from crux_torch.network.probe import live_trace
from crux_torch.network.probe.live_trace import resolve, source_address, trace_connection
from crux_torch.network.probe.packets import (
    Answer,
    ErrorQueue,
    Probe,
    ProbeError,
    QueuedError,
    read_error,
)
from crux_torch.network.probe.prober import ROCE_PORTS, PathMap, default_ports, probe
from crux_torch.network.probe.rules import Rules

LOOPBACKS = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on loopback")),
]


closed_port = pytest.fixture(free_port)


def ask(queue: ErrorQueue, *probes: Probe, within_s: float = 5.0) -> list[Answer]:
    for question in probes:
        assert queue.send(question)
    answers: list[Answer] = []
    until = time.monotonic() + within_s
    while len(answers) < len(probes) and time.monotonic() < until:
        answers += queue.receive(0.1)
    return answers


@pytest.mark.parametrize("to", LOOPBACKS)
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_closed_port_answers_for_itself(to: str, protocol: str, closed_port: int) -> None:
    with ErrorQueue(to, to, protocol, closed_port) as queue:  # type: ignore[arg-type]
        probes = [Probe(0, ttl) for ttl in range(1, 9)]
        answers = ask(queue, *probes)
        assert {answer.probe for answer in answers} == set(probes)
        assert {(answer.address, answer.kind) for answer in answers} == {(to, "destination")}
        assert queue.receive(0) == []


def test_a_listener_that_is_reached_after_all_is_left_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        to = listener.getsockname()[1]
        with ErrorQueue("127.0.0.1", "127.0.0.1", "tcp", to) as queue:
            [answer] = ask(queue, Probe(0, 1))
            assert answer.kind == "destination"
            peer, _ = listener.accept()
            peer.settimeout(5)
            with peer, pytest.raises(ConnectionResetError):
                peer.recv(1)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_port_in_use_is_said_to_be_taken(protocol: str, closed_port: int) -> None:
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as s:
        s.bind(("127.0.0.1", 0))
        if protocol == "tcp":
            s.listen()
        taken = s.getsockname()[1]
        with ErrorQueue("127.0.0.1", "127.0.0.1", protocol, closed_port) as queue:  # type: ignore[arg-type]
            assert not queue.send(Probe(taken, 1))
            assert queue.receive(0.01) == []


def test_the_ends_of_a_live_connection_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        to = listener.getsockname()[1]
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", 0))
            s.connect(("127.0.0.1", to))
            with ErrorQueue("127.0.0.1", "127.0.0.1", "tcp", to) as queue:
                assert not queue.send(Probe(s.getsockname()[1], 1))
            s.sendall(b"still there")
            peer, _ = listener.accept()
            with peer:
                assert peer.recv(100) == b"still there"


def test_forgotten_probes_hold_no_sockets(closed_port: int) -> None:
    before = open_descriptors()
    with ErrorQueue("127.0.0.1", "127.0.0.1", "udp", closed_port) as queue:
        for ttl in range(1, 31):
            assert queue.send(Probe(0, ttl))
        queue.forget(Probe(0, 1))
        queue.forget(Probe(0, 1))
        queue.forget(Probe(0, 99))
        assert len(open_descriptors() - before) == 1 + 29
    assert open_descriptors() <= before


def test_a_failed_probe_holds_no_socket(closed_port: int) -> None:
    before = open_descriptors()
    with ErrorQueue("192.0.2.1", "127.0.0.1", "udp", closed_port) as queue:
        for _ in range(5):
            with pytest.raises(ProbeError, match=r"can't send from 192\.0\.2\.1"):
                queue.send(Probe(0, 1))
    assert open_descriptors() <= before


def test_an_answer_to_an_earlier_datagram_is_not_taken_for_this_one(closed_port: int) -> None:
    with ErrorQueue("127.0.0.1", "127.0.0.1", "udp", closed_port) as queue:
        assert queue.send(Probe(0, 1))
        [(sock, _)] = queue._flight.values()
        sock.recvmsg(512, 512, socket.MSG_ERRQUEUE)
        # What the router would quote of another probe from the same port.
        sock.send(struct.pack("!8sBHI", b"cruxprob", 7, 0, queue._nonce))
        assert queue.receive(0.2) == []


def read(data: bytes, quoted: bytes = b"") -> QueuedError | None:
    """The error that a queue with this one entry holds."""
    entries = iter([(quoted, [(socket.IPPROTO_IP, 11, data)], 0, None)])

    def recvmsg(*_: int) -> object:
        if (entry := next(entries, None)) is None:
            raise BlockingIOError
        return entry

    return read_error(SimpleNamespace(recvmsg=recvmsg))  # type: ignore[arg-type]


def extended_error(origin: int, kind: int, code: int, address: str) -> bytes:
    head = struct.pack("=IBBBBII", 113, origin, kind, code, 0, 0, 0)
    if ":" in address:
        return head + struct.pack("=HHI", 10, 0, 0) + socket.inet_pton(socket.AF_INET6, address)
    return head + struct.pack("=HH", 2, 0) + socket.inet_aton(address) + bytes(8)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (extended_error(2, 11, 0, "10.0.0.1"), "hop", ""),
        (extended_error(2, 3, 3, "10.0.0.1"), "destination", ""),
        (extended_error(2, 3, 1, "10.0.0.1"), "refusal", "host unreachable"),
        (extended_error(2, 3, 13, "10.0.0.1"), "refusal", "administratively prohibited"),
        (extended_error(2, 3, 99, "10.0.0.1"), "refusal", "type 3 code 99"),
        (extended_error(3, 3, 0, "2001:db8::1"), "hop", ""),
        (extended_error(3, 1, 4, "2001:db8::1"), "destination", ""),
        (extended_error(3, 1, 0, "2001:db8::1"), "refusal", "no route to destination"),
        (extended_error(3, 2, 0, "2001:db8::1"), "refusal", "type 2 code 0"),
    ],
)
def test_what_icmp_errors_mean(data: bytes, kind: str, words: str) -> None:
    queued = read(data, b"quoted")
    assert queued is not None
    assert queued.kind == kind
    assert words in queued.detail
    assert queued.address in ("10.0.0.1", "2001:db8::1")
    assert queued.quoted == b"quoted"


@pytest.mark.parametrize("origin", [0, 1, 4, 5])
def test_errors_of_this_host_are_not_answers(origin: int) -> None:
    assert read(extended_error(origin, 11, 0, "10.0.0.1")) is None


@pytest.mark.parametrize("to", LOOPBACKS)
def test_nothing_is_on_the_way_to_oneself(to: str) -> None:
    found = probe(to, 4791, "udp")
    assert found.distance == 1
    assert set(found.hops.values()) == {()}
    assert found.ended == "confident"
    assert found.source == to
    assert set(found.hops) <= set(ROCE_PORTS)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_one_hop(protocol: str, closed_port: int) -> None:
    rules = Rules(ports_per_path=20, rate_per_s=2000)

    def found_by(seed: int = 0) -> PathMap:
        return probe("127.0.0.1", closed_port, protocol, ttls=[1], rules=rules, seed=seed)  # type: ignore[arg-type]

    found = found_by()
    assert list(found.paths) == [((1, "127.0.0.1"),)]
    assert len(found.hops) >= 20
    assert found.ports_via([(1, "127.0.0.1")]) == tuple(found.hops)
    assert (found.repeated, found.changed) == (6, 0)
    assert found.distance is None
    assert list(found_by().hops)[:10] == list(found.hops)[:10], "the same order every time"
    assert list(found_by(seed=1).hops)[:10] != list(found.hops)[:10]


def test_told_ports_in_told_order(closed_port: int) -> None:
    ports = [50007, 50003, 50005]
    found = probe("127.0.0.1", closed_port, "udp", ttls=[1], ports=ports, seed=None)
    assert list(found.hops) == ports
    assert found.ended == "ports"


def test_a_name_is_looked_up(closed_port: int) -> None:
    assert probe("localhost", closed_port, "udp").destination in ("127.0.0.1", "::1")
    assert resolve("2001:0db8::0001") == "2001:db8::1"
    assert source_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ProbeError, match=r"'nowhere\.invalid' is no address and no known name"):
        resolve("nowhere.invalid")
    with pytest.raises(ProbeError, match="no known name"):
        resolve("x" * 300)


@pytest.mark.parametrize(
    "bad", [{"port": 0}, {"port": 65536}, {"max_ttl": 0}, {"ttls": []}, {"ttls": [0]}]
)
def test_arguments_out_of_bounds(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        probe("127.0.0.1", **({"port": 4791} | bad))  # type: ignore[arg-type]


def test_default_ports() -> None:
    assert default_ports("udp", 4791) == range(49152, 65536)
    assert default_ports("tcp", 4791) == default_ports("udp", 53)
    assert 1024 < default_ports("tcp", 4791)[0] < default_ports("tcp", 4791)[-1] < 65536


def test_silence_ends_in_time_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ErrorQueue, "receive", lambda self, timeout_s: time.sleep(timeout_s) or [])
    rules = Rules(answer_wait_s=0.01)
    with pytest.raises(ProbeError, match=r"nobody on the way to 127\.0\.0\.1 answered 12 probes"):
        probe("127.0.0.1", 4791, "udp", rules=rules)
    with pytest.raises(ProbeError, match=r"no router answered for udp to 127\.0\.0\.1"):
        probe("127.0.0.1", 4791, "udp", ttls=[1], rules=rules)
    start = time.monotonic()
    with pytest.raises(ProbeError):
        probe("127.0.0.1", 4791, "udp", ttls=[1], rules=Rules(time_limit_s=0.2))
    assert time.monotonic() - start < 5


def test_probing_needs_no_torch() -> None:
    program = "import sys, crux_torch.network.probe.prober; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


class Played:
    """A network behind the error queue: what answers at each TTL."""

    def __init__(self, answers: dict[int, Answer]) -> None:
        self.answers, self.sent = answers, 0
        self._coming: list[Answer] = []

    def send(self, question: Probe) -> bool:
        self.sent += 1
        if question.ttl in self.answers:
            self._coming.append(self.answers[question.ttl])
        return True

    def receive(self, timeout_s: float) -> list[Answer]:
        told, self._coming = self._coming, []
        if not told:
            time.sleep(timeout_s)
        return told

    def forget(self, question: Probe) -> None:
        pass

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def played_depth(monkeypatch: pytest.MonkeyPatch, net: Played) -> live_trace.Depth:
    monkeypatch.setattr(live_trace, "ErrorQueue", lambda *args: net)
    return live_trace.sound("10.0.0.2", "10.1.0.2", 16, 0.005, time.monotonic() + 10)


def network(routers: int, reached: bool = True) -> dict[int, Answer]:
    hops = {ttl: Answer(Probe(0, ttl), f"10.9.{ttl}.1", "hop") for ttl in range(1, routers + 1)}
    ends = {ttl: Answer(Probe(0, ttl), "10.1.0.2", "destination") for ttl in range(routers + 1, 17)}
    return hops | ends if reached else hops


@pytest.mark.parametrize("reached", [True, False], ids=["a peer", "a silent peer"])
@pytest.mark.parametrize("routers", [1, 3, 4, 7, 11])
def test_routers_are_counted(monkeypatch: pytest.MonkeyPatch, routers: int, reached: bool) -> None:
    depth = played_depth(monkeypatch, Played(network(routers, reached)))
    assert depth.distance == (routers + 1 if reached else None)
    assert depth.ttls == tuple(range(1, routers + 1))


def test_a_peer_that_limits_its_answers_is_not_taken_for_a_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = network(3)
    # All its answers to TTL 4 are lost, so it seems to be at 5.
    del answers[4]
    depth = played_depth(monkeypatch, Played(answers))
    assert depth.ttls == (1, 2, 3), "never a TTL that reaches the peer"
    assert depth.distance == 5


def test_a_router_before_the_peer_that_answers_late_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = network(3)
    net = Played({ttl: answer for ttl, answer in answers.items() if ttl != 3})
    receive = net.receive

    def limited(timeout_s: float) -> list[Answer]:
        # Where answers are limited to one a second, the first three attempts may all be lost.
        if net.sent > 6:
            net.answers = answers
        return receive(timeout_s)

    monkeypatch.setattr(net, "receive", limited)
    depth = played_depth(monkeypatch, net)
    assert depth.ttls == (1, 2, 3)
    assert depth.distance == 4


def test_silent_routers_in_between_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = network(5)
    del answers[2], answers[4]
    depth = played_depth(monkeypatch, Played(answers))
    assert depth.ttls == (1, 2, 3, 4, 5)
    assert depth.distance == 6


def test_a_refusal_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Answer(Probe(0, 1), "10.0.0.1", "refusal", "host unreachable (ICMP type 3 code 1)")
    with pytest.raises(ProbeError, match=r"10\.0\.0\.1 says host unreachable"):
        played_depth(monkeypatch, Played({1: refusal}))


def ones_complement_sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@given(
    st.sampled_from([("10.0.0.2", "10.1.0.2"), ("fd00::2", "fd00:1::2")]),
    st.integers(1, 65535),
    st.integers(1, 65535),
    st.integers(1, 64),
    st.booleans(),
)
def test_traced_packets_are_refused_by_their_checksum(
    addresses: tuple[str, str], sport: int, dport: int, ttl: int, tcp: bool
) -> None:
    local, peer = (addresses[0], sport), (addresses[1], dport)
    packet = (live_trace._segment if tcp else live_trace._datagram)(local, peer, ttl)
    assert struct.unpack("!HH", packet[:4]) == (sport, dport)
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    ends = b"".join(socket.inet_pton(family, address) for address in addresses)
    pseudo = ends + struct.pack("!II", len(packet), 6 if tcp else 17)
    # A receiver accepts a sum of all ones (RFC 1071), and a UDP checksum of 0 unread.
    assert ones_complement_sum(pseudo + packet) != 0xFFFF
    checksum = packet[16:18] if tcp else packet[6:8]
    assert checksum != b"\0\0"
    right = bytearray(packet)
    at = 16 if tcp else 6
    right[at : at + 2] = bytes(2)
    value = ~ones_complement_sum(pseudo + bytes(right)) & 0xFFFF
    right[at : at + 2] = value.to_bytes(2, "big")
    assert ones_complement_sum(pseudo + bytes(right)) == 0xFFFF, "the pseudo-header is the real one"
    if tcp:
        assert packet[13] == 0x10, "an ACK, no SYN, FIN or RST"
        assert len(packet) == 20, "no data"


def test_no_router_is_on_the_way_to_oneself() -> None:
    trace = trace_connection(("127.0.0.1", 40000), ("127.0.0.1", 50000))
    assert (trace.hops, trace.reason) == ((), "no router is on the way")


def test_without_the_right_a_trace_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def refuse_raw(family: int = -1, kind: int = -1, *args: int) -> socket.socket:
        if kind == socket.SOCK_RAW:
            raise PermissionError(1, "Operation not permitted")
        return real(family, kind, *args)

    monkeypatch.setattr(live_trace.socket, "socket", refuse_raw)
    trace = trace_connection(("127.0.0.1", 40000), ("127.0.0.1", 50000), ttls=[1])
    assert trace.method == "none"
    assert "CAP_NET_RAW" in trace.reason


@pytest.mark.parametrize(
    ("local", "peer"),
    [
        (("localhost", 1), ("127.0.0.1", 1)),
        (("127.0.0.1", 0), ("127.0.0.1", 1)),
        (("127.0.0.1", 1), ("127.0.0.1", 65536)),
    ],
)
def test_ends_that_are_none(local: tuple[str, int], peer: tuple[str, int]) -> None:
    with pytest.raises(ValueError):
        trace_connection(local, peer)


def test_a_trace_that_cannot_leave_says_so() -> None:
    trace = trace_connection(("192.0.2.1", 40000), ("127.0.0.1", 50000))
    assert trace.method == "none"
    assert "can't send from 192.0.2.1" in trace.reason


def crux(*argv: str) -> click.testing.Result:
    return CliRunner().invoke(cli.main, ["probe", *argv], prog_name="crux")


def test_a_table_and_json(tmp_path: Path, closed_port: int) -> None:
    done = crux("127.0.0.1")
    assert done.exit_code == 0, done.output
    assert "127.0.0.1 to 127.0.0.1, udp port 4791, 0 routers on the way" in done.output
    assert "no router on the way" in done.output
    assert re.search(r"8 ports, .* is at most 0\.8%", done.output)
    out = tmp_path / "paths.json"
    done = crux("127.0.0.1", "--tcp", "--port", str(closed_port), "--ttl", "1", "--json", str(out))
    assert done.exit_code == 0, done.output
    told = json.loads(out.read_text())
    found = msgspec.json.decode(json.dumps(told["map"]), type=PathMap)
    assert (found.protocol, found.port) == ("tcp", closed_port)
    assert told["paths"][0]["hops"] == [{"ttl": 1, "address": "127.0.0.1", "node": None}]
    assert told["paths"][0]["ports"] == list(found.hops)
    assert "via" not in told
    done = crux("127.0.0.1", "--ttl", "1", "--json", "-", "--via", "127.0.0.1")
    assert json.loads(done.output)["via"]["nodes"] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["127.0.0.1", "--tcp"], 2, "--tcp needs --port"),
        (["127.0.0.1", "--ports", "x-y"], 2, "expected A-B, two port numbers"),
        (["127.0.0.1", "--ports", "9-8"], 2, "expected A-B with 1 <= A <= B <= 65535"),
        (["127.0.0.1", "--ports", "1-99999"], 2, "expected A-B with"),
        (["127.0.0.1", "--confidence", "1"], 2, "confidence"),
        (["127.0.0.1", "--via", "spine0"], 1, "--via spine0: expected an address"),
        (["127.0.0.1", "--via", "10.9.9.9", "--ttl", "1"], 1, "leads via 10.9.9.9"),
        (["nowhere.invalid"], 1, "no known name"),
        (["127.0.0.1", "--source", "192.0.2.1"], 1, "can't send from 192.0.2.1"),
        (["127.0.0.1", "--json", "/nowhere/x"], 1, "/nowhere/x: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said(argv: list[str], code: int, words: str) -> None:
    done = crux(*argv)
    assert done.exit_code == code, done.output
    assert words in " ".join(done.output.split())


def test_a_topology_without_addresses_is_of_no_use(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(
        "version: 1\nhosts: {h0: {}}\nswitches: {leaf: tor}\n"
        "links: [{between: [h0, leaf], capacity_Bps: 1.0e+9}]\n"
    )
    done = crux("127.0.0.1", "--topology", str(file))
    assert done.exit_code == 1
    assert "gives no node an address" in done.output
    file.write_text(file.read_text() + "addresses: {h0: [127.0.0.1]}\n")
    done = crux("127.0.0.1", "--topology", str(file), "--ttl", "1", "--via", "h0")
    assert done.exit_code == 0, done.output
    assert "ports via h0" in done.output
    done = crux("127.0.0.1", "--topology", str(file), "--via", "leaf")
    assert "the topology gives this node no address" in done.output
