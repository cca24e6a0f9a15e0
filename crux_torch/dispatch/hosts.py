"""The hosts of LiteGD's Appendix A, and the bandwidth of their sets of GPUs by a ring model.

The paper's measured tables are not published. Here the links of each host have their nominal rates,
and a set's bandwidth is that of the best rings over it: an all-gather sends the same bytes over
every hop of a ring, so the link that most hops share, for its capacity, is the bottleneck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from crux_torch.dispatch.table import HostTable, table_of

#: One direction of 16 lanes: 8 and 16 GT/s with 128b/130b encoding (PCI Express 3.0 and 4.0).
PCIE3_BPS, PCIE4_BPS = 15.75e9, 31.5e9
#: One direction of one NVLink: NVLink 2 to 4 (V100, A800, H100), and the bridge of RTX A6000
#: (112.5 GB/s over 4 links, both directions; NVIDIA's data sheets).
NVLINK_BPS, BRIDGE_BPS = 25e9, 112.5e9 / 8
#: One direction between two sockets: two QPI links of 9.6 GT/s, three UPI links of 10.4 GT/s.
QPI_BPS, UPI_BPS = 38.4e9, 62.4e9

Hop = tuple[str, float]


@dataclass(frozen=True)
class HostModel:
    """A host's GPUs and what connects them (Tables 3 to 6).

    Attributes:
        kind: the name of its GPUs.
        nvlinks: number of NVLinks between two GPUs, by their numbers, the smaller first.
        nvlink_Bps: one direction of one of these.
        nvswitch_Bps: one direction between a GPU and the NVSwitch; 0: there is none.
        groups: for each GPU the PCIe root port that it shares with the others of its group
            (PXB or PIX in the tables).
        sockets: the socket of each group; by default the first half of the groups is on one socket,
            the other on another (SYS).
        pcie_Bps, socket_Bps: one direction of a PCIe link, and between the two sockets.
        peer_to_peer: whether two GPUs of a group exchange through their switch. GeForce boards
            don't: everything goes through the host's memory, and a group shares one root port. So
            GPUs that are far apart do better (the paper's "anti-locality", §2.2).
    """

    kind: str
    groups: tuple[int, ...]
    pcie_Bps: float
    socket_Bps: float
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

    def type_of(self, one: int, other: int) -> str:
        """The connection of two GPUs as ``nvidia-smi topo`` calls it: NV8, NV2, PXB or SYS."""
        if self.nvswitch_Bps:
            return f"NV{round(self.nvswitch_Bps / self.nvlink_Bps)}"
        if links := self.links(one, other):
            return f"NV{links}"
        return "PXB" if self.groups[one] == self.groups[other] else "SYS"

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


#: Table 4: a DGX-1's hybrid cube mesh.
_DGX1 = (
    *((0, 1, 1), (0, 2, 2), (0, 3, 1), (0, 7, 2), (1, 2, 1), (1, 3, 2), (1, 6, 2), (2, 3, 2)),
    *((2, 5, 1), (3, 4, 1), (4, 5, 2), (4, 6, 2), (4, 7, 1), (5, 6, 1), (5, 7, 2), (6, 7, 1)),
)
_FOUR_AND_FOUR = (0, 0, 0, 0, 1, 1, 1, 1)
MODELS = {
    model.kind: model
    for model in (
        HostModel("4090", _FOUR_AND_FOUR, PCIE4_BPS, UPI_BPS, peer_to_peer=False),
        HostModel("V100", (0, 0, 1, 1, 2, 2, 3, 3), PCIE3_BPS, QPI_BPS, _DGX1),
        HostModel(
            "A6000",
            _FOUR_AND_FOUR,
            PCIE4_BPS,
            UPI_BPS,
            ((0, 1, 4), (2, 3, 4), (4, 5, 4), (6, 7, 4)),
            BRIDGE_BPS,
        ),
        HostModel("A800", _FOUR_AND_FOUR, PCIE4_BPS, UPI_BPS, nvswitch_Bps=8 * NVLINK_BPS),
        HostModel("H100", _FOUR_AND_FOUR, PCIE4_BPS, UPI_BPS, nvswitch_Bps=16 * NVLINK_BPS),
    )
}


def rings_Bps(model: HostModel, gpus: tuple[int, ...]) -> float:
    """Bandwidth of an all-gather over two GPUs or more of a host, in bytes/s."""
    if model.nvswitch_Bps:
        return model.nvswitch_Bps
    return max(_one_ring_Bps(model, gpus), _nvlink_rings_Bps(model, gpus))


def _one_ring_Bps(model: HostModel, gpus: tuple[int, ...]) -> float:
    """The best single ring, over any links."""
    best = 0.0
    for rest in permutations(gpus[1:]):
        ring = (gpus[0], *rest)
        load: Counter[Hop] = Counter()
        for src, dst in zip(ring, (*rest, gpus[0]), strict=True):
            load.update(model.hop(src, dst))
        best = max(best, min(capacity / shared for (_, capacity), shared in load.items()))
    return best


def _nvlink_rings_Bps(model: HostModel, gpus: tuple[int, ...]) -> float:
    """As many rings over NVLinks alone as fit at once, as NCCL makes them."""
    edges = [
        (one, other) for one in gpus for other in gpus if one < other and model.links(one, other)
    ]
    if len(gpus) == 2:
        return model.links(*gpus) * model.nvlink_Bps
    number = {edge: i for i, edge in enumerate(edges)}
    cycles = []
    for rest in permutations(gpus[1:]):
        if rest[0] > rest[-1]:
            continue  # the same cycle the other way round
        ring = (gpus[0], *rest)
        pairs = [tuple(sorted(pair)) for pair in zip(ring, (*rest, gpus[0]), strict=True)]
        if all(pair in number for pair in pairs):
            cycles.append([number[pair] for pair in pairs])  # type: ignore[index]
    if not cycles:
        return 0.0
    uses = np.zeros((len(edges), len(cycles)))
    for column, cycle in enumerate(cycles):
        uses[cycle, column] = 1
    counts = [model.links(*edge) for edge in edges]
    packed = milp(
        -np.ones(len(cycles)),
        constraints=LinearConstraint(uses, ub=counts),
        integrality=np.ones(len(cycles), np.int64),
        bounds=Bounds(0, np.inf),
    )
    number_of_cycles = 0 if packed.x is None else round(float(packed.x.sum()))
    # A cycle carries a ring in either direction.
    return number_of_cycles * 2 * model.nvlink_Bps


@lru_cache
def host_table(kind: str) -> HostTable:
    """The table of a host of ``MODELS``, by the ring model."""
    model = MODELS[kind]
    count = len(model.groups)
    found = {}
    for members in range(1 << count):
        gpus = tuple(gpu for gpu in range(count) if members >> gpu & 1)
        if len(gpus) > 1:
            found[members] = rings_Bps(model, gpus)
    return table_of(kind, map(str, range(count)), found)
