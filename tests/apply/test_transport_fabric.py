"""Steering in a fabric of network namespaces, confirmed by what its spines have carried."""

from __future__ import annotations

import errno
import itertools
import json
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fabric_programs import Talker, add_ipv6, built

from crux_torch.apply.transport import LIBRARY
from lab import netns
from lab.fabric import Fabric, Host

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _OK, reason=_REASON)]

PORT, STORE = 5001, 29500
SENT = 60_000
FIRST, LAST = 20000, 28999

# Takes connections, and answers each with a byte after what it announced to send.
_SERVER = """
import socket, sys, threading
def serve(listener):
    while True:
        peer, _ = listener.accept()
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=read, args=(peer,), daemon=True).start()
def read(peer):
    left = int(sys.argv[2])
    while left > 0:
        data = peer.recv(1 << 16)
        if not data: return
        left -= len(data)
    peer.sendall(b".")
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listeners = [socket.create_server((sys.argv[1], int(p)), family=family) for p in sys.argv[3:]]
for listener in listeners: threading.Thread(target=serve, args=(listener,)).start()
print("ready", flush=True)
"""

# For each line of input, a connection to the address and port in it; tells how it was made.
_CLIENT = """
import json, os, socket, sys, time
from crux_torch.apply.transport import Route, Transport
t = Transport.load()
held = []
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "routes" in order:
        routes = order["routes"]
        t.set_routes([Route(d, tuple(map(tuple, hops)), **more) for d, hops, more in routes])
    family = socket.AF_INET6 if ":" in order["to"] else socket.AF_INET
    s = socket.socket(family); begin = time.perf_counter()
    s.connect((order["to"], order["port"])); taken_s = time.perf_counter() - begin
    inode = os.fstat(s.fileno()).st_ino
    if "live_dscp" in order: t.set_socket(s.fileno(), inode, dscp=order["live_dscp"])
    for _ in range(2):
        s.sendall(bytes(int(sys.argv[1]) // 2))
    answered = s.recv(1) == b"."
    [me] = [c for c in t.connections() if c.id == inode]
    held.append(s)
    print(json.dumps({"how": me.how, "error": me.error, "probes": me.probes, "via": me.via,
        "via_ttl": me.via_ttl, "local_port": me.local_port, "dscp": me.dscp, "peer": me.peer,
        "answered": answered, "taken_s": taken_s}), flush=True)
"""


class Client(Talker):
    """One program on one host whose every connection may be steered."""

    def __init__(self, fabric: Fabric, host: Host, **env: str) -> None:
        loaded = {"LD_PRELOAD": str(LIBRARY), "CRUX_TRANSPORT_STEER_ALL": "1"}
        super().__init__(fabric, host, _CLIENT, SENT, **loaded, **env)

    def connect(self, to: str, port: int = PORT, **order: Any) -> Any:
        return json.loads(self(json.dumps({**order, "to": to, "port": port})))


def _serve(fabric: Fabric, host: Host, *ports: int) -> subprocess.Popen[str]:
    return Talker(fabric, host, _SERVER, host.address, SENT, *ports).process


def _fabric(spines: int) -> AbstractContextManager[tuple[Fabric, Host, Host]]:
    return built(spines, rate_mbit=1000)


def _via(to: Host, spine: int, **more: Any) -> list[Any]:
    """The route over a spine, as its side towards leaf 0 answers."""
    return [to.address, [[2, f"10.100.{spine}.2"]], more]


def _carried(fabric: Fabric, leaf: int, spines: int) -> list[int]:
    links = {c.link: sum(c.bytes.values()) for c in fabric.counters()}
    return [links[f"leaf{leaf}->spine{j}"] for j in range(spines)]


@pytest.mark.parametrize("spines", [2, 4])
def test_the_planned_spine_is_taken_every_time(spines: int) -> None:
    with _fabric(spines) as (fabric, a, to):
        _serve(fabric, to, PORT)
        client = Client(fabric, a)
        for spine in itertools.islice(itertools.cycle(range(spines)), 24):
            before = _carried(fabric, 0, spines)
            told = client.connect(to.address, routes=[_via(to, spine)])
            after = _carried(fabric, 0, spines)
            assert (told["how"], told["error"]) == ("at_connect", 0)
            assert (told["via_ttl"], told["via"]) == (2, f"10.100.{spine}.2")
            assert FIRST <= told["local_port"] <= LAST
            sent = [now - then for now, then in zip(after, before, strict=True)]
            others = sum(sent) - sent[spine]
            assert sent[spine] >= SENT > 4 * others, "probes are all that others carry"


def test_routes_of_a_file_steer_a_program_without_a_python_face(tmp_path: Path) -> None:
    with _fabric(2) as (fabric, a, to):
        _serve(fabric, to, PORT)
        for spine in (0, 1):
            routes = tmp_path / f"routes{spine}"
            routes.write_text(f"{to.address} via 2:10.100.{spine}.2 dscp 48\n")
            client = Client(fabric, a, CRUX_TRANSPORT_ROUTES=str(routes), CRUX_PORTS="30000-30999")
            before = {c.link: c.bytes for c in fabric.counters()}
            told = client.connect(to.address)
            after = {c.link: c.bytes for c in fabric.counters()}
            assert (told["how"], told["dscp"]) == ("at_connect", 48)
            assert 30000 <= told["local_port"] <= 30999
            link = f"leaf0->spine{spine}"
            assert after[link][6] - before[link][6] >= SENT, "DSCP 48 is level 6"


def test_a_live_connection_has_its_new_class_on_the_wire() -> None:
    def at_level(fabric: Fabric, level: int) -> int:
        return sum(c.bytes[level] for c in fabric.counters() if c.link.startswith("leaf0->"))

    with _fabric(2) as (fabric, a, to):
        _serve(fabric, to, PORT)
        client = Client(fabric, a)
        assert client.connect(to.address)["how"] == "untouched"
        assert at_level(fabric, 0) >= SENT
        assert at_level(fabric, 5) == 0
        assert client.connect(to.address, live_dscp=40)["how"] == "live_option"
        assert at_level(fabric, 5) >= SENT


def test_other_destinations_and_stores_are_left_alone() -> None:
    with _fabric(2) as (fabric, a, to):
        _serve(fabric, to, PORT, STORE)
        client = Client(fabric, a, MASTER_PORT=str(STORE))
        other = Host(1, 9, "", "10.9.0.2")
        for order in (
            {"port": STORE, "routes": [_via(to, 0, dscp=40)]},
            {"port": PORT, "routes": [_via(other, 0, dscp=40)]},
            {"port": PORT, "routes": []},
        ):
            told = client.connect(to.address, **order)
            assert told["how"] == "untouched"
            assert (told["probes"], told["dscp"], told["answered"]) == (0, 0, True)
            assert not FIRST <= told["local_port"] <= LAST


def test_a_path_that_is_not_there_is_told_and_the_connection_made() -> None:
    with _fabric(2) as (fabric, a, to):
        server = _serve(fabric, to, PORT)
        client = Client(fabric, a, CRUX_TRANSPORT_PROBE_MS="100")
        told = client.connect(to.address, routes=[_via(to, 7)])
        assert (told["how"], told["error"]) == ("refused", errno.EHOSTUNREACH)
        assert told["via"] in ("10.100.0.2", "10.100.1.2")
        assert told["answered"]
        # One hop too far is the destination: its probes must not become connections there.
        told = client.connect(to.address, routes=[[to.address, [[4, "10.100.0.2"]], {}]])
        assert told["how"] == "refused"
        assert told["error"] in (errno.ETIMEDOUT, errno.ERANGE)
        assert told["answered"]
        assert told["probes"] > 0
        time.sleep(0.2)
        server.terminate()
        assert server.stdout is not None
        accepted = server.stdout.read().split()
        assert len(accepted) == 2 or told["error"] == errno.ERANGE


def test_no_port_is_chosen_where_packets_are_sprayed() -> None:
    with _fabric(4) as (fabric, a, to):
        _serve(fabric, to, PORT)
        # This policy takes the skb's hash, which is random for each socket inside one machine.
        spray = "echo 1 > /proc/sys/net/ipv4/fib_multipath_hash_policy"
        argv = ["ip", "netns", "exec", f"{fabric.prefix}leaf0", "sh", "-c", spray]
        subprocess.run(argv, check=True)
        client = Client(fabric, a, CRUX_TRANSPORT_PROBE_MS="3000")
        told = [client.connect(to.address, routes=[_via(to, i % 4)]) for i in range(8)]
        assert all(one["answered"] for one in told)
        # Three repeats are all over one spine of four once in 64 searches.
        refused = [one["error"] for one in told if one["how"] == "refused"]
        assert len(refused) >= 6
        assert set(refused) == {errno.ENOTUNIQ}


def test_every_listed_hop_has_to_answer_as_planned() -> None:
    with _fabric(2) as (fabric, a, to):
        _serve(fabric, to, PORT)
        client = Client(fabric, a, CRUX_TRANSPORT_PROBE_MS="100")
        near, far = [1, a.gateway], [3, "10.100.17.1"]
        both = [to.address, [near, [2, "10.100.1.2"], far, [3, "10.100.16.1"]], {}]
        told = client.connect(to.address, routes=[both])
        assert (told["how"], told["via_ttl"]) == ("at_connect", 3), told
        wrong = [to.address, [[1, "10.0.0.99"], [2, "10.100.1.2"]], {}]
        told = client.connect(to.address, routes=[wrong])
        assert (told["how"], told["error"]) == ("refused", errno.EHOSTUNREACH)


def test_an_ipv6_socket_to_an_ipv4_host_is_steered() -> None:
    with _fabric(2) as (fabric, a, to):
        _serve(fabric, to, PORT)
        client = Client(fabric, a)
        for spine in (0, 1, 1, 0):
            before = _carried(fabric, 0, 2)
            route = _via(to, spine, dscp=40)
            told = client.connect(f"::ffff:{to.address}", routes=[route])
            after = _carried(fabric, 0, 2)
            assert (told["how"], told["peer"], told["dscp"]) == ("at_connect", to.address, 40)
            assert after[spine] - before[spine] >= SENT


def test_routers_that_limit_their_answers_delay_a_connection_no_longer_than_allowed() -> None:
    with _fabric(2) as (fabric, a, to):
        _serve(fabric, to, PORT)
        for j in range(2):
            # One answer each 200 ms to one host, after a burst of six.
            limit = "echo 200 > /proc/sys/net/ipv4/icmp_ratelimit"
            argv = ["ip", "netns", "exec", f"{fabric.prefix}spine{j}", "sh", "-c", limit]
            subprocess.run(argv, check=True)
        client = Client(fabric, a, CRUX_TRANSPORT_PROBE_MS="3000")
        steered = [client.connect(to.address, routes=[_via(to, i % 2)]) for i in range(4)]
        assert [told["how"] for told in steered] == ["at_connect"] * 4
        hasty = Client(fabric, a, CRUX_TRANSPORT_PROBE_MS="30")
        for i in range(4):
            told = hasty.connect(to.address, routes=[_via(to, i % 2)])
            assert told["answered"]
            assert told["how"] == "at_connect" or told["error"] in (
                errno.ETIMEDOUT,
                errno.EHOSTUNREACH,
            )


def test_many_processes_that_connect_at_once_all_get_their_path() -> None:
    with _fabric(2) as (fabric, a, to):
        _serve(fabric, to, PORT)
        clients = [Client(fabric, a, CRUX_PORTS="21000-21127") for _ in range(4)]
        ports = set()
        for round_ in range(6):
            spine = round_ % 2
            order = {"to": to.address, "port": PORT, "routes": [_via(to, spine)]}
            for client in clients:
                client.tell(json.dumps(order))
            for client in clients:
                told = json.loads(client.hear())
                assert (told["how"], told["via"]) == ("at_connect", f"10.100.{spine}.2")
                ports.add(told["local_port"])
        assert len(ports) == 24, "each connection has a port of its own"


_IPV6_HASH = Path("/proc/sys/net/ipv6/fib_multipath_hash_fields")


@pytest.mark.skipif(not _IPV6_HASH.exists(), reason=f"no {_IPV6_HASH}")
def test_an_ipv6_connection_is_steered() -> None:
    with _fabric(2) as (fabric, a, b):
        add_ipv6(fabric)
        to = Host(1, 0, b.namespace, "fd00:1::2")
        _serve(fabric, to, PORT)
        # Fresh interfaces take a second until they know their neighbours.
        client = Client(fabric, a, CRUX_TRANSPORT_PROBE_MS="5000")
        for spine in (0, 1, 1, 0, 0, 1):
            before = _carried(fabric, 0, 2)
            via = f"fd00:10{spine}::2"
            told = client.connect(to.address, routes=[[to.address, [[2, via]], {"dscp": 40}]])
            assert (told["how"], told["via"], told["dscp"]) == ("at_connect", via, 40)
            assert _carried(fabric, 0, 2)[spine] - before[spine] >= SENT
