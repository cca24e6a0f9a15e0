"""This host: its GPUs, CPU and NICs, its identity, and its inside as part of a topology.

Facts that the host does not tell are None or empty, never an error.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crux_torch.host.interfaces import SYSFS, Nic, number, own_addresses, read_nics, text
from crux_torch.host.nvml import Gpu, bounded, read_gpus
from crux_torch.host.pcie import PcieLink, PcieTree
from crux_torch.network.builders import PCIE4_X16_Bps
from crux_torch.network.host_match import match_host
from crux_torch.network.topology import Link, Node, Topology, TopologyBuilder, TopologyError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/net")
CPUINFO = Path("/proc/cpuinfo")
_FIELD = re.compile(r"^[ \t]*(.*?)[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
#: Single-precision FLOPs of one core in one cycle by instruction set, widest first: lanes x 2 (a
#: multiply-add is two FLOPs) x 2 units, the most that such a core has (Intel 64 and IA-32
#: optimization manual; Arm Neoverse guides). AMX counts its bfloat16 tiles: 16 x 16 x 32
#: multiply-adds in 16 cycles.
SIMD_FLOPS_PER_CYCLE = (
    (("amx_bf16",), 1024),
    (("avx512f",), 64),
    (("avx2", "fma"), 32),
    (("avx",), 16),
    (("sve",), 64),
    (("asimd",), 32),
    (("sse2",), 8),
)
#: Above NVLink's, so that GPUs of one host use NVLink if there is any.
PCIE_COST = 2


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processors of this host, and the most that they could compute.

    Attributes:
        cores: physical cores, or hardware threads if the kernel doesn't list cores.
        frequency_Hz: highest known clock; None if no source tells.
        flops_per_cycle: FLOPs of one core in one cycle, by its widest instructions.
    """

    model: str
    cores: int
    frequency_Hz: float | None
    flops_per_cycle: int | None

    @property
    def peak_flops(self) -> float | None:
        """An upper bound in FLOP/s, for bounding what a job on CPUs may claim."""
        if self.frequency_Hz is None or self.flops_per_cycle is None:
            return None
        return self.cores * self.frequency_Hz * self.flops_per_cycle


@dataclass(frozen=True, slots=True)
class Host:
    """The hardware of one host."""

    name: str
    gpus: tuple[Gpu, ...]
    cpu: Cpu | None
    nics: tuple[Nic, ...]


def this_host() -> Host:
    """Returns this host, as far as this process can see it."""
    return Host(socket.gethostname(), bounded(read_gpus) or (), read_cpu(), read_nics())


def read_cpu(cpuinfo: Path = CPUINFO, sysfs: Path = SYSFS) -> Cpu | None:
    """Returns the processors in ``cpuinfo``; None if it can't be read or lists none."""
    parts = [_FIELD.findall(part) for part in text(cpuinfo).split("\n\n")]
    processors = [p for p in map(dict, parts) if "processor" in p]
    if not processors:
        return None
    places = ((p.get("physical id"), p.get("core id")) for p in processors)
    cores = {place for place in places if None not in place}
    flags = set((processors[0].get("flags") or processors[0].get("Features") or "").split())
    per_cycle = (flops for needed, flops in SIMD_FLOPS_PER_CYCLE if flags.issuperset(needed))
    return Cpu(
        model=processors[0].get("model name", ""),
        cores=len(cores) or len(processors),
        frequency_Hz=_frequency_Hz(processors, sysfs),
        flops_per_cycle=next(per_cycle, None),
    )


def _frequency_Hz(processors: list[dict[str, str]], sysfs: Path) -> float | None:
    """The highest of the limit in sysfs, the nominal clock in the name, and the clocks now."""
    limit = text(sysfs / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    nominal = re.search(r"@ *([0-9.]+) *GHz", processors[0].get("model name", ""))
    figures = [(limit, 1e3), (nominal[1] if nominal else "", 1e9)]
    figures += [(p.get("cpu MHz", ""), 1e6) for p in processors]
    return max((number(figure) or 0.0) * unit_Hz for figure, unit_Hz in figures) or None


def machine_id() -> str:
    """Returns an id that all processes of one machine share until it boots; empty if unknown."""
    return text(BOOT_ID).strip()


def network_id() -> str:
    """Returns an id that all processes of one network namespace share; empty if unknown."""
    try:
        return str(os.stat(NAMESPACE).st_ino)
    except OSError:
        return ""


def host_in(topology: Topology, configured: str) -> str:
    """Returns the host of ``topology`` that this machine is (:func:`match_host`).

    Args:
        configured: CRUX_HOST; empty: this machine's own name counts.
    """
    name = configured or socket.gethostname()
    return match_host(topology, name, own_addresses(), configured=bool(configured))


@dataclass
class Inside:
    """The inside of one host.

    Attributes:
        host: its name in the topology, and that of the node for its root complex and memory.
        nodes: its parts, by name; ``HOST/gpu3`` is the GPU with the fourth PCI address.
        cables: (one end, other end, link in either direction).
        node_of: node of each GPU's and NIC's PCI address.
        notes: facts that are missing, in words.
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
    """Returns the inside of a host, as far as NVML and sysfs describe it.

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
    """Returns ``topology`` with the inside of a host in place of the bare host.

    Args:
        topology: of the cluster, where the host is one node, or that and its NICs.
        nics_of_cables: the NIC at the end of each of the host's cables, in their order; default:
            the NIC of the same name, the NICs one by one if there are as many, or the only NIC.

    Raises:
        TopologyError: the host is unknown or already described, or it is unclear which cable ends
            at which NIC.
    """
    host = inside.host
    if host not in topology.hosts:
        raise TopologyError(f"there is no host {host!r}; hosts are {', '.join(topology.hosts)}")
    ends = set(topology.inside(host))
    linked = any(edge.src in ends and edge.dst in ends for edge in topology.edges)
    if linked or len(ends) != 1 + len(topology.inside(host, "nic")):
        raise TopologyError(f"the inside of host {host!r} is described already")
    if not inside.nics:
        raise TopologyError(f"host {host!r} has no NIC that its cables could end at")
    nics = _nics_of_cables(topology, inside, ends, nics_of_cables)
    addresses: dict[str, Sequence[str]] = {}
    for name, given in topology.addresses.items():
        # A NIC that is known by another name now leaves its addresses to the host.
        at = host if name in ends and name not in inside.nodes else name
        addresses[at] = (*addresses.get(at, ()), *given)
    builder = TopologyBuilder(
        addresses=addresses,
        device_flops=topology.device_flops,
        tables=topology.tables,
        qos=topology.qos,
    )
    for name, node in topology.nodes.items():
        if name == host or name not in ends:
            builder.node(name, node.kind, node.host)
        if name == host:
            for inner, part in inside.nodes.items():
                builder.node(inner, part.kind, host)
    out, into = iter(nics), iter(nics)
    for edge in topology.edges:
        src = next(out) if edge.src in ends else edge.src
        dst = next(into) if edge.dst in ends else edge.dst
        moved = (src, dst) != (edge.src, edge.dst)
        builder.arrow(src, dst, edge.link, None if moved else edge.name)
    for a, b, link in inside.cables:
        builder.cable(a, b, link)
    return builder.build()


def as_entries(inside: Inside) -> dict[str, object]:
    """Returns the entries of a topology file for this host (``docs/operate/topology.md``)."""
    return {
        "hosts": {inside.host: {name: node.kind for name, node in inside.nodes.items()}},
        "links": [
            {"between": [a, b], "capacity_Bps": link.capacity_Bps}
            | ({"cost": link.cost} if link.cost != 1 else {})
            for a, b, link in inside.cables
        ],
    }


def usable_nics(nics: Sequence[Nic], tree: PcieTree) -> tuple[Nic, ...]:
    """Returns the NICs on the PCI bus; only those that are up, if the speed of any is known."""
    present = [nic for nic in nics if nic.pci_address in tree.devices]
    up = [nic for nic in present if nic.speed_Bps]
    return tuple(up or present)


def _nics_of_cables(
    topology: Topology, inside: Inside, ends: Collection[str], given: Sequence[str] | None
) -> Sequence[str]:
    host, nics = inside.host, inside.nics
    out = [edge.src for edge in topology.edges if edge.src in ends]
    into = [edge.dst for edge in topology.edges if edge.dst in ends]
    if len(out) != len(into) or (len(ends) > 1 and out != into):
        raise TopologyError(
            f"host {host!r} has {len(out)} links out and {len(into)} in; expected cables"
        )
    if given is None and set(nics).issuperset(out):
        return out
    if given is None and len(nics) not in (1, len(out)):
        raise TopologyError(
            f"host {host!r} has {len(nics)} NICs and {len(out)} cables: say at which NIC each "
            "cable ends, or write one cable for each NIC"
        )
    if given is None:
        return nics * len(out) if len(nics) == 1 else nics
    if len(given) != len(out) or not set(nics).issuperset(given):
        raise TopologyError(
            f"expected the NICs of the {len(out)} cables of host {host!r}, out of {', '.join(nics)}"
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
    for index, address in enumerate(gpus):
        add(f"gpu{index}", "gpu", address, PCIE4_X16_Bps)
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
