"""GPUs of a job: at random, on whole hosts, near to each other (HiveD), or interleaved (Muri)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from crux_torch.network.topology import Topology
from crux_torch.schedule.arrays import Arrays, IntArray, Reader, path_links, traffic_entries
from crux_torch.schedule.model import Cluster, Job
from crux_torch.schedule.papers.crux import alone_of
from crux_torch.sim.catalogue import Model, WorkloadError, model
from crux_torch.sim.collectives import (
    ALLTOALL_PEERS,
    PATHS_OF_FLOW,
    JoinedPaths,
    build_job,
    hashed_paths,
)
from crux_torch.sim.play import iteration_alone_s

#: What the cells of each level are; a level that would repeat the one below is left out.
LEVELS = ("gpu", "pcie", "host", "tor", "pod", "cluster")
HOST_LEVEL = LEVELS.index("host")


@dataclass(frozen=True, slots=True)
class Request:
    """GPUs that a job asks for, and seconds of its iteration on GPUs and network, for Muri."""

    name: str
    gpus: int
    compute_s: float = 1.0
    network_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """GPUs that are near to each other: HiveD's cell (Zhao et al., OSDI '20, §3).

    ``level`` is an index into ``LEVELS``; ``children`` are the cells of the level below.
    """

    level: int
    gpus: tuple[str, ...]
    children: tuple[Cell, ...] = ()


class Allocation:
    """The free GPUs of a cluster, and the jobs that hold the others.

    Attributes:
        root: the widest cell.
        levels: the cells of each level that there is, from single GPUs upwards.
    """

    def __init__(self, root: Cell) -> None:
        self.root = root
        self.levels: dict[int, list[Cell]] = {}
        self.running: dict[str, tuple[Request, tuple[str, ...]]] = {}
        self._gpu = {gpu: i for i, gpu in enumerate(root.gpus)}
        for cell in sorted(walk(root), key=lambda c: c.level):
            self.levels.setdefault(cell.level, []).append(cell)
        every = [cell for found in self.levels.values() for cell in found]
        self._number = {cell: i for i, cell in enumerate(every)}
        self._free_in = np.array([len(cell.gpus) for cell in every])
        self._widest = {k: max(len(c.gpus) for c in found) for k, found in self.levels.items()}
        # The cell of each level (column, the narrowest first) that each GPU (row) is in.
        self._above = np.empty((len(root.gpus), len(self.levels)), np.int64)
        for column, found in enumerate(self.levels.values()):
            for cell in found:
                self._above[[self._gpu[gpu] for gpu in cell.gpus], column] = self._number[cell]
        # The cells around each cell, from itself outwards; single GPUs come first of all cells.
        self._around = self._above[[self._gpu[cell.gpus[0]] for cell in every]]
        self._column = {level: column for column, level in enumerate(self.levels)}

    def free(self) -> list[str]:
        """The GPUs that nobody holds, in the order of the topology."""
        return [self.root.gpus[i] for i in np.flatnonzero(self._free_in[self._above[:, 0]])]

    def free_in(self, cell: Cell) -> int:
        """Number of free GPUs of ``cell``."""
        return int(self._free_in[self._number[cell]])

    def free_below(self, cell: Cell) -> dict[Cell, int]:
        """The children of ``cell`` that have free GPUs, and how many."""
        first = self._number[cell.children[0]]
        room = self._free_in[first : first + len(cell.children)].tolist()
        return {child: free for child, free in zip(cell.children, room, strict=True) if free}

    def in_order(self, gpus: Iterable[str]) -> tuple[str, ...]:
        """``gpus`` in the order of the topology, which is that of each cell."""
        return tuple(sorted(gpus, key=self._gpu.__getitem__))

    def fitting(self, gpus: int, lowest: int = 0) -> list[Cell]:
        """The cells of the lowest level, ``lowest`` or higher, on which ``gpus`` find room."""
        for level, cells_there in self.levels.items():
            if level >= min(lowest, self.root.level) and gpus <= self._widest[level]:
                first = self._number[cells_there[0]]
                room = self._free_in[first : first + len(cells_there)]
                found = [cells_there[i] for i in np.flatnonzero(room >= gpus)]
                if found:
                    return found
        return []

    def fullest_first(self, cells_there: Sequence[Cell]) -> list[Cell]:
        """Cells of one level by the free GPUs in them, of equals by those of the cell around them,
        and so on outwards; then in the given order."""
        if not cells_there:
            return []
        inner = self._column[cells_there[0].level]
        around = self._around[[self._number[cell] for cell in cells_there], inner:]
        return [cells_there[i] for i in np.lexsort(self._free_in[around].T[::-1])]

    def beside(self, level: int) -> dict[Cell, list[Request]]:
        """The jobs that hold GPUs of each cell of ``level``."""
        cells_there, column = self.levels[level], self._column[level]
        first = self._number[cells_there[0]]
        found: dict[Cell, list[Request]] = {}
        for request, gpus in self.running.values():
            held = self._above[[self._gpu[gpu] for gpu in gpus], column]
            for number in set(held.tolist()):
                found.setdefault(cells_there[number - first], []).append(request)
        return found

    def take(self, request: Request, gpus: Sequence[str]) -> None:
        """Give ``gpus``, which are free, to a job that has none."""
        self.running[request.name] = (request, tuple(gpus))
        self._change(gpus, -1)

    def release(self, name: str) -> None:
        """Take a job's GPUs back."""
        _, gpus = self.running.pop(name)
        self._change(gpus, 1)

    def _change(self, gpus: Iterable[str], change: int) -> None:
        np.add.at(self._free_in, self._above[[self._gpu[gpu] for gpu in gpus]], change)


#: The GPUs that a job gets; None where it finds no room.
Chosen = tuple[str, ...] | None
Placement = Callable[[Request, Allocation, random.Random], Chosen]


def cells(topology: Topology) -> Cell:
    """The cluster's cells: GPU, PCIe switch, host, hosts below the same ToRs, pod, cluster.

    Raises:
        WorkloadError: the topology has no GPUs.
    """
    above = _switches_above(topology)
    pods = {
        host: frozenset(a for tor in above[host] for a in above[tor]) for host in topology.hosts
    }
    host_of = {gpu: host for host in topology.hosts for gpu in topology.gpus(host)}
    if not host_of:
        raise WorkloadError("the topology has no GPUs to give out")
    keys: tuple[Callable[[str], object], ...] = (
        lambda gpu: (host_of[gpu], topology.nearest_nics(gpu)),
        lambda gpu: host_of[gpu],
        lambda gpu: above[host_of[gpu]],
        lambda gpu: pods[host_of[gpu]],
        lambda gpu: None,
    )
    found = [Cell(0, (gpu,)) for gpu in host_of]
    for level, key in enumerate(keys, start=1):
        groups: dict[object, list[Cell]] = {}
        for cell in found:
            groups.setdefault(key(cell.gpus[0]), []).append(cell)
        if len(groups) < len(found):
            found = [
                Cell(level, tuple(gpu for child in below for gpu in child.gpus), tuple(below))
                for below in groups.values()
            ]
    return found[0]


def walk(cell: Cell) -> Iterable[Cell]:
    """``cell`` and all below it, the widest first."""
    yield cell
    for child in cell.children:
        yield from walk(child)


def place_random(request: Request, allocation: Allocation, rng: random.Random) -> Chosen:
    """Returns free GPUs chosen uniformly at random; ranks count up host by host."""
    free = allocation.free()
    if len(free) < request.gpus:
        return None
    return tuple(free[i] for i in sorted(rng.sample(range(len(free)), request.gpus)))


def place_hosts(request: Request, allocation: Allocation, rng: random.Random) -> Chosen:
    """As few hosts as can be, each as likely as any other that holds as much; the rest of the job
    goes to the fullest host that has room for it."""
    level = min((k for k in allocation.levels if k >= HOST_LEVEL), default=allocation.root.level)
    room = {host: allocation.free_in(host) for host in allocation.levels[level]}
    if sum(room.values()) < request.gpus:
        return None
    left, taken = request.gpus, list[str]()
    while left:
        holds_rest = [free for free in room.values() if free >= left]
        wanted = min(holds_rest) if holds_rest else max(room.values())
        host = rng.choice([host for host, free in room.items() if free == wanted])
        part = min(left, room.pop(host))
        taken += _take(host, part, allocation)
        left -= part
    return allocation.in_order(taken)


def place_hived(request: Request, allocation: Allocation, rng: random.Random) -> Chosen:
    """HiveD's buddy allocation: the lowest cell that holds the job, in the fullest surroundings.

    In that cell, whole children are taken first and the rest from the fullest child that has room,
    so that wide cells stay whole. HiveD's quotas of virtual clusters are left out: there is one
    tenant.
    """
    fitting = allocation.fitting(request.gpus)
    if not fitting:
        return None
    return _take(allocation.fullest_first(fitting)[0], request.gpus, allocation)


def place_muri(request: Request, allocation: Allocation, rng: random.Random) -> Chosen:
    """Beside the jobs that it interleaves with best, else as HiveD would.

    Muri (Zhao et al., SIGCOMM '22) puts jobs with complementary stages on the same GPUs in turns.
    Here jobs share links, not GPUs. So of the cells from hosts upwards that have room, it chooses
    the one whose running jobs have the highest mean interleaving efficiency with the job; an empty
    cell counts as 1.
    """
    fitting = allocation.fitting(request.gpus, HOST_LEVEL)
    if not fitting:
        return None
    beside = allocation.beside(fitting[0].level)

    def mean_efficiency(cell: Cell) -> float:
        others = beside.get(cell)
        if not others:
            return 1.0
        return sum(interleaving_efficiency(request, other) for other in others) / len(others)

    # Of equals, the one in the fullest surroundings.
    best = max(allocation.fullest_first(fitting), key=mean_efficiency)
    return _take(best, request.gpus, allocation)


PLACEMENTS: dict[str, Placement] = {
    "none": place_random,
    "hosts": place_hosts,
    "hived": place_hived,
    "muri": place_muri,
}
#: The placement that ranks candidates by their compatibility (CASSINI); in traces only, where the
#: links of all jobs are known.
RANKED = "cassini"
#: Candidates that are ranked, as in CASSINI's evaluation (NSDI '24, §5.1).
CANDIDATES = 10


def candidates(
    request: Request, allocation: Allocation, rng: random.Random
) -> list[tuple[str, ...]]:
    """Up to ``CANDIDATES`` choices that are as near as HiveD's, its own first; none if none fits.

    Then come its choices in the other cells that are as low, and choices in these cells that take
    their hosts in random order.
    """
    fitting = allocation.fullest_first(allocation.fitting(request.gpus))
    found = dict.fromkeys(_take(cell, request.gpus, allocation) for cell in fitting[:CANDIDATES])
    for draw in range(CANDIDATES if fitting else 0):
        cell = fitting[draw % len(fitting)]
        found[_take_shuffled(cell, request.gpus, allocation, rng)] = None
    return list(found)[:CANDIDATES]


def interleaving_efficiency(a: Request, b: Request) -> float:
    """Busy share of computing and network when two jobs take turns (Muri's efficiency).

    Together they have the period max(c_a, n_b) + max(n_a, c_b).
    """
    period = max(a.compute_s, b.network_s) + max(a.network_s, b.compute_s)
    busy = a.compute_s + a.network_s + b.compute_s + b.network_s
    return busy / (2 * period) if period else 1.0


def _switches_above(topology: Topology) -> dict[str, frozenset[str]]:
    """The ToRs of each host, and the switches that each switch is joined to."""
    found: dict[str, set[str]] = {name: set() for name in topology.nodes}
    for edge in topology.edges:
        if topology.host_of(edge.dst) is None:
            found[topology.host_of(edge.src) or edge.src].add(edge.dst)
    return {name: frozenset(above) for name, above in found.items()}


def _take(cell: Cell, count: int, allocation: Allocation) -> tuple[str, ...]:
    """``count`` free GPUs of ``cell``, in its order: whole children, then the fullest that holds
    the rest."""
    if count == len(cell.gpus):
        return cell.gpus
    taken: list[str] = []
    free = allocation.free_below(cell)
    while count:
        enough = [child for child in free if free[child] >= count]
        # A child that holds the rest, the fullest; otherwise the emptiest one as a whole.
        best = min(enough, key=free.__getitem__) if enough else max(free, key=free.__getitem__)
        part = min(count, free.pop(best))
        taken += _take(best, part, allocation)
        count -= part
    return allocation.in_order(taken)


def _take_shuffled(
    cell: Cell, count: int, allocation: Allocation, rng: random.Random
) -> tuple[str, ...]:
    """``count`` free GPUs of ``cell``, in its order, from its children in random order."""
    if not cell.children:
        return cell.gpus
    taken: list[str] = []
    for child in rng.sample(cell.children, len(cell.children)):
        part = min(count - len(taken), allocation.free_in(child))
        if part:
            taken += _take_shuffled(child, part, allocation, rng)
    return allocation.in_order(taken)


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A job on its GPUs.

    Attributes:
        default_path: the candidate that ECMP's hash gives to each flow.
        alone_s: seconds of an iteration on an empty network, on paths selected there.
        intensity: I_j there, in FLOP/s.
        layer_bytes: bytes of one iteration on all links of each layer of the topology; the same for
            all candidates of a flow, which cross the same kinds of link.
        arrays: the job's, over all links of the topology.
    """

    job: Job
    default_path: tuple[int, ...]
    alone_s: float
    intensity: float
    layer_bytes: Mapping[str, float]
    arrays: Arrays = field(compare=False)


class Reference(NamedTuple):
    """Seconds of one iteration alone on the nearest GPUs: of computation, and in total."""

    compute_s: float
    alone_s: float


class Placer:
    """Builds placed jobs for one topology, and caches what depends on the model and GPUs only.

    With ``rings_apart`` the rings and groups of a job move each on its own; each hop is split into
    ``connections`` flows. ``models`` gives the model of a name; default: the catalogue's.

    Attributes:
        reference: called with a model's name and a number of GPUs; see :class:`Reference`. Raises
            WorkloadError if the cluster has fewer GPUs.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        rings_apart: bool = True,
        connections: int = 1,
        models: Callable[[str], Model] = model,
    ) -> None:
        self.topology = topology
        self._model = models
        self._rings_apart = rings_apart
        self._connections = connections
        self.cells = cells(topology)
        self._idle = Allocation(self.cells)
        self._paths = JoinedPaths(topology, PATHS_OF_FLOW)
        self._reader = Reader()
        self._build = lru_cache(maxsize=1 << 8)(self._build_alone)
        self.reference = lru_cache(maxsize=None)(self._find_reference)
        layers = [topology.layer(link) for link in topology.links]
        self._layers = sorted(set(layers))
        self._layer = np.array([self._layers.index(layer) for layer in layers])
        # Of each link among the names.
        self._rank = np.argsort(np.argsort(np.array(list(topology.links))))
        self._first = np.empty(len(layers) + 1, np.int64)

    def place(self, name: str, model_name: str, gpus: Sequence[str]) -> PlacedJob:
        """The job ``name`` that trains the model of that name on ``gpus``."""
        found = self._build(model_name, tuple(gpus))
        job = replace(found.job, name=name)
        return replace(found, job=job, default_path=hashed_paths(job, self.topology))

    def _find_reference(self, model_name: str, gpus: int) -> Reference:
        """Seconds of an iteration alone on the GPUs that are nearest to each other."""
        request = Request(model_name, gpus)
        chosen = place_hived(request, self._idle, random.Random(0))
        if chosen is None:
            raise WorkloadError(f"a job of {gpus} GPUs; the cluster has {len(self.cells.gpus)}")
        found = self._build(model_name, chosen)
        return Reference(found.job.compute_s, found.alone_s)

    def _build_alone(self, model_name: str, gpus: tuple[str, ...]) -> PlacedJob:
        job = build_job(
            model_name,
            self._model(model_name),
            gpus,
            self.topology,
            paths=self._paths,
            alltoall_peers=ALLTOALL_PEERS,
            apart=self._rings_apart,
            connections=self._connections,
        )
        arrays = self._reader.read(Cluster(self.topology.capacity_Bps, (job,)))
        found = alone_of(arrays)
        alone_s = found.period_s
        if job.parts:
            alone_s = iteration_alone_s(arrays, found.path, alone_s, self._rank)
        layer_bytes = self._layer_bytes(arrays, np.array(found.path, np.int64))
        return PlacedJob(job, (), alone_s, found.intensity, layer_bytes, arrays)

    def _layer_bytes(self, arrays: Arrays, choice: IntArray) -> dict[str, float]:
        moved, links, _ = traffic_entries(arrays, choice)
        crossed = path_links(arrays, choice)
        # Summed up in the order in which the flows come to the links, which sets the rounding.
        self._first[crossed[::-1]] = np.arange(len(crossed))[::-1]
        order = np.argsort(self._first[links])
        totals = np.bincount(self._layer[links[order]], moved[order], len(self._layers))
        by_layer = zip(self._layers, totals.tolist(), strict=True)
        return {layer: total for layer, total in by_layer if total}
