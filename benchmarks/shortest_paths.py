"""Time of ``Topology.candidate_paths`` beside networkx and rustworkx, on 2,048 hosts.

Two tasks, for pairs of hosts drawn at random from a Clos and from a 3-D torus; each figure is the
time of one pair:

* ``paths``: the equal-cost shortest paths. candidate_paths gives 512 of them at most. The libraries
  always list all, so pairs with more than 10,000 paths are left out.
* ``distances``: the cost from every node to the destination, with which a search starts.
  candidate_paths keeps it for later pairs; here it is computed anew for every pair.

The libraries get switches and hosts only, and may let paths pass through other hosts: less work
than candidate_paths does. The run fails if the sets of paths differ. rustworkx is measured where
it is installed.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import networkx as nx

from crux_torch.network.builders import GpuServer, torus, two_layer_clos
from crux_torch.network.topology import Topology

try:
    import rustworkx as rx
except ModuleNotFoundError:
    rx = None

SERVER = GpuServer(gpus=1, nics=1, pcie_switches=1)
MOST_PATHS = 10_000
Pair = tuple[str, str]


class Network:
    """One topology, as Crux has it and as graphs of the libraries with one node for each host."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.digraph = nx.DiGraph()
        for edge in topology.edges:
            src, dst = (topology.host_of(end) or end for end in (edge.src, edge.dst))
            if src != dst:
                self.digraph.add_edge(src, dst, cost=edge.link.cost)
        self.backward = self.digraph.reverse()
        self.names = list(self.digraph)
        self.number = {name: i for i, name in enumerate(self.names)}
        if rx is not None:
            self.rust = rx.PyDiGraph()
            self.rust.add_nodes_from(self.names)
            links = self.digraph.edges(data="cost")
            self.rust.add_edges_from([(self.number[a], self.number[b], c) for a, b, c in links])
            self.rust_backward = self.rust.copy()
            self.rust_backward.reverse()

    def crux_paths(self, src: str, dst: str) -> object:
        return self.topology._find_candidates(src, dst, 512)

    def networkx_paths(self, src: str, dst: str) -> set[tuple[str, ...]]:
        return set(map(tuple, nx.all_shortest_paths(self.digraph, src, dst, weight="cost")))

    def rustworkx_paths(self, src: str, dst: str) -> set[tuple[str, ...]]:
        ends = self.number[src], self.number[dst]
        found = rx.digraph_all_shortest_paths(self.rust, *ends, weight_fn=float)
        return {tuple(self.names[i] for i in path) for path in found}

    def crux_distances(self, src: str, dst: str) -> object:
        search = self.topology._search
        for kept in (search._arrival, search._network, search._departure):
            kept.cache_clear()
        return self.topology.path_count(src, dst)

    def networkx_distances(self, src: str, dst: str) -> object:
        return nx.single_source_dijkstra_path_length(self.backward, dst, weight="cost")

    def rustworkx_distances(self, src: str, dst: str) -> object:
        found = rx.dijkstra_shortest_path_lengths(self.rust_backward, self.number[dst], float)
        return dict(found.items())

    def check(self, src: str, dst: str) -> None:
        """Every candidate, as its nodes, is what the libraries find."""
        expected = set()
        for path in self.topology.candidate_paths(src, dst, None):
            ends = [self.topology.ends(link) for link in path]
            nodes = [ends[0][0], *(end for _, end in ends)]
            places = [self.topology.host_of(node) or node for node in nodes]
            expected.add(tuple(dict.fromkeys(places)))
        assert self.networkx_paths(src, dst) == expected
        assert rx is None or self.rustworkx_paths(src, dst) == expected


def time_of_one_ms(call: Callable[[str, str], object], pairs: Sequence[Pair]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for src, dst in pairs:
            call(src, dst)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times) / len(pairs)


@click.command(help=__doc__)
@click.option("--pairs", "count", type=click.IntRange(1), default=20, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
def main(count: int, json_path: Path | None) -> None:
    rows = []
    libraries = ["crux", "networkx"] + (["rustworkx"] if rx is not None else [])
    for name, topology in (
        ("Clos, 64 ToRs, 32 spines", two_layer_clos(2048, 64, 32, server=SERVER)),
        ("torus, 16 x 16 x 8", torus((16, 16, 8), server=SERVER)),
    ):
        network, rng = Network(topology), random.Random(1)
        drawn: list[Pair] = [tuple(rng.sample(topology.hosts, 2)) for _ in range(count)]
        few = [pair for pair in drawn if topology.path_count(*pair) <= MOST_PATHS]
        for pair in few:
            network.check(*pair)
        for task, pairs in (("paths", few), ("distances", drawn)):
            times = {
                who: time_of_one_ms(getattr(network, f"{who}_{task}"), pairs) for who in libraries
            }
            listed = (f"{who} {ms:.2f} ms ({ms / times['crux']:.1f}x)" for who, ms in times.items())
            click.echo(f"{name}, {task} of {len(pairs)} pairs: {', '.join(listed)}")
            rows.append({"network": name, "task": task, "pairs": len(pairs), "ms": times})
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
