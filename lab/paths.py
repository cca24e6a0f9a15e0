"""Jobs whose connections a hash puts on one spine, and the same jobs under Crux's paths.

The network has as many spines as there are jobs, so that a plan can give each job its own. Every
job has a rank on two hosts below different leaves, and so one connection over one spine. The hash
of the leaves has a seed, as switches have. The first seed under which connections collide is used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import sockets
from lab.fabric import Fabric, FabricSpec
from lab.job import JobError, Step
from lab.measurement import losses_equal
from lab.phases import Spread, Window, durations
from lab.twins import CRUX, STOCK, Say, Twins, Workload

#: Seeds of the leaves' hash that are tried until connections collide.
MAX_SEEDS = 1000


@dataclass(frozen=True)
class Study:
    """What is run.

    Attributes:
        name: of the study.
        workloads: the jobs; the network has a spine for each.
        rate_mbit: of each leaf-spine link, Mbit/s.
        sharing: connections that must share a spine under the hash, in both runs.
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
        steps: of rank 0, by run (``stock`` or ``crux``) and job.
        alone: when each job was measured alone.
        windows: when the cases ``together`` and ``crux`` were measured.
        spines: over which each job's connection goes, by case and job; ``before`` is the run under
            Crux before its plan.
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


class PathStudy(Twins):
    """The running study.

    Args:
        study: what to run.
        fabric: :func:`fabric_of` the study, inside its ``with``.
        folder: for logs and for what the jobs print.
        say: called with what is going on.
        topology: see :class:`~lab.twins.Twins`.
    """

    def __init__(
        self, study: Study, fabric: Fabric, folder: Path, say: Say, *, topology: str | None = ""
    ) -> None:
        hosts = {
            w.name: (fabric.host(0, i), fabric.host(1, i)) for i, w in enumerate(study.workloads)
        }
        super().__init__(
            study.workloads, fabric, hosts, folder, say, cluster="paths",
            settings=study.settings, topology=topology,
        )  # fmt: skip
        self.seen = Seen()
        self._study, self._network, self._ends = study, fabric, hosts

    def collide(self) -> None:
        """Takes the first hash seed under which connections share a spine, in both runs.

        Raises:
            JobError: there is none among ``MAX_SEEDS``.
        """
        for seed in range(1, MAX_SEEDS + 1):
            self._network.set_hash_seed(seed)
            hashed = {run: self._spines(run) for run in (STOCK, CRUX)}
            if all(most_on_one(found) >= self._study.sharing for found in hashed.values()):
                self.seen.seed = seed
                self.seen.spines |= {"together": hashed[STOCK], "before": hashed[CRUX]}
                return
        raise JobError(f"no two connections collide under {MAX_SEEDS} hash seeds")

    def separate(self) -> None:
        """Lets the jobs run under Crux until each has a spine of its own.

        That is the case once the ranks have seen all their connections on the planned paths, and
        the kernels of the leaves send each job over another spine.

        Raises:
            JobError: a job has ended, or that takes too long.
        """

        def apart() -> bool:
            if not all(map(_on_planned_paths, self.status["jobs"])):
                return False
            self.seen.spines["crux"] = self._spines(CRUX)
            return most_on_one(self.seen.spines["crux"]) == 1

        self.plan(apart)

    def compare(self, steps: int, rounds: int) -> None:
        """Measures every case in short turns, so that a disturbance of the machine meets all."""
        each = math.ceil(steps / rounds)
        for turn in range(rounds):
            for name in self.names:
                window = self.measure(f"{name} alone", STOCK, (name,), each)
                self.seen.alone.setdefault(name, []).append(window)
            for case, run in (("together", STOCK), ("crux", CRUX)):
                before = self._sent()
                window = self.measure(f"round {turn + 1}: {case}", run, self.names, each)
                self.seen.windows.setdefault(case, []).append(window)
                total = self.seen.bytes.setdefault(case, {})
                for spine, sent in self._sent().items():
                    total[spine] = total.get(spine, 0) + sent - before[spine]
        self.seen.spines["crux"] = self._spines(CRUX)

    def count(self, steps: int = 3) -> None:
        """Lets each job under Crux run alone, and sees which spine's counters grow."""
        for name in self.names:
            self.measure(f"{name} alone, counted", CRUX, (name,), 1)
            before = self._sent()
            self.measure(f"{name} alone, counted", CRUX, (name,), steps)
            sent = self._sent()
            self.seen.counted[name] = {spine: sent[spine] - before[spine] for spine in sent}

    def finish(self) -> dict[str, dict[str, list[Step]]]:
        self.seen.status = self.status
        self.seen.steps = super().finish()
        return self.seen.steps

    def _sent(self) -> dict[int, int]:
        """Bytes that each spine has forwarded."""
        total = dict.fromkeys(range(self._network.spec.spines), 0)
        for link in self._network.counters():
            if link.link.startswith("spine"):
                spine = int(link.link.removeprefix("spine").split("-")[0])
                total[spine] += sum(link.bytes.values())
        return total

    def _spines(self, run: str) -> dict[str, int]:
        """The spine that the leaves' kernels choose for each job's busiest connection."""
        found = {}
        for name in self.names:
            here, there = self._ends[name]
            with sockets.busiest(self.jobs[f"{name}-{run}"].workers()[0]) as connection:
                ports = connection.getsockname()[1], connection.getpeername()[1]
            ways = {
                self._network.spine_taken(here, there, *ports),
                self._network.spine_taken(there, here, *ports[::-1]),
            }
            if len(ways) > 1:
                raise JobError(f"{name}: its two directions take different spines: {ways}")
            found[name] = ways.pop()
        return found


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
