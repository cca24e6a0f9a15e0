"""The inside of a host in the matrix that ``nvidia-smi topo -m`` prints.

The matrix tells how far apart two devices are, not the links between them. So this takes one PCIe
switch for devices that are PIX to each other, one above it for PXB, and the host for all else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from crux_torch.host.machine import PCIE_COST, Inside
from crux_torch.network.formats.draft import Capacities
from crux_torch.network.topology import Link, Node, TopologyError

#: NVLinks of one GPU at most (H100, B200). With more, pairs share them over NVSwitches.
MAX_NVLINKS = 18
MAX_DEVICES = 256

#: Underlines the head; pasted text may have lost the first letter.
_ESCAPE = re.compile(r"\x1b?\[[0-9;]*m")
_HEAD = re.compile(r"^[ \t]*(?:GPU|NIC)\d+\s", re.MULTILINE)
_DEVICE = re.compile(r"GPU\d{1,3}|NIC\d{1,3}|[a-z]\w*_\d{1,3}")
_LEGEND = re.compile(r"^[ \t]*(NIC\d{1,3}): (\S+)", re.MULTILINE)
_RELATION = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|PSB|N/A")


def is_smi_matrix(text: str) -> bool:
    """Returns True for the output of ``nvidia-smi topo -m``."""
    plain = _ESCAPE.sub("", text[:65536])
    return _HEAD.search(plain) is not None and "GPU0" in plain


def read_smi_matrix(text: str, host: str, capacities: Mapping[str, float]) -> Inside:
    """Returns the inside of ``host``.

    Args:
        text: the matrix, with or without its legend.
        capacities: bytes per second of a ``pcie`` link and of one ``nvlink``.

    Raises:
        TopologyError: it is no such matrix, or a capacity is missing.
    """
    relation = _relations(_ESCAPE.sub("", text))
    names = dict(_LEGEND.findall(text))
    inside = Inside(host, notes=["PCIe switches are concluded from the distances of devices"])
    rates = Capacities(capacities)
    devices = list(dict.fromkeys(a for a, _ in relation))
    for device in devices:
        kind = "gpu" if device.startswith("GPU") else "nic"
        name = device.lower() if kind == "gpu" else names.get(device, device)
        inside.node_of[device] = f"{host}/{name}"
        inside.nodes[inside.node_of[device]] = Node(kind, host)
    _add_pcie(inside, relation, rates)
    _add_nvlinks(inside, relation, rates)
    inside.notes += rates.check()
    return inside


def _relations(text: str) -> dict[tuple[str, str], str]:
    """Returns the entry of the matrix for each two devices, in the order of its rows."""
    lines = [line.split() for line in text.splitlines()]
    head = next((line for line in lines if line and line[0] == "GPU0" and "X" not in line), None)
    if head is None:
        raise TopologyError("expected the output of nvidia-smi topo -m, with a head of GPU0, GPU1")
    end = next((i for i, word in enumerate(head) if not _DEVICE.fullmatch(word)), len(head))
    columns = head[:end]
    if len(columns) > MAX_DEVICES:
        raise TopologyError(f"it has over {MAX_DEVICES} devices")
    relation: dict[tuple[str, str], str] = {}
    for line in lines:
        cells = line[1 : 1 + len(columns)]
        if line and line[0] in columns and line is not head:
            if len(cells) < len(columns) or not all(map(_RELATION.fullmatch, cells)):
                expected = f"{len(columns)} entries such as PIX, NV18 and SYS"
                raise TopologyError(f"row {line[0]}: {' '.join(cells)[:80]!r}; expected {expected}")
            relation |= {(line[0], column): c for column, c in zip(columns, cells, strict=True)}
    missing = [name for name in columns if (name, name) not in relation]
    if missing:
        raise TopologyError(f"there is no row of {missing[0]}; expected one for each device")
    return relation


def _add_pcie(inside: Inside, relation: Mapping[tuple[str, str], str], rates: Capacities) -> None:
    """Add PCIe switches and the links to them."""

    def cable(low: str, high: str) -> None:
        inside.cables.append((low, high, Link(rates.of("pcie"), cost=PCIE_COST)))

    def switch(number: int) -> str:
        name = f"{inside.host}/pcie{number}"
        inside.nodes[name] = Node("pcie", inside.host)
        return name

    devices = list(inside.node_of)
    near = _together(devices, relation, ("PIX",))
    count = 0
    for far in _together(devices, relation, ("PIX", "PXB")):
        parts = [part for part in near if part[0] in far]
        upper = inside.host
        if len(parts) > 1:
            upper, count = switch(count), count + 1
            cable(upper, inside.host)
        for part in parts:
            above = upper
            if len(part) > 1:
                above, count = switch(count), count + 1
                cable(above, upper)
            for device in part:
                cable(inside.node_of[device], above)


def _together(
    devices: Iterable[str], relation: Mapping[tuple[str, str], str], kinds: tuple[str, ...]
) -> list[list[str]]:
    """Returns the devices in parts that relations of these kinds connect."""
    parts: list[list[str]] = []
    left = dict.fromkeys(devices)
    while left:
        part = [next(iter(left))]
        del left[part[0]]
        for device in part:
            new = [other for other in left if relation.get((device, other)) in kinds]
            part += new
            for other in new:
                del left[other]
        parts.append(part)
    return parts


def _add_nvlinks(
    inside: Inside, relation: Mapping[tuple[str, str], str], rates: Capacities
) -> None:
    """Add NVLinks: between GPUs, or to the NVSwitches if a GPU would need too many for that."""
    links = {pair: int(entry[2:]) for pair, entry in relation.items() if entry.startswith("NV")}
    gpus = [device for device in inside.node_of if device.startswith("GPU")]
    of_gpu = {gpu: [n for (a, _), n in links.items() if a == gpu] for gpu in gpus}
    if any(sum(each) > MAX_NVLINKS for each in of_gpu.values()):
        switch = f"{inside.host}/nvswitch"
        inside.nodes[switch] = Node("nvswitch", inside.host)
        for gpu, each in of_gpu.items():
            if max(each, default=0):
                capacity_Bps = rates.of("nvlink") * max(each)
                inside.cables.append((inside.node_of[gpu], switch, Link(capacity_Bps)))
        return
    for (a, b), count in links.items():
        if gpus.index(a) < gpus.index(b) and count:
            capacity_Bps = rates.of("nvlink") * count
            inside.cables.append((inside.node_of[a], inside.node_of[b], Link(capacity_Bps)))
