"""Collectives of placed ranks as flows over the topology: ring, tree, all-to-all, hierarchical.

How many bytes go from whom to whom is the profile's own arithmetic
(:func:`crux_torch.profile.traffic.flows`), applied to GPUs in place of hosts; what is decided here
is the order of the GPUs, which NIC a hop leaves by, and which links it may cross.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from crux_torch.fabric.topology import CANDIDATE_LIMIT, Topology
from crux_torch.profile import traffic
from crux_torch.schedule.model import Burst, Flow, Job, Path
from crux_torch.sim.catalogue import A100_FLOPS, Model, WorkloadError
from crux_torch.sim.parallelism import Collective, Layout, iteration, layout_of

Algorithm = Literal["ring", "tree", "hierarchical"]
#: Bytes from one GPU (or host, where a topology has no GPUs) to another.
Transfers = dict[tuple[str, str], float]


def build_job(
    name: str,
    model: Model,
    gpus: Sequence[str],
    topology: Topology,
    *,
    layout: Layout | None = None,
    algorithm: Algorithm = "ring",
    gradient_start: float = 0.5,
    buckets: int = 1,
    connections: int = 1,
    candidate_limit: int | None = CANDIDATE_LIMIT,
    alltoall_peers: int | None = None,
    peak_flops: float = A100_FLOPS,
    paths: Callable[[str, str], tuple[Path, ...]] | None = None,
) -> Job:
    """The job that trains ``model`` on ``gpus``, as schedulers see it.

    Args:
        name: of the job.
        model: what is trained.
        gpus: the GPU (or host) of each rank.
        topology: the network; gives each flow its candidate paths.
        layout: default: the model's own (:func:`crux_torch.sim.parallelism.layout_of`).
        algorithm: of the all-reduces.
        gradient_start: see :func:`crux_torch.sim.parallelism.iteration`.
        buckets: likewise.
        connections: flows that a hop is split into, each with a path of its own.
        candidate_limit: the most paths of one flow.
        alltoall_peers: see :func:`transfers`.
        peak_flops: FLOP/s of one device.
        paths: gives the candidates of two ends in the topology's place, which then are not limited.

    Raises:
        WorkloadError: the layout doesn't have as many ranks as there are GPUs.
    """
    if connections < 1:
        raise WorkloadError(f"connections is {connections}; expected 1 or more")
    layout = layout or layout_of(model, len(gpus))
    if layout.gpus != len(gpus):
        raise WorkloadError(f"a layout of {layout.gpus} ranks on {len(gpus)} GPUs")
    between = paths or partial(topology.candidate_paths, limit=candidate_limit)
    total: Transfers = {}
    bytes_at: dict[float, float] = defaultdict(float)
    for collective in iteration(model, layout, gradient_start=gradient_start, buckets=buckets):
        moved = transfers(collective, gpus, topology, algorithm, alltoall_peers)
        part = contended(moved, topology)
        traffic.add_flows(total, part)
        bytes_at[collective.at] += sum(part.values())
    return Job(
        name=name,
        gpus=len(gpus),
        flops=model.flops_per_gpu * len(gpus),
        compute_s=model.compute_s(peak_flops) * (1 + layout.bubble),
        flows=tuple(
            Flow(size / connections, between(src, dst))
            for (src, dst), size in total.items()
            for _ in range(connections)
        ),
        bursts=_bursts(bytes_at),
    )


def transfers(
    collective: Collective,
    gpus: Sequence[str],
    topology: Topology,
    algorithm: Algorithm = "ring",
    alltoall_peers: int | None = None,
) -> Transfers:
    """Bytes from GPU to GPU of one iteration's runs of ``collective``, hosts' inner hops included.

    Args:
        collective: what is run.
        gpus: the GPU (or host) of each rank.
        topology: tells which GPUs share a host and a NIC.
        algorithm: of an all-reduce: ``ring``, as many as a host has NICs, each through its own;
            ``tree``, NCCL's double binary tree over the hosts; ``hierarchical``, reduce-scatter
            within hosts, rings between GPUs of the same place, all-gather within hosts.
        alltoall_peers: the most other hosts that each host's all-to-all is spread over. Every host
            then sends as many bytes as it would to all, to hosts at even distances in the order of
            ranks: what leaves a host is exact, what the links between switches carry is a sample.
            None: to all, which takes as many flows as there are pairs of hosts.
    """
    total: Transfers = {}
    for group in collective.groups:
        members = [gpus[rank] for rank in group]
        if collective.op == "send":
            part = _counted("send", collective.bytes, members, peer=1)
        elif collective.op == "alltoall":
            part = _alltoall(collective.bytes, members, topology, alltoall_peers)
        elif algorithm == "ring":
            part = _rings(collective.bytes, members, topology)
        elif algorithm == "tree":
            part = _trees(collective.bytes, members, topology)
        else:
            part = _hierarchical(collective.bytes, members, topology)
        traffic.add_flows(total, part, collective.count)
    return total


def contended(moved: Transfers, topology: Topology) -> Transfers:
    """The transfers that can meet another job's.

    NVLink belongs to the two GPUs that it joins, and the share of peak that a model achieves was
    measured with its traffic, so hops within a host that has it are left out.
    """
    return {
        (src, dst): size
        for (src, dst), size in moved.items()
        if (host := topology.host_of(src)) != topology.host_of(dst)
        or (src != dst and not topology.inside(host or "", "nvswitch"))
    }


def _counted(op: str, size: float, members: Sequence[str], **how: object) -> Transfers:
    """The profile's arithmetic with GPUs as places."""
    return traffic.flows(op, size, range(len(members)), members, **how)  # type: ignore[arg-type]


def _rings(size: float, members: Sequence[str], topology: Topology) -> Transfers:
    hosts = _by_host(members, topology)
    channels = _channels(hosts, topology)
    total: Transfers = {}
    for channel in range(channels):
        order = [gpu for i, h in enumerate(hosts) for gpu in _ring_order(h, channel, i, topology)]
        traffic.add_flows(total, _counted("allreduce", size / channels, order))
    return total


def _trees(size: float, members: Sequence[str], topology: Topology) -> Transfers:
    """Double binary trees between the hosts' first GPUs; chains below them within the hosts."""
    hosts = _by_host(members, topology)
    channels = _channels(hosts, topology)
    total: Transfers = {}
    for channel in range(channels):
        chains = [_ring_order(h, channel, 0, topology) for h in hosts]
        heads = [chain[0] for chain in chains]
        part = size / channels
        traffic.add_flows(total, _counted("allreduce", part, heads, algorithm="tree"))
        for chain in chains:
            traffic.add_flows(total, _counted("reduce", part, chain, peer=0))
            traffic.add_flows(total, _counted("broadcast", part, chain, peer=0))
    return total


def _hierarchical(size: float, members: Sequence[str], topology: Topology) -> Transfers:
    hosts = _by_host(members, topology)
    rails = min(map(len, hosts))
    total: Transfers = {}
    for local in hosts:
        traffic.add_flows(total, _counted("reduce_scatter", size, local))
        traffic.add_flows(total, _counted("allgather", size, local))
    for rail in range(rails):
        peers = [local[rail * len(local) // rails] for local in hosts]
        traffic.add_flows(total, _counted("allreduce", size / rails, peers))
    return total


def _alltoall(
    size: float, members: Sequence[str], topology: Topology, peers: int | None
) -> Transfers:
    """Between hosts over NICs of the same place, as NCCL's PXN does: GPUs there carry for others.

    The ranks of a host give the same to every other host, so one of them is counted for all.
    """
    hosts = _by_host(members, topology)
    homes = [topology.host_of(gpu) or gpu for gpu in members]
    first = {home: i for i, home in reversed(list(enumerate(homes)))}
    local = dict(zip(dict.fromkeys(homes), hosts, strict=True))
    names = list(local)
    total: Transfers = {}
    for i, home in enumerate(names):
        if peers is None or len(names) - 1 <= peers:
            given = _counted("alltoall", size, homes, my_rank=first[home])
        else:
            away = size * (len(homes) - len(local[home])) / len(homes)
            others = len(names) - 1
            steps = (1 + (2 * k + 1) * others // (2 * peers) for k in range(peers))
            given = {(home, names[(i + s) % len(names)]): away / peers for s in steps}
        for (src, dst), moved in given.items():
            pairs = _rail_pairs(local[src], local[dst], topology)
            share = moved * len(local[home]) / len(pairs)
            traffic.add_flows(total, dict.fromkeys(pairs, share))
    for gpus in hosts:
        for gpu in gpus:
            within = {(gpu, other): size / len(members) for other in gpus if other != gpu}
            traffic.add_flows(total, within)
    return total


def _rail_pairs(
    src: Sequence[str], dst: Sequence[str], topology: Topology
) -> list[tuple[str, str]]:
    """GPUs of two hosts, one for each NIC, paired in the order of the NICs."""
    ours, theirs = _by_nic(src, topology), _by_nic(dst, topology)
    rails = min(len(ours), len(theirs))
    return [(ours[i][0], theirs[i][0]) for i in range(rails)]


def _by_host(members: Sequence[str], topology: Topology) -> list[tuple[str, ...]]:
    """The members host by host; hosts and members in the order in which they come."""
    hosts: dict[str, list[str]] = {}
    for gpu in members:
        hosts.setdefault(topology.host_of(gpu) or gpu, []).append(gpu)
    return [tuple(local) for local in hosts.values()]


def _channels(hosts: Sequence[tuple[str, ...]], topology: Topology) -> int:
    """Rings or trees side by side: as many as the host with the fewest NICs in use has."""
    return min(len(_by_nic(local, topology)) for local in hosts)


def _ring_order(
    local: tuple[str, ...], channel: int, position: int, topology: Topology
) -> tuple[str, ...]:
    """A host's part of a ring that enters and leaves through the NIC of ``channel``.

    It starts at the second GPU of that NIC and comes round to the first. Every other host runs it
    backwards, so that a hop between hosts joins NICs of the same place (NCCL's rings do both).
    """
    nics = _by_nic(local, topology)
    near = nics[channel % len(nics)]
    start = (local.index(near[0]) + (1 if len(near) > 1 else 0)) % len(local)
    order = local[start:] + local[:start]
    return order[::-1] if position % 2 else order


def _by_nic(local: Sequence[str], topology: Topology) -> tuple[tuple[str, ...], ...]:
    """The GPUs of one host by the NIC that their traffic leaves through."""
    nics: dict[tuple[str, ...], list[str]] = {}
    for gpu in local:
        nics.setdefault(topology.nearest_nics(gpu), []).append(gpu)
    return tuple(map(tuple, nics.values()))


def _bursts(bytes_at: dict[float, float]) -> tuple[Burst, ...]:
    total = sum(bytes_at.values())
    if not total:
        return (Burst(1.0, 1.0),)
    return tuple(Burst(at, moved / total) for at, moved in sorted(bytes_at.items()) if moved)
