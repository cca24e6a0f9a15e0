"""The inside of a host in the XML that NCCL writes to ``NCCL_TOPO_DUMP_FILE``.

NCCL reads the same format from ``NCCL_TOPO_FILE``; it is that of ``src/graph/xml.cc`` (NCCL 2.27).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

from crux_torch.host.machine import PCIE_COST, Inside
from crux_torch.host.nvml import NVLINK_Bps
from crux_torch.host.pcie import ENCODING, WIDTHS, LinkRate
from crux_torch.network.formats.draft import Capacities, some
from crux_torch.network.topology import Link, Node, TopologyError

#: Nesting and elements of a file; a host's has about ten levels and two hundred elements.
MAX_DEPTH, MAX_ELEMENTS = 64, 1 << 16
_SYSTEM = re.compile(r"<(system|graphs)\b")
_SPEED = re.compile(r"(\d{1,3}(?:\.\d)?) *GT/s")
#: Classes of PCI functions by their first byte, as NCCL writes them (``0x030200``).
_GPU_CLASSES, _NIC_CLASSES, _BRIDGES = ("0x03", "0x12"), ("0x02",), ("0x06",)
_NVSWITCH = "0x0680"


@dataclass
class Element:
    """An element of the XML."""

    tag: str
    attributes: Mapping[str, str]
    children: list[Element] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        """Yields this element and all inside it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def of(self, tag: str) -> list[Element]:
        """Returns the direct children with ``tag``."""
        return [child for child in self.children if child.tag == tag]


def is_nccl_xml(text: str) -> bool:
    """Returns True for an XML of NCCL, that of its graphs included."""
    return _SYSTEM.search(text[:65536]) is not None


def read_nccl_topology(text: str, host: str, capacities: Mapping[str, float]) -> Inside:
    """Returns the inside of ``host``.

    Args:
        text: the XML.
        capacities: bytes per second of ``pcie`` and of one ``nvlink``, where the XML has no rate.

    Raises:
        TopologyError: it is no such XML, it has several hosts or no GPU and no NIC, or a rate is
            missing.
    """
    root = parse_xml(text)
    if root.tag != "system":
        raise TopologyError(
            f"the XML has <{root.tag[:40]}>, expected <system>: NCCL_TOPO_DUMP_FILE has the links "
            "of a host, NCCL_GRAPH_DUMP_FILE only the rings that NCCL chose"
        )
    cpus = root.of("cpu")
    hashes = {cpu.attributes.get("host_hash", "") for cpu in cpus}
    if len(hashes) > 1:
        raise TopologyError(f"it has {len(hashes)} hosts; expected one: dump it on each alone")
    builder = _Builder(Inside(host), Capacities(capacities))
    for cpu in cpus:
        for child in cpu.children:
            builder.place(child, host, None)
    builder.add_nvlinks()
    pci = (element for element in root.walk() if element.tag == "pci")
    unknown = [each.attributes.get("busid", "") for each in pci if _kind(each) == "unknown"]
    if unknown:
        builder.inside.notes.append(f"left out, of unknown class: PCI {some(unknown)}")
    builder.inside.notes += builder.rates.check()
    if not builder.inside.node_of:
        raise TopologyError("it has no GPU and no NIC")
    return builder.inside


def parse_xml(text: str) -> Element:
    """Returns the root of a small XML without a document type, which could stand for any amount.

    Raises:
        TopologyError: it is no XML, has a document type, or is too large.
    """
    above: list[Element] = [Element("", {})]
    count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if len(above) > MAX_DEPTH or count > MAX_ELEMENTS:
            raise TopologyError(f"the XML has over {MAX_DEPTH} levels or {MAX_ELEMENTS} elements")
        above.append(Element(tag, attributes))
        above[-2].children.append(above[-1])

    def end(_tag: str) -> None:
        above.pop()

    def refuse(*_: object) -> None:
        raise TopologyError("the XML has a document type; expected none")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise TopologyError(f"it is no XML: {error}") from None
    return above[0].children[0]


class _Builder:
    """The inside of a host while its elements are added."""

    def __init__(self, inside: Inside, rates: Capacities) -> None:
        self.inside, self.rates = inside, rates
        self._gpus: dict[str, Element] = {}
        self._ends: dict[int, bool] = {}

    def place(self, element: Element, upper: str, rate_Bps: float | None) -> None:
        """Add an element below ``upper``, over a chain of links of at least ``rate_Bps``."""
        if element.tag == "nic":
            self._add_nic(element, upper, rate_Bps)
            return
        if element.tag != "pci":
            return
        own_Bps = _rate_Bps(element)
        rate_Bps = min((r for r in (rate_Bps, own_Bps) if r is not None), default=None)
        kind, address = _kind(element), element.attributes.get("busid", "")
        inner = [child for child in element.of("pci") if self._has_ends(child)]
        if kind == "gpu":
            self._add(f"gpu{self._gpu_number(element)}", "gpu", address, upper, rate_Bps)
            self._gpus[address] = element
        elif kind == "nic" and not inner:
            self._add_nic(next(iter(element.of("nic")), element), upper, rate_Bps, address)
        elif len(inner) == 1:
            self.place(inner[0], upper, rate_Bps)
        elif inner:
            switch = self._add(f"pcie-{address.replace(':', '-')}", "pcie", "", upper, rate_Bps)
            for child in inner:
                self.place(child, switch, None)

    def add_nvlinks(self) -> None:
        """Add the NVLinks of every GPU: to the NVSwitches, which count as one, or to its peers."""
        switch = f"{self.inside.host}/nvswitch"
        for address, element in self._gpus.items():
            node = self.inside.node_of[address]
            gpu = next(iter(element.of("gpu")), None)
            links = gpu.of("nvlink") if gpu is not None else []
            to_switch_Bps = 0.0
            for link in links:
                capacity_Bps = self._nvlink_Bps(gpu) * _number(link, "count")
                peer = self.inside.node_of.get(link.attributes.get("target", ""))
                if link.attributes.get("tclass", "").startswith(_NVSWITCH):
                    to_switch_Bps += capacity_Bps
                elif peer is None:
                    self.inside.notes.append(f"NVLinks of {node} lead to what is not known")
                elif node < peer and capacity_Bps:
                    self.inside.cables.append((node, peer, Link(capacity_Bps)))
            if to_switch_Bps:
                self.inside.nodes.setdefault(switch, Node("nvswitch", self.inside.host))
                self.inside.cables.append((node, switch, Link(to_switch_Bps)))

    def _add_nic(
        self, element: Element, upper: str, rate_Bps: float | None, address: str = ""
    ) -> None:
        nets = element.of("net")
        names = [net.attributes.get("name", "").replace("/", ":") for net in nets]
        if not address:
            # A NIC that is no PCI device, such as a virtual machine's, is as fast as its network.
            rate_Bps = sum(_number(net, "speed") for net in nets) * 1e6 / 8 or None
        name = names[0] if names and names[0] else f"nic{len(self.inside.nics)}"
        node = self._add(name, "nic", address, upper, rate_Bps)
        for name in names[1:]:
            self.inside.notes.append(f"{name} is another port of {node}")

    def _add(self, name: str, kind: str, address: str, upper: str, rate_Bps: float | None) -> str:
        node, number = f"{self.inside.host}/{name}", 1
        while node in self.inside.nodes:
            node, number = f"{self.inside.host}/{name}-{number}", number + 1
        self.inside.nodes[node] = Node(kind, self.inside.host)
        if kind != "pcie":
            self.inside.node_of[address or node] = node
        capacity_Bps = self.rates.of("pcie") if rate_Bps is None else rate_Bps
        self.inside.cables.append((node, upper, Link(capacity_Bps, cost=PCIE_COST)))
        return node

    def _gpu_number(self, element: Element) -> int:
        dev = next((gpu.attributes.get("dev", "") for gpu in element.of("gpu")), "")
        return int(dev) if dev.isdecimal() and len(dev) < 6 else len(self._gpus)

    def _nvlink_Bps(self, gpu: Element | None) -> float:
        sm = int(_number(gpu, "sm")) if gpu is not None else 0
        capability = divmod(sm, 10)
        known = NVLINK_Bps.get(capability) or NVLINK_Bps.get(capability[:1])
        return known or self.rates.of("nvlink")

    def _has_ends(self, element: Element) -> bool:
        """True if a GPU or NIC is in ``element``; remembered, as it is asked at every level."""
        if id(element) not in self._ends:
            self._ends[id(element)] = _kind(element) in ("gpu", "nic") or any(
                self._has_ends(child) for child in element.of("pci")
            )
        return self._ends[id(element)]


def _kind(element: Element) -> str:
    given = element.attributes.get("class", "")
    if element.of("gpu") or given.startswith(_GPU_CLASSES):
        return "gpu"
    if element.of("nic") or given.startswith(_NIC_CLASSES):
        return "nic"
    return "bridge" if given.startswith(_BRIDGES) or element.of("pci") else "unknown"


def _rate_Bps(element: Element) -> float | None:
    match = _SPEED.match(element.attributes.get("link_speed", ""))
    speed, lanes = float(match[1]) if match else 0.0, _number(element, "link_width")
    return LinkRate(speed, int(lanes)).Bps if speed in ENCODING and lanes in WIDTHS else None


def _number(element: Element, attribute: str) -> float:
    """Returns a number of an element; 0 without one, or for one that no hardware has."""
    text = element.attributes.get(attribute, "")
    return float(text) if text.isdecimal() and len(text) < 10 else 0.0
