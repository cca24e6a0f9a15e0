"""A path map as a table and as JSON: for ``crux probe``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from crux_torch.fabric.topology import Topology
from crux_torch.probe.path_map import Hops, PathMap
from crux_torch.report.json_text import json_text
from crux_torch.report.tables import Grid, console, say

EXAMPLES = 6
PORTS_LISTED = 100


@dataclass(frozen=True, slots=True)
class PathTable:
    """What is to be told.

    Attributes:
        topology: gives switches their names; None: addresses.
        via: nodes or addresses that a path must pass, all of them.
    """

    found: PathMap
    topology: Topology | None = None
    via: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, Hops, tuple[int, ...]]]:
        """Number, hops and ports of the paths that pass all of ``via``; ``?``: partly seen."""
        groups = [(str(i), *group) for i, group in enumerate(self.found.paths.items(), start=1)]
        groups += [("?", *group) for group in self.found.partial.items()]
        return [group for group in groups if self._passes(group[1])]

    def ports_via(self) -> tuple[int, ...]:
        """The source ports whose path passes all of ``via``, in the order of their numbers."""
        return tuple(sorted(p for p, hops in self.found.hops.items() if self._passes(hops)))

    def _passes(self, hops: Hops) -> bool:
        answers = {address for _, address in hops}
        return all(answers & addresses_of(name, self.topology) for name in self.via)


def addresses_of(name: str, topology: Topology | None) -> frozenset[str]:
    """The addresses of a node of the topology; anything else is taken for an address."""
    known = topology.addresses.get(name) if topology is not None else None
    return frozenset(known) if known else frozenset({name})


def as_json_text(report: PathTable) -> str:
    """``report`` as JSON; the map keeps its schema under ``map``."""
    found, topology = report.found, report.topology
    fields: dict[str, Any] = {
        "map": msgspec.to_builtins(found, str_keys=True),
        "paths": [
            {
                "hops": [
                    {"ttl": ttl, "address": address, "node": name if name != address else None}
                    for (ttl, address), name in zip(hops, found.names(hops, topology), strict=True)
                ],
                "ports": list(ports),
            }
            for hops, ports in (*found.paths.items(), *found.partial.items())
        ],
    }
    if report.via:
        fields["via"] = {"nodes": list(report.via), "ports": list(report.ports_via())}
    return json_text(fields)


def render(report: PathTable) -> None:
    """Print ``report``: a row for each path, what it rests on, and what to beware of."""
    to = console()
    found = report.found
    title = f"{found.source} to {found.destination}, {found.protocol} port {found.port}"
    if found.distance is not None:
        title += f", {found.distance - 1} routers on the way"
    say(to, title)
    rows = []
    for number, hops, ports in report.rows():
        way = " > ".join(found.names(hops, report.topology)) or "no router on the way"
        share = f"{100 * len(ports) / len(found.hops):.0f}%"
        more = ["..."] if len(ports) > EXAMPLES else []
        examples = ", ".join([*map(str, ports[:EXAMPLES]), *more])
        counts = {"ports": str(len(ports)), "share": share, "source ports": examples}
        rows.append({"path": number, "hops": way, **counts})
    if rows:
        Grid(rows, text=("hops", "source ports")).print(to)
    for line in _footnotes(report):
        say(to, line)


def _footnotes(report: PathTable) -> list[str]:
    found = report.found
    lines = [
        f"{len(found.hops)} ports, {found.sent} probes, {found.answered} answers, "
        f"{found.seconds:.1f} s; the probability that a path with an equal share is missing is at "
        f"most {1 - found.confidence:.1%}"
    ]
    if found.ended == "time":
        lines.append("the time limit ended the search, so there may be more paths: see --time")
    if found.ended == "ports":
        lines.append("every source port was probed")
    if found.changed:
        lines.append(
            f"do not rely on this table: {found.changed} of {found.repeated} ports took another "
            "path when they were probed again, so the source port does not decide the path here "
            "(packet spraying, IPv6 flow labels, or a change of routes)"
        )
    if found.partial:
        count = sum(map(len, found.partial.values()))
        lines.append(
            f"{count} ports got no answer (*) from a hop that answered for other ports: their path "
            "crosses a silent router, or answers were lost; the probability does not cover them"
        )
    if found.silent:
        lines.append(f"nobody answered at TTL {', '.join(map(str, found.silent))} (*)")
    if found.inferred:
        ttls = ", ".join(map(str, found.inferred))
        lines.append(
            f"TTL {ttls} answers slowly and was asked about some ports only: for the others its "
            "answer follows from the hops before it"
        )
    ports = report.ports_via() if report.via else ()
    if ports:
        more = f", and {len(ports) - PORTS_LISTED} more" if len(ports) > PORTS_LISTED else ""
        lines.append(
            f"{len(ports)} ports via {' and '.join(report.via)}: "
            f"{', '.join(map(str, ports[:PORTS_LISTED]))}{more}"
        )
    return lines
