"""The tree of groups in a network: which hosts meet below which switches. Pure.

Other tools describe a network as a tree. A group of level k is what hosts and switches up to level
k connect, so its hosts reach each other without a higher switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from crux_torch.network.formats.draft import MAX_LEVELS
from crux_torch.network.topology import Topology, TopologyError

T = TypeVar("T")

LEVEL_OF_KIND = {"host": 0, "tor": 1, "aggregation": 2, "core": 3}


@dataclass(frozen=True, slots=True)
class Group:
    """Switches side by side, and what is below them.

    Attributes:
        switches: those of the group's own level.
        hosts: hosts at these switches that are in no lower group.
        groups: groups of lower levels.
        level: 1 for ToRs.
    """

    switches: tuple[str, ...]
    hosts: tuple[str, ...]
    groups: tuple[Group, ...]
    level: int

    @property
    def name(self) -> str:
        """The switch's own name, or the first one's with the number of switches."""
        more = f"_x{len(self.switches)}" if len(self.switches) > 1 else ""
        return f"{self.switches[0]}{more}"

    def walk(self) -> Iterator[Group]:
        """Yields this group and all below, each before those below it."""
        yield self
        for group in self.groups:
            yield from group.walk()

    def all_hosts(self) -> tuple[str, ...]:
        """Returns the hosts of this group and of all below it."""
        return tuple(host for group in self.walk() for host in group.hosts)


def hierarchy(topology: Topology) -> Group:
    """Returns the group of all hosts.

    Raises:
        TopologyError: there is no switch, or more than 16 layers of them.
    """
    height = heights(topology)
    levels = sorted(set(height.values()) - {0})
    if not 0 < len(levels) <= MAX_LEVELS:
        raise TopologyError(f"expected 1 to {MAX_LEVELS} layers of switches, not {len(levels)}")
    joined: dict[int, list[tuple[str, str]]] = {level: [] for level in levels}
    for edge in topology.edges:
        a, b = (topology.host_of(end) or end for end in (edge.src, edge.dst))
        if a != b:
            joined[max(height[a], height[b])].append((a, b))
    part = _Parts(height)
    hosts = {host: [host] for host in topology.hosts}
    groups: dict[str, list[Group]] = {}
    for level in levels:
        for a, b in joined[level]:
            part.join(a, b)
        hosts, groups = part.gathered(hosts), part.gathered(groups)
        switches = part.gathered({n: [n] for n, h in height.items() if h == level})
        for at, names in switches.items():
            below = tuple(hosts.pop(at, ())), tuple(groups.get(at, ()))
            groups[at] = [Group(tuple(names), *below, level)]
    return groups[part.of(topology.hosts[0])][0]


def heights(topology: Topology) -> dict[str, int]:
    """Returns the level of each host (0) and switch.

    It is that of a switch's kind. Routers, and cores above cores, have one more than the lowest
    level that they are cabled to.
    """
    near: dict[str, list[str]] = {}
    for edge in topology.edges:
        a, b = (topology.host_of(end) or end for end in (edge.src, edge.dst))
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    places = [(name, node.kind) for name, node in topology.nodes.items()
              if node.host is None or node.kind == "host"]  # fmt: skip
    height = {
        n: LEVEL_OF_KIND[kind] for n, kind in places if kind in ("host", "tor", "aggregation")
    }
    height |= {
        name: LEVEL_OF_KIND[kind]
        for name, kind in places
        if kind == "core" and any(n in height for n in near.get(name, ()))
    }
    todo = sorted(height, key=lambda node: height[node])
    for node in todo:
        for neighbour in near.get(node, ()):
            if neighbour not in height:
                height[neighbour] = height[node] + 1
                todo.append(neighbour)
    # What no host reaches has no place; any will do.
    return dict.fromkeys((name for name, _ in places), 1) | height


class _Parts:
    """Connected parts of a graph whose edges come one by one (union-find)."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self._above = {node: node for node in nodes}

    def of(self, node: str) -> str:
        """Returns the node that stands for the part of ``node``."""
        while (above := self._above[node]) != node:
            self._above[node] = node = self._above[above]
        return node

    def join(self, a: str, b: str) -> None:
        """Make one part of those of ``a`` and ``b``."""
        self._above[self.of(b)] = self.of(a)

    def gathered(self, lists: Mapping[str, list[T]]) -> dict[str, list[T]]:
        """Returns ``lists`` of nodes as lists of their parts, joined in their order."""
        found: dict[str, list[T]] = {}
        for node, members in lists.items():
            found.setdefault(self.of(node), []).extend(members)
        return found
