"""The inside of this host as part of a topology: GPUs, PCIe switches, NICs and NVLinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crux_torch.fabric.builders.server import PCIE4_X16_Bps
from crux_torch.fabric.topology import Link, Node, Topology, TopologyBuilder, TopologyError
from crux_torch.host.machine import Host
from crux_torch.host.nic import Nic
from crux_torch.host.pcie import PcieLink, PcieTree

#: Above NVLink's, so that GPUs of one host use NVLink if there is any.
PCIE_COST = 2


@dataclass
class Inside:
    """The inside of one host.

    Attributes:
        host: its name in the topology, and that of the node for its root complex and memory.
        nodes: what is in it, by name; ``HOST/gpu3`` is the GPU with the fourth PCI address.
        cables: (one end, other end, link in either direction).
        node_of: node of each GPU's and NIC's PCI address.
        notes: what could not be found out, in words.
    """

    host: str
    nodes: dict[str, Node] = field(default_factory=dict)
    cables: list[tuple[str, str, Link]] = field(default_factory=list)
    node_of: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def nics(self) -> tuple[str, ...]:
        return tuple(name for name, node in self.nodes.items() if node.kind == "nic")


def inside_of(host: Host, tree: PcieTree, name: str | None = None) -> Inside:
    """The inside of a host, as far as NVML and sysfs describe it.

    If NVML lists no GPUs, they are taken from the PCI bus. If a link does not report its rate, PCIe
    4.0 with 16 lanes is assumed (for a NIC: the rate of its network), and noted.
    """
    inside = Inside(name or host.name)
    if tree.obstacle:
        inside.notes.append(tree.obstacle)
    _add_pcie(inside, tree, _add_ends(inside, host, tree))
    _add_nvlinks(inside, host)
    return inside


def join(
    topology: Topology, inside: Inside, nics_of_cables: Sequence[str] | None = None
) -> Topology:
    """``topology`` with the inside of a host in place of the bare host.

    Args:
        topology: of the cluster, where the host is one node.
        nics_of_cables: the NIC at the end of each of the host's cables, in their order; default:
            the NICs one by one if there are as many, or the only NIC if there is one.

    Raises:
        TopologyError: the host is unknown or already described, or it is unclear which cable ends
            at which NIC.
    """
    host = inside.host
    if host not in topology.hosts:
        raise TopologyError(f"there is no host {host!r}; hosts are {', '.join(topology.hosts)}")
    if topology.inside(host) != (host,):
        raise TopologyError(f"the inside of host {host!r} is described already")
    if not inside.nics:
        raise TopologyError(f"host {host!r} has no NIC that its cables could end at")
    builder = TopologyBuilder(
        addresses=dict(topology.addresses), device_flops=topology.device_flops
    )
    for name, node in topology.nodes.items():
        builder.node(name, node.kind, node.host)
        if name == host:
            for inner, part in inside.nodes.items():
                builder.node(inner, part.kind, host)
    nics = _nics_of_cables(topology, inside, nics_of_cables)
    out, into = iter(nics), iter(nics)
    for edge in topology.edges:
        src = next(out) if edge.src == host else edge.src
        dst = next(into) if edge.dst == host else edge.dst
        moved = (src, dst) != (edge.src, edge.dst)
        builder.arrow(src, dst, edge.link, None if moved else edge.name)
    for a, b, link in inside.cables:
        builder.cable(a, b, link)
    return builder.build()


def as_entries(inside: Inside) -> dict[str, object]:
    """What a topology file says of this host (``docs/topology.md``): its parts and its links."""
    return {
        "hosts": {inside.host: {name: node.kind for name, node in inside.nodes.items()}},
        "links": [
            {"between": [a, b], "capacity_Bps": link.capacity_Bps}
            | ({"cost": link.cost} if link.cost != 1 else {})
            for a, b, link in inside.cables
        ],
    }


def usable_nics(nics: Sequence[Nic], tree: PcieTree) -> tuple[Nic, ...]:
    """The NICs on the PCI bus; only those that are up, if the speed of any is known."""
    present = [nic for nic in nics if nic.pci_address in tree.devices]
    up = [nic for nic in present if nic.speed_Bps]
    return tuple(up or present)


def _nics_of_cables(
    topology: Topology, inside: Inside, given: Sequence[str] | None
) -> Sequence[str]:
    host, nics = inside.host, inside.nics
    out = sum(edge.src == host for edge in topology.edges)
    into = sum(edge.dst == host for edge in topology.edges)
    if out != into:
        raise TopologyError(f"host {host!r} has {out} links out and {into} in; expected cables")
    if given is None and len(nics) not in (1, out):
        raise TopologyError(
            f"host {host!r} has {len(nics)} NICs and {out} cables: say at which NIC each cable "
            "ends, or write one cable for each NIC"
        )
    if given is None:
        return nics * out if len(nics) == 1 else nics
    if len(given) != out or not set(nics).issuperset(given):
        raise TopologyError(
            f"expected the NICs of the {out} cables of host {host!r}, out of {', '.join(nics)}"
        )
    return given


def _add_ends(inside: Inside, host: Host, tree: PcieTree) -> dict[str, float]:
    """Add GPUs and NICs. Returns the rate to assume for each if its link reports none."""
    rates: dict[str, float] = {}

    def add(name: str, kind: str, address: str, rate_Bps: float) -> None:
        node = inside.node_of[address] = f"{inside.host}/{name}"
        inside.nodes[node] = Node(kind, inside.host)
        rates[address] = rate_Bps

    gpus = [gpu.pci_address for gpu in host.gpus] or tree.of_kind("gpu")
    for number, address in enumerate(gpus):
        add(f"gpu{number}", "gpu", address, PCIE4_X16_Bps)
    for nic in usable_nics(host.nics, tree):
        address = nic.pci_address or ""
        if address in inside.node_of:
            inside.notes.append(f"{nic.name} is another port of {inside.node_of[address]}")
        else:
            add(nic.name.replace("/", ":"), "nic", address, nic.speed_Bps or PCIE4_X16_Bps)
    return rates


def _add_pcie(inside: Inside, tree: PcieTree, rates: Mapping[str, float]) -> None:
    """Add the links above every end, and a node for each place where several of them meet."""
    chains = {address: tree.links_above(address) for address in inside.node_of}
    for address in (a for a, chain in chains.items() if not chain):
        node = inside.node_of[address]
        inside.notes.append(f"the PCIe link of {node} can't be seen")
        inside.cables.append((node, inside.host, Link(rates[address], cost=PCIE_COST)))
    ends = [chain[0].name for chain in chains.values() if chain]
    lower: dict[str, str] = {}
    for address, chain in chains.items():
        node, upper = inside.node_of[address], inside.host
        for link in reversed(chain):
            if link.name not in lower:
                # The device, or what several devices share the link through.
                below = f"{inside.host}/{link.name}"
                if link is chain[0] and ends.count(link.name) == 1:
                    below = node
                else:
                    inside.nodes[below] = Node("pcie", inside.host)
                lower[link.name] = below
                inside.cables.append((below, upper, _pcie(inside, link, rates[address])))
            upper = lower[link.name]
        if chain and node != upper:
            inside.cables.append((node, upper, _pcie(inside, chain[0], rates[address])))


def _pcie(inside: Inside, link: PcieLink, default_Bps: float) -> Link:
    """A link of the topology with the rate of a PCIe link, or ``default_Bps`` and a note."""
    note = f"{link.name} does not report its rate"
    if link.capacity_Bps is None and note not in inside.notes:
        inside.notes.append(note)
    return Link(default_Bps if link.capacity_Bps is None else link.capacity_Bps, cost=PCIE_COST)


def _add_nvlinks(inside: Inside, host: Host) -> None:
    switch = f"{inside.host}/nvswitch"
    for gpu in host.gpus:
        node = inside.node_of[gpu.pci_address]
        rates = [x.capacity_Bps for x in gpu.nvlinks if x.kind == "switch" and x.capacity_Bps]
        if rates:
            inside.nodes.setdefault(switch, Node("nvswitch", inside.host))
            inside.cables.append((node, switch, Link(sum(rates))))
        for link in gpu.nvlinks:
            peer = inside.node_of.get(link.peer)
            if link.capacity_Bps is None or (link.kind != "switch" and peer is None):
                inside.notes.append(f"{link.count} NVLinks of {node} lead to what is not known")
            elif link.kind == "gpu" and peer is not None and node < peer:
                inside.cables.append((node, peer, Link(link.capacity_Bps)))
