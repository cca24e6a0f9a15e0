"""What the transport library costs: TCP with it preloaded against without, in one run.

    python benchmarks/transport.py [--rounds N] [--pairs N] [--connections N] [--quick]
                                   [--json FILE] [--out DIR]

On loopback two pairs of processes live side by side, one with the library and one without; only one
works at a time. Each pair of blocks gives one ratio, so whatever slows the machine for longer than
a block slows both; every round starts new processes, as each has its luck with memory and caches.
A connection without a route costs what recording it costs. Where network namespaces can be made,
connections are also steered over fabrics of 2, 4 and 8 spines.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

# The package of the examples lies beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from crux_torch.apply.transport import LIBRARY
from crux_torch.cli.results import Result, publish
from lab import netns
from lab.fabric import Fabric, FabricSpec

GOAL = 0.99
#: Messages, exchanges and connections of one block: some milliseconds of work, so that both sides
#: of a pair meet the same mood of the machine.
MESSAGES = 24
EXCHANGES = 200
CONNECTIONS = 200
MESSAGE_BYTES = 1 << 20
#: Of a steered connection in a fabric, which is one measurement.
SPINES = (2, 4, 8)
PORT = 5001

# Serves on one core and measures on the other; for each line of input, one line with seconds.
_WORKER = """
import json, os, socket, struct, sys, time
chunk = memoryview(bytes(1 << 18))
abort = struct.pack("ii", 1, 0)
cores = sorted(os.sched_getaffinity(0))

def serve(listener):
    buffer = bytearray(1 << 18)
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try: what = peer.recv(1)
        except ConnectionResetError: what = b""
        while what == b"x" and (got := peer.recv_into(buffer, 64)):
            peer.sendall(memoryview(buffer)[:got])
        left = message = 1 << 20
        while what == b"s" and (got := peer.recv_into(buffer, min(left, len(buffer)))):
            left -= got
            if not left: peer.sendall(b"."); left = message
        peer.close()

def connected():
    s = socket.socket()
    # BBR estimates the bandwidth of a loopback anew for each connection, and paces by it.
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    s.connect(address)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s

def timed(what, count, step):
    with connected() as s:
        s.sendall(what); taken = []
        for _ in range(count):
            begin = time.perf_counter(); step(s)
            taken.append(time.perf_counter() - begin)
    return sorted(taken)[count // 2]

def send(s):
    for _ in range(4): s.sendall(chunk)
    s.recv(1)

def swap(s):
    s.sendall(chunk[:64]); s.recv(64)

def connect(count):
    taken = []
    for _ in range(count):
        s = socket.socket(); begin = time.perf_counter()
        s.connect(address)
        taken.append(time.perf_counter() - begin)
        # No TIME_WAIT: thousands of them would use up the ports.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, abort); s.close()
    return sorted(taken)[count // 2]

listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
address = listener.getsockname()
if os.fork() == 0:
    sys.stdin.close()
    os.sched_setaffinity(0, {cores[-1]})
    serve(listener)
listener.close()
os.sched_setaffinity(0, {cores[0]})
try:
    for line in sys.stdin:
        what, count, marked = json.loads(line)
        if what == "connect" and marked is not None:
            from crux_torch.apply.transport import Route, Transport
            Transport.load().set_routes([Route(address[0], dscp=40)] if marked else [])
        if what == "connect": median_s = connect(count)
        else: median_s = timed(b"s", count, send) if what == "send" else timed(b"x", count, swap)
        print(median_s, flush=True)
finally:
    os.killpg(0, 15)
"""

# Steers connections to one address over a spine each; tells the seconds and probes of each.
_STEERED = """
import json, os, socket, sys, time
from crux_torch.apply.transport import Route, Transport
t = Transport.load()
address, port, spines, count = sys.argv[1], *map(int, sys.argv[2:])
told = []
for i in range(count):
    hops = ((2, f"10.100.{i // 2 % spines}.2"),) if i % 2 else ()
    t.set_routes([Route(address, hops)] if hops else [])
    s = socket.socket(); begin = time.perf_counter()
    s.connect((address, port))
    taken_s = time.perf_counter() - begin
    [me] = [c for c in t.connections() if c.id == os.fstat(s.fileno()).st_ino]
    told.append((taken_s, me.probes, me.how)); s.close()
print(json.dumps(told))
"""


class Worker:
    """A pair of processes, with the library or without."""

    def __init__(self, preloaded: bool) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "LD_PRELOAD"))}
        if preloaded:
            env |= {"LD_PRELOAD": str(LIBRARY), "CRUX_TRANSPORT_STEER_ALL": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def measure(self, what: str, count: int, marked: bool | None = None) -> float:
        """Seconds of one of its kind, the median of a block.

        Args:
            what: "send" a message and wait for its receipt, "swap" 64 bytes, or "connect".
            count: how many of them are a block.
            marked: whether connections have a route that gives them a class; None without library.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([what, count, marked]), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def measure_loopback(rounds: int, pairs: int) -> list[dict[str, Any]]:
    """One row for each kind of work: seconds with and without, and the ratio of each pair."""
    kinds = (
        ("throughput", "send", MESSAGES, None),
        ("round trip", "swap", EXCHANGES, None),
        ("connect, no route", "connect", CONNECTIONS, False),
        ("connect, class set", "connect", CONNECTIONS, True),
    )
    rows: list[dict[str, Any]] = [
        {"measured": name, "count": count, "without_s": [], "with_s": [], "ratios": []}
        for name, _, count, _ in kinds
    ]
    for _ in range(rounds):
        stock, preloaded = Worker(False), Worker(True)
        try:
            for row, (_, what, count, marked) in zip(rows, kinds, strict=True):
                sides = {stock: None, preloaded: marked}
                for side, routes in sides.items():
                    side.measure(what, count, routes)
                for _ in range(pairs):
                    taken = {
                        side: side.measure(what, count, sides[side])
                        for side in random.sample(list(sides), 2)
                    }
                    row["without_s"].append(taken[stock])
                    row["with_s"].append(taken[preloaded])
                    row["ratios"].append(taken[stock] / taken[preloaded])
        finally:
            stock.close()
            preloaded.close()
    return rows


def measure_fabric(spines: int, connections: int) -> dict[str, Any]:
    """A row with the seconds of connections over a planned spine and of those left alone."""
    server = f"""
import socket
with socket.create_server(("", {PORT}), backlog=1024) as listener:
    print("up", flush=True)
    while True: listener.accept()[0].close()
"""
    with Fabric(FabricSpec(spines=spines, hosts_per_leaf=1, rate_mbit=1000)) as fabric:
        source, to = fabric.host(0, 0), fabric.host(1, 0)
        sink = fabric.popen(to, [sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
        assert sink.stdout is not None
        assert sink.stdout.readline().strip() == "up"
        argv = ["env", f"LD_PRELOAD={LIBRARY}", "CRUX_TRANSPORT_STEER_ALL=1"]
        argv += [sys.executable, "-c", _STEERED, to.address, str(PORT), str(spines)]
        told = json.loads(fabric.run(source, [*argv, str(2 * connections)], timeout_s=120))
    alone, steered = told[0::2], told[1::2]
    return {
        "measured": f"connect, {spines} spines",
        "count": connections,
        "without_s": [taken_s for taken_s, *_ in alone],
        "with_s": [taken_s for taken_s, *_ in steered],
        "probes": [probes for _, probes, _ in steered],
        "as_wanted": sum(how == "at_connect" for *_, how in steered),
    }


def table(rows: Sequence[dict[str, Any]], skipped: str) -> str:
    """The rows as text."""
    lines = [
        f"{'on loopback':<20} {'without':>12} {'with':>12} {'ratio':>7} {'quartiles':>17} "
        f"{'pairs':>6}"
    ]
    for row in (r for r in rows if "ratios" in r):
        without, with_ = (statistics.median(row[k]) for k in ("without_s", "with_s"))
        low, median, high = statistics.quantiles(row["ratios"], n=4)
        shown = [f"{s * 1e6:.2f} us" for s in (without, with_)]
        if row["measured"] == "throughput":
            shown = [f"{MESSAGE_BYTES / s / 1e6:.0f} MB/s" for s in (without, with_)]
        lines.append(
            f"{row['measured']:<20} {shown[0]:>12} {shown[1]:>12} {median:>7.3f} "
            f"{low:>8.3f}-{high:<8.3f} {len(row['ratios']):>6}"
        )
    fabrics = [r for r in rows if "probes" in r]
    if fabrics:
        lines += [
            "",
            f"{'over a fabric':<20} {'unsteered':>12} {'steered: median':>16} {'p90':>9} "
            f"{'p99':>9} {'probes':>7} {'as planned':>11}",
        ]
    for row in fabrics:
        quantiles = statistics.quantiles(row["with_s"], n=100)
        shown = [f"{s * 1e3:.2f} ms" for s in (quantiles[49], quantiles[89], quantiles[98])]
        lines.append(
            f"{row['measured']:<20} {statistics.median(row['without_s']) * 1e3:>9.2f} ms "
            f"{shown[0]:>16} {shown[1]:>9} {shown[2]:>9} "
            f"{statistics.median(row['probes']):>7.0f} {row['as_wanted']:>6}/{row['count']}"
        )
    if skipped:
        lines.append(f"no fabric: {skipped}")
    goals = [r for r in rows if r["measured"] in ("throughput", "round trip")]
    met = all(statistics.median(row["ratios"]) >= GOAL for row in goals)
    lines.append(f"throughput and round trip at least {GOAL} of those without: {met}")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--rounds", default=6, help="Times that the processes are started anew.")
@click.option("--pairs", default=60, help="Pairs of blocks of each kind in a round.")
@click.option("--connections", default=200, help="Steered connections in each fabric.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/transport.{json,txt}.")
@click.option("--quick", is_flag=True, help="A few small blocks: whether it works, no figures.")
def main(
    rounds: int, pairs: int, connections: int, json_path: Path | None, out: Path | None, quick: bool
) -> None:
    """Times TCP with the transport library preloaded against without."""
    if quick:
        rounds, pairs, connections = 1, 4, 10
    rows = measure_loopback(rounds, pairs)
    possible, reason = netns.available()
    if possible:
        rows += [measure_fabric(spines, connections) for spines in SPINES]
    text = table(rows, "" if possible else reason)
    settings = {
        "rounds": rounds,
        "pairs": pairs,
        "connections": connections,
        "goal": GOAL,
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
        "nice": os.nice(0),
    }
    publish(Result("transport", settings, rows), text, json_path, out)


if __name__ == "__main__":
    main()
