"""Which devices to give to a newcomer beside the jobs that run: by the cluster's utilisation.

A choice is worth what the cluster's GPUs do with the job there. Crux plans the running jobs and the
newcomer together (:mod:`crux_torch.schedule.policy`), and a rehearsal plays the plan
(:mod:`crux_torch.schedule.rehearsal`). That takes some 50 ms a choice. So a closed form proposes
the choices: the newcomer's bandwidth on what the running jobs leave of each link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from crux_torch.dispatch.alternatives import alternatives
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Floats, Ints, count
from crux_torch.dispatch.newcomer import Newcomer
from crux_torch.dispatch.search import strongest
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.intensity import link_traffic
from crux_torch.schedule.model import Cluster, Decision, Link, Scheduler, SchedulerOptions
from crux_torch.schedule.placing import alone
from crux_torch.schedule.policy import crux
from crux_torch.schedule.rehearsal import Length, Rehearsal

#: How long a plan is played for the score of one choice.
PLAYED = Length(phases=4, iterations=300, rounds=10)
#: Choices that are proposed of each kind, that are played first, and that each exchange plays.
PROPOSED, PLAYED_FIRST, EXCHANGED, EXCHANGES = 8, 16, 8, 3
#: Utilisations that differ by less are equal: the bandwidth decides.
EQUAL = 5e-4


@dataclass(frozen=True, eq=False)
class Placement:
    """A choice beside running jobs.

    Attributes:
        alone_Bps: bandwidth on the topology's paths while no other job runs.
        now_Bps: on what the running jobs leave: of each link the idle share, or an even share.
        utilisation: share of the time in which the GPUs of all jobs compute, the newcomer's
            included, under Crux's plan for all of them.
    """

    choice: Ints
    alone_Bps: float
    now_Bps: float
    utilisation: float


class Contention:
    """Scores choices for one newcomer.

    Args:
        cluster: the hosts; their tables have to be of hosts of ``topology``.
        running: the jobs that run, as the scheduler sees them
            (:func:`crux_torch.control.inputs.plan_inputs`).
        scheduler, options: the plan that will be in force.
    """

    def __init__(
        self,
        cluster: DispatchCluster,
        topology: Topology,
        running: Cluster,
        newcomer: Newcomer,
        *,
        scheduler: Scheduler = crux,
        options: SchedulerOptions | None = None,
        length: Length = PLAYED,
    ) -> None:
        for table in cluster.tables:
            if table.host not in topology.hosts:
                raise DispatchError(f"host {table.host!r} has a table, and is not in the topology")
        self._cluster, self._topology, self._newcomer = cluster, topology, newcomer
        self._running = running
        self._scheduler, self._options = scheduler, options or SchedulerOptions()
        self._length = length
        self._known: dict[bytes, Placement] = {}
        names = {job.name for job in running.jobs}
        self._name = "newcomer"
        while self._name in names:
            self._name += "'"

    def placement(self, choice: Ints) -> Placement:
        """A choice, scored."""
        key = choice.tobytes()
        if key not in self._known:
            alone_Bps, now_Bps = self.bandwidths_Bps(choice)
            self._known[key] = Placement(choice, alone_Bps, now_Bps, self._utilisation(choice))
        return self._known[key]

    def bandwidths_Bps(self, choice: Ints) -> tuple[float, float]:
        """Bytes/s alone, and on what the running jobs leave; infinite for one device."""
        job, own = self._newcomer.job(self._name, self._cluster, choice, self._topology)
        if not job.flows or not self._newcomer.reduced_bytes:
            return np.inf, np.inf
        crossing = self._newcomer.crossing_bytes(job.gpus)
        whole = {**self._topology.capacity_Bps, **own}
        found = []
        for capacity_Bps in (whole, {**self._left_Bps, **own}):
            on = {e: capacity_Bps[e] for f in job.flows for path in f.candidates for e in path}
            found.append(crossing / alone(job, on).t_s)
        return found[0], found[1]

    def best(self, free: Ints, k: int, unit: int = 1) -> list[Placement]:
        """Choices of ``k`` free devices, the best first.

        Proposed are the strongest by bandwidth, with and without the running jobs, and compact ones
        around each host. Then devices of the best one are exchanged while that helps. Every host
        gives a multiple of ``unit``.

        Raises:
            DispatchError: if there is no choice at all.
        """
        proposed = _distinct(self._proposals(free, k, unit))
        by_bandwidth = proposed[:1]
        proposed.sort(key=lambda choice: -self.bandwidths_Bps(choice)[1])
        first = _distinct([*by_bandwidth, *proposed[:PLAYED_FIRST]])
        found = self._ranked(map(self.placement, first))
        for _ in range(EXCHANGES):
            moved = _distinct(_exchanges(self._cluster, found[0].choice, free))
            moved = [choice for choice in moved if choice.tobytes() not in self._known]
            moved.sort(key=lambda choice: -self.bandwidths_Bps(choice)[1])
            before = found[0]
            found = self._ranked((*found, *map(self.placement, moved[:EXCHANGED])))
            if found[0] is before:
                break
        return found

    @staticmethod
    def _ranked(placements: Iterable[Placement]) -> list[Placement]:
        return sorted(placements, key=lambda p: (-round(p.utilisation / EQUAL), -p.now_Bps))

    def _proposals(self, free: Ints, k: int, unit: int) -> Iterator[Ints]:
        for cluster in (self._cluster, DispatchCluster(self._cluster.tables, self._left_of_hosts)):
            yield from (a.choice for a in islice(alternatives(cluster, free, k, unit), PROPOSED))
        yield from _compact(self._cluster, self._topology, free, k, unit)

    @cached_property
    def _decision(self) -> Decision:
        return self._scheduler(self._running, self._options)

    @cached_property
    def _left_Bps(self) -> dict[Link, float]:
        """What the running jobs leave of each link: what is idle, or an even share of it."""
        busy: dict[Link, float] = {}
        sharing: dict[Link, int] = {}
        for job in self._running.jobs:
            traffic = link_traffic(job, self._decision.path[job.name])
            capacity_Bps = {e: self._running.capacity_Bps[e] for e in traffic}
            t_s = max((moved / capacity_Bps[e] for e, moved in traffic.items()), default=0.0)
            period_s = max(job.compute_s, t_s)
            for link, moved in traffic.items():
                busy[link] = busy.get(link, 0.0) + moved / period_s
                sharing[link] = sharing.get(link, 0) + 1
        return {
            link: max(capacity_Bps - busy.get(link, 0.0), capacity_Bps / (1 + sharing.get(link, 0)))
            for link, capacity_Bps in self._topology.capacity_Bps.items()
        }

    @cached_property
    def _left_of_hosts(self) -> Floats:
        """Of each host's links to the network, the direction that has less left."""
        out = dict.fromkeys(self._topology.hosts, 0.0)
        into = dict(out)
        nodes = self._topology.nodes
        for edge in self._topology.edges:
            src, dst = nodes[edge.src].host, nodes[edge.dst].host
            if src is not None and dst is None:
                out[src] += self._left_Bps[edge.name]
            elif dst is not None and src is None:
                into[dst] += self._left_Bps[edge.name]
        return np.array([min(out[t.host], into[t.host]) for t in self._cluster.tables])

    def _utilisation(self, choice: Ints) -> float:
        job, own = self._newcomer.job(self._name, self._cluster, choice, self._topology)
        capacity_Bps = {**self._running.capacity_Bps, **self._topology.capacity_Bps, **own}
        cluster = Cluster(capacity_Bps, (*self._running.jobs, job))
        decision = self._scheduler(cluster, self._options)
        rehearsal = Rehearsal(cluster, self._length, seed=self._options.seed)
        routes = [rehearsal.route(i, decision.path[j.name]) for i, j in enumerate(rehearsal.jobs)]
        levels = np.array([[decision.level[j.name] for j in rehearsal.jobs]])
        (busy,) = rehearsal.busy_gpus([(routes, levels)])
        return float(busy[0]) / sum(j.gpus for j in cluster.jobs)


def _distinct(choices: Iterable[Ints]) -> list[Ints]:
    return list({choice.tobytes(): choice for choice in choices}.values())


def _compact(
    cluster: DispatchCluster, topology: Topology, free: Ints, k: int, unit: int
) -> Iterator[Ints]:
    """Around each host: its own free devices, then those of the hosts that are nearest to it."""
    number = [bin(members).count("1") for members in free.tolist()]
    names = [table.host for table in cluster.tables]
    for home in np.flatnonzero(free).tolist():

        def far(host: int, home: int = home) -> tuple[int, int]:
            away = topology.candidate_paths(names[home], names[host], 1)[0]
            return len(away), -number[host]

        allowed, room = np.zeros_like(free), 0
        for host in sorted(np.flatnonzero(free).tolist(), key=far):
            allowed[host] = free[host]
            room += number[host] // unit * unit
            if room >= k:
                break
        if room >= k:
            try:
                yield strongest(cluster, allowed, k, unit)
            except DispatchError:
                continue


def _exchanges(cluster: DispatchCluster, choice: Ints, free: Ints) -> Iterator[Ints]:
    """``choice`` with all of one host's devices on another host."""
    for host in np.flatnonzero(choice).tolist():
        number = bin(int(choice[host])).count("1")
        without = choice.copy()
        without[host] = 0
        for other in range(len(free)):
            if other == host:
                continue
            room = free[other] & ~without[other]
            if bin(int(room)).count("1") < number:
                continue
            total = number + bin(int(without[other])).count("1")
            allowed = np.zeros_like(free)
            allowed[other] = free[other]
            moved = without.copy()
            try:
                moved[other] = strongest(cluster, allowed, total)[other]
            except DispatchError:
                continue
            assert count(moved) == count(choice)
            yield moved
