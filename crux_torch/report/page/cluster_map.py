"""The cluster's map: where hosts, switches and the cables between them are drawn."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from crux_torch.network.topology import NETWORK_KINDS, Topology
from crux_torch.report.live_cluster import LinkLoad

#: Distance of two nodes beside each other, of two rows, and of the drawing's edge.
ACROSS, DOWN, EDGE = 26, 110, 30
#: Drawings are at least so wide.
LEAST_WIDTH = 720
#: Sweeps that put nodes above those that they are connected to.
SWEEPS = 4
#: Load over capacity at which a link's colour changes.
STEPS = (0.25, 0.5, 0.75, 1.0)

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """A host or a switch on the map."""

    name: str
    kind: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Cable:
    """All links between two places, in both directions, drawn as one line.

    Attributes:
        links: names of the links, that with the highest planned load first.
        ratio: planned load over capacity of the first one.
    """

    ends: Pair
    x1: int
    y1: int
    x2: int
    y2: int
    links: tuple[str, ...]
    ratio: float

    @property
    def step(self) -> int:
        """Number of the load's colour: 0 without load."""
        return step_of(self.ratio)


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """A drawing of ``width`` and ``height``."""

    places: tuple[Place, ...]
    cables: tuple[Cable, ...]
    width: int
    height: int


def step_of(ratio: float) -> int:
    """Returns the number of a load's colour: 0 without load, 5 above what the link has."""
    return 0 if ratio <= 0 else 1 + bisect_left(STEPS, ratio)


class MapLayout:
    """The places of one topology; loads may change."""

    def __init__(self, topology: Topology) -> None:
        #: The place that each node is part of.
        self._place_of = {
            name: node.host or name
            for name, node in topology.nodes.items()
            if node.host is not None or node.kind in NETWORK_KINDS
        }
        self._links: dict[Pair, list[str]] = defaultdict(list)
        for edge in topology.edges:
            a, b = self._place_of[edge.src], self._place_of[edge.dst]
            if a != b:
                self._links[min(a, b), max(a, b)].append(edge.name)
        self.places = _placed(topology, self._links)
        self._at = {place.name: place for place in self.places}

    def links_at(self, name: str) -> tuple[str, ...]:
        """Returns the links that leave or enter a place."""
        return tuple(link for ends, links in self._links.items() if name in ends for link in links)

    def draw(self, loads: Mapping[str, LinkLoad]) -> ClusterMap:
        """Returns the map with the loads of links, by name; a link without one carries nothing."""
        ratio = {name: load.planned_ratio for name, load in loads.items()}
        cables = []
        for ends, names in self._links.items():
            a, b = (self._at[name] for name in ends)
            links = tuple(sorted(names, key=lambda name: -ratio.get(name, 0.0)))
            highest = ratio.get(links[0], 0.0)
            cables.append(Cable(ends, a.x, a.y, b.x, b.y, links, highest))
        # What carries most is drawn last, on top.
        cables.sort(key=lambda cable: cable.ratio)
        width = max(place.x for place in self.places) + EDGE
        height = max(place.y for place in self.places) + EDGE
        return ClusterMap(self.places, tuple(cables), max(width, LEAST_WIDTH), height)


def _placed(topology: Topology, links: Mapping[Pair, list[str]]) -> tuple[Place, ...]:
    """Returns hosts in the lowest row and switches above, each near what it is connected to."""
    beside: dict[str, list[str]] = defaultdict(list)
    for a, b in links:
        beside[a].append(b)
        beside[b].append(a)
    depth = {name: 0 for name, node in topology.nodes.items() if node.kind == "host"}
    front = list(depth)
    while front:
        reached = dict.fromkeys(b for name in front for b in beside[name] if b not in depth)
        depth |= dict.fromkeys(reached, depth[front[0]] + 1)
        front = list(reached)
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name, height in depth.items():
        rows[height].append(name)
    at = {name: float(x) for row in rows for x, name in enumerate(row)}
    widest = max(map(len, rows))
    for sweep in range(SWEEPS):
        is_up = sweep % 2 == 0
        for number in range(len(rows)) if is_up else range(len(rows) - 1, -1, -1):
            # Upwards, a row goes by the one below it; downwards, by the one above.
            row, other = rows[number], number - 1 if is_up else number + 1
            near = {n: [at[b] for b in beside[n] if depth[b] == other] for n in row}
            row.sort(key=lambda name: fmean(near[name]) if near[name] else at[name])
            step = widest / len(row)
            at |= {name: (x + 0.5) * step for x, name in enumerate(row)}
    scale = max(ACROSS, (LEAST_WIDTH - 2 * EDGE) / widest)
    return tuple(
        Place(
            name,
            topology.nodes[name].kind,
            round(EDGE + scale * at[name]),
            EDGE + DOWN * (len(rows) - 1 - number),
        )
        for number, row in enumerate(rows)
        for name in row
    )
