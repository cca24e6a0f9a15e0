"""The job that is to be placed: what it computes and moves, and its flows on a choice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crux_torch.control.records import JobRecord
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Ints, count
from crux_torch.dispatch.order import ring_of_hosts
from crux_torch.fabric.topology import Link as Cable
from crux_torch.fabric.topology import Topology, TopologyBuilder
from crux_torch.schedule.model import Burst, Flow, Job, Link


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
        """What a ring all-reduce of ``k`` ranks sends over each hop in an iteration."""
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
