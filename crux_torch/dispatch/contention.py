"""Choices for a new job beside the jobs that run, by the utilisation of the whole cluster.

Crux plans the running jobs and the newcomer together, and a rehearsal plays the plan. That takes
some 50 ms a choice. So a closed form proposes the choices: the newcomer's bandwidth on what the
running jobs leave of each link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from crux_torch.agreement.records import JobRecord
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Floats, Ints, count
from crux_torch.dispatch.search import Choice, alternatives, limit, ring_of_hosts, strongest
from crux_torch.network.topology import Link as Cable
from crux_torch.network.topology import Topology, TopologyBuilder
from crux_torch.schedule.default.crux import crux
from crux_torch.schedule.default.rehearsal import Length, Rehearsal
from crux_torch.schedule.model import (
    Burst,
    Cluster,
    Decision,
    Flow,
    Job,
    Link,
    Scheduler,
    SchedulerOptions,
)
from crux_torch.schedule.papers.crux import alone
from crux_torch.schedule.papers.intensity import link_traffic


@dataclass(frozen=True)
class Newcomer:
    """A data-parallel job, for any number of devices.

    Attributes:
        reduced_bytes: what every rank reduces in an iteration (its gradients).
        compute_s: seconds of an iteration in which its devices compute.
        device_flops: FLOPs of an iteration on each device.
        bursts: when in the iteration it communicates.
    """

    reduced_bytes: float
    compute_s: float
    device_flops: float = 1.0
    bursts: tuple[Burst, ...] = (Burst(0.5, 1.0),)

    def crossing_bytes(self, k: int) -> float:
        """Bytes that a ring all-reduce of ``k`` ranks sends over each hop in an iteration."""
        return self.reduced_bytes * 2 * (k - 1) / k

    def job(
        self, name: str, cluster: DispatchCluster, choice: Ints, topology: Topology
    ) -> tuple[Job, dict[Link, float]]:
        """The job on a choice, and the capacities of links that only it has.

        A ring over all ranks crosses from each host to the next one, by all NICs that both have.
        The part within a host is one link of the table's bandwidth.

        Raises:
            DispatchError: for a set of a host that its table does not have.
        """
        k = int(count(choice))
        crossing = self.crossing_bytes(k)
        inside = cluster.inside_Bps(choice[None])[0]
        flows: list[Flow] = []
        own: dict[Link, float] = {}
        involved = np.flatnonzero(choice).tolist()
        hosts = [cluster.tables[h].host for h in involved]
        for h in involved:
            if not inside[h]:
                raise DispatchError(f"a set of {cluster.tables[h].host!r} was not measured")
            if np.isfinite(inside[h]):
                link = f"within {cluster.tables[h].host}, {name}"
                own[link] = float(inside[h])
                flows.append(Flow(crossing, ((link,),)))
        ring = ring_of_hosts(hosts, topology)
        for src, dst in zip(ring, (*ring[1:], ring[0]), strict=True):
            if src == dst:
                continue
            pairs = list(zip(_ends(topology, src), _ends(topology, dst), strict=False))
            for one, other in pairs:
                paths = topology.candidate_paths(one, other)
                flows.append(Flow(crossing / len(pairs), paths))
        flops = self.device_flops * k
        return Job(name, k, flops, self.compute_s, tuple(flows), self.bursts), own


def like(record: JobRecord) -> Newcomer:
    """A newcomer that computes and reduces in an iteration what a running job does.

    Raises:
        DispatchError: the job was not profiled yet, or it moves nothing between hosts.
    """
    profile = record.profile
    if profile is None:
        raise DispatchError(f"job {record.job!r} was not measured yet: wait, or name another one")
    largest = max((flow.bytes for flow in profile.flows), default=0.0)
    if not largest:
        raise DispatchError(f"job {record.job!r} moves nothing between hosts: name another one")
    ranks = profile.gpus
    shares = [burst.share for burst in profile.bursts]
    total = sum(shares)
    bursts = tuple(Burst(b.at, b.share / total) for b in profile.bursts) if total else ()
    return Newcomer(
        reduced_bytes=largest * ranks / (2 * (ranks - 1)) if ranks > 1 else largest,
        compute_s=profile.compute_s,
        device_flops=profile.flops / ranks,
        bursts=tuple(sorted(bursts, key=lambda b: b.at)) or (Burst(0.5, 1.0),),
    )


def typical(records: Sequence[JobRecord]) -> Newcomer | None:
    """One like the running job that reduces the median of bytes; None if none is measured."""
    known = []
    for record in records:
        try:
            known.append(like(record))
        except DispatchError:
            continue
    known.sort(key=lambda one: one.reduced_bytes)
    return known[len(known) // 2] if known else None


def star(cluster: DispatchCluster) -> Topology:
    """The network where no topology is known: each host's link to one switch."""
    builder = TopologyBuilder()
    builder.node("(switch)", "tor")
    for table, rate_Bps in zip(cluster.tables, cluster.uplink_Bps.tolist(), strict=True):
        builder.cable(builder.node(table.host, "host"), "(switch)", Cable(rate_Bps))
    return builder.build()


def uplinks_Bps(topology: Topology, hosts: Collection[str]) -> Mapping[str, float]:
    """One direction of all links of each of ``hosts`` into the network.

    Raises:
        DispatchError: for a host that is not in the topology.
    """
    total = dict.fromkeys(hosts, 0.0)
    for edge in topology.edges:
        host = topology.nodes[edge.src].host
        if host in total and topology.nodes[edge.dst].host is None:
            total[host] += edge.link.capacity_Bps
    for host, rate_Bps in total.items():
        if not rate_Bps:
            raise DispatchError(f"host {host!r} is not in the topology, or it has no link there")
    return total


def _ends(topology: Topology, host: str) -> Sequence[str]:
    return topology.inside(host, "nic") or (host,)


#: How long a plan is played for the score of one choice.
PLAYED = Length(phases=4, iterations=300, rounds=10)
#: Choices that are proposed of each kind, that are played first, and that each exchange plays.
PROPOSED, PLAYED_FIRST, EXCHANGED, EXCHANGES = 8, 16, 8, 3
#: Utilisations that differ by less are equal: the bandwidth decides.
EQUAL = 5e-4


class Contention:
    """Scores choices for one newcomer.

    Args:
        cluster: the hosts; their tables have to be of hosts of ``topology``.
        running: the jobs that run, as the scheduler sees them
            (:func:`crux_torch.agreement.inputs.plan_inputs`).
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
    ) -> None:
        for table in cluster.tables:
            if table.host not in topology.hosts:
                raise DispatchError(f"host {table.host!r} has a table, and is not in the topology")
        self._cluster, self._topology, self._newcomer = cluster, topology, newcomer
        self._running = running
        self._scheduler, self._options = scheduler, options or SchedulerOptions()
        self._known: dict[bytes, Choice] = {}
        names = {job.name for job in running.jobs}
        self._name = "newcomer"
        while self._name in names:
            self._name += "'"

    def scored(self, devices: Ints) -> Choice:
        """A choice of ``devices``, scored."""
        key = devices.tobytes()
        if key not in self._known:
            alone_Bps, now_Bps = self.bandwidths_Bps(devices)
            nominal_Bps = self._cluster.weakest_link_Bps(devices[None])[0]
            slower = alone_Bps < 0.999 * nominal_Bps
            why = "the network" if slower else limit(self._cluster, devices)
            busy = self._utilisation(devices)
            self._known[key] = Choice(devices, alone_Bps, why, now_Bps, busy)
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

    def best(self, free: Ints, k: int, unit: int = 1) -> list[Choice]:
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
        found = self._ranked(map(self.scored, first))
        for _ in range(EXCHANGES):
            moved = _distinct(_exchanges(self._cluster, found[0].devices, free))
            moved = [choice for choice in moved if choice.tobytes() not in self._known]
            moved.sort(key=lambda choice: -self.bandwidths_Bps(choice)[1])
            before = found[0]
            found = self._ranked((*found, *map(self.scored, moved[:EXCHANGED])))
            if found[0] is before:
                break
        return found

    @staticmethod
    def _ranked(choices: Iterable[Choice]) -> list[Choice]:
        return sorted(choices, key=lambda c: (-round(c.worth / EQUAL), -(c.now_Bps or 0.0)))

    def _proposals(self, free: Ints, k: int, unit: int) -> Iterator[Ints]:
        for cluster in (self._cluster, DispatchCluster(self._cluster.tables, self._left_of_hosts)):
            yield from (a.devices for a in islice(alternatives(cluster, free, k, unit), PROPOSED))
        yield from _compact(self._cluster, self._topology, free, k, unit)

    @cached_property
    def _decision(self) -> Decision:
        return self._scheduler(self._running, self._options)

    @cached_property
    def _left_Bps(self) -> dict[Link, float]:
        """Bytes/s that the running jobs leave of each link: the idle ones, or an even share."""
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
        """Bytes/s left of each host's links to the network, in the direction that has less."""
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
        rehearsal = Rehearsal(cluster, PLAYED, seed=self._options.seed)
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
    number = count(free[:, None]).tolist()
    names = [table.host for table in cluster.tables]
    for home in np.flatnonzero(free).tolist():

        def distance(host: int, home: int = home) -> tuple[int, int]:
            away = topology.candidate_paths(names[home], names[host], 1)[0]
            return len(away), -number[host]

        allowed, room = np.zeros_like(free), 0
        for host in sorted(np.flatnonzero(free).tolist(), key=distance):
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
