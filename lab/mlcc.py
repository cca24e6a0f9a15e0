"""mlcc beside the kernel's congestion controls: the same training jobs in turns, in one network.

All sets of ranks are started once, and all but one wait between two steps. So conditions follow one
another within seconds, and what else the machine does falls on all of them alike. The jobs share
two hosts and the link between them, as in mlcc's Figure 1; their computation waits as in the demo.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lab import sockets
from lab.contest import LOOK_S, PLAN_S, START_S, Seen
from lab.cross_traffic import EVERY_S
from lab.fabric import MARKS, Fabric, Host
from lab.job import ROOT, TORCHRUN, Job, JobError, JobSpec, Step
from lab.measurement import losses_equal
from lab.mlcc_mixes import MLCC, MLCC_BBR, MLCC_HOSTS, MLCC_STILL, MODELS, PLAIN, SERVED, Mix
from lab.phases import Phase, Window, durations, measure
from lab.steering import (
    STORE_PORT,
    StoreWatch,
    look_after,
    make_secret,
    pause_after_first_steps,
    wait_until,
)

#: Seconds in which jobs end their steps, and again before a window; seconds by which one job begins
#: after another at most; and steps of a job that is measured alone.
SETTLE_S, LATER_S, ALONE_STEPS = 2.0, 1.0, 8
FOREIGN_PORT = 5001
#: The program that keeps load tables.
TABLES = "crux_torch.agreement.load_tables"
#: ``SO_MAX_PACING_RATE``, and what it says of a socket without a limit.
_PACING, _NO_LIMIT = 47, (1 << 32) - 1


def offered() -> tuple[str, ...]:
    """The congestion controls of this kernel."""
    return tuple(Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split())


@dataclass
class Measured:
    """What one turn showed.

    Attributes:
        turn, round: which one.
        window: in which it was measured, of the monotonic clock.
        sent: of each job, bytes that its rank 0 had sent, with times.
        paced: of each job, the share of looks at which its sockets had a limit.
        drops: packets that the link's queues dropped.
        load: the machine's load average, of a minute, at the window's end.
    """

    turn: str
    round: int
    window: Window
    sent: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    paced: dict[str, float] = field(default_factory=dict)
    drops: int = 0
    load: float = 0.0


class SideBySide:
    """The sets of ranks of one mix, in its network.

    Args:
        mix, fabric: what runs, and the mix's fabric, inside its ``with``.
        folder: for logs.
        turns: those of the mix that the kernel offers.
        say: called with what is going on.
        slot_ms: length of mlcc's slots.
    """

    def __init__(
        self,
        mix: Mix,
        fabric: Fabric,
        folder: Path,
        turns: Sequence[str],
        say: Callable[[str], None],
        slot_ms: int = 60,
    ) -> None:
        self._mix, self._fabric, self._folder = mix, fabric, folder
        self._turns, self._say, self._slot_ms = turns, say, slot_ms
        #: The ends of the link, for jobs without a server.
        self._hosts: tuple[Host, ...] = (fabric.host(0, 0), fabric.host(1, 0))
        #: BBR paces a socket ever after, so the sockets of its turns are no one else's.
        self._sets: dict[str, dict[str, Job]] = {}
        shared = {**dict.fromkeys(PLAIN, "cubic"), "bbr": "bbr", MLCC_STILL: MLCC}
        self._set_of = {turn: shared.get(turn, turn) for turn in turns}
        self._watches: dict[str, StoreWatch] = {}
        self._foreign: list[subprocess.Popen[str]] = []
        self.foreign: list[dict[str, float]] = []
        self.alone: dict[str, Window] = {}
        self.found: list[Measured] = []

    def __enter__(self) -> SideBySide:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs."""
        for watch in self._watches.values():
            watch.close()
        for process in reversed(self._foreign):
            process.kill()
            process.wait()
        for job in self._everyone().values():
            job.kill()

    def prepare(self) -> None:
        """Have each of mlcc's sets planned, and measure each job alone.

        Raises:
            JobError: a job ended, or that took too long.
        """
        for name in self._watches:
            self._say(f"{name}: the jobs are measured and planned")
            self._run_only(name)
            planned = partial(self._planned, name)
            wait_until(planned, self._everyone().values(), PLAN_S, f"a plan for {name}")
        for watch in self._watches.values():
            watch.close()
        stock = self._sets["cubic"]
        self._use("cubic", "cubic")
        for name, job in stock.items():
            self._say(f"{name} alone")
            self._run_only("")
            phase = Phase(name, (name,))
            self.alone[name] = measure(phase, {name: job}, ALONE_STEPS, START_S)
        if self._mix.cross:
            self._begin_foreign()

    def play(self, turn: str, round_: int, window_s: float) -> Measured:
        """One turn.

        Raises:
            JobError: a job ended.
        """
        self._say(f"round {round_ + 1}, {turn}")
        name = self._set_of[turn]
        later = random.Random(round_)
        self._use(name, {MLCC_BBR: "bbr"}.get(turn, turn if turn in PLAIN else "cubic"))
        self._run_only("")
        self._wait(SETTLE_S)
        # As far apart in all turns of a round, so that no turn is luckier than another.
        for job in self._sets[name].values():
            job.resume()
            self._wait(later.uniform(0.0, LATER_S))
        self._wait(SETTLE_S)
        workers = {job: ranks.workers()[:1] for job, ranks in self._sets[name].items()}
        drops = self._drops()
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            if turn == MLCC_STILL:
                stack.enter_context(self._tables_stand_still())
            sampler = stack.enter_context(sockets.Sampler(workers, LOOK_S))
            limits = stack.enter_context(_limits(workers))
            self._wait(window_s)
        measured = Measured(turn, round_, Window(turn, start, time.monotonic()), sampler.samples)
        measured.paced = {job: statistics.fmean(looks) for job, looks in limits.items() if looks}
        measured.drops, measured.load = self._drops() - drops, os.getloadavg()[0]
        self.found.append(measured)
        return measured

    def rows(self) -> list[dict[str, Any]]:
        """A row for each turn, and one for each of its jobs; times in seconds."""
        steps = {key: list(job.steps()) for key, job in self._everyone().items()}
        stock = {job: steps[f"{job}-cubic"] for job in self._mix.jobs}
        rows: list[dict[str, Any]] = []
        for measured in self.found:
            of = self._set_of[measured.turn]
            mine = {job: steps[f"{job}-{of}"] for job in self._mix.jobs}
            about = {"mix": self._mix.name, "turn": measured.turn, "round": measured.round}
            about |= {"slot_ms": self._slot_ms}
            seen = Seen(measured.turn, window=measured.window, steps=mine, sent=measured.sent)
            overlap = seen.overlap(self._mix.rate_Bps) if len(mine) == 2 else None
            more = {"overlap": overlap, "drops": measured.drops, "load": measured.load}
            more |= {"window_s": measured.window.length_s}
            rows.append({**about, **more, **self._foreign_rate(measured.window)})
            for job in self._mix.jobs:
                times, senders = seen.step_s(job), self._mix.senders(job)
                equal, compared = losses_equal(stock[job], mine[job])
                rows.append(
                    {
                        **about,
                        "job": job,
                        "step_s": statistics.fmean(times) if times else None,
                        "steps": len(times),
                        "step_bytes": _step_bytes(measured.sent[job], times, senders),
                        "alone_s": self._alone_s(stock[job], job),
                        "paced": measured.paced.get(job),
                        "losses_equal": equal,
                        "losses_compared": compared,
                    }
                )
        return rows

    def _alone_s(self, steps: Sequence[Step], job: str) -> float:
        return statistics.median(durations(steps, [self.alone[job]]))

    def _foreign_rate(self, window: Window) -> dict[str, float]:
        """What foreign flows that lay in the window sent, while they sent."""
        inside = [f for f in self.foreign if window.start <= f["start"] and f["end"] <= window.end]
        if not inside:
            return {}
        seconds = sum(f["end"] - f["start"] for f in inside)
        return {"foreign_Bps": sum(f["bytes"] for f in inside) / seconds, "foreign": len(inside)}

    def _start(self) -> None:
        """Start all sets, and let each of their jobs pause after its first steps."""
        first = self._hosts[0]
        secret = make_secret(self._folder)
        store = f"tcp://{first.address}:{STORE_PORT}"
        ports = itertools.count(29600)
        for name in dict.fromkeys(self._set_of.values()):
            launcher: Sequence[str] = TORCHRUN
            folder = self._folder / name
            folder.mkdir(exist_ok=True)
            if name in (MLCC, MLCC_HOSTS, MLCC_BBR):
                topology = folder / "topology.yaml"
                tables = "" if name == MLCC_HOSTS else first.name
                topology.write_text(self._fabric.topology_yaml(tables, self._mix.rate_Bps))
                launcher = [
                    *(sys.executable, "-m", "cruxrun", "--crux-policy", "mlcc"),
                    *("--crux-store", store, "--crux-store-secret", secret),
                    *("--crux-cluster", name, "--crux-topology", str(topology)),
                ]
            self._sets[name] = {
                job: self._launch(job, number, folder, launcher, next(ports))
                for number, job in enumerate(self._mix.jobs)
            }
        self._say("the ranks start")
        pause_after_first_steps(self._everyone().values(), START_S)
        for name in self._sets:
            if name in (MLCC, MLCC_HOSTS, MLCC_BBR):
                self._watches[name] = StoreWatch(store, secret, name, self._fabric, first)

    def _launch(
        self, job: str, number: int, folder: Path, launcher: Sequence[str], port: int
    ) -> Job:
        width, ms = MODELS[job]
        flags = ["--steps", "1000000", "--accelerator-ms", str(ms), "--width", str(width)]
        hosts, named = self._hosts, [*launcher]
        if launcher != TORCHRUN:
            named += ["--crux-job", job]
        if job in SERVED:
            hosts = (*self._fabric.hosts[:2], self._hosts[1])
            flags += ["--servers", "1"]
            named += ["--crux-servers", "2"] if launcher != TORCHRUN else []
        spec = JobSpec(job, "mlp", (*flags, "--seed", str(number)), port)
        settings = {
            **MARKS,
            "CRUX_PROFILE_S": "8",
            "CRUX_TUNING": f"profile_iterations=8,warmup_iterations=2,slot_ms={self._slot_ms}",
        }
        environment = settings if launcher != TORCHRUN else {}
        return Job(spec, folder, named, self._fabric, hosts, environment)

    def _everyone(self) -> dict[str, Job]:
        sets = self._sets.items()
        return {f"{job}-{name}": ranks for name, jobs in sets for job, ranks in jobs.items()}

    def _run_only(self, name: str) -> None:
        for other, jobs in self._sets.items():
            for job in jobs.values():
                job.resume() if other == name else job.pause()

    def _use(self, name: str, control: str) -> None:
        """Give the connections of a set's ranks a congestion control."""
        for job in self._sets[name].values():
            for pid in job.workers():
                for each in sockets.connections(pid):
                    with each:
                        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())

    def _planned(self, name: str) -> bool:
        status = self._watches[name].status
        entries = (status.get("plan") or {}).get("entries", ())
        done = {job["job"] for job in status.get("jobs", ()) if job["state"] == "running"}
        return {entry["job"] for entry in entries} == set(self._mix.jobs) == done

    @contextlib.contextmanager
    def _tables_stand_still(self) -> Iterator[None]:
        """Stop the service of the host that keeps all tables."""
        stopped = [
            pid
            for name, jobs in self._sets.items()
            if name != MLCC_HOSTS
            for job in jobs.values()
            for pid in job.processes()
            if TABLES.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        if not stopped:
            raise JobError("no load tables are kept")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _drops(self) -> int:
        return sum(sum(link.drops.values()) for link in self._fabric.counters())

    def _begin_foreign(self) -> None:
        """Foreign flows from each host to the other."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "text": True, "cwd": ROOT}
        module = (sys.executable, "-m", "lab.cross_traffic")
        for here in self._hosts:
            argv = [*module, "serve", str(FOREIGN_PORT)]
            self._foreign.append(self._fabric.popen(here, argv, **pipes))
        time.sleep(EVERY_S)
        for number, (here, there) in enumerate((self._hosts, self._hosts[::-1])):
            argv = [*module, "send", there.address, str(FOREIGN_PORT), str(number)]
            sender = self._fabric.popen(here, argv, stdout=subprocess.PIPE, **pipes)
            self._foreign.append(sender)

            def read(lines: Any = sender.stdout) -> None:
                for line in lines:
                    self.foreign.append(json.loads(line))

            threading.Thread(target=read, name="foreign", daemon=True).start()

    def _wait(self, seconds: float) -> None:
        look_after(self._everyone().values(), seconds)


def _step_bytes(
    sent: Sequence[tuple[float, int]], times: Sequence[float], senders: int
) -> float | None:
    """Mean bytes that ``senders`` ranks send in a step, if each sends as much as this one."""
    if len(sent) < 2 or not times:
        return None
    (began_s, before), (ended_s, after) = sent[0], sent[-1]
    return senders * (after - before) / (ended_s - began_s) * statistics.fmean(times)


@contextlib.contextmanager
def _limits(workers: Mapping[str, Sequence[int]]) -> Iterator[dict[str, list[bool]]]:
    """Look again and again whether the sockets of the workers have a limit."""
    opened = {
        n: [s for pid in pids for s in sockets.connections(pid)] for n, pids in workers.items()
    }
    found: dict[str, list[bool]] = {name: [] for name in workers}
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(4 * LOOK_S):
            for name, mine in opened.items():
                rates = [s.getsockopt(socket.SOL_SOCKET, _PACING) & _NO_LIMIT for s in mine]
                found[name].append(any(rate != _NO_LIMIT for rate in rates))

    thread = threading.Thread(target=look, name="limits", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        for each in itertools.chain.from_iterable(opened.values()):
            each.close()
