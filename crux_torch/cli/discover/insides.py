"""Puts the insides of hosts, as each told its own, into the network that was discovered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from crux_torch.host.machine import Inside
from crux_torch.network.discover.tasks import Hello
from crux_torch.network.topology import Edge, Topology, TopologyBuilder


def read_insides(told: Sequence[Hello]) -> tuple[dict[str, Inside], list[str]]:
    """Returns the inside of each host that told one with NICs, and a note for each misfit."""
    insides: dict[str, Inside] = {}
    notes = []
    for hello in told:
        name = hello.host.name
        try:
            inside = msgspec.json.decode(hello.inside, type=Inside | None)
        except (msgspec.MsgspecError, RecursionError):
            notes.append(f"the inside of host {name} can't be read")
            continue
        if inside is not None and inside.nics and _is_own(inside, name):
            insides[name] = inside
    return insides, notes


def _is_own(inside: Inside, host: str) -> bool:
    ends = [end for a, b, _ in inside.cables for end in (a, b)]
    return (
        inside.host == host
        and all(name.startswith(f"{host}/") for name in inside.nodes)
        and all(end == host or end in inside.nodes for end in ends)
    )


def furnish(
    topology: Topology, insides: Mapping[str, Inside], nics: Mapping[str, str]
) -> tuple[Topology, list[str]]:
    """Returns the topology with the insides of its hosts, and a note for each that does not fit.

    Args:
        insides: by host.
        nics: NIC (``HOST/eth0``) of each address.
    """
    moves: dict[str, str] = {}
    notes = []
    fitting: dict[str, Inside] = {}
    for host, inside in insides.items():
        ports = topology.inside(host, "nic") or (host,) if host in topology.hosts else ()
        moved = {port: _nic_of(topology, port, nics) for port in ports}
        if ports and all(nic in inside.nodes for nic in moved.values()):
            moves |= moved
            fitting[host] = inside
        elif ports:
            notes.append(
                f"the inside of host {host} is left out: {', '.join(sorted(moved.values()))} "
                "is no NIC on its PCI bus"
            )
    builder = TopologyBuilder(
        addresses={moves.get(node, node): given for node, given in topology.addresses.items()},
        device_flops=topology.device_flops,
        tables=topology.tables,
        qos=topology.qos,
    )
    for name, node in topology.nodes.items():
        if node.host in fitting and node.kind == "nic":
            continue
        builder.node(name, node.kind, node.host)
        for inner, part in fitting[name].nodes.items() if name in fitting else ():
            builder.node(inner, part.kind, name)
    for edge in _in_cables(topology.edges):
        hosts = {topology.host_of(end) for end in (edge.src, edge.dst)}
        if len(hosts) == 1 and hosts & fitting.keys():
            continue
        src, dst = moves.get(edge.src, edge.src), moves.get(edge.dst, edge.dst)
        builder.arrow(src, dst, edge.link)
    for inside in fitting.values():
        for a, b, link in inside.cables:
            builder.cable(a, b, link)
    return builder.build(), notes


def _in_cables(edges: Sequence[Edge]) -> Iterator[Edge]:
    """The links such that those of one cable follow each other: the file has one line for both."""
    between: dict[frozenset[str], list[Edge]] = {}
    for edge in edges:
        between.setdefault(frozenset((edge.src, edge.dst)), []).append(edge)
    for cable in between.values():
        yield from cable


def _nic_of(topology: Topology, port: str, nics: Mapping[str, str]) -> str:
    """The NIC that a cable ends at: that of the port's addresses."""
    found = (nics[a] for a in topology.addresses.get(port, ()) if a in nics)
    return next(found, port)
