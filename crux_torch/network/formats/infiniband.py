"""The output of ``ibnetdiscover``: every switch, host channel adapter and cable of a subnet.

The format is that of ``man ibnetdiscover``, topology file format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from crux_torch.network.formats.draft import Cable, Draft, some
from crux_torch.network.topology import TopologyError

#: Data bits per second of one lane, after encoding (InfiniBand Architecture Specification).
LANE_bps = {
    "SDR": 2e9,
    "DDR": 4e9,
    "QDR": 8e9,
    "FDR10": 10e9,
    "FDR": 14.0625e9 * 64 / 66,
    "EDR": 25e9,
    "HDR": 50e9,
    "NDR": 100e9,
    "XDR": 200e9,
}

_NODE = re.compile(r'^(Switch|Ca|Rt)\s+\d+\s+"([^"]+)"\s*(?:#\s*"(.*)")?', re.MULTILINE)
_PORT = re.compile(r'^\[(\d+)\](?:\[ext \d+\])?(?:\([0-9a-f]+\))?\s+"([^"]+)"\[(\d+)\]')
_RATE = re.compile(r"(\d{1,2})x([A-Z]+\d*)\s*$")
#: A managed switch tells its name between ``MF0;`` and its model.
_SWITCH_NAME = re.compile(r"MF\d+;([^:]+):\S*")
#: Host and device, as the kernel's ``rdma-ndd`` sets them.
_HOST_DEVICE = re.compile(r"(\S+) +([A-Za-z]\S*)")


@dataclass
class _Node:
    kind: str
    guid: str
    description: str
    ports: dict[int, tuple[str, int, float | None]] = field(default_factory=dict)


def is_ibnetdiscover(text: str) -> bool:
    """Returns True for the output of ``ibnetdiscover``."""
    return _NODE.search(text) is not None


def read_ibnetdiscover(texts: Mapping[str, str]) -> Draft:
    """Returns the subnets in outputs of ``ibnetdiscover``.

    An adapter that does not tell its host's name counts as a host of its own.
    """
    nodes = {node.guid: node for text in texts.values() for node in _nodes(text)}
    draft = Draft()
    aggregation = [n.guid for n in nodes.values() if "Aggregation Node" in n.description]
    if aggregation:
        draft.notes.append(f"left out: {len(aggregation)} aggregation nodes inside of switches")
        for guid in aggregation:
            del nodes[guid]
    name_of = _switch_names([n for n in nodes.values() if n.kind != "Ca"])
    draft.switches = dict.fromkeys(name_of.values())
    name_of |= _add_adapters(draft, [n for n in nodes.values() if n.kind == "Ca" and n.ports])
    draft.cables = list(_cables(nodes, name_of))
    return draft


def _nodes(text: str) -> Iterator[_Node]:
    node: _Node | None = None
    for line in text.splitlines():
        if (match := _NODE.match(line)) is not None:
            if node is not None:
                yield node
            node = _Node(match[1], match[2], (match[3] or "").strip())
        elif node is not None and (port := _PORT.match(line)) is not None:
            node.ports[int(port[1])] = (port[2], int(port[3]), _capacity_Bps(line))
    if node is not None:
        yield node


def _capacity_Bps(line: str) -> float | None:
    match = _RATE.search(line)
    lane_bps = LANE_bps.get(match[2]) if match else None
    return int(match[1]) * lane_bps / 8 if match and lane_bps else None


def _switch_names(switches: list[_Node]) -> dict[str, str]:
    """Returns a name for each switch's GUID; names that several share get the GUID as well."""
    names: dict[str, str] = {}
    for switch in switches:
        match = _SWITCH_NAME.fullmatch(switch.description)
        names[switch.guid] = match[1] if match else switch.description
    uses = Counter(names.values())
    return {
        guid: name if name and uses[name] == 1 else f"{name} {guid}".strip()
        for guid, name in names.items()
    }


def _add_adapters(draft: Draft, adapters: list[_Node]) -> dict[str, str]:
    """Add hosts and their NICs. Returns the NIC of each adapter's GUID."""
    nic_of: dict[str, str] = {}
    unnamed: list[str] = []
    taken: set[str] = set()
    for adapter in adapters:
        match = _HOST_DEVICE.fullmatch(adapter.description)
        host, device = (match[1], match[2]) if match else (adapter.guid, "hca")
        nic = f"{host}/{device}"
        if nic in taken:
            nic = f"{nic}-{adapter.guid}"
        taken.add(nic)
        if match is None:
            unnamed.append(adapter.guid)
        draft.hosts.setdefault(host, []).append(nic)
        nic_of[adapter.guid] = nic
    if unnamed:
        draft.notes.append(
            f"adapters that do not tell their host count as hosts: {some(unnamed)} (start rdma-ndd "
            "there)"
        )
    return nic_of


def _cables(nodes: Mapping[str, _Node], name_of: Mapping[str, str]) -> Iterator[Cable]:
    """Yields each cable once, though both of its ends tell it."""
    told: dict[frozenset[tuple[str, int]], tuple[str, str, float | None]] = {}
    for node in nodes.values():
        for port, (peer, peer_port, capacity_Bps) in node.ports.items():
            if node.guid in name_of and peer in name_of:
                ends = frozenset(((node.guid, port), (peer, peer_port)))
                if len(ends) == 2 and (ends not in told or told[ends][2] is None):
                    told[ends] = node.guid, peer, capacity_Bps
    if not told:
        raise TopologyError("no cable joins two nodes; expected the whole output of ibnetdiscover")
    for a, b, capacity_Bps in told.values():
        yield Cable(name_of[a], name_of[b], capacity_Bps)
