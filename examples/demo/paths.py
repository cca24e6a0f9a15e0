"""Jobs whose connections a hash puts on one spine, and the same jobs under Crux's paths.

The network has as many spines as there are jobs, so that a plan can give each its own. Every job
has a rank on two hosts of its own below different leaves, hence one connection over one spine. The
leaves' hash has a seed, as switches have: the first seed counts under which connections collide.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo import sockets
from examples.demo.fabric import Fabric, FabricSpec
from examples.demo.job import TORCHRUN, Job, JobError, JobSpec, Step, warm_up
from examples.demo.measurement import losses_equal
from examples.demo.phases import Phase, Spread, Window, durations, measure

CLUSTER = "paths"
STORE_PORT = 29410
ROOT = Path(__file__).parents[2]
#: Bounds on waiting, seconds: for ranks to start, for a phase, for the plan to be on the wire.
START_S, PHASE_S, PLAN_S = 180.0, 120.0, 120.0
#: Seeds of the leaves' hash that are tried until connections collide.
MAX_SEEDS = 1000


@dataclass(frozen=True)
class Workload:
    """A script with its arguments, as a job of a study."""

    name: str
    script: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """What is run.

    Attributes:
        name: of the study.
        workloads: the jobs; the network has a spine for each.
        rate_mbit: of each leaf-spine link, Mbit/s.
        sharing: connections that must share a spine under the hash, of each kind of run.
        settings: ``CRUX_*`` variables of the jobs under Crux.
    """

    name: str
    workloads: tuple[Workload, ...]
    rate_mbit: float
    sharing: int = 2
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """What was observed.

    Attributes:
        seed: of the leaves' hash.
        steps: of rank 0 by run (``stock`` or ``crux``) and job.
        windows: when each case was measured, by case: ``alone``, ``together`` and ``crux``;
            ``alone`` by job.
        spines: over which each job's connection goes, by case and job; ``before`` is that of the
            runs under Crux until their plan.
        bytes: sent over each spine, both directions, by case.
        counted: bytes over each spine while one job ran alone under Crux, by job.
        status: the store's last state, as ``crux status --json`` prints it.
    """

    seed: int = 0
    steps: dict[str, dict[str, list[Step]]] = field(default_factory=dict)
    alone: dict[str, list[Window]] = field(default_factory=dict)
    windows: dict[str, list[Window]] = field(default_factory=dict)
    spines: dict[str, dict[str, int]] = field(default_factory=dict)
    bytes: dict[str, dict[int, int]] = field(default_factory=dict)
    counted: dict[str, dict[int, int]] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)

    def spread(self, job: str, case: str) -> Spread:
        """Step times of a job in a case, seconds."""
        windows = self.alone[job] if case == "alone" else self.windows[case]
        run = "crux" if case == "crux" else "stock"
        return Spread.of(durations(self.steps[run][job], windows))

    def ratios(self, job: str, case: str) -> list[float]:
        """Of each round the median step in ``case`` over the median alone."""
        run = "crux" if case == "crux" else "stock"
        return [
            _median(self.steps[run][job], window) / _median(self.steps["stock"][job], alone)
            for window, alone in zip(self.windows[case], self.alone[job], strict=True)
        ]

    def losses_equal(self, job: str) -> tuple[bool | None, int]:
        """Whether the losses under Crux are the same bits; of how many steps."""
        return losses_equal(self.steps["stock"][job], self.steps["crux"][job])


def _median(steps: Iterable[Step], window: Window) -> float:
    return statistics.median(durations(steps, [window]))


class PathStudy:
    """The running study: its jobs, each once under torchrun and once under cruxrun.

    Args:
        study: what to run.
        fabric: :func:`fabric_of` the study, inside its ``with``.
        folder: for logs and what the jobs print.
        say: called with what is going on now.
    """

    def __init__(
        self, study: Study, fabric: Fabric, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.seen = Seen()
        self._study, self._fabric, self._folder, self._say = study, fabric, folder, say
        self._hosts = {
            w.name: (fabric.host(0, i), fabric.host(1, i)) for i, w in enumerate(study.workloads)
        }
        self._names = tuple(w.name for w in study.workloads)
        self._store = f"tcp://{fabric.host(0, 0).address}:{STORE_PORT}"
        self._watch: subprocess.Popen[str] | None = None
        self.jobs: dict[str, Job] = {}

    def start(self) -> None:
        """Start every job under both launchers and let each do its first steps."""
        self._folder.mkdir(parents=True, exist_ok=True)
        topology = self._folder / "topology.yaml"
        topology.write_text(self._fabric.topology_yaml())
        for i, workload in enumerate(self._study.workloads):
            self._launch(workload, "stock", list(TORCHRUN), 29600 + i)
            crux = [sys.executable, "-m", "cruxrun", "--crux-job", workload.name]
            crux += ["--crux-store", self._store, "--crux-cluster", CLUSTER]
            crux += ["--crux-topology", str(topology)]
            self._launch(workload, "crux", crux, 29700 + i, self._study.settings)
        warm_up(
            self.jobs, START_S, lambda left: self._say(f"starting the ranks, {left} jobs to go")
        )

    def collide(self) -> None:
        """Take the first hash seed under which connections share a spine, in either run.

        Raises:
            JobError: there is none among ``MAX_SEEDS``.
        """
        for seed in range(1, MAX_SEEDS + 1):
            self._fabric.set_hash_seed(seed)
            hashed = {run: self._spines(run) for run in ("stock", "crux")}
            if all(most_on_one(found) >= self._study.sharing for found in hashed.values()):
                self.seen.seed = seed
                self.seen.spines |= {"together": hashed["stock"], "before": hashed["crux"]}
                return
        raise JobError(f"no two connections collide under {MAX_SEEDS} hash seeds")

    def separate(self) -> None:
        """Let the jobs run under Crux until each has a spine of its own.

        That is so when the jobs' own ranks have seen all their connections, the old ones ended, on
        the planned paths, and the leaves' kernels send each over another spine.

        Raises:
            JobError: it is not so after ``PLAN_S``.
        """
        self._watch = self._start_watch()
        for name in self._names:
            self.jobs[f"{name}-stock"].pause()
            self.jobs[f"{name}-crux"].resume()
        deadline = time.monotonic() + PLAN_S
        while True:
            for job in self.jobs.values():
                job.check()
            states = {job["job"]: job["state"] for job in self.seen.status.get("jobs", ())}
            self._say("Crux measures: " + ", ".join(f"{n} {s}" for n, s in sorted(states.items())))
            planned = self._planned()
            if planned and all(map(_on_planned_paths, self.seen.status["jobs"])):
                spines = self._spines("crux")
                if most_on_one(spines) == 1:
                    self.seen.spines["crux"] = spines
                    return
            if time.monotonic() > deadline:
                tail = self.jobs[f"{self._names[0]}-crux"].tail()
                paths = {job["job"]: job["paths"] for job in self.seen.status.get("jobs", ())}
                raise JobError(
                    f"not separated after {PLAN_S:.0f} s, planned: {planned}, "
                    f"paths: {paths}\n{tail}"
                )
            time.sleep(0.25)

    def compare(self, steps: int, rounds: int) -> None:
        """Measure every case in short turns, so that the machine's moods meet all of them."""
        each = math.ceil(steps / rounds)
        for turn in range(rounds):
            for name in self._names:
                window = self._phase(f"{name} alone", "stock", (name,), each)
                self.seen.alone.setdefault(name, []).append(window)
            for case, run in (("together", "stock"), ("crux", "crux")):
                before = self._sent()
                window = self._phase(f"round {turn + 1}: {case}", run, self._names, each)
                self.seen.windows.setdefault(case, []).append(window)
                total = self.seen.bytes.setdefault(case, {})
                for spine, sent in self._sent().items():
                    total[spine] = total.get(spine, 0) + sent - before[spine]
        self.seen.spines["crux"] = self._spines("crux")

    def count(self, steps: int = 3) -> None:
        """Let each job under Crux run alone, and see which spine's counters grow."""
        for name in self._names:
            self._phase(f"{name} alone, counted", "crux", (name,), 1)
            before = self._sent()
            self._phase(f"{name} alone, counted", "crux", (name,), steps)
            sent = self._sent()
            self.seen.counted[name] = {spine: sent[spine] - before[spine] for spine in sent}

    def finish(self) -> None:
        """Let the jobs end by themselves and keep their steps.

        Raises:
            JobError: one did not end well.
        """
        self._stop_watch()
        self._say("ending the jobs")
        for job in self.jobs.values():
            job.finish()
        for key, job in self.jobs.items():
            codes = job.wait(60.0)
            if codes != [0] * len(codes):
                raise JobError(f"{key} ended with {codes}\n{job.tail()}")
            name, run = key.rsplit("-", 1)
            self.seen.steps.setdefault(run, {})[name] = job.steps()

    def close(self) -> None:
        """End whatever still runs."""
        for job in self.jobs.values():
            job.kill()
        self._stop_watch()

    def _launch(
        self,
        workload: Workload,
        run: str,
        launcher: list[str],
        port: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        key = f"{workload.name}-{run}"
        arguments = ("--steps", "1000000", *workload.arguments)
        spec = JobSpec(key, workload.name, workload.script, arguments, port)
        hosts = self._hosts[workload.name]
        self.jobs[key] = Job(
            spec, self._folder, launcher, self._fabric, hosts, dict(environment or {})
        )

    def _phase(self, title: str, run: str, names: Sequence[str], steps: int) -> Window:
        self._say(title)
        phase = Phase(title, tuple(f"{name}-{run}" for name in names))
        return measure(phase, self.jobs, steps, PHASE_S)

    def _sent(self) -> dict[int, int]:
        """Bytes that each spine has forwarded."""
        total = dict.fromkeys(range(self._fabric.spec.spines), 0)
        for link in self._fabric.counters():
            if link.link.startswith("spine"):
                total[int(link.link.removeprefix("spine").split("-")[0])] += sum(
                    link.bytes.values()
                )
        return total

    def _spines(self, run: str) -> dict[str, int]:
        """The spine that the leaves' kernels choose for each job's busiest connection."""
        found = {}
        for name in self._names:
            here, there = self._hosts[name]
            opened = sockets.connections(self.jobs[f"{name}-{run}"].workers()[0])
            try:
                busiest = max(opened, key=sockets.bytes_acked)
                ports = busiest.getsockname()[1], busiest.getpeername()[1]
            finally:
                for each in opened:
                    each.close()
            ways = {
                self._fabric.spine_taken(here, there, *ports),
                self._fabric.spine_taken(there, here, *ports[::-1]),
            }
            if len(ways) > 1:
                raise JobError(f"{name}: both ways do not take one spine: {ways}")
            found[name] = ways.pop()
        return found

    def _planned(self) -> bool:
        jobs = self.seen.status.get("jobs", ())
        plan = self.seen.status.get("plan") or {}
        planned = {entry["job"] for entry in plan.get("entries", ())}
        return planned >= set(self._names) and all(job["state"] == "running" for job in jobs)

    def _start_watch(self) -> subprocess.Popen[str]:
        watch = self._fabric.popen(
            self._fabric.host(0, 0),
            [sys.executable, "-m", "examples.demo.watch", self._store, CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

        def read() -> None:
            for line in watch.stdout or ():
                self.seen.status = json.loads(line)

        threading.Thread(target=read, name="watch", daemon=True).start()
        return watch

    def _stop_watch(self) -> None:
        if self._watch:
            self._watch.kill()
            self._watch.wait()
            self._watch = None


def _on_planned_paths(job: Mapping[str, Any]) -> bool:
    """Whether a record says that every rank has seen all its connections on their paths."""
    ranks, paths = job["gpus"], job["paths"] or {}
    return paths.get("as_planned", 0) >= ranks and paths["as_planned"] == sum(paths.values())


def fabric_of(study: Study) -> Fabric:
    """The network of a study."""
    count = len(study.workloads)
    return Fabric(FabricSpec(spines=count, hosts_per_leaf=count, rate_mbit=study.rate_mbit))


def most_on_one(spines: Mapping[str, int]) -> int:
    """Jobs on the spine that has the most of them."""
    taken = list(spines.values())
    return max(map(taken.count, taken))
