"""Pictures of a topology: a tree for terminals, and an SVG of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from crux_torch.network.check import rate_text
from crux_torch.network.formats.groups import Group, heights, hierarchy
from crux_torch.network.formats.slurm import compress
from crux_torch.network.topology import Topology

#: Groups below one group that the tree shows; the others are counted.
SHOWN = 16
#: Boxes of a layer of the SVG; a wider layer has a box for each group of switches.
WIDEST = 24
BOX_WIDTH, BOX_HEIGHT, GAP, LAYER = 132, 34, 14, 120


def print_tree(topology: Topology, to: Console) -> None:
    """Print the groups of switches as a tree, hosts at its leaves, a line each.

    Raises:
        TopologyError: there is no switch.
    """
    up: dict[str, list[float]] = {}
    for (low, _), capacities in _cables(topology).items():
        up.setdefault(low, []).extend(capacities)
    to.print(_tree(topology, hierarchy(topology), up, to.width), no_wrap=True)


def _tree(topology: Topology, group: Group, up: Mapping[str, Sequence[float]], width: int) -> Tree:
    """Returns the tree of a group; ``up`` has the capacities of the links above each node."""

    def line(nodes: Sequence[str], more: str, room: int) -> Text:
        kind = topology.nodes[nodes[0]].kind
        count = f"{len(nodes)} × {kind}" if len(nodes) > 1 or kind == "host" else kind
        capacities = [each for node in nodes for each in up.get(node, ())]
        return _line(nodes, f"{count}{more}{_each_up(capacities, len(nodes))}", room)

    tree = Tree(line(group.switches, "", width))
    if group.hosts:
        tree.add(line(group.hosts, _inside(topology, group.hosts), width - 4))
    for below in group.groups[:SHOWN]:
        tree.add(_tree(topology, below, up, width - 4))
    if len(group.groups) > SHOWN:
        rest = group.groups[SHOWN:]
        hosts = sum(len(each.all_hosts()) for each in rest)
        tree.add(f"and {len(rest)} more groups with {hosts} hosts")
    return tree


def _line(names: Iterable[str], facts: str, width: int) -> Text:
    """Returns names and facts in one line; long names are cut."""
    listed = compress(names)
    room = max(8, width - len(facts) - 2)
    listed = listed if len(listed) <= room else f"{listed[: room - 1]}…"
    return Text(f"{listed}  {facts}", style="", no_wrap=True, overflow="ellipsis")


def _each_up(capacities_Bps: Sequence[float], nodes: int) -> str:
    """Returns the links upwards of each of ``nodes``, or of all if that is no whole number."""
    if not capacities_Bps:
        return ""
    rates = Counter(map(rate_text, capacities_Bps))
    each = "each " if nodes > 1 else ""
    if any(count % nodes for count in rates.values()):
        each, nodes = "in all ", 1
    return f", {each}" + " + ".join(f"{n // nodes} × {rate}" for rate, n in rates.items()) + " up"


def _inside(topology: Topology, hosts: Sequence[str]) -> str:
    gpus = {len(topology.gpus(host)) for host in hosts}
    return f" of {gpus.pop()} GPUs" if len(gpus) == 1 and gpus != {0} else ""


def _cables(topology: Topology) -> dict[tuple[str, str], list[float]]:
    """Capacities of the links from each host or switch to each one above it."""
    height = heights(topology)
    cables: dict[tuple[str, str], list[float]] = {}
    for edge in topology.edges:
        low, high = (topology.host_of(end) or end for end in (edge.src, edge.dst))
        if height.get(low, 0) < height.get(high, 0):
            cables.setdefault((low, high), []).append(edge.link.capacity_Bps)
    return cables


@dataclass(frozen=True, slots=True)
class _Box:
    """Nodes of one layer that are drawn as one."""

    nodes: tuple[str, ...]
    level: int


def to_svg(topology: Topology) -> str:
    """Returns an SVG: a row for each layer, switches above, hosts at the same switches in one box.

    Raises:
        TopologyError: there is no switch.
    """
    root = hierarchy(topology)
    boxes = _boxes(root)
    box_of = {node: box for row in boxes for box in row for node in box.nodes}
    joined: dict[tuple[_Box, _Box], list[float]] = {}
    for (low, high), capacities in _cables(topology).items():
        joined.setdefault((box_of[low], box_of[high]), []).extend(capacities)
    width = max(map(len, boxes)) * (BOX_WIDTH + GAP) + GAP
    height = len(boxes) * LAYER + GAP
    place: dict[_Box, tuple[float, float]] = {}
    for row in boxes:
        for i, box in enumerate(row):
            y = height - (box.level + 1) * LAYER + LAYER / 2
            place[box] = (i + 0.5) * width / len(row), y
    most_Bps = max(map(sum, joined.values()))
    lines = [
        _svg_line(place[low], place[high], capacities, most_Bps)
        for (low, high), capacities in joined.items()
    ]
    shapes = [_svg_box(topology, box, *place[box]) for row in boxes for box in row]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *lines,
            *shapes,
            "</svg>\n",
        ]
    )


def _boxes(root: Group) -> list[list[_Box]]:
    """Returns the boxes of each layer, hosts first."""
    groups = list(root.walk())
    rows: list[list[_Box]] = []
    for level in range(1, root.level + 1):
        at = [group for group in groups if group.level == level]
        switches = [switch for group in at for switch in group.switches]
        if len(switches) <= WIDEST:
            rows.append([_Box((switch,), level) for switch in switches])
        else:
            rows.append([_Box(group.switches, level) for group in at])
    return [[_Box(group.hosts, 0) for group in groups if group.hosts], *rows]


def _svg_line(
    low: tuple[float, float], high: tuple[float, float], capacities: Sequence[float], most: float
) -> str:
    rates = Counter(map(rate_text, capacities))
    title = escape(", ".join(f"{n} × {rate}" for rate, n in rates.items()))
    stroke = 0.7 + 3.0 * sum(capacities) / most
    return (
        f'<line x1="{low[0]:.1f}" y1="{low[1]:.1f}" x2="{high[0]:.1f}" y2="{high[1]:.1f}" '
        f'stroke="#8a94a6" stroke-width="{stroke:.2f}"><title>{title}</title></line>'
    )


def _svg_box(topology: Topology, box: _Box, x: float, y: float) -> str:
    kind = topology.nodes[box.nodes[0]].kind
    listed = compress(box.nodes)
    shown = listed if len(listed) <= 20 else f"{listed[:19]}…"
    count = f"{len(box.nodes)} × {kind}" if len(box.nodes) > 1 else kind
    fill = "#e8f0fe" if kind == "host" else "#fff4e0"
    left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    return (
        f"<g id={quoteattr(box.nodes[0])}><title>{escape(listed)}</title>"
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4" '
        f'fill="{fill}" stroke="#5f6b7c"/>'
        f'<text x="{x:.1f}" y="{y - 2:.1f}" text-anchor="middle">{escape(shown)}</text>'
        f'<text x="{x:.1f}" y="{y + 12:.1f}" text-anchor="middle" fill="#5f6b7c">{count}</text></g>'
    )
