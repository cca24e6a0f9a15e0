"""How far a store bears: many leaders that agree on plans, in a few processes on this machine.

    python benchmarks/control.py [--trial JOBS] [--share N] [--json FILE] [STORE:LEADERS,...]...

    python benchmarks/control.py embedded:10,100,300 etcd:10,100,300,1000

``STORE`` is ``embedded`` or ``etcd``, a server of its own for each row. The leaders are the real
ones; only their jobs are made up, each on two hosts of its own. A thread drives ``--share`` leaders
in turn, so what is reported includes waiting for each other and for this machine's cores. With an
etcd, these leaders have one client of it, in their process: a store process for each, as real jobs
have it, would be too many Python processes for one machine. With ``--share 1`` each has a client of
its own there, with connection and watches: so the etcd has the work that it would have from real
jobs.

In rest nobody changes. With churn, one job arrives each second. For the delays, one job after the
other arrives, or publishes another profile, and each leader says when it has a plan of that:
planning itself is a constant here, so the delay is that of the store and of the agreement. Between
two of them there is a pause, so that no delay is that of the limit on plans a minute. With
``--trial``, the jobs are in components that have a plan to try, so that all publish their
iterations, of half a second, all the time.

Segments and bytes are those of the server's TCP connections, with 66 bytes of headers for each
segment, as the kernel counts them. *% of the server's NIC* is the direction of more bytes, all
leaders together, as a share of one NIC of the paper's testbed (200 Gbit/s).
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing as mp
import multiprocessing.connection
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from msgspec import UNSET
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from control_fakes import profile, record
from loopback import free_port

from crux_torch.agreement.leader import Leader
from crux_torch.agreement.plan_author import PLANS_PER_MINUTE
from crux_torch.agreement.records import JobRecord, OnTrial, PlanEntry
from crux_torch.errors import StoreError
from crux_torch.measure.profile import HostFlow
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import ETCD, TcpConnector, open_store, parse_etcd, server_addresses
from crux_torch.store.frames import Refused
from crux_torch.store.host import StoreHost

DEFAULT_RUNS = "embedded:10,100,300", "etcd:10,100,300,1000"
#: Of Ethernet, IPv4 and TCP with timestamps, in each segment.
HEADER_BYTES = 66
#: The NICs of the paper's testbed (Figure 18), one direction.
NIC_Bps = 25e9
NOTHING = 0, 0, 0
PROCESSES = 2
TICK_S = 0.05
#: Seconds after which leaders are given up that do not agree.
AGREE_S = 100.0
#: Leaders that begin at once. More of them read each other's records at once than two cores bear.
AT_ONCE = 200


def _flat(
    records: Sequence[JobRecord], *_: Any, trial: int = 0, **__: Any
) -> tuple[PlanEntry, ...]:
    names = [r.job for r in records if r.profile is not None]
    entries = []
    for n, name in enumerate(names):
        of = names[n - n % trial :][:trial] if trial else []
        told = OnTrial(name=of[0], judge=of[0], jobs=len(of), on=False) if len(of) > 1 else UNSET
        flat: Any = {"level": 0, "priority": 1.0, "intensity": 1.0, "correction": 1.0}
        entries.append(PlanEntry(job=name, trial=told, **flat))
    return tuple(entries)


def _ends(since_ns: int) -> list[int]:
    """Ends of iterations of half a second, that vary so much that they are measured for long."""
    first, now_ns = max(0, since_ns - 1) // 500_000_000 + 1, time.monotonic_ns()
    ends = [
        n * 500_000_000 + n * 7919 % 11 * 40_000_000
        for n in range(first - 1, now_ns // 500_000_000)
    ]
    return [end for end in ends if since_ns <= end <= now_ns]


def _record(job: str, flops: float = 1e15) -> JobRecord:
    hosts = f"{job}-a", f"{job}-b"
    flows = tuple(HostFlow(src, dst, 1e9) for src, dst in (hosts, hosts[::-1]))
    made: JobRecord = record(job, hosts=hosts, profile=profile(flops=flops, flows=flows))
    return made


class _EtcdHere(StoreClient):
    """Asks a client of an etcd in this process, where others have a store process of their own."""

    def __init__(self, contents: Any, endpoint: str) -> None:
        super().__init__(TcpConnector(*server_addresses(endpoint)[0]))
        self._contents = contents

    def _connected(self) -> Any:
        return None

    def _ask(self, _: Any, request: Any) -> Any:
        answer = self._contents.answer(request)
        if isinstance(answer, Refused):
            raise StoreError(answer.reason)
        return answer


class _Group:
    """Leaders that one thread drives in turn; of an etcd, they share a client."""

    def __init__(
        self, endpoint: str, lease_s: float, trial: int, tell: Callable[..., None]
    ) -> None:
        self._endpoint, self._lease_s, self._trial, self._tell = endpoint, lease_s, trial, tell
        self._contents: Any = None
        self._leaders: dict[str, Leader] = {}
        self._prints: dict[str, str] = {}
        #: CPU seconds of each leader's ticks.
        self.cpu_s: dict[str, float] = {}
        self.size = 0
        #: Leaders that are connected, and jobs whose profile changes.
        self._connected: queue.SimpleQueue[tuple[str, StoreClient]] = queue.SimpleQueue()
        self._changes: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def arrive(self, name: str) -> None:
        """Connect apart, as nobody else waits for it."""
        store, self.size = self._open(), self.size + 1

        def connect() -> None:
            with contextlib.suppress(StoreError):
                store.get("nothing")
            self._connected.put((name, store))

        threading.Thread(target=connect, daemon=True).start()

    def change(self, name: str, flops: float) -> None:
        self._changes.put((name, flops))

    def _open(self) -> StoreClient:
        if not self._endpoint.startswith(ETCD):
            return open_store(self._endpoint, timeout_s=5.0)
        if self._contents is None:
            from crux_torch.store.etcd import EtcdContents

            self._contents = EtcdContents(parse_etcd(self._endpoint))
            self._contents.start()
        return _EtcdHere(self._contents, self._endpoint)

    def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            while not self._connected.empty():
                name, store = self._connected.get()
                self._leaders[name] = Leader(
                    store, "bench", _record(name), partial(_flat, trial=self._trial),
                    lease_s=self._lease_s, plan_valid_s=2.5 * self._lease_s, iteration_ends=_ends,
                )  # fmt: skip
                self._prints[name], self.cpu_s[name] = "", 0.0
            while not self._changes.empty():
                name, flops = self._changes.get()
                self._leaders[name].update(profile=_record(name, flops).profile)
            for name, leader in self._leaders.items():
                tick_s = time.thread_time()
                leader.tick()
                self.cpu_s[name] += time.thread_time() - tick_s
                plan = leader.plan
                now = plan.fingerprint if plan is not None else ""
                if now != self._prints[name]:
                    self._prints[name] = now
                    self._tell((name, now, time.monotonic()))
            time.sleep(max(0.0, began_s + TICK_S - time.monotonic()))


def _drive(
    endpoint: str, share: int, lease_s: float, trial: int, names: Sequence[str], pipe: Connection
) -> None:
    """Has leaders tick; tells when each has another plan; changes jobs when told to."""
    logging.disable()  # a thousand leaders would say the same
    told: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_send, args=(pipe, told), daemon=True).start()
    groups: list[_Group] = []
    of: dict[str, _Group] = {}

    def arrive(name: str) -> None:
        if not groups or groups[-1].size == share:
            groups.append(_Group(endpoint, lease_s, trial, told.put))
        of[name] = groups[-1]
        of[name].arrive(name)

    for name in names:
        arrive(name)
    while True:
        match pipe.recv():
            case "change", name, flops:
                of[name].change(name, flops)
            case "arrive", name:
                arrive(name)
            case "count":
                cpu_s = {name: s for group in groups for name, s in list(group.cpu_s.items())}
                told.put((cpu_s, time.process_time()))
            case "end":
                os._exit(0)  # threads of gRPC need not end in order


def _send(pipe: Connection, told: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    while True:
        pipe.send(told.get())


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _traffic(port: int) -> dict[str, tuple[int, ...]]:
    """For each peer of that port's server: segments with data, and bytes sent and got, so far."""
    told = subprocess.run(
        ["ss", "-tinH", "state", "established", f"sport = :{port}"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip

    found = {}
    for about, counted in zip(*[iter(told.splitlines())] * 2, strict=True):
        of = {name: int(n) for name, n in re.findall(r"(\w+):(\d+)", counted)}
        found[about.split()[-1]] = (
            of.get("data_segs_out", 0) + of.get("data_segs_in", 0),
            of.get("bytes_sent", 0) + HEADER_BYTES * of.get("segs_out", 0),
            of.get("bytes_received", 0) + HEADER_BYTES * of.get("segs_in", 0),
        )
    return found


class NotAgreed(Exception):
    """Leaders did not agree in ``AGREE_S``."""


class _Run:
    """Leaders in processes, and what they tell."""

    def __init__(self, endpoint: str, share: int, count: int, lease_s: float, trial: int) -> None:
        context = mp.get_context("spawn")
        names = [f"job{n}" for n in range(min(count, AT_ONCE))]
        self.pipes: list[Connection] = []
        self.processes = []
        self.owner: dict[str, Connection] = {}
        for n in range(min(PROCESSES, len(names))):
            ours, its = context.Pipe()
            mine = names[n::PROCESSES]
            process = context.Process(
                target=_drive, args=(endpoint, share, lease_s, trial, mine, its), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
            self.owner |= dict.fromkeys(mine, ours)
        self.prints: dict[str, tuple[str, float]] = dict.fromkeys(names, ("", 0.0))

    def agree(self, other_than: str) -> str:
        """Wait until all have the same plan, and not that one."""
        until_s = time.monotonic() + AGREE_S
        while time.monotonic() < until_s:
            found = {fingerprint for fingerprint, _ in self.prints.values()}
            if len(found) == 1 and found.isdisjoint(("", other_than)):
                return found.pop()
            for pipe in mp.connection.wait(self.pipes, 1.0):
                assert isinstance(pipe, Connection)
                self._take(pipe.recv())
        raise NotAgreed

    def listen(self, seconds: float) -> None:
        """Take what they tell for so long: their processes wait for that."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            for pipe in mp.connection.wait(self.pipes, left_s):
                assert isinstance(pipe, Connection)
                self._take(pipe.recv())

    def change(self, name: str, flops: float) -> None:
        self.owner[name].send(("change", name, flops))

    def arrive(self, name: str) -> None:
        self.owner[name] = self.pipes[len(self.prints) % len(self.pipes)]
        self.prints[name] = "", 0.0
        self.owner[name].send(("arrive", name))

    def cpu_s(self) -> tuple[dict[str, float], float]:
        """CPU seconds of each leader's thread so far, and of all their processes."""
        leaders: dict[str, float] = {}
        total_s = 0.0
        for pipe in self.pipes:
            pipe.send("count")
            while len(answer := pipe.recv()) != 2:
                self._take(answer)
            leaders |= answer[0]
            total_s += answer[1]
        return leaders, total_s

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send("end")
        for process in self.processes:
            process.join(30)
            process.kill()

    def _take(self, told: tuple[str, str, float]) -> None:
        name, fingerprint, at_s = told
        self.prints[name] = fingerprint, at_s


@contextlib.contextmanager
def _server(store: str) -> Iterator[tuple[str, int]]:
    """A store of its own: its endpoint and its process."""
    with contextlib.ExitStack() as stack:
        if store == "etcd":
            from etcd_server import Etcd, wait_ready

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            etcd = stack.enter_context(Etcd(folder))
            wait_ready(etcd)
            yield ETCD + etcd.endpoints, etcd.processes[0].pid
            return
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        host = StoreHost(endpoint)
        host.start()
        stack.callback(host.stop)
        while host.pid is None:
            time.sleep(0.05)
        yield endpoint, host.pid


def measure(
    store: str, count: int, share: int, lease_s: float, trial: int, seconds: float, changes: int
) -> dict[str, Any]:
    """One row of the table."""
    with _server(store) as (endpoint, server), contextlib.ExitStack() as stack:
        port = server_addresses(endpoint)[0][1]
        began_s = time.monotonic()
        run = _Run(endpoint, share, count, lease_s, trial)
        stack.callback(run.end)
        plan = run.agree("")
        for n in range(AT_ONCE, count):
            run.arrive(f"job{n}")
            if n % AT_ONCE == AT_ONCE - 1 or n == count - 1:
                plan = run.agree(plan)
        row: dict[str, Any] = {
            "store": store,
            "leaders": count,
            "agreed": True,
            "load": os.getloadavg()[0],
            "agreed_after_s": time.monotonic() - began_s,
        }

        @contextlib.contextmanager
        def watched(word: str) -> Iterator[None]:
            """Count what happens meanwhile."""
            (cpu_s, total_s), server_s = run.cpu_s(), _cpu_s(server)
            many, began, began_s = len(run.prints), _traffic(port), time.monotonic()
            yield
            for_s = time.monotonic() - began_s
            grown = [
                [
                    after - before
                    for after, before in zip(counts, began.get(peer, NOTHING), strict=True)
                ]
                for peer, counts in _traffic(port).items()
            ]
            segments, sent, got = (sum(count) / for_s for count in zip(*grown, strict=True))
            server_cores = (_cpu_s(server) - server_s) / for_s
            many = (many + len(run.prints)) / 2
            leaders, all_s = run.cpu_s()
            cores = [(s - cpu_s[name]) / for_s for name, s in leaders.items() if name in cpu_s]
            row[word] = {
                "segments_per_s": segments,
                "sent_Bps_a_leader": got / many,
                "received_Bps_a_leader": sent / many,
                "server_cores": server_cores,
                "leader_cores": statistics.median(cores),
                "busiest_leader_cores": max(cores),
                "all_leaders_cores": (all_s - total_s) / for_s,
            }

        run.listen(2.0)
        with watched("rest"):
            run.listen(seconds)
        for word in ("change", "arrival"):
            delays = []
            for n in range(changes):
                began_s = time.monotonic()
                if word == "change":
                    run.change(f"job{n * 7919 % count}", 1e15 + n + 1)
                else:
                    run.arrive(f"new{n}")
                plan = run.agree(plan)
                delays += [at_s - began_s for _, at_s in run.prints.values()]
                run.listen(60 / PLANS_PER_MINUTE)
            row[word] = {
                "p50_s": statistics.median(delays),
                "p99_s": statistics.quantiles(delays, n=100)[98],
            }
        with watched("churn"):
            for n in range(round(seconds)):
                run.arrive(f"late{n}")
                run.listen(1.0)
        row["load"] = max(row["load"], os.getloadavg()[0])
    return row


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"{os.cpu_count()} cores, which run leaders, server and other work")
    flat = [
        {
            f"{part} {name}".replace("_", " "): value
            for part, held in row.items()
            for name, value in (held.items() if isinstance(held, dict) else [("", held)])
        }
        for row in rows
    ]
    for row in flat:
        for part in ("rest", "churn"):
            ways = [f"{part} {way} Bps a leader" for way in ("sent", "received")]
            if ways[0] in row:
                most_Bps = row["leaders "] * max(row[way] for way in ways)
                row[f"{part} % of the server's NIC"] = 100.0 * most_Bps / NIC_Bps
    table.add_column("")
    for row in flat:
        table.add_column(f"{row.pop('store ')}\n{row.pop('leaders ')} leaders", justify="right")
    for name in flat[0]:
        table.add_row(name, *(f"{row[name]:.4g}" if name in row else "–" for row in flat))
    return table


@click.command()
@click.argument("runs", nargs=-1)
@click.option("--seconds", default=10.0, help="Length of rest and churn that are measured.")
@click.option("--changes", default=5, help="Jobs that change, and that arrive, one by one.")
@click.option("--lease-s", default=6.0, help="Lease of the records; each is renewed thrice in it.")
@click.option("--trial", default=0, help="Jobs of a component that has a plan to try.")
@click.option("--share", default=25, help="Leaders of one thread and, of an etcd, client.")
@click.option("--json", "path", default="", help="File for the figures.")
def main(
    runs: Sequence[str],
    seconds: float,
    changes: int,
    lease_s: float,
    trial: int,
    share: int,
    path: str,
) -> None:
    """Measure what stores bear. RUNS: STORE:LEADERS,..."""
    rows = []
    for run in runs or DEFAULT_RUNS:
        store, _, counts = run.partition(":")
        if store not in ("embedded", "etcd"):
            raise click.UsageError(f"{run!r}: expected embedded:LEADERS,... or etcd:LEADERS,...")
        for count in map(int, counts.split(",")):
            try:
                rows.append(measure(store, count, share, lease_s, trial, seconds, changes))
            except NotAgreed:
                load = os.getloadavg()[0]
                rows.append({"store": store, "leaders": count, "load": load, "agreed": False})
            print(json.dumps(rows[-1]), file=sys.stderr)
    Console(width=160).print(_table(rows))
    if path:
        Path(path).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
