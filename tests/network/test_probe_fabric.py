"""Probing and tracing in the fabric of network namespaces, against its byte counters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from ipaddress import ip_address
from pathlib import Path

import msgspec
import pytest
import yaml
from fabric_programs import Talker, add_ipv6, built, sysctl

from crux_torch.network.probe.prober import PathMap
from lab import netns
from lab.fabric import Fabric, Host

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _OK, reason=_REASON)]

FLOWS = 24
#: Enough to stand out from ARP and probes, quick at 200 Mbit/s.
FLOW_BYTES = 100_000

# Takes what comes, TCP and UDP, on one port; says how many connections and what they brought.
_SINK = """
import hashlib, json, socket, sys, threading
address, port = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
listener = socket.create_server((address, port), family=family, backlog=64)
datagrams = socket.socket(family, socket.SOCK_DGRAM); datagrams.bind((address, port))
done = []
def serve():
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=take, args=(peer,), daemon=True).start()
def take(peer):
    digest, count = hashlib.sha256(), 0
    try:
        while data := peer.recv(1 << 16):
            digest.update(data); count += len(data)
        peer.sendall(digest.hexdigest().encode())
    finally:
        done.append(count); peer.close()
threading.Thread(target=serve, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(done), flush=True)
"""

# For each line "tcp|udp PORT": sends from that port, and says so when all of it has arrived.
_SENDER = """
import socket, sys
source, to, port, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
family = socket.AF_INET6 if ":" in to else socket.AF_INET
print("ready", flush=True)
for line in sys.stdin:
    protocol, sport = line.split()
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as s:
        s.bind((source, int(sport))); s.connect((to, port))
        if protocol == "tcp":
            s.sendall(bytes(size)); s.shutdown(socket.SHUT_WR); s.recv(100)
        else:
            for _ in range(size // 1000): s.send(bytes(1000))
    print("sent", flush=True)
"""

_PROBE = """
import sys, msgspec
from crux_torch.network.probe.prober import probe
from crux_torch.network.probe.rules import Rules
options = eval(sys.argv[4]) if len(sys.argv) > 4 else {}
print(msgspec.json.encode(probe(sys.argv[1], int(sys.argv[2]), sys.argv[3], **options)).decode())
"""


# Says when it knows of two paths, waits for a line, and goes on.
_SEARCH = """
import sys, msgspec
from crux_torch.network.probe.prober import probe
told = False
def watch(search):
    global told
    if search.path_count == 2 and not told:
        told = True
        print("two", flush=True)
        sys.stdin.readline()
print("ready", flush=True)
print(msgspec.json.encode(probe(sys.argv[1], 4791, "udp", watch=watch)).decode())
"""


def probed(
    fabric: Fabric, host: Host, to: str, port: int, protocol: str, options: str = "{}"
) -> PathMap:
    argv = [sys.executable, "-c", _PROBE, to, str(port), protocol, options]
    return msgspec.json.decode(fabric.run(host, argv), type=PathMap)


def sent_over(fabric: Fabric, before: dict[str, int] | None = None) -> dict[str, int]:
    """Bytes that the first leaf sent to each spine, since ``before``."""
    argv = ["ip", "-n", f"{fabric.prefix}leaf0", "-j", "-s", "link", "show"]
    links = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    counters = {
        f"spine{link['ifname'].removeprefix('up')}": int(link["stats64"]["tx"]["bytes"])
        for link in links
        if link["ifname"].startswith("up")
    }
    return {spine: count - (before or {}).get(spine, 0) for spine, count in counters.items()}


def spine_taken(fabric: Fabric, before: dict[str, int], at_least: int) -> str:
    """The spine that carried a flow; the others carried next to nothing."""
    until = time.monotonic() + 5
    while True:
        moved = sorted(sent_over(fabric, before).items(), key=lambda item: -item[1])
        # Datagrams may still be queued.
        if moved[0][1] >= at_least or time.monotonic() > until:
            break
    assert moved[0][1] >= at_least
    assert moved[1][1] < at_least / 10
    return moved[0][0]


def foretold(fabric: Fabric, found: PathMap, port: int) -> str:
    return f"spine{fabric.spine_of(str(dict(found.hops[port])[2]))}"


@pytest.mark.parametrize("spines", [2, 4, 8])
def test_real_flows_take_the_foretold_spine(spines: int) -> None:
    with built(spines) as (fabric, a, b):
        sink = Talker(fabric, b, _SINK, b.address, 4791)
        send = Talker(fabric, a, _SENDER, a.address, b.address, 4791, FLOW_BYTES)
        for protocol in ("tcp", "udp"):
            options = f"{{'rules': Rules(ports_per_path={FLOWS // spines}, rate_per_s=2000)}}"
            found = probed(fabric, a, b.address, 4791, protocol, options)
            assert found.ended == "confident"
            assert len(found.paths) == spines
            assert found.distance == 4
            assert found.repeated == 6
            assert found.changed == 0
            if protocol == "tcp":
                assert json.loads(sink("?")) == [], "no probe reached the listener"
            ports = [port for group in found.paths.values() for port in group[: FLOWS // spines]]
            assert len(ports) == FLOWS
            hits = 0
            for port in ports:
                before = sent_over(fabric)
                assert send(f"{protocol} {port}") == "sent"
                hits += spine_taken(fabric, before, FLOW_BYTES) == foretold(fabric, found, port)
            assert hits == FLOWS


def test_a_spine_that_vanishes_during_the_search_is_no_path_and_no_spraying() -> None:
    with built(2) as (fabric, a, b):
        search = Talker(fabric, a, _SEARCH, b.address)
        assert search.hear() == "two"
        fabric.cut(1)
        search.tell("go on")
        found = msgspec.json.decode(search.hear(), type=PathMap)
        assert found.changed == 0
        assert found.ended == "confident"
        assert [fabric.spine_of(str(dict(hops)[2])) for hops in found.paths] == [0]
        assert not found.partial


def test_the_kernels_own_icmp_limits_cost_time_only() -> None:
    with built(4) as (fabric, a, b):
        fast = probed(fabric, a, b.address, 4791, "udp")
        for switch in [
            name for name in netns.named(fabric.prefix) if re.search("leaf|spine", name)
        ]:
            sysctl(
                switch, "ipv4/icmp_ratelimit=1000 ipv4/icmp_msgs_per_sec=1000 "
                "ipv4/icmp_msgs_burst=50"
            )  # fmt: skip
        slow = probed(fabric, a, b.address, 4791, "udp", "{'rules': Rules(0.95, time_limit_s=60)}")
        assert slow.ended == "confident"
        assert set(slow.paths) == set(fast.paths)
        assert slow.hops.items() <= fast.hops.items()
        assert slow.changed == 0
        assert slow.answered < slow.sent
        assert slow.seconds > fast.seconds
        assert slow.inferred, "some hop was too slow to be asked for every port"


def test_a_silent_spine_is_told() -> None:
    with built(2) as (fabric, a, b):
        # The limit of one namespace: nothing is left of a second's zero answers.
        sysctl(
            f"{fabric.prefix}spine1",
            "ipv4/icmp_ratelimit=1000 ipv4/icmp_msgs_burst=0 ipv4/icmp_msgs_per_sec=0",
        )
        found = probed(fabric, a, b.address, 4791, "udp", "{'rules': Rules(0.9, retries=1)}")
        assert found.ended == "confident"
        assert {hops[1][1] for hops in found.paths} == {"10.100.0.2"}
        assert {hops[1][1] for hops in found.partial} <= {None}


def test_ipv6() -> None:
    with built(2) as (fabric, a, b):
        add_ipv6(fabric)
        to = "fd00:1::2"
        sink = Talker(fabric, b, _SINK, to, 4791)
        send = Talker(fabric, a, _SENDER, "fd00:0::2", to, 4791, FLOW_BYTES)
        for protocol in ("tcp", "udp"):
            found = probed(fabric, a, to, 4791, protocol, "{'rules': Rules(ports_per_path=4)}")
            assert found.source == "fd00::2"
            assert found.ended == "confident"
            assert {dict(hops)[2] for hops in found.paths} == {"fd00:100::2", "fd00:101::2"}
            for group in found.paths.values():
                for port in group[:4]:
                    before = sent_over(fabric)
                    assert send(f"{protocol} {port}") == "sent"
                    spine = spine_taken(fabric, before, FLOW_BYTES)
                    address = ip_address(str(dict(found.hops[port])[2]))
                    assert address == ip_address(f"fd00:10{spine[-1]}::2")
        assert json.loads(sink("?")) == [FLOW_BYTES] * 8


# Keeps one connection after the other busy, by far less than the links carry, and traces each.
_LIVE = """
import hashlib, json, os, socket, sys, threading, time
from crux_torch.network.probe.live_trace import trace_connection
source, to, port, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ttls = json.loads(sys.argv[5])
print("ready", flush=True)
for line in sys.stdin:
    s = socket.socket(); s.bind((source, int(line))); s.connect((to, port))
    digest, total, traced = hashlib.sha256(), 0, False
    def send():
        global total
        while total < size or not traced:
            data = os.urandom(5000); s.sendall(data); digest.update(data); total += len(data)
            time.sleep(0.001)
    sender = threading.Thread(target=send); sender.start(); time.sleep(0.05)
    trace = trace_connection(s.getsockname(), s.getpeername(), "tcp", ttls=ttls)
    traced = True
    sender.join(); s.shutdown(socket.SHUT_WR)
    same = s.recv(100).decode() == digest.hexdigest()
    s.close()
    print(json.dumps({"hops": trace.hops, "method": trace.method, "reason": trace.reason,
                      "bytes": total, "same": same}), flush=True)
"""


def tcp_counters(fabric: Fabric, host: Host) -> dict[str, int]:
    text = fabric.run(host, ["cat", "/proc/net/netstat", "/proc/net/snmp"])
    lines = [line.split() for line in text.splitlines()]
    pairs = [
        (f"{names[0]}{name}", int(value))
        for names, values in zip(lines[::2], lines[1::2], strict=True)
        for name, value in zip(names[1:], values[1:], strict=True)
    ]
    return dict(pairs)


def test_a_live_connection_under_load_is_traced_and_undisturbed() -> None:
    with built(4) as (fabric, a, b):
        Talker(fabric, b, _SINK, b.address, 5001)
        live = Talker(fabric, a, _LIVE, a.address, b.address, 5001, 200_000, "null")
        hits, spines = 0, set()
        for port in range(41000, 41000 + FLOWS):
            before = sent_over(fabric)
            told = json.loads(live(str(port)))
            spine = spine_taken(fabric, before, told["bytes"])
            spines.add(spine)
            assert told["method"] == "raw", told["reason"]
            assert [ttl for ttl, _ in told["hops"]] == [1, 2, 3]
            hits += f"spine{fabric.spine_of(dict(told['hops'])[2])}" == spine
            assert told["bytes"] >= 200_000
            assert told["same"]
        assert hits == FLOWS
        assert len(spines) == 4
        there, here = tcp_counters(fabric, b), tcp_counters(fabric, a)
        assert there["Tcp:InErrs"] == 0, "no traced segment got there"
        assert there["TcpExt:TCPChallengeACK"] == 0
        # This host's TCP saw the routers' errors for each segment, and took none for its own.
        assert here["TcpExt:OutOfWindowIcmps"] >= 3 * FLOWS
        # Nothing was lost: on a busy machine TCP sends a segment again now and then, traced or
        # not, and the peer had it already each time (DSACK; one may come after the close).
        assert here["Tcp:RetransSegs"] <= here["TcpExt:TCPDSACKRecvSegs"] + 1
        assert not any(any(counter.drops.values()) for counter in fabric.counters())


def test_a_trace_that_does_arrive_is_dropped_unread() -> None:
    with built(2) as (fabric, a, b):
        Talker(fabric, b, _SINK, b.address, 5001)
        live = Talker(fabric, a, _LIVE, a.address, b.address, 5001, 200_000, "[2, 9]")
        told = json.loads(live("41000"))
        assert told["hops"][1] == [9, None]
        assert told["same"]
        there = tcp_counters(fabric, b)
        assert there["Tcp:InCsumErrors"] > 0, "or this test proves nothing"
        assert there["TcpExt:TCPChallengeACK"] == 0
        assert there["Tcp:EstabResets"] == 0


# A datagram flow of RoCEv2's: no socket of this host holds the port. Then one that a socket holds.
_DATAGRAMS = """
import json, os, socket, sys
from crux_torch.network.probe.live_trace import trace_connection
source, to = sys.argv[1:]
for port in range(50000, 50012):
    traces = [trace_connection((source, port), (to, 4791), "udp")]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind((source, port)); s.connect((to, 4791))
        traces.append(trace_connection((source, port), (to, 4791), "udp"))
        s.setblocking(False)
        try: s.send(b"still works")
        except OSError as error: print(error)
    print(json.dumps([[t.method, t.hops] for t in traces]))
"""


def test_datagram_flows_are_traced_whoever_holds_the_port() -> None:
    with built(4) as (fabric, a, b):
        rules = "Rules(ports_per_path=12, rate_per_s=2000)"
        options = f"{{'ports': range(50000, 50012), 'rules': {rules}}}"
        found = probed(fabric, a, b.address, 4791, "udp", options)
        assert found.ended == "ports"
        Talker(fabric, b, _SINK, b.address, 4791)
        out = fabric.run(a, [sys.executable, "-c", _DATAGRAMS, a.address, b.address])
        for port, line in zip(range(50000, 50012), out.splitlines(), strict=True):
            expected = [list(hop) for hop in found.hops[port]]
            assert json.loads(line) == [["socket", expected], ["raw", expected]]


_UNPRIVILEGED = """
import json, os, socket, sys
from crux_torch.network.probe.live_trace import trace_connection
from crux_torch.network.probe.prober import probe
import encodings.idna
os.setgroups([]); os.setgid(65534); os.setuid(65534)
source, to = sys.argv[1:]
held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); held.bind((source, 50001))
traces = [trace_connection((source, 41000), (to, 5001), "tcp"),
          trace_connection((source, 50000), (to, 4791), "udp"),
          trace_connection((source, 50001), (to, 4791), "udp")]
paths = [len(probe(to, 4791, protocol).paths) for protocol in ("tcp", "udp")]
told = [[t.method, len(t.hops), t.reason] for t in traces]
print(json.dumps({"traces": told, "paths": paths}))
"""


def test_without_privileges_probing_works_and_tracing_says_what_it_lacks() -> None:
    with built(2) as (fabric, a, b):
        out = fabric.run(a, [sys.executable, "-c", _UNPRIVILEGED, a.address, b.address])
        told = json.loads(out)
        assert told["paths"] == [2, 2]
        tcp, free, held = told["traces"]
        for method, hops, reason in (tcp, held):
            assert (method, hops) == ("none", 0)
            assert "CAP_NET_RAW" in reason
            assert "setcap" in reason
        assert free == ["socket", 3, ""]


def crux(
    fabric: Fabric, host: Host, *argv: str, command: tuple[str, ...] = ("probe",)
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "crux_torch.cli", *command, *argv]
    return subprocess.run(
        ["ip", "netns", "exec", host.namespace, *words],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_the_check_compares_a_topology_with_what_answers(tmp_path: Path) -> None:
    with built(2) as (fabric, a, _):
        topology = tmp_path / "fabric.yaml"
        topology.write_text(fabric.topology_yaml())
        check = ("topology", "check")
        done = crux(fabric, a, str(topology), "--probe", command=check)
        assert done.returncode == 0, done.stdout + done.stderr
        document = yaml.safe_load(fabric.topology_yaml())
        document["addresses"]["spine1"] = ["192.168.0.1"]
        topology.write_text(yaml.safe_dump(document))
        done = crux(fabric, a, str(topology), "--probe", command=check)
        assert done.returncode == 1
        assert "is not in the file" in done.stdout
        assert "switches that did not answer from any of their addresses: spine1" in done.stdout


def test_the_command_names_the_switches_and_lists_ports(tmp_path: Path) -> None:
    with built(4) as (fabric, a, b):
        topology = tmp_path / "fabric.yaml"
        topology.write_text(fabric.topology_yaml())
        named = ("--topology", str(topology))
        done = crux(fabric, a, b.address, *named)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "progress is for terminals"
        for j in range(4):
            assert f"leaf0 > spine{j} > leaf1" in done.stdout
        assert "10.0.0.2 to 10.1.0.2, udp port 4791, 3 routers on the way" in done.stdout

        out = tmp_path / "paths.json"
        done = crux(
            fabric, a, b.address, "--tcp", "--port", "29500", "--ports", "40000-40999",
            "--via", "spine2", "--count", "3", "--json", str(out), *named,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told = json.loads(out.read_text())
        found = msgspec.json.decode(json.dumps(told["map"]), type=PathMap)
        spine2 = [
            port for port, hops in found.hops.items() if fabric.spine_of(str(hops[1][1])) == 2
        ]
        assert told["via"] == {"nodes": ["spine2"], "ports": sorted(spine2)}
        assert len(spine2) >= 3
        assert set(found.hops) <= set(range(40000, 41000))
        assert f"{len(spine2)} ports via spine2: {', '.join(map(str, sorted(spine2)))}" in (
            done.stdout.replace("\n", " ")
        )
        assert [hop["node"] for hop in told["paths"][0]["hops"]][::2] == ["leaf0", "leaf1"]

        done = crux(fabric, a, b.address, "--via", "10.9.9.9", *named)
        assert done.returncode == 1
        assert "leads via 10.9.9.9" in done.stderr


def test_the_command_says_what_is_wrong_with_the_network(tmp_path: Path) -> None:
    with built(2) as (fabric, a, b):
        netns.run_batch("ip", "route add 192.168.7.0/24 via 10.0.0.1\n", a.namespace)
        for argv, words in (
            (["192.168.7.7"], "192.168.7.7 can't be reached: 10.0.0.1 says network unreachable"),
            (["fd00::1"], "no route to fd00::1 (Network is unreachable): see `ip route get"),
            ([b.address, "--source", "10.7.7.7"], "can't send from 10.7.7.7"),
        ):
            done = crux(fabric, a, *argv, "--time", "8")
            assert done.returncode == 1, done.stdout
            assert words in done.stderr
            assert done.stderr.count("\n") < 6, "no traceback"
        # A firewall of this host that drops what is sent to the peer.
        netns.run_batch("ip", "route replace prohibit 10.1.0.0/16\n", a.namespace)
        done = crux(fabric, a, b.address)
        assert done.returncode == 1
        assert "no route to 10.1.0.2" in done.stderr


def test_nobody_answers() -> None:
    with built(2) as (fabric, a, b):
        netns.run_batch("ip", "route replace blackhole 10.0.0.0/16\n", f"{fabric.prefix}leaf1")
        sysctl(
            f"{fabric.prefix}leaf0",
            "ipv4/icmp_ratelimit=1000 ipv4/icmp_msgs_burst=0 ipv4/icmp_msgs_per_sec=0",
        )
        for j in (0, 1):
            netns.run_batch(
                "ip", "route replace blackhole 10.0.0.0/16\n", f"{fabric.prefix}spine{j}"
            )
        done = crux(fabric, a, b.address)
        assert done.returncode == 1
        assert "nobody on the way to 10.1.0.2 answered" in textwrap.fill(done.stderr, 10_000)
