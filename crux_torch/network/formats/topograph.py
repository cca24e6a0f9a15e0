"""Topologies of NVIDIA's topograph: the JSON of its engine ``graph``, and node labels.

Formats: topograph's ``docs/engines/graph.md`` and ``docs/reference/node-labels.md`` (2026); AWS,
Oracle and Google document the labels of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from crux_torch.files import parse_json
from crux_torch.network.formats.draft import Draft, draft_of_layers, some
from crux_torch.network.formats.groups import Group, hierarchy
from crux_torch.network.formats.slurm import ONE_NODE_A_GROUP
from crux_torch.network.topology import Topology, TopologyError

#: Keys of one family of labels, that of the switch at the host first.
FAMILIES: tuple[tuple[str, ...], ...] = (
    tuple(f"network.topology.nvidia.com/{layer}" for layer in ("leaf", "spine", "core")),
    # Of its releases until 2024.
    tuple(f"network.topology.kubernetes.io/{layer}" for layer in ("block", "spine", "datacenter")),
    tuple(f"topology.k8s.aws/network-node-layer-{n}" for n in (4, 3, 2, 1)),
    tuple(
        f"oci.oraclecloud.com/rdma.{layer}"
        for layer in ("local_block_id", "network_block_id", "hpc_island_id")
    ),
    tuple(f"oci.oraclecloud.com/host.{layer}" for layer in ("rack_id", "network_block_id")),
    tuple(f"cloud.google.com/gce-topology-{layer}" for layer in ("subblock", "block")),
)
#: Above the switches of every family.
PLACES = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region")

_TIER = re.compile(r"fabric\.topograph\.run/tier-(\d{1,3})")


class _Instance(msgspec.Struct):
    id: str
    network_layers: list[str] | None = None


class _Graph(msgspec.Struct):
    instances: list[_Instance]


class _Address(msgspec.Struct):
    type: str = ""
    address: str = ""


class _Metadata(msgspec.Struct):
    #: Empty for a list.
    name: str = ""
    labels: dict[str, str] = {}


class _Status(msgspec.Struct):
    addresses: list[_Address] = []


class _Node(msgspec.Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


class _Nodes(msgspec.Struct):
    """A list of nodes, or one node."""

    items: list[_Node] = []
    metadata: _Metadata | None = None
    status: _Status = msgspec.field(default_factory=_Status)

    def all(self) -> list[_Node]:
        if self.items or self.metadata is None or not self.metadata.name:
            return self.items
        return [_Node(self.metadata, self.status)]


def is_graph(document: object) -> bool:
    """Returns True for what topograph's engine ``graph`` answers."""
    return isinstance(document, dict) and "instances" in document


def is_node_list(document: object) -> bool:
    """Returns True for what ``kubectl get nodes -o json`` prints, or for one node."""
    kinds = ("List", "NodeList", "Node")
    return isinstance(document, dict) and document.get("kind") in kinds


def read_graph(texts: Mapping[str, str]) -> Draft:
    """Returns the network in topograph's graph: ``instances`` with their ``network_layers``."""
    layers: dict[str, Sequence[str]] = {}
    for name, text in texts.items():
        for instance in _converted(name, text, _Graph).instances:
            layers[instance.id] = [layer for layer in instance.network_layers or () if layer]
    draft = draft_of_layers(layers)
    draft.notes.append(ONE_NODE_A_GROUP)
    return draft


def read_node_labels(texts: Mapping[str, str]) -> Draft:
    """Returns the network in the labels of Kubernetes nodes, with the nodes' internal addresses.

    Of several families of labels, one is taken for all nodes: topograph's, else the provider's.
    Zone and region stand above it where nodes differ in them.
    """
    nodes = [node for name, text in texts.items() for node in _converted(name, text, _Nodes).all()]
    keys = _family([node.metadata.labels for node in nodes])
    layers: dict[str, list[str]] = {}
    bare: list[str] = []
    for node in nodes:
        labels = node.metadata.labels
        above = [labels[key] for key in (*keys, *PLACES) if labels.get(key)]
        if any(labels.get(key) for key in keys or PLACES):
            layers[node.metadata.name] = above
        else:
            bare.append(node.metadata.name)
    if not layers:
        known = ", ".join(keys[0] for keys in FAMILIES)
        raise TopologyError(
            f"no node has a label of its place in the network, such as fabric.topograph.run/tier-0 "
            f"or {known}"
        )
    draft = draft_of_layers(_without_common(layers))
    for node in nodes:
        if node.metadata.name in layers:
            draft.addresses[node.metadata.name] = [
                each.address for each in node.status.addresses if each.type == "InternalIP"
            ]
    draft.notes.append(f"from the labels {', '.join(keys or PLACES)}; {ONE_NODE_A_GROUP}")
    if bare:
        draft.notes.append(f"left out, without such labels: nodes {some(bare)}")
    return draft


def write_graph(topology: Topology) -> str:
    """Returns ``topology`` as topograph's graph: groups of switches above each host.

    Raises:
        TopologyError: there is no switch.
    """
    instances: list[dict[str, Any]] = []

    def add(group: Group, above: tuple[str, ...]) -> None:
        layers = (group.name, *above)
        instances.extend({"id": host, "network_layers": layers} for host in group.hosts)
        for below in group.groups:
            add(below, layers)

    add(hierarchy(topology), ())
    instances.sort(key=lambda instance: str(instance["id"]))
    text = msgspec.json.encode({"instances": instances})
    return msgspec.json.format(text, indent=2).decode() + "\n"


def _family(labels: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Returns the keys of the first family that any node has, that at the host first."""
    tiers = {int(match[1]) for each in labels for key in each if (match := _TIER.fullmatch(key))}
    if tiers:
        return tuple(f"fabric.topograph.run/tier-{tier}" for tier in sorted(tiers))
    present = {key for each in labels for key in each}
    return next((tuple(k for k in keys if k in present) for keys in FAMILIES
                 if present.intersection(keys)), ())  # fmt: skip


def _without_common(layers: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Returns the layers without those above the first switch that all hosts have in common."""
    depth = min(map(len, layers.values()))
    for level in range(depth):
        if len({above[level] for above in layers.values()}) == 1:
            return {host: above[: level + 1] for host, above in layers.items()}
    return dict(layers)


def _converted(name: str, text: str, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(parse_json(text.encode()), kind)
    except (ValueError, msgspec.ValidationError) as error:
        raise TopologyError(f"{name}: {error}") from None
