"""Free GPUs of this host for a launcher (``--crux-dispatch``), and a model of their links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from math import comb

import numpy as np

from crux_torch.dispatch.cluster import (
    MAX_DEVICES,
    DispatchCluster,
    DispatchError,
    HostTable,
    table_of,
)
from crux_torch.dispatch.search import ring_of_devices, strongest
from crux_torch.host.activity import VISIBLE, visible_gpus
from crux_torch.host.nvml import Gpu, NvmlReport
from crux_torch.host.pcie import Distance

#: Sets whose rings are tried one by one; more take longer than a launch should.
MAX_SETS, MAX_RING = 256, 8
#: One direction of 16 lanes at 16 GT/s (PCI Express 4.0), of one NVLink 2 to 4, and of three UPI
#: links between sockets.
PCIE4_BPS, NVLINK_BPS, UPI_BPS = 31.5e9, 25e9, 62.4e9

Hop = tuple[str, float]


@dataclass(frozen=True)
class HostModel:
    """A host's GPUs and what connects them.

    Attributes:
        nvlinks: number of NVLinks between two GPUs, by their numbers, the smaller first.
        nvlink_Bps: one direction of one of these.
        nvswitch_Bps: one direction between a GPU and the NVSwitch; 0: there is none.
        groups: for each GPU the PCIe root port that it shares with the others of its group.
        sockets: the socket of each group; by default the first half of the groups is on one socket,
            the other on another.
        pcie_Bps, socket_Bps: one direction of a PCIe link, and between the two sockets.
        peer_to_peer: False where GPUs of a group exchange through the host's memory, as GeForce
            boards do. The group then shares one root port, so GPUs that are far apart do better
            (the paper's "anti-locality", §2.2).
    """

    groups: tuple[int, ...]
    pcie_Bps: float = PCIE4_BPS
    socket_Bps: float = UPI_BPS
    nvlinks: tuple[tuple[int, int, int], ...] = ()
    nvlink_Bps: float = NVLINK_BPS
    nvswitch_Bps: float = 0.0
    peer_to_peer: bool = True
    sockets: tuple[int, ...] = ()

    def socket(self, group: int) -> int:
        """The socket of a group."""
        return self.sockets[group] if self.sockets else group // ((max(self.groups) + 1) // 2)

    def links(self, one: int, other: int) -> int:
        """Number of NVLinks between two GPUs."""
        return _links(self.nvlinks).get((min(one, other), max(one, other)), 0)

    def hop(self, src: int, dst: int) -> Iterator[Hop]:
        """The links, with their capacities, that bytes from ``src`` to ``dst`` cross."""
        if links := self.links(src, dst):
            yield f"nvlink {src} {dst}", links * self.nvlink_Bps
            return
        yield f"out of {src}", self.pcie_Bps
        yield f"into {dst}", self.pcie_Bps
        one, other = self.groups[src], self.groups[dst]
        if one != other or not self.peer_to_peer:
            yield f"up from {one}", self.pcie_Bps
            yield f"down to {other}", self.pcie_Bps
        here, there = self.socket(one), self.socket(other)
        if here != there:
            yield f"socket {here} to {there}", self.socket_Bps


@lru_cache
def _links(nvlinks: tuple[tuple[int, int, int], ...]) -> dict[tuple[int, int], int]:
    return {(one, other): number for one, other, number in nvlinks}


def rings_Bps(model: HostModel, gpus: tuple[int, ...]) -> float:
    """Bytes/s of an all-gather over two GPUs or more of a host: that of the best rings over them.

    Every hop of a ring carries the same bytes, so the link that most hops share, for its capacity,
    is the bottleneck.
    """
    if model.nvswitch_Bps:
        return model.nvswitch_Bps
    return max(_one_ring_Bps(model, gpus), _nvlink_rings_Bps(model, gpus))


def _one_ring_Bps(model: HostModel, gpus: tuple[int, ...]) -> float:
    """The best single ring, over any links."""
    best = 0.0
    for rest in permutations(gpus[1:]):
        load: Counter[Hop] = Counter()
        for src, dst in zip((gpus[0], *rest), (*rest, gpus[0]), strict=True):
            load.update(model.hop(src, dst))
        best = max(best, min(capacity / shared for (_, capacity), shared in load.items()))
    return best


def _nvlink_rings_Bps(model: HostModel, gpus: tuple[int, ...]) -> float:
    """As many rings over NVLinks alone as fit at once, as NCCL makes them."""
    if len(gpus) == 2:
        return model.links(*gpus) * model.nvlink_Bps
    edges = [pair for pair in combinations(sorted(gpus), 2) if model.links(*pair)]
    number = {edge: i for i, edge in enumerate(edges)}
    cycles = []
    for rest in permutations(gpus[1:]):
        if rest[0] > rest[-1]:
            continue  # the same cycle the other way round
        pairs = zip((gpus[0], *rest), (*rest, gpus[0]), strict=True)
        ring = [(min(pair), max(pair)) for pair in pairs]
        if all(edge in number for edge in ring):
            cycles.append([number[edge] for edge in ring])
    if not cycles:
        return 0.0
    # Only hosts with such links wait for scipy.
    from scipy.optimize import Bounds, LinearConstraint, milp

    uses = np.zeros((len(edges), len(cycles)))
    for column, cycle in enumerate(cycles):
        uses[cycle, column] = 1
    packed = milp(
        -np.ones(len(cycles)),
        constraints=LinearConstraint(uses, ub=[model.links(*edge) for edge in edges]),
        integrality=np.ones(len(cycles), np.int64),
        bounds=Bounds(0, np.inf),
    )
    number_of_cycles = 0 if packed.x is None else round(float(packed.x.sum()))
    # A cycle carries a ring in either direction.
    return number_of_cycles * 2 * model.nvlink_Bps


@dataclass(frozen=True)
class Chosen:
    """GPUs of this host for a job.

    Attributes:
        gpus: by local rank.
        bandwidth_Bps: between them; infinite for one.
        taken: why others could not be chosen, by number.
    """

    gpus: tuple[Gpu, ...]
    bandwidth_Bps: float
    taken: Mapping[int, str]


def choose(
    report: NvmlReport,
    k: int,
    env: Mapping[str, str],
    claimed: Mapping[str, str],
    table: HostTable | None = None,
) -> Chosen:
    """The ``k`` free GPUs of this host with the most bandwidth between them (``--crux-dispatch``).

    A GPU is taken if NVML sees a process that computes on it, or if a launcher claims it. The
    table's devices are numbers in NVML's order; without a table, NVLinks and PCIe switches decide
    by :func:`rings_Bps`.

    Args:
        report: of NVML, with pairs.
        env: of the launcher: GPUs that CUDA_VISIBLE_DEVICES leaves out are not chosen.
        claimed: jobs by the UUIDs of the GPUs that they claim.

    Raises:
        DispatchError: no NVML, too few free GPUs, or a table that does not have them.
    """
    if report.error is not None or not report.gpus:
        why = report.error or "there is none"
        raise DispatchError(f"this host's GPUs can't be chosen: {why}; name them in {VISIBLE}")
    taken: dict[int, str] = {}
    if VISIBLE in env:
        seen = [gpu for gpu in visible_gpus(report.gpus, env) if gpu is not None]
        taken |= {gpu.index: f"not in {VISIBLE}" for gpu in report.gpus if gpu not in seen}
    for gpu in report.gpus:
        if gpu.uuid in claimed:
            taken[gpu.index] = f"job {claimed[gpu.uuid]}"
        elif gpu.processes:
            taken[gpu.index] = f"{gpu.processes} process{'es' if gpu.processes > 1 else ''}"
        elif gpu.mig:
            taken[gpu.index] = "split by MIG"
    free = [gpu for gpu in report.gpus if gpu.index not in taken]
    if k > len(free):
        reasons = "; ".join(f"{index}: {why}" for index, why in sorted(taken.items()))
        raise DispatchError(
            f"{k} GPUs asked for, and {len(free)} of {len(report.gpus)} are free"
            + (f" ({reasons})" if reasons else "")
        )
    known = estimated(report, free, k) if table is None else table
    names = {str(gpu.index): gpu for gpu in free}
    cluster = DispatchCluster([known], np.array([1.0]))
    lacking = names.keys() - set(known.devices)
    if lacking:
        raise DispatchError(
            f"the table of {known.host!r} has no device {min(lacking)!r}: measure this host"
        )
    choice = strongest(cluster, cluster.choice({known.host: sorted(names)}), k)
    devices = cluster.names(choice)[known.host]
    gpus = tuple(names[name] for name in ring_of_devices(known, devices))
    return Chosen(gpus, float(cluster.weakest_link_Bps(choice[None])[0]), taken)


def estimated(report: NvmlReport, gpus: Sequence[Gpu], k: int) -> HostTable:
    """A table of the sets of two and of ``k`` GPUs by NVLinks and PCIe switches.

    Raises:
        DispatchError: for too many sets, or too large ones.
    """
    if len(gpus) > MAX_DEVICES:
        raise DispatchError(f"{len(gpus)} free GPUs: choose among {MAX_DEVICES} with {VISIBLE}")
    model = model_of(report, gpus)
    hard = not model.nvswitch_Bps and k > 2
    if hard and (comb(len(gpus), k) > MAX_SETS or k > MAX_RING):
        raise DispatchError(
            f"{k} of {len(gpus)} free GPUs have too many rings to try: name a table of `crux "
            "dispatch measure` in place of auto"
        )
    found = {
        sum(1 << i for i in members): rings_Bps(model, members)
        for size in {2, k} - {1}
        for members in combinations(range(len(gpus)), size)
    }
    return table_of("this host", [str(gpu.index) for gpu in gpus], found)


def model_of(report: NvmlReport, gpus: Sequence[Gpu]) -> HostModel:
    """Links between some GPUs, by their places in ``gpus``. PCIe has its nominal rates."""
    place = {gpu.index: i for i, gpu in enumerate(gpus)}
    pairs = [pair for pair in report.pairs if {pair.a, pair.b} <= place.keys()]
    near = [(p.a, p.b) for p in pairs if p.distance is not None and p.distance <= Distance.PXB]
    one_socket = [(p.a, p.b) for p in pairs if p.distance is not None and p.distance < Distance.SYS]
    groups = _parts(place, near)
    sockets = _parts(place, [*near, *one_socket])
    switch = [sum(n.capacity_Bps or 0.0 for n in g.nvlinks if n.kind == "switch") for g in gpus]
    at = {gpu.pci_address: i for i, gpu in enumerate(gpus)}
    counts = {
        (i, at[link.peer]): link
        for i, gpu in enumerate(gpus)
        for link in gpu.nvlinks
        if link.kind == "gpu" and i < at.get(link.peer, -1)
    }
    rates = [link.capacity_Bps / link.count for link in counts.values() if link.capacity_Bps]
    refused = any(p.peer_access not in ("ok", None) for p in pairs if (p.a, p.b) in near)
    return HostModel(
        groups=groups,
        sockets=tuple(dict(zip(groups, sockets, strict=True)).values()),
        nvlinks=tuple((a, b, link.count) for (a, b), link in counts.items()),
        nvlink_Bps=min(rates, default=NVLINK_BPS),
        nvswitch_Bps=min(switch),
        peer_to_peer=not refused,
    )


def _parts(place: Mapping[int, int], joined: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Numbers of the parts that the places are in, in order of appearance."""
    part = list(range(len(place)))
    for a, b in joined:
        one, other = part[place[a]], part[place[b]]
        part = [one if p == other else p for p in part]
    number = {p: i for i, p in enumerate(dict.fromkeys(part))}
    return tuple(number[p] for p in part)
