"""Which free GPUs of this host to give to a job, and in which order (``--crux-dispatch``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from crux_torch.dispatch.cluster import DispatchCluster, DispatchError
from crux_torch.dispatch.hosts import NVLINK_BPS, PCIE4_BPS, UPI_BPS, HostModel, rings_Bps
from crux_torch.dispatch.order import ring_of_devices
from crux_torch.dispatch.search import strongest
from crux_torch.dispatch.table import MAX_DEVICES, HostTable, table_of
from crux_torch.host.nvml import Gpu, NvmlReport
from crux_torch.host.nvml_device import VISIBLE, visible_gpus
from crux_torch.host.pcie import Distance

#: Sets whose rings are tried one by one; more take longer than a launch should.
MAX_SETS, MAX_RING = 256, 8


@dataclass(frozen=True)
class Chosen:
    """GPUs for a job.

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
    """The ``k`` free GPUs with the most bandwidth between them.

    A GPU is taken if NVML sees a process that computes on it, or if a launcher claims it. The
    table's devices are numbers in NVML's order; without a table, NVLinks and PCIe switches decide
    by the ring model of :mod:`crux_torch.dispatch.hosts`.

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
        told = "; ".join(f"{index}: {why}" for index, why in sorted(taken.items()))
        raise DispatchError(
            f"{k} GPUs asked for, and {len(free)} of {len(report.gpus)} are free"
            + (f" ({told})" if told else "")
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
    found = {}
    for size in {2, k} - {1}:
        for members in combinations(range(len(gpus)), size):
            found[sum(1 << i for i in members)] = rings_Bps(model, members)
    return table_of("this host", [str(gpu.index) for gpu in gpus], found)


def model_of(report: NvmlReport, gpus: Sequence[Gpu]) -> HostModel:
    """What connects some GPUs, by their places in ``gpus``. PCIe has its nominal rates."""
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
        kind="this host",
        groups=groups,
        sockets=tuple(dict(zip(groups, sockets, strict=True)).values()),
        pcie_Bps=PCIE4_BPS,
        socket_Bps=UPI_BPS,
        nvlinks=tuple((a, b, link.count) for (a, b), link in counts.items()),
        nvlink_Bps=min(rates, default=NVLINK_BPS),
        nvswitch_Bps=min(switch),
        peer_to_peer=not refused,
    )


def _parts(place: Mapping[int, int], joined: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """For each place the number of the part that it is in, in order of appearance."""
    part = list(range(len(place)))
    for a, b in joined:
        one, other = part[place[a]], part[place[b]]
        part = [one if p == other else p for p in part]
    number = {p: i for i, p in enumerate(dict.fromkeys(part))}
    return tuple(number[p] for p in part)
