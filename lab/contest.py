"""The same jobs, arrivals and paths under one policy after the other, in a network of namespaces.

The jobs train real models and send real gradients; their computation waits as in the demo. The hash
of the leaves is searched until it puts each job's connection on the spine that a seed drew for it,
so that connections take the same paths in every turn, unless a policy chooses others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import sockets
from lab.fabric import MARKS, Fabric, FabricSpec, Host
from lab.job import TORCHRUN, Job, JobError, JobSpec, Step
from lab.phases import Phase, Window, compute_seconds, durations, measure, steps_within, utilisation
from lab.steering import (
    STORE_PORT,
    StoreWatch,
    look_after,
    make_secret,
    pause_after_first_steps,
    wait_until,
)
from lab.twins import Workload
from lab.watch import is_seen

#: No Crux at all: torchrun and stock gloo.
NONE = "none"
#: Ends the names of entrants whose jobs are given no topology: they find the network themselves.
NO_TOPOLOGY = ":no-topology"
#: Bounds on waiting, seconds: for ranks to start, a plan, its trial, and for new connections.
START_S, PLAN_S, TRIAL_S, PATHS_S = 240.0, 300.0, 300.0, 30.0
#: The same for jobs that search the network: until all paths are seen, and a plan stays for so
#: long.
SEEN_S, CALM_S = 300.0, 10.0
#: Seconds between what is waited for and the window.
SETTLE_S = 4.0
#: Seeds of one leaf's hash that are tried.
MAX_SEEDS = 4000
#: Iterations of a job whose completion time is told.
JOB_STEPS = 500
#: Seconds between two looks at what a connection has sent, and the share of a link's rate at which
#: the job counts as sending.
LOOK_S, SENDING = 0.005, 0.1
CLUSTER = "contest"


def policy_of(entrant: str) -> str:
    """The policy that an entrant plays: its name, without what ends it."""
    return entrant.removesuffix(NO_TOPOLOGY)


@dataclass(frozen=True)
class Scenario:
    """What the jobs are, and where they run.

    Attributes:
        name, about: of the scenario; where its shape comes from.
        workloads: the jobs.
        leaves_of: below which leaf each rank of a job is; others have one below leaf 0 and 1.
        rate_mbit: of each leaf-spine link.
        spines: of the network.
        arrivals_s: jobs arrive within so many seconds, as a seed draws; 0: at the same time.
        heavy: the job that has most to compute, if one has.
    """

    name: str
    about: str
    workloads: tuple[Workload, ...]
    leaves_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rate_mbit: float = 100.0
    spines: int = 1
    arrivals_s: float = 2.0
    heavy: str = ""

    def leaves(self, job: str) -> tuple[int, ...]:
        """Below which leaf each rank of ``job`` is."""
        return self.leaves_of.get(job, (0, 1))

    def arrivals(self, rng: random.Random) -> dict[str, float]:
        """After how many seconds each job arrives, as ``rng`` draws it."""
        return {w.name: rng.uniform(0.0, self.arrivals_s) for w in self.workloads}

    def fabric(self) -> Fabric:
        """Its network: every job has hosts of its own."""
        used = [leaf for w in self.workloads for leaf in self.leaves(w.name)]
        hosts = max(map(used.count, used))
        return Fabric(
            FabricSpec(max(used) + 1, self.spines, hosts_per_leaf=hosts, rate_mbit=self.rate_mbit)
        )


@dataclass
class Seen:
    """Results of one entrant's turn. Seconds are of the monotonic clock.

    Attributes:
        policy: the entrant: a policy, which ``NO_TOPOLOGY`` may end, or ``NONE``.
        arrived: when each job began.
        planned: when the watch first saw the job in a plan of this policy.
        window: in which everything below was counted.
        steps: of rank 0 of each job.
        alone: when each job was measured alone (only without Crux).
        spines: over which each job's connection went in the window, by the kernels of the leaves.
        on_paths: whether all connections were seen on the planned paths in time; None without.
        bytes, drops: of each direction of each leaf-spine link, by level.
        sent: bytes that rank 0 of each job had sent, with times.
        status: the store's state in the window, as ``crux status --json`` prints it.
        load: the machine's load average, of a minute, at the window's end.
    """

    policy: str
    arrived: dict[str, float] = field(default_factory=dict)
    planned: dict[str, float] = field(default_factory=dict)
    window: Window = field(default_factory=lambda: Window("", 0.0, 0.0))
    steps: dict[str, list[Step]] = field(default_factory=dict)
    alone: dict[str, Window] = field(default_factory=dict)
    spines: dict[str, int] = field(default_factory=dict)
    on_paths: bool | None = None
    bytes: dict[str, dict[int, int]] = field(default_factory=dict)
    drops: dict[str, dict[int, int]] = field(default_factory=dict)
    sent: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    load: float = 0.0

    def step_s(self, job: str) -> list[float]:
        """Times between the starts of the job's steps in the window."""
        starts = [s.start for s in self.steps[job] if self._inside(s.start)]
        return [b - a for a, b in itertools.pairwise(starts)]

    def alone_s(self, job: str) -> float:
        """Median step of the job alone."""
        return statistics.median(durations(self.steps[job], [self.alone[job]]))

    def compute_s(self, job: str) -> float:
        """Median computation of a step of the job alone."""
        return compute_seconds(self.steps[job], [self.alone[job]])

    def utilisation(self, compute_s: Mapping[str, float], ranks: Mapping[str, int]) -> float:
        """The share of the window in which devices compute; see :func:`lab.phases.utilisation`."""
        done = {name: steps_within(steps, [self.window]) for name, steps in self.steps.items()}
        return utilisation(done, compute_s, dict(ranks), self.window.length_s, sum(ranks.values()))

    def completion_s(self, job: str) -> float | None:
        """When a job of ``JOB_STEPS`` would be done after its arrival.

        The steps up to the window's end are measured; the others take the window's mean.
        """
        done = sum(
            self.arrived[job] <= s.start and s.end <= self.window.end for s in self.steps[job]
        )
        times = self.step_s(job)
        if not times:
            return None
        left = max(0, JOB_STEPS - done)
        return self.window.end - self.arrived[job] + left * statistics.mean(times)

    def overlap(self, rate_Bps: float) -> float | None:
        """Share of the time in which any job sends on links of this rate, in which two or more do.

        None if none sends.
        """
        sending = {
            job: self._sending(samples, SENDING * rate_Bps) for job, samples in self.sent.items()
        }
        edges = sorted(
            (at, change)
            for spans in sending.values()
            for s, e in spans
            for at, change in ((s, 1), (e, -1))
        )
        one = two = 0.0
        count = 0
        for (at, change), (following, _) in itertools.pairwise(edges):
            count += change
            one += (following - at) * (count > 0)
            two += (following - at) * (count > 1)
        return two / one if one else None

    def timeline(self, rate_Bps: float, length_s: float) -> dict[str, list[list[float]]]:
        """When each job sends in the window's last seconds, from their begin."""
        begin = self.window.end - length_s
        spans: dict[str, list[list[float]]] = {}
        for job, samples in self.sent.items():
            mine = spans.setdefault(job, [])
            for a, b in self._sending(samples, SENDING * rate_Bps):
                if a < begin:
                    continue
                if mine and a - begin - mine[-1][1] < 1e-3:
                    mine[-1][1] = round(b - begin, 3)
                else:
                    mine.append([round(a - begin, 3), round(b - begin, 3)])
        return spans

    def chance(self, rate_Bps: float) -> float | None:
        """What :meth:`overlap` of two jobs would be if neither knew of the other's phase."""
        length_s = self.window.length_s
        a, b = (
            sum(end - begin for begin, end in self._sending(samples, SENDING * rate_Bps)) / length_s
            for samples in self.sent.values()
        )
        return a * b / (a + b - a * b) if a and b else None

    def _sending(
        self, samples: Sequence[tuple[float, int]], least_Bps: float
    ) -> list[tuple[float, float]]:
        inside = [sample for sample in samples if self._inside(sample[0])]
        gaps = itertools.pairwise(inside)
        return [(a, b) for (a, m), (b, n) in gaps if n - m > least_Bps * (b - a)]

    def _inside(self, at: float) -> bool:
        return self.window.start <= at <= self.window.end


class Turn:
    """One entrant's turn of a scenario.

    Args:
        scenario: what runs.
        entrant: the policy or ``NONE``; a policy that ``NO_TOPOLOGY`` ends is given no topology.
        fabric: the scenario's, inside its ``with``.
        folder: for logs.
        seed: draws arrivals and spines.
        window_s: seconds that are measured.
        say: called with what is going on.
    """

    def __init__(
        self,
        scenario: Scenario,
        entrant: str,
        fabric: Fabric,
        folder: Path,
        seed: int,
        window_s: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.seen = Seen(entrant)
        self._policy = policy_of(entrant)
        self._gives_topology = self._policy == entrant
        self._scenario, self._fabric, self._folder = scenario, fabric, folder
        self._window_s, self._say = window_s, say
        names = [w.name for w in scenario.workloads]
        rng = random.Random(seed)
        self._arrivals = scenario.arrivals(rng)
        self._drawn = {n: rng.randrange(scenario.spines) for n in names}
        free = {leaf: iter(range(fabric.spec.hosts_per_leaf)) for leaf in range(fabric.spec.leaves)}
        self._hosts: dict[str, list[Host]] = {
            n: [fabric.host(leaf, next(free[leaf])) for leaf in scenario.leaves(n)] for n in names
        }
        self._settings = {
            **MARKS,
            "CRUX_PROFILE_S": "8",
            # Iterations before its arrival do not count.
            "CRUX_TUNING": "profile_iterations=8,warmup_iterations=6",
        }
        self._jobs: dict[str, Job] = {}
        self._watch: StoreWatch | None = None

    def play(self) -> Seen:
        """From the launch of the jobs to their end.

        Raises:
            JobError: a job ended, or something took too long.
        """
        try:
            self._start()
            self._lay_paths()
            self._arrive()
            if self.seen.policy != NONE:
                self._await_plan()
            self._measure()
            if self.seen.policy == NONE:
                self._measure_alone()
            self.seen.steps = {name: list(job.steps()) for name, job in self._jobs.items()}
        finally:
            self._end()
        return self.seen

    def profile(self) -> list[dict[str, Any]]:
        """What Crux measures of each job while all others wait: their records, as in its store.

        Raises:
            JobError: a job ended, or something took too long.
        """
        try:
            self._start()
            return [self._profile(job) for job in self._jobs.values()]
        finally:
            self._end()

    @property
    def _status(self) -> dict[str, Any]:
        """The store's last state, see :class:`StoreWatch`."""
        return self._watch.status if self._watch else {}

    def _profile(self, job: Job) -> dict[str, Any]:
        self._say(f"{job.name} alone is measured by Crux")
        job.resume()
        found: list[dict[str, Any]] = []

        def measured() -> bool:
            found[:] = [
                record
                for record in self._status.get("jobs", ())
                if record["job"] == job.name and record["state"] == "running"
            ]
            return bool(found)

        self._until(measured, PLAN_S, "its measurement")
        job.pause()
        return found[0]

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        for job in self._jobs.values():
            job.kill()

    def _start(self) -> None:
        """Start every job, and let it pause after its first steps."""
        first = self._hosts[self._scenario.workloads[0].name][0]
        store = f"tcp://{first.address}:{STORE_PORT}"
        secret, topology = make_secret(self._folder), self._folder / "topology.yaml"
        # Without tables of all links, mlcc would book the hosts' own, which nobody can fill.
        tables = first.name if self._policy == "mlcc" else ""
        topology.write_text(self._fabric.topology_yaml(tables))
        for number, workload in enumerate(self._scenario.workloads):
            launcher: Sequence[str] = TORCHRUN
            if self.seen.policy != NONE:
                launcher = [
                    *(sys.executable, "-m", "cruxrun", "--crux-job", workload.name),
                    *("--crux-store", store, "--crux-store-secret", secret),
                    *("--crux-cluster", CLUSTER, "--crux-policy", self._policy),
                    *(("--crux-topology", str(topology)) if self._gives_topology else ()),
                ]
            arguments = ("--steps", "1000000", *workload.arguments)
            spec = JobSpec(
                workload.name, workload.model, arguments, 29600 + number, program=workload.program
            )
            hosts = self._hosts[workload.name]
            environment = self._settings if self.seen.policy != NONE else {}
            self._jobs[workload.name] = Job(
                spec, self._folder, launcher, self._fabric, hosts, environment
            )
        self._say("the ranks start")
        pause_after_first_steps(self._jobs.values(), START_S)
        if self.seen.policy != NONE:
            self._watch = StoreWatch(store, secret, CLUSTER, self._fabric, first)

    def _lay_paths(self) -> None:
        """Find a hash for each leaf that sends every job over the spine that was drawn for it."""
        if self._scenario.spines == 1:
            return
        ends = {}
        for name, job in self._jobs.items():
            with sockets.busiest(job.workers()[0]) as connection:
                ends[name] = connection.getsockname()[1], connection.getpeername()[1]
        for leaf in range(2):
            for seed in range(1, MAX_SEEDS + 1):
                self._fabric.set_hash_seed(seed, leaf)
                if all(self._spine(n, leaf, ends[n]) == self._drawn[n] for n in ends):
                    break
            else:
                raise JobError(f"no seed of {MAX_SEEDS} gives leaf {leaf} the drawn paths")

    def _spine(self, name: str, leaf: int, ports: tuple[int, int]) -> int:
        """The spine over which ``leaf`` sends the job's connection on."""
        here, there = self._hosts[name][:2]
        if leaf == 0:
            return self._fabric.spine_taken(here, there, *ports)
        return self._fabric.spine_taken(there, here, *ports[::-1])

    def _arrive(self) -> None:
        """Let the jobs go on, each at its time."""
        begin = time.monotonic()
        for name, after_s in sorted(self._arrivals.items(), key=lambda item: item[1]):
            time.sleep(max(0.0, begin + after_s - time.monotonic()))
            self._jobs[name].resume()
            self.seen.arrived[name] = time.monotonic()

    def _await_plan(self) -> None:
        """Until a plan has all jobs, and their connections the paths of it, as far as it can be."""
        self._say(f"{self.seen.policy}: the jobs are measured and planned")

        def planned() -> bool:
            plan = self._status.get("plan") or {}
            entries = plan.get("entries", ()) if plan.get("policy") == self._policy else ()
            for entry in entries:
                self.seen.planned.setdefault(entry["job"], self._status["at"])
            there = {entry["job"] for entry in entries}
            done = [job["job"] for job in self._status.get("jobs", ()) if job["state"] == "running"]
            return there == self._jobs.keys() == set(done)

        self._until(planned, PLAN_S, "a plan")
        if not self._gives_topology:
            self._say(f"{self.seen.policy}: the jobs see the network")
            self._until(self._is_seen, SEEN_S, "all paths")
            self._say(f"{self.seen.policy}: it is planned with")
            self._await_calm()
        self._say(f"{self.seen.policy}: what comes before a trial is measured")
        self._until(self._tried, TRIAL_S, "what comes before a trial")
        if any(entry["paths"] for entry in self._status["plan"]["entries"]):
            self.seen.on_paths = False
            with contextlib.suppress(JobError):
                self._until(self._on_planned_paths, PATHS_S, "the planned paths")
                self.seen.on_paths = True

    def _is_seen(self) -> bool:
        return is_seen(self._status)

    def _await_calm(self) -> None:
        """Until the plan has followed from the same facts for a while."""
        last, since = None, time.monotonic()

        def calm() -> bool:
            nonlocal last, since
            fingerprint = (self._status.get("plan") or {}).get("fingerprint")
            if fingerprint is None or fingerprint != last:
                last, since = fingerprint, time.monotonic()
            return time.monotonic() - since >= CALM_S

        self._until(calm, PLAN_S, "a plan that stays")

    def _trials(self) -> dict[str, tuple[str, bool]]:
        """Of each job whose component has a plan to try: where the trial stands (``before`` if it
        has not begun), and whether the plan is on."""
        judges = {job["job"]: job.get("tried", ()) for job in self._status.get("jobs", ())}
        found = {}
        for entry in (self._status.get("plan") or {}).get("entries", ()):
            if trial := entry.get("trial"):
                said = {t["name"]: t["state"] for t in judges.get(trial["judge"], ())}
                found[entry["job"]] = said.get(trial["name"], "before"), trial["on"]
        return found

    def _tried(self) -> bool:
        """Whether every component has a plan that was measured, or is about to be."""
        return all(on or state == "worse" for state, on in self._trials().values())

    def _on_planned_paths(self) -> bool:
        entries = self._status["plan"]["entries"]
        routed = {entry["job"] for entry in entries if entry["paths"]}
        found = [job["paths"] or {} for job in self._status["jobs"] if job["job"] in routed]
        return all(
            p.get("as_planned", 0) >= 2 and p["as_planned"] == sum(p.values()) for p in found
        )

    def _measure(self) -> None:
        self._say(f"{self.seen.policy}: measuring for {self._window_s:g} s")
        self._wait(SETTLE_S)
        workers = {name: job.workers()[:1] for name, job in self._jobs.items()}
        before = self._fabric.counters()
        start = time.monotonic()
        with sockets.Sampler(workers, LOOK_S) as sampler:
            self._wait(self._window_s)
            self.seen.sent = sampler.samples
        self.seen.window = Window(self.seen.policy, start, time.monotonic())
        for was, now in zip(before, self._fabric.counters(), strict=True):
            self.seen.bytes[now.link] = {n: now.bytes[n] - was.bytes[n] for n in now.bytes}
            self.seen.drops[now.link] = {n: now.drops[n] - was.drops[n] for n in now.drops}
        self.seen.status, self.seen.load = self._status, os.getloadavg()[0]
        for name, job in self._jobs.items():
            if len(self._hosts[name]) == 2:
                with sockets.busiest(job.workers()[0]) as connection:
                    ports = connection.getsockname()[1], connection.getpeername()[1]
                self.seen.spines[name] = self._spine(name, 0, ports)

    def _measure_alone(self) -> None:
        for name in self._jobs:
            self._say(f"{name} alone")
            self.seen.alone[name] = measure(Phase(name, (name,)), self._jobs, 10, START_S)

    def _wait(self, seconds: float) -> None:
        look_after(self._jobs.values(), seconds)

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        wait_until(condition, self._jobs.values(), seconds, f"{self.seen.policy}: {what}")
