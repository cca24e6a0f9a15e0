"""The fabric of network namespaces: shape, priorities, paths, teardown."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time

import pytest
from places import ROOT
from training_job import alive

from lab import netns
from lab.fabric import Fabric, FabricSpec, Host

pytestmark = pytest.mark.slow

_OK, _REASON = netns.available()
needs_netns = pytest.mark.skipif(not _OK, reason=_REASON)

# Receives on two ports for some seconds and prints the bytes that came through each.
_SINK = r"""
import json, socket, sys, threading, time
address, seconds, *ports = sys.argv[1:]
got, deadline = {}, []
def serve(port):
    listener = socket.create_server((address, int(port)))
    sys.stdout.write("listening\n"); sys.stdout.flush()
    peer, _ = listener.accept(); got[port] = 0; started.wait()
    while time.monotonic() < deadline[0]:
        data = peer.recv(1 << 16)
        if not data: break
        got[port] += len(data)
started = threading.Event()
threads = [threading.Thread(target=serve, args=(p,)) for p in ports]
for t in threads: t.start()
while len(got) < len(ports): time.sleep(0.01)
deadline.append(time.monotonic() + float(seconds)); started.set()
for t in threads: t.join()
print(json.dumps(got), flush=True)
"""

# Sends as fast as it can, with a TOS byte of choice.
_SOURCE = """
import socket, sys
address, port, tos = sys.argv[1], *map(int, sys.argv[2:])
s = socket.socket(); s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
s.connect((address, port))
try:
    while True: s.sendall(bytes(1 << 16))
except OSError: pass
"""


def _start(fabric: Fabric, host: Host, program: str, *args: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", program, *map(str, args)]
    return fabric.popen(host, argv, stdout=subprocess.PIPE, text=True)


def _transfer(
    fabric: Fabric, flows: dict[int, tuple[Host, int]], to: Host, seconds: float
) -> dict[int, int]:
    """Bytes that arrive for each destination port; a flow is (from, TOS)."""
    sink = _start(fabric, to, _SINK, to.address, seconds, *flows)
    assert sink.stdout is not None
    for _ in flows:
        assert sink.stdout.readline().strip() == "listening"
    sources = [
        _start(fabric, host, _SOURCE, to.address, port, tos) for port, (host, tos) in flows.items()
    ]
    out, _ = sink.communicate(timeout=120)
    for source in sources:
        source.kill()
        source.communicate(timeout=120)
    return {int(port): count for port, count in json.loads(out).items()}


@needs_netns
def test_builds_what_the_spec_says_and_leaves_nothing() -> None:
    spec = FabricSpec(leaves=3, spines=2, hosts_per_leaf=2)
    with Fabric(spec) as fabric:
        assert len(fabric.hosts) == 6
        assert len(netns.named(fabric.prefix)) == 3 + 2 + 6
        assert len({host.address for host in fabric.hosts}) == 6
        links = {counters.link for counters in fabric.counters()}
        assert links == {f"leaf{i}->spine{j}" for i in range(3) for j in range(2)} | {
            f"spine{j}->leaf{i}" for i in range(3) for j in range(2)
        }
        sleeper = fabric.popen(fabric.host(0, 0), ["sleep", "600"])
    assert netns.named(fabric.prefix) == []
    assert sleeper.wait(timeout=120) != 0
    fabric.close()


@needs_netns
def test_two_fabrics_do_not_touch_each_other() -> None:
    with Fabric() as first:
        with Fabric() as second:
            assert first.prefix != second.prefix
        assert netns.named(second.prefix) == []
        assert first.run(first.host(0, 0), ["echo", "alive"]).strip() == "alive"


@needs_netns
def test_a_failed_build_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric()
    monkeypatch.setattr(fabric, "_shaping", lambda device: ["qdisc add dev nowhere root htb"])
    with pytest.raises(netns.NamespaceError, match="nowhere"):
        fabric.__enter__()
    assert netns.named(fabric.prefix) == []


@needs_netns
def test_the_next_fabric_removes_what_a_killed_owner_left() -> None:
    program = textwrap.dedent(
        """
        import subprocess, time
        from lab.fabric import Fabric
        with Fabric() as fabric:
            argv = ["sh", "-c", "echo ready; exec sleep 600"]
            sleeper = fabric.popen(fabric.host(0, 0), argv, stdout=subprocess.PIPE)
            sleeper.stdout.readline()
            print(fabric.prefix, flush=True)
            time.sleep(600)
        """
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert owner.stdout is not None
    prefix = owner.stdout.readline().strip()
    left = netns.named(prefix)
    assert left
    netns.remove_orphans()
    assert netns.named(prefix) == left, "the owner lives: its fabric is not an orphan"
    owner.kill()
    owner.wait(timeout=120)
    owner.stdout.close()
    [sleeper] = netns.processes_in(left)
    with Fabric():
        assert netns.named(prefix) == []
    assert not alive(sleeper)


@needs_netns
def test_a_higher_class_is_served_first() -> None:
    # Senders keep up with it on a busy machine.
    with Fabric(FabricSpec(hosts_per_leaf=2, rate_mbit=50)) as fabric:
        a, b, to = fabric.host(0, 0), fabric.host(0, 1), fabric.host(1, 0)
        before = {c.link: c.bytes for c in fabric.counters()}
        ordered = _transfer(fabric, {5001: (a, 0xC0), 5002: (b, 0)}, to, 1.5)
        assert ordered[5001] > 3 * ordered[5002]
        after = {c.link: c.bytes for c in fabric.counters()}
        sent = {
            level: after["leaf0->spine0"][level] - before["leaf0->spine0"][level]
            for level in range(8)
        }
        assert sent[6] >= ordered[5001], "TOS 0xc0 is counted as level 6"
        assert sent[0] >= ordered[5002]
        assert not any(sent[level] for level in (1, 2, 3, 4, 5, 7))
        swapped = _transfer(fabric, {5003: (a, 0), 5004: (b, 0xC0)}, to, 1.5)
        assert swapped[5004] > 3 * swapped[5003]


@needs_netns
def test_the_rate_changes_while_traffic_runs() -> None:
    with Fabric(FabricSpec(hosts_per_leaf=1, rate_mbit=100)) as fabric:
        a, to = fabric.host(0, 0), fabric.host(1, 0)
        fast = _transfer(fabric, {5001: (a, 0)}, to, 1.0)[5001]
        fabric.set_rate(10)
        slow = _transfer(fabric, {5002: (a, 0)}, to, 1.0)[5002]
        assert fast > 3 * slow


# Sends numbered datagrams, or counts those that come until a pause.
_SEND_DATAGRAMS = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(int(sys.argv[2])):
    s.sendto(bytes(100), (sys.argv[1], 6000))
    if n % 20 == 0: time.sleep(0.002)
for _ in range(100):
    s.sendto(b"end", (sys.argv[1], 6000))
"""
_COUNT_DATAGRAMS = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)  # for a receiver that gets no CPU
s.bind(("", 6000))
s.settimeout(120)
print("ready", flush=True)
count = 0
while s.recv(200) != b"end": count += 1
print(count, flush=True)
"""


@needs_netns
def test_a_link_loses_the_share_of_packets_that_it_is_told() -> None:
    sent, arrived = 4000, {}
    for loss in (0.0, 0.05):
        with Fabric(FabricSpec(hosts_per_leaf=1, loss=loss)) as fabric:
            a, b = fabric.hosts
            counter = _start(fabric, b, _COUNT_DATAGRAMS)
            assert counter.stdout
            assert counter.stdout.readline() == "ready\n"
            fabric.run(a, [sys.executable, "-c", _SEND_DATAGRAMS, b.address, str(sent)])
            arrived[loss] = int(counter.stdout.readline())
    # Two links in a row, each of which loses its share: five standard deviations.
    expected = sent * 0.95**2
    assert arrived[0.0] == sent
    assert abs(arrived[0.05] - expected) < 5 * (expected * (1 - 0.95**2)) ** 0.5


def test_a_spec_that_cannot_be_addressed_is_refused() -> None:
    with pytest.raises(ValueError, match="loss"):
        FabricSpec(loss=1.0)
    for bad in ({"leaves": 1}, {"spines": 17}, {"hosts_per_leaf": 0}, {"rate_mbit": 0.0}):
        with pytest.raises(ValueError):
            FabricSpec(**bad)  # type: ignore[arg-type]


def test_works_in_an_unprivileged_user_namespace() -> None:
    possible, reason = netns.user_namespace_available()
    if not possible:
        pytest.skip(reason)
    program = textwrap.dedent(
        """
        import os, subprocess, sys
        from lab import netns
        if netns.USER_NAMESPACE_ENV not in os.environ:
            netns.enter_user_namespace([sys.executable, "-c", sys.argv[1], sys.argv[1]])
        from lab.fabric import Fabric
        with Fabric() as fabric:
            user = fabric.run(fabric.host(0, 0), ["id", "-u"]).strip()
            print(len(netns.named(fabric.prefix)), user)
        print(netns.named(""))
        """
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, program],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split("\n")[:2] == ["7 0", "[]"], done.stderr
    assert time.monotonic() - started < 60
