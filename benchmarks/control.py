"""How far a store bears: many leaders that agree on plans, in a few processes on this machine.

    python benchmarks/control.py [--leaders 10,100,1000] [--lease-s S] [--trial JOBS] [--store URL]
        [--json FILE]

The leaders are the real ones, each with a connection of its own; only their jobs are made up. Each
process drives its leaders in turn, so what is reported includes waiting for this machine's cores.

In rest nobody changes. For the delays, one job after the other publishes another profile, and each
leader says when it has a plan of the new record: planning itself is a constant here, so that the
delay is that of the store and of the agreement. With ``--trial``, the jobs are in components that
have a plan to try, so that all publish their iterations, of half a second, all the time.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import multiprocessing.connection
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from msgspec import UNSET
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from control_fakes import profile, record
from loopback import free_port

from crux_torch.control.leader import Leader
from crux_torch.control.records import JobRecord, OnTrial, PlanEntry
from crux_torch.store import frame_socket
from crux_torch.store.endpoint import open_store
from crux_torch.store.host import StoreHost

PROCESSES = 2
TICK_S = 0.05
#: Seconds after which leaders are given up that do not agree.
AGREE_S = 300.0


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


class _Counted:
    """Exchanges and bytes of all connections of this process."""

    exchanges = sent = received = 0

    @classmethod
    def install(cls) -> None:
        kind: Any = frame_socket.FrameSocket
        send, receive = kind.send, kind.receive

        def counted_send(self: Any, data: bytes, deadline_s: float) -> None:
            cls.exchanges += 1
            cls.sent += len(data)
            send(self, data, deadline_s)

        def counted_receive(self: Any, limit: int, deadline_s: float) -> bytes:
            frame: bytes = receive(self, limit, deadline_s)
            cls.received += 4 + len(frame)
            return frame

        kind.send, kind.receive = counted_send, counted_receive


def _drive(
    endpoint: str, lease_s: float, trial: int, names: Sequence[str], pipe: Connection
) -> None:
    """Ticks its leaders; tells when each has another plan; changes a job when told to."""
    _Counted.install()
    leaders = {}
    for name in names:
        store = open_store(endpoint, timeout_s=5.0)
        leaders[name] = Leader(
            store, "bench", record(name), partial(_flat, trial=trial),
            lease_s=lease_s, plan_valid_s=2.5 * lease_s, iteration_ends=_ends,
        )  # fmt: skip
    prints = dict.fromkeys(names, "")
    while True:
        began_s = time.monotonic()
        for name, leader in leaders.items():
            leader.tick()
            plan = leader.plan
            now = plan.fingerprint if plan is not None else ""
            if now != prints[name]:
                prints[name] = now
                pipe.send((name, now, time.monotonic()))
        while pipe.poll(max(0.0, began_s + TICK_S - time.monotonic())):
            what, argument = pipe.recv()
            if what == "change":
                leader = leaders[argument[0]]
                leader.update(profile=profile(flops=argument[1]))
            elif what == "count":
                pipe.send((_Counted.exchanges, _Counted.sent, _Counted.received))
            else:
                return


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Run:
    """Leaders in processes, and what they tell."""

    def __init__(self, endpoint: str, count: int, lease_s: float, trial: int) -> None:
        context = mp.get_context("spawn")
        self.names = [f"job{n}" for n in range(count)]
        self.pipes: list[Connection] = []
        self.processes = []
        self.owner: dict[str, Connection] = {}
        for share in range(min(PROCESSES, count)):
            ours, its = context.Pipe()
            names = self.names[share::PROCESSES]
            process = context.Process(
                target=_drive, args=(endpoint, lease_s, trial, names, its), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
            self.owner |= dict.fromkeys(names, ours)
        self.prints: dict[str, tuple[str, float]] = dict.fromkeys(self.names, ("", 0.0))

    def agree(self, other_than: str) -> str:
        """Wait until all have the same plan, and not that one."""
        until_s = time.monotonic() + AGREE_S
        while time.monotonic() < until_s:
            found = {fingerprint for fingerprint, _ in self.prints.values()}
            if len(found) == 1 and found.isdisjoint(("", other_than)):
                return found.pop()
            for pipe in mp.connection.wait(self.pipes, 1.0):
                assert isinstance(pipe, Connection)
                name, fingerprint, at_s = pipe.recv()
                self.prints[name] = fingerprint, at_s
        raise click.ClickException(f"{len(self.names)} leaders did not agree in {AGREE_S:g} s")

    def counts(self) -> tuple[int, ...]:
        told = []
        for pipe in self.pipes:
            pipe.send(("count", None))
            while len(answer := pipe.recv()) != 3 or isinstance(answer[0], str):
                self.prints[answer[0]] = answer[1:]
            told.append(answer)
        return tuple(map(sum, zip(*told, strict=True)))

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(("end", None))
        for process in self.processes:
            process.join(30)
            process.kill()


def measure(
    endpoint: str,
    count: int,
    lease_s: float,
    trial: int,
    seconds: float,
    changes: int,
    server: int | None,
) -> Any:
    """One row of the table."""
    began_s = time.monotonic()
    run = _Run(endpoint, count, lease_s, trial)
    plan = run.agree("")
    start_s = time.monotonic() - began_s
    time.sleep(2.0)
    cpu_s = _cpu_s(server) if server else 0.0
    before, began_s = run.counts(), time.monotonic()
    time.sleep(seconds)
    rest_s = time.monotonic() - began_s
    rates = [(after - b) / rest_s for after, b in zip(run.counts(), before, strict=True)]
    cpu = (_cpu_s(server) - cpu_s) / rest_s if server else None
    delays = []
    for n in range(changes):
        name = run.names[n * 7919 % count]
        changed_s = time.monotonic()
        run.owner[name].send(("change", (name, 1e15 + n + 1)))
        plan = run.agree(plan)
        delays += [at_s - changed_s for _, at_s in run.prints.values()]
    run.end()
    quantiles = statistics.quantiles(delays, n=100)
    return {
        "leaders": count,
        "agreed_after_s": start_s,
        "exchanges_per_s": rates[0],
        "sent_Bps_a_leader": rates[1] / count,
        "received_Bps_a_leader": rates[2] / count,
        "server_cores": cpu,
        "p50_s": statistics.median(delays),
        "p99_s": quantiles[98],
    }


@click.command()
@click.option("--leaders", default="10,100,300,1000", help="How many, separated by commas.")
@click.option("--seconds", default=10.0, help="Length of the rest that is measured.")
@click.option("--changes", default=5, help="Jobs that change, one after the other.")
@click.option("--lease-s", default=6.0, help="Lease of the records; each is renewed thrice in it.")
@click.option("--trial", default=0, help="Jobs of a component that has a plan to try.")
@click.option("--store", default="", help="Another store than an embedded one of its own.")
@click.option("--json", "path", default="", help="File for the figures.")
def main(
    leaders: str,
    seconds: float,
    changes: int,
    lease_s: float,
    trial: int,
    store: str,
    path: str,
) -> None:
    """Measure what a store bears."""
    rows = []
    for count in map(int, leaders.split(",")):
        endpoint = store or f"tcp://127.0.0.1:{free_port()}"
        host = None if store else StoreHost(endpoint)
        if host is not None:
            host.start()
            while host.pid is None:
                time.sleep(0.05)
        server = host and host.pid
        rows.append(measure(endpoint, count, lease_s, trial, seconds, changes, server))
        if host is not None:
            host.stop()
        print(json.dumps(rows[-1]), file=sys.stderr)
    table = Table(title=f"{store or 'embedded store'}, {os.cpu_count()} cores")
    for heading in rows[0]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*("–" if v is None else f"{v:.4g}" for v in row.values()))
    Console(width=160).print(table)
    if path:
        Path(path).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
