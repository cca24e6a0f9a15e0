"""Collectives of placed ranks as flows over the topology: rings and all-to-alls, and their paths.

:func:`crux_torch.measure.traffic.flows`, which also serves measured jobs, gives the bytes from rank
to rank. This module chooses the order of the GPUs and the NIC that each hop leaves by.
"""

from __future__ import annotations

import random
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crux_torch.measure import traffic
from crux_torch.network.paths import hashed_choice, spread
from crux_torch.network.topology import Topology
from crux_torch.schedule.model import Burst, Flow, Job, Path
from crux_torch.sim.catalogue import Collective, Group, Model, iteration, layout_of

#: Bytes from one GPU (or host, where a topology has no GPUs) to another.
Transfers = dict[tuple[str, str], float]


def build_job(
    name: str,
    model: Model,
    gpus: Sequence[str],
    topology: Topology,
    *,
    gradient_start: float = 0.5,
    buckets: int = 1,
    connections: int = 1,
    alltoall_peers: int | None = None,
    paths: Callable[[str, str], tuple[Path, ...]] | None = None,
    apart: bool = True,
) -> Job:
    """The job that trains ``model`` on ``gpus`` (or hosts), one a rank, as schedulers see it.

    Args:
        gradient_start, buckets: see :func:`crux_torch.sim.collectives.iteration`.
        connections: flows that a hop is split into, each with a path of its own.
        alltoall_peers: see :func:`transfers`.
        paths: candidates of two ends; default: the topology's.
        apart: every ring, all-to-all and send moves on its own, as the part of the job that it is;
            otherwise all move as one transfer.
    """
    between = paths or topology.candidate_paths
    shape, places = shape_of(gpus, topology)
    moved, bursts = _moved(model, shape, gradient_start, buckets, alltoall_peers, apart)
    parts = tuple(part for part, *_ in moved for _ in range(connections))
    return Job(
        name=name,
        gpus=len(gpus),
        flops=model.flops_per_gpu * len(gpus),
        compute_s=model.compute_s * (1 + layout_of(model, len(gpus)).bubble),
        flows=tuple(
            Flow(size / connections, between(places[src], places[dst]))
            for _, src, dst, size in moved
            for _ in range(connections)
        ),
        bursts=bursts,
        parts=parts if len(set(parts)) > 1 else (),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """Distances between the ranks of a job: all that its collectives depend on.

    It answers for places, by their numbers as text, what a topology answers for GPUs.

    Attributes:
        ranks: the place of each rank, which is a GPU (or host).
        hosts, nics: of each place: its host, and the set of NICs that its traffic leaves through.
        switched: the hosts with NVLink.
    """

    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    nics: tuple[int, ...]
    switched: frozenset[int]

    def host_of(self, place: str) -> str:
        return str(self.hosts[int(place)])

    def nearest_nics(self, place: str) -> tuple[str, ...]:
        return (str(self.nics[int(place)]),)

    def inside(self, host: str, kind: str) -> tuple[str, ...]:
        return (kind,) if kind == "nvswitch" and int(host) in self.switched else ()


#: The place of each GPU (or host).
Places = Topology | Shape


def shape_of(gpus: Sequence[str], topology: Topology) -> tuple[Shape, tuple[str, ...]]:
    """The shape of a job with a rank on each of ``gpus`` (or hosts); the names of its places."""
    places = {gpu: number for number, gpu in enumerate(dict.fromkeys(gpus))}
    names: dict[str, int] = {}
    reached: dict[tuple[int, tuple[str, ...]], int] = {}
    hosts, nics = [], []
    for place in places:
        host = names.setdefault(topology.host_of(place) or place, len(names))
        hosts.append(host)
        nics.append(reached.setdefault((host, topology.nearest_nics(place)), len(reached)))
    switched = frozenset(i for host, i in names.items() if topology.inside(host, "nvswitch"))
    ranks = tuple(places[gpu] for gpu in gpus)
    return Shape(ranks, tuple(hosts), tuple(nics), switched), tuple(places)


# Jobs of one model that are placed alike differ in nothing but the names of their GPUs.
@lru_cache(maxsize=1 << 10)
def _moved(
    model: Model,
    shape: Shape,
    gradient_start: float,
    buckets: int,
    alltoall_peers: int | None,
    apart: bool,
) -> tuple[tuple[tuple[int, int, int, float], ...], tuple[Burst, ...]]:
    """Transfers of an iteration that may share links with other jobs, and its bursts.

    Each entry has the number of a part, two places, and the bytes from the first to the second.
    """
    layout = layout_of(model, len(shape.ranks))
    ranks = list(map(str, shape.ranks))
    parts: dict[Hashable, Transfers] = {}
    bytes_at: dict[float, float] = defaultdict(float)
    for collective in iteration(model, layout, gradient_start=gradient_start, buckets=buckets):
        found = contended_by_mover(collective, ranks, shape, alltoall_peers, apart=apart)
        for mover, ours in found.items():
            traffic.add_flows(parts.setdefault(mover, {}), ours)
            bytes_at[collective.at] += sum(ours.values())
    moved = tuple(
        (number, int(src), int(dst), size)
        for number, part in enumerate(parts.values())
        for (src, dst), size in part.items()
    )
    return moved, _bursts(bytes_at)


def contended_by_mover(
    collective: Collective,
    gpus: Sequence[str],
    topology: Places,
    alltoall_peers: int | None,
    *,
    apart: bool,
) -> dict[Hashable, Transfers]:
    """The :func:`contended` of the :func:`transfers` of ``collective``, by what moves on its own.

    A ring, all-to-all or send does, if ``apart``; otherwise all is one mover. Collectives of one
    kind that run in the same rings have the same movers.
    """
    found: dict[Hashable, Transfers] = {}
    if apart:
        for group in collective.groups:
            rings = _of_group(collective, group, gpus, topology, alltoall_peers)
            for ring, part in enumerate(rings):
                moved = {pair: size * collective.count for pair, size in part.items()}
                found[collective.op, group, ring] = moved
    else:
        found[()] = transfers(collective, gpus, topology, alltoall_peers)
    return {mover: ours for mover, part in found.items() if (ours := contended(part, topology))}


def transfers(
    collective: Collective, gpus: Sequence[str], topology: Places, alltoall_peers: int | None = None
) -> Transfers:
    """Bytes from GPU to GPU of all runs of ``collective`` in one iteration, also inside hosts.

    ``gpus`` has the GPU (or host) of each rank. With ``alltoall_peers`` each host sends its part of
    an all-to-all to this many other hosts at most, evenly spaced in the order of ranks. The bytes
    that leave a host stay exact; those on links between switches are a sample.
    """
    total: Transfers = {}
    for group in collective.groups:
        whole: Transfers = {}
        for part in _of_group(collective, group, gpus, topology, alltoall_peers):
            traffic.add_flows(whole, part)
        traffic.add_flows(total, whole, collective.count)
    return total


def _of_group(
    collective: Collective,
    group: Group,
    gpus: Sequence[str],
    topology: Places,
    alltoall_peers: int | None,
) -> list[Transfers]:
    """Transfers of a group in one run: one entry for each ring, where it runs as rings."""
    members = [gpus[rank] for rank in group]
    if collective.op == "send":
        return [_counted("send", collective.bytes, members, peer=1)]
    if collective.op == "alltoall":
        return [_alltoall(collective.bytes, members, topology, alltoall_peers)]
    return _rings(collective.bytes, members, topology)


def contended(moved: Transfers, topology: Places) -> Transfers:
    """The transfers that may share links with other jobs.

    Hops inside a host with NVLink are left out: an NVLink belongs to the two GPUs that it joins,
    and the share of peak that a model achieves was measured with that traffic.
    """
    host_of = {place: topology.host_of(place) for pair in moved for place in pair}
    return {
        (src, dst): size
        for (src, dst), size in moved.items()
        if (host := host_of[src]) != host_of[dst]
        or (src != dst and not topology.inside(host or "", "nvswitch"))
    }


def _counted(op: str, size: float, members: Sequence[str], **how: object) -> Transfers:
    """The flows of one collective, with a GPU as each rank's place."""
    return traffic.flows(op, size, range(len(members)), members, **how)  # type: ignore[arg-type]


def _rings(size: float, members: Sequence[str], topology: Places) -> list[Transfers]:
    hosts = list(_by_host(members, topology).values())
    nics = [_by_nic(local, topology) for local in hosts]
    # One ring for each NIC of the host that has the fewest in use.
    channels = min(map(len, nics))
    rings = []
    for channel in range(channels):
        order: list[str] = []
        for i, (local, used) in enumerate(zip(hosts, nics, strict=True)):
            order += _ring_order(local, used[channel % len(used)], i)
        rings.append(_counted("allreduce", size / channels, order))
    return rings


def _alltoall(
    size: float, members: Sequence[str], topology: Places, peers: int | None
) -> Transfers:
    """Between hosts, over NICs of the same index: as with NCCL's PXN, the GPU there forwards.

    All ranks of a host send the same to every other host, so one rank is counted for all of them.
    """
    local = _by_host(members, topology)
    nics = {home: _by_nic(gpus, topology) for home, gpus in local.items()}
    homes = [topology.host_of(gpu) or gpu for gpu in members]
    names = list(local)
    total: Transfers = {}
    for i, home in enumerate(names):
        if peers is None or len(names) - 1 <= peers:
            given = _counted("alltoall", size, homes, my_rank=homes.index(home))
        else:
            away = size * (len(homes) - len(local[home])) / len(homes)
            others = len(names) - 1
            steps = (1 + (2 * k + 1) * others // (2 * peers) for k in range(peers))
            given = {(home, names[(i + s) % len(names)]): away / peers for s in steps}
        for (src, dst), moved in given.items():
            pairs = [
                (ours[0], theirs[0]) for ours, theirs in zip(nics[src], nics[dst], strict=False)
            ]
            share = moved * len(local[home]) / len(pairs)
            traffic.add_flows(total, dict.fromkeys(pairs, share))
    for gpus in local.values():
        for gpu in gpus:
            within = {(gpu, other): size / len(members) for other in gpus if other != gpu}
            traffic.add_flows(total, within)
    return total


def _by_host(members: Sequence[str], topology: Places) -> dict[str, tuple[str, ...]]:
    """The members of each host, in order of appearance."""
    hosts: dict[str, list[str]] = {}
    for gpu in members:
        hosts.setdefault(topology.host_of(gpu) or gpu, []).append(gpu)
    return {host: tuple(local) for host, local in hosts.items()}


def _ring_order(local: tuple[str, ...], near: tuple[str, ...], position: int) -> tuple[str, ...]:
    """A host's part of the ring that enters and leaves through the NIC of the GPUs ``near``.

    It starts at the second GPU of that NIC and ends at the first. Every second host runs it
    backwards, so that a hop between hosts joins NICs of the same index. NCCL's rings do both.
    """
    start = (local.index(near[0]) + (1 if len(near) > 1 else 0)) % len(local)
    order = local[start:] + local[:start]
    return order[::-1] if position % 2 else order


def _by_nic(local: Sequence[str], topology: Places) -> tuple[tuple[str, ...], ...]:
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


#: Paths between two switches that are kept, spread over all; parallel links can make millions.
MIDDLE_LIMIT = 4096


class _Ports(NamedTuple):
    """The ways between a GPU and the switches beside its nearest NICs.

    Attributes:
        beside: of each way, the switch and the cost of the link to it.
        up, down: of each way, its links from the GPU and back to it.
    """

    beside: tuple[tuple[str, int], ...]
    up: tuple[Path, ...]
    down: tuple[Path, ...]


class _Joint(NamedTuple):
    """Paths from one way of a GPU to one way of another: their numbers, the links between."""

    up: int
    down: int
    middle: tuple[Path, ...]


class JoinedPaths:
    """Candidate paths of two GPUs as :meth:`Topology.candidate_paths`, in a tenth of the time.

    If all NICs of a host lead to the same switches at the same cost, a GPU's shortest paths to
    other hosts leave by its nearest NICs. Each is a path to a NIC, a path between two switches, and
    a path from a NIC. Only the middle part is searched, once for each pair of switches. For pairs
    of other hosts, and pairs within a host, the topology is asked. At most ``limit`` paths of a
    pair are given, spread over all of them.
    """

    def __init__(self, topology: Topology, limit: int | None) -> None:
        self._topology = topology
        self._limit = limit
        self._at: dict[str, list[tuple[str, str, int]]] = {}
        self._from: dict[str, list[tuple[str, str, int]]] = {}
        for edge in topology.edges:
            src, dst = topology.nodes[edge.src], topology.nodes[edge.dst]
            if src.host is not None and dst.host is None:
                self._at.setdefault(edge.src, []).append((edge.name, edge.dst, edge.link.cost))
            elif src.host is None and dst.host is not None:
                self._from.setdefault(edge.dst, []).append((edge.name, edge.src, edge.link.cost))
        self._candidates = lru_cache(maxsize=1 << 15)(self._find_candidates)
        self._joints = lru_cache(maxsize=None)(self._find_joints)
        self._middle = lru_cache(maxsize=None)(self._find_middle)
        self._ports = lru_cache(maxsize=None)(self._find_ports)
        self._uniform = lru_cache(maxsize=None)(self._is_uniform)

    def __call__(self, src: str, dst: str) -> tuple[Path, ...]:
        """The candidates from ``src`` to ``dst``, two GPUs; cached, so one object for a pair."""
        return self._candidates(src, dst)

    def _find_candidates(self, src: str, dst: str) -> tuple[Path, ...]:
        home, away = self._topology.host_of(src), self._topology.host_of(dst)
        if home == away or not (home and away and self._uniform(home) and self._uniform(away)):
            return self._topology.candidate_paths(src, dst, self._limit)
        ours, theirs = self._ports(src), self._ports(dst)
        joints = self._joints(ours.beside, theirs.beside)
        total = sum(len(joint.middle) for joint in joints)
        ranks = spread(total, self._limit, zlib.crc32(f"{src} {dst}".encode()))
        found: list[Path] = []
        first = begin = 0  # of the paths by their ranks, and of the ranks
        for joint in joints:
            up, down, middle = ours.up[joint.up], theirs.down[joint.down], joint.middle
            end = bisect_left(ranks, first + len(middle), begin)
            found += [up + middle[rank - first] + down for rank in ranks[begin:end]]
            first, begin = first + len(middle), end
        return tuple(found)

    def _find_joints(
        self, ours: tuple[tuple[str, int], ...], theirs: tuple[tuple[str, int], ...]
    ) -> tuple[_Joint, ...]:
        """Joints of the least cost between the ways of two GPUs."""
        found = []
        for up, (src, cost_up) in enumerate(ours):
            for down, (dst, cost_down) in enumerate(theirs):
                cost, middle = self._middle(src, dst)
                found.append((cost_up + cost + cost_down, _Joint(up, down, middle)))
        best = min(cost for cost, _ in found)
        return tuple(joint for cost, joint in found if cost == best)

    def _find_middle(self, src: str, dst: str) -> tuple[int, tuple[Path, ...]]:
        limit = None if self._limit is None else max(self._limit, MIDDLE_LIMIT)
        paths = self._topology.candidate_paths(src, dst, limit)
        links = self._topology.links
        return sum(links[name].cost for name in paths[0]), paths

    def _find_ports(self, gpu: str) -> _Ports:
        topology = self._topology
        beside, up, down = [], [], []
        for nic in topology.nearest_nics(gpu):
            back = {(switch, cost): name for name, switch, cost in self._from[nic]}
            for out in topology.candidate_paths(gpu, nic, None):
                for into in topology.candidate_paths(nic, gpu, None):
                    for name, switch, cost in self._at[nic]:
                        beside.append((switch, cost))
                        up.append((*out, name))
                        down.append((back[switch, cost], *into))
        return _Ports(tuple(beside), tuple(up), tuple(down))

    def _is_uniform(self, host: str) -> bool:
        """All NICs lead to the same switches and back, and each has one way to its GPUs."""
        nics = self._topology.inside(host, "nic")
        out = [sorted((s, c) for _, s, c in self._at.get(nic, ())) for nic in nics]
        back = [sorted((s, c) for _, s, c in self._from.get(nic, ())) for nic in nics]
        return bool(nics and out[0]) and all(ports == out[0] for ports in out + back)


#: The most paths of one flow.
PATHS_OF_FLOW = 16
#: See :func:`crux_torch.sim.collectives.transfers`.
ALLTOALL_PEERS = 4
#: Source ports that a connection's own is drawn from (RFC 6335: the dynamic ones).
EPHEMERAL_PORTS = range(49152, 65536)


def hashed_paths(job: Job, topology: Topology, *, seed: int = 0) -> tuple[int, ...]:
    """The candidate that ECMP chooses for each flow of ``job``; each flow is one connection.

    ``seed`` is that of the source ports, which have to differ between draws. Another start value of
    the CRC would move all flows alike and leave the collisions as they are.
    """
    ports = random.Random(f"{seed}: ports of {job.name}")
    chosen = []
    for flow in job.flows:
        port = ports.choice(EPHEMERAL_PORTS)
        first = flow.candidates[0]
        src, dst = topology.ends(first[0])[0], topology.ends(first[-1])[1]
        chosen.append(hashed_choice(src, dst, port, len(flow.candidates)))
    return tuple(chosen)
