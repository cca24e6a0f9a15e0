"""Jobs that run twice at the same time, under torchrun and under cruxrun, and are compared."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.fabric import MARKS, Fabric, Host
from lab.job import PROGRAM, TORCHRUN, Job, JobError, JobSpec, Step
from lab.phases import Phase, Window, measure
from lab.steering import STORE_PORT, StoreWatch, make_secret
from lab.watch import is_seen

#: Bounds on waiting, seconds: for ranks to start, for a phase, for a plan.
START_S, PHASE_S, PLAN_S = 180.0, 120.0, 300.0
#: The two runs of each job.
STOCK, CRUX = "stock", "crux"

#: Called with what is going on, and the share of it that is done.
Say = Callable[[str, float], None]


@dataclass(frozen=True)
class Workload:
    """What one job trains.

    Attributes:
        name: of the job.
        model: one of lab.train's models.
        arguments: flags of lab.train.
        device: type of device.
        program: the module that trains, see :class:`lab.job.JobSpec`.
    """

    name: str
    model: str
    arguments: tuple[str, ...] = ()
    device: str = "cpu"
    program: str = PROGRAM


class Twins:
    """Each job once under torchrun (``NAME-stock``) and once under cruxrun (``NAME-crux``).

    Jobs that are not measured wait between two steps.

    Args:
        workloads: the jobs.
        fabric: the network; None: the loopback.
        hosts: of each job, one for each rank; empty on the loopback.
        folder: for logs and for what the jobs print.
        say: called with what is going on.
        cluster: name in the store.
        settings: ``CRUX_*`` variables of the runs under Crux.
        policy: of the runs under Crux. By default the paper's: levels also where a rehearsal would
            see no gain in them.
        topology: the network as YAML; empty: as the fabric describes itself; None: nobody tells
            the jobs, which find it themselves.
    """

    def __init__(
        self,
        workloads: Sequence[Workload],
        fabric: Fabric | None,
        hosts: Mapping[str, Sequence[Host]],
        folder: Path,
        say: Say,
        *,
        cluster: str,
        settings: Mapping[str, str] | None = None,
        policy: str = "crux-paper",
        topology: str | None = "",
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.names = tuple(workload.name for workload in workloads)
        self._workloads, self._fabric, self._hosts = workloads, fabric, hosts
        self._folder, self._say = folder, say
        self._cluster, self._settings = cluster, {**MARKS, **(settings or {})}
        self._policy, self._topology = policy, topology
        # The first job's leader is on this host, and cruxrun starts the store there.
        self._first = hosts[self.names[0]][0] if fabric else None
        self._store = f"tcp://{self._first.address if self._first else '127.0.0.1'}:{STORE_PORT}"
        self._secret = ""
        self._watch: StoreWatch | None = None

    @property
    def status(self) -> dict[str, Any]:
        """The store's last state, as ``crux status --json`` prints it."""
        return self._watch.status if self._watch else {}

    def start(self) -> None:
        """Starts every job under both launchers and lets each do its first steps.

        Raises:
            JobError: one has ended, or was not ready in time.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        crux = ["--crux-store", self._store, "--crux-cluster", self._cluster]
        crux += ["--crux-policy", self._policy]
        if self._fabric:
            # Beyond loopback the store wants one.
            self._secret = make_secret(self._folder)
            crux += ["--crux-store-secret", self._secret]
            if self._topology is not None:
                topology = self._folder / "topology.yaml"
                topology.write_text(self._topology or self._fabric.topology_yaml())
                crux += ["--crux-topology", str(topology)]
        for number, workload in enumerate(self._workloads):
            launcher = [sys.executable, "-m", "cruxrun", "--crux-job", workload.name, *crux]
            self._launch(workload, STOCK, TORCHRUN, 29600 + number, {})
            self._launch(workload, CRUX, launcher, 29700 + number, self._settings)
        self._warm_up()
        self._watch = StoreWatch(
            self._store, self._secret, self._cluster, self._fabric, self._first
        )

    def plan(self, is_done: Callable[[], bool] = lambda: True) -> None:
        """Lets the jobs run under Crux until there is a plan for all of them, and ``is_done``.

        Raises:
            JobError: a job has ended, or that takes more than ``PLAN_S``.
        """
        for name in self.names:
            self.jobs[f"{name}-{STOCK}"].pause()
            self.jobs[f"{name}-{CRUX}"].resume()
        start = time.monotonic()
        while not (self._planned() and self._knows_network() and is_done()):
            waited = time.monotonic() - start
            states = {job["job"]: job["state"] for job in self.status.get("jobs", ())}
            line = ", ".join(f"{name} {state}" for name, state in sorted(states.items()))
            self._say(f"Crux measures the jobs ({line or 'no record yet'})", min(0.95, waited / 40))
            for job in self.jobs.values():
                job.check()
            if waited > PLAN_S:
                tail = self.jobs[f"{self.names[0]}-{CRUX}"].tail()
                raise JobError(f"no plan after {PLAN_S:.0f} s: {self.status.get('jobs')}\n{tail}")
            time.sleep(0.2)

    def measure(self, title: str, run: str, names: Sequence[str], steps: int) -> Window:
        """Lets these jobs run until each has done ``steps`` steps; all others wait."""
        running = tuple(f"{name}-{run}" for name in names)
        start = time.monotonic()

        def tick() -> None:
            done = [sum(s.start >= start for s in self.jobs[key].steps()) for key in running]
            self._say(title, min(1.0, min(done) / (steps + 2)))

        return measure(Phase(title, running), self.jobs, steps, PHASE_S, tick)

    def finish(self) -> dict[str, dict[str, list[Step]]]:
        """Lets the jobs end by themselves; returns their steps by run and name.

        Raises:
            JobError: one did not end well.
        """
        # The records in the store go when the jobs end.
        if self._watch:
            self._watch.close()
        self._say("ending the jobs", 0.0)
        for job in self.jobs.values():
            job.finish()
        steps: dict[str, dict[str, list[Step]]] = {STOCK: {}, CRUX: {}}
        for key, job in self.jobs.items():
            codes = job.wait(60.0)
            if codes != [0] * len(codes):
                raise JobError(f"{key} ended with {codes}\n{job.tail()}")
            name, run = key.rsplit("-", 1)
            steps[run][name] = job.steps()
        return steps

    def close(self) -> None:
        """Ends whatever still runs."""
        for job in self.jobs.values():
            job.kill()
        if self._watch:
            self._watch.close()

    def _launch(
        self,
        workload: Workload,
        run: str,
        launcher: Sequence[str],
        port: int,
        environment: dict[str, str],
    ) -> None:
        name = f"{workload.name}-{run}"
        arguments = ("--steps", "1000000", *workload.arguments)
        spec = JobSpec(name, workload.model, arguments, port, workload.device)
        hosts = self._hosts.get(workload.name, ())
        self.jobs[name] = Job(spec, self._folder, launcher, self._fabric, hosts, environment)

    def _warm_up(self) -> None:
        """Waits until every job has done its first steps, and lets each pause after them."""
        deadline = time.monotonic() + START_S
        waiting = dict(self.jobs)
        while waiting:
            self._say("starting the ranks", 1 - len(waiting) / len(self.jobs))
            for key, job in list(waiting.items()):
                job.check()
                if len(job.steps()) >= 2:
                    job.pause()
                    del waiting[key]
            if time.monotonic() > deadline:
                slow = next(iter(waiting.values()))
                raise JobError(f"{slow.name} did not start in {START_S:.0f} s\n{slow.tail()}")
            time.sleep(0.1)

    def _planned(self) -> bool:
        jobs = self.status.get("jobs", ())
        plan = self.status.get("plan") or {}
        planned = {entry["job"] for entry in plan.get("entries", ())}
        return planned >= set(self.names) and all(job["state"] == "running" for job in jobs)

    def _knows_network(self) -> bool:
        """True once jobs without a topology have seen the network."""
        return not self._fabric or self._topology is not None or is_seen(self.status)
