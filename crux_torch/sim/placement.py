"""Which GPUs a job gets: at random, by affinity (HiveD), or by interleaving (Muri)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from crux_torch.fabric.topology import Topology
from crux_torch.sim.catalogue import WorkloadError

#: What the cells of each level are; a level that would repeat the one below is left out.
LEVELS = ("gpu", "pcie", "host", "tor", "pod", "cluster")
HOST_LEVEL = LEVELS.index("host")


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks for, and what Muri looks at: seconds of an iteration on GPUs and network."""

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
    """Which GPUs of a cluster are free, and who holds the others.

    Attributes:
        root: the widest cell.
        levels: the cells of each level that there is, from single GPUs upwards.
        free_in: free GPUs of each cell.
    """

    def __init__(self, root: Cell) -> None:
        self.root = root
        self.levels: dict[int, list[Cell]] = {}
        self.running: dict[str, tuple[Request, tuple[str, ...]]] = {}
        self.free_in: dict[Cell, int] = {}
        self._above: dict[str, dict[int, Cell]] = {gpu: {} for gpu in root.gpus}
        self._number = {gpu: i for i, gpu in enumerate(root.gpus)}
        self._free = np.ones(len(root.gpus), dtype=bool)
        self._widest: dict[int, int] = {}
        for cell in sorted(walk(root), key=lambda c: c.level):
            self.levels.setdefault(cell.level, []).append(cell)
            self.free_in[cell] = len(cell.gpus)
            self._widest[cell.level] = max(self._widest.get(cell.level, 0), len(cell.gpus))
            for gpu in cell.gpus:
                self._above[gpu][cell.level] = cell

    def free(self) -> list[str]:
        """The GPUs that nobody holds, in the order of the topology."""
        return [self.root.gpus[i] for i in np.flatnonzero(self._free)]

    def fitting(self, gpus: int, lowest: int = 0) -> list[Cell]:
        """The cells of the lowest level, ``lowest`` or higher, on which ``gpus`` find room."""
        for level, cells_there in self.levels.items():
            if level >= min(lowest, self.root.level) and gpus <= self._widest[level]:
                found = [c for c in cells_there if self.free_in[c] >= gpus]
                if found:
                    return found
        return []

    def room_around(self, cell: Cell) -> tuple[int, ...]:
        """Free GPUs of ``cell`` and of every wider cell around it, the narrowest first."""
        above = self._above[cell.gpus[0]]
        return tuple(self.free_in[c] for level, c in above.items() if level >= cell.level)

    def beside(self, level: int) -> dict[Cell, list[Request]]:
        """The jobs that hold GPUs of each cell of ``level``."""
        found: dict[Cell, list[Request]] = {}
        for request, gpus in self.running.values():
            for cell in {self._above[gpu][level] for gpu in gpus}:
                found.setdefault(cell, []).append(request)
        return found

    def take(self, request: Request, gpus: Sequence[str]) -> None:
        """Give ``gpus``, which are free, to a job that has none."""
        self.running[request.name] = (request, tuple(gpus))
        self._change(gpus, free=False)

    def release(self, name: str) -> None:
        """Take a job's GPUs back."""
        _, gpus = self.running.pop(name)
        self._change(gpus, free=True)

    def _change(self, gpus: Iterable[str], free: bool) -> None:
        change = 1 if free else -1
        for gpu in gpus:
            self._free[self._number[gpu]] = free
            for cell in self._above[gpu].values():
                self.free_in[cell] += change


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
    """Any free GPUs, each as likely as any other; ranks count up host by host."""
    free = allocation.free()
    if len(free) < request.gpus:
        return None
    return tuple(free[i] for i in sorted(rng.sample(range(len(free)), request.gpus)))


def place_hived(request: Request, allocation: Allocation, rng: random.Random) -> Chosen:
    """HiveD's buddy allocation: the lowest cell that holds the job, in the fullest surroundings.

    In that cell, whole children are taken first and the rest from the fullest child that has room,
    so that wide cells stay whole. HiveD's quotas of virtual clusters are left out: there is one
    tenant.
    """
    fitting = allocation.fitting(request.gpus)
    if not fitting:
        return None
    best = min(fitting, key=allocation.room_around)
    return _take(best, request.gpus, allocation)


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

    # The negated efficiency first: of equals, the one in the fullest surroundings.
    best = min(fitting, key=lambda c: (-mean_efficiency(c), allocation.room_around(c)))
    return _take(best, request.gpus, allocation)


PLACEMENTS: dict[str, Placement] = {
    "none": place_random,
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
    fitting = sorted(allocation.fitting(request.gpus), key=allocation.room_around)
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
    """For each host its ToRs; for each switch the switches that it is joined to."""
    found: dict[str, set[str]] = {name: set() for name in topology.nodes}
    for edge in topology.edges:
        if topology.host_of(edge.dst) is None:
            found[topology.host_of(edge.src) or edge.src].add(edge.dst)
    return {name: frozenset(above) for name, above in found.items()}


def _take(cell: Cell, wanted: int, allocation: Allocation) -> tuple[str, ...]:
    """``wanted`` free GPUs of ``cell``, in its order: whole children, then the fullest that holds
    the rest."""
    if wanted == len(cell.gpus):
        return cell.gpus
    taken: set[str] = set()
    left = [child for child in cell.children if allocation.free_in[child]]
    while wanted:
        free = {child: allocation.free_in[child] for child in left}
        enough = [child for child in left if free[child] >= wanted]
        # A child that holds the rest, the fullest; otherwise the emptiest one as a whole.
        best = min(enough, key=free.__getitem__) if enough else max(left, key=free.__getitem__)
        part = min(wanted, free[best])
        taken.update(_take(best, part, allocation))
        wanted -= part
        left.remove(best)
    return tuple(gpu for gpu in cell.gpus if gpu in taken)


def _take_shuffled(
    cell: Cell, wanted: int, allocation: Allocation, rng: random.Random
) -> tuple[str, ...]:
    """``wanted`` free GPUs of ``cell``, in its order, from its children in random order."""
    if not cell.children:
        return cell.gpus
    taken: set[str] = set()
    for child in rng.sample(cell.children, len(cell.children)):
        part = min(wanted - len(taken), allocation.free_in[child])
        if part:
            taken.update(_take_shuffled(child, part, allocation, rng))
    return tuple(gpu for gpu in cell.gpus if gpu in taken)
