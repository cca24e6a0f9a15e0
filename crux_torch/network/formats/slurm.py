"""Slurm's ``topology.conf`` and ``topology.yaml``, read and written.

The format is that of ``man topology.conf`` and ``man topology.yaml`` (Slurm 25.05). Its trees have
one node for all switches of a group and no parallel cables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from crux_torch.network.formats.draft import Cable, Draft, some
from crux_torch.network.formats.groups import Group, hierarchy
from crux_torch.network.formats.hostlist import compress, expand
from crux_torch.network.loaders import read_yaml
from crux_torch.network.topology import Topology, TopologyError

ONE_NODE_A_GROUP = (
    "its tree has one node for all switches of a group: it orders jobs, but gives no paths to "
    "choose from"
)
#: Name of the tree in a ``topology.yaml`` that is written.
TREE_NAME = "crux"

_LINE = re.compile(r"^[ \t]*(?:SwitchName|BlockName)[ \t]*=", re.IGNORECASE | re.MULTILINE)
_YAML = re.compile(r"^[ \t]*-[ \t]+topology[ \t]*:", re.MULTILINE)
_PLAIN = re.compile(r"[^\s\[\],=#]+")


def is_conf(text: str) -> bool:
    """Returns True for the text of a ``topology.conf``."""
    return _LINE.search(text) is not None


def is_yaml(text: str) -> bool:
    """Returns True for the text of a ``topology.yaml``."""
    return _YAML.search(text) is not None


def read_conf(texts: Mapping[str, str]) -> Draft:
    """Returns the tree, or the blocks, of ``topology.conf``.

    Args:
        texts: one file by its name.

    Raises:
        TopologyError: names the line, and what was expected there.
    """
    name, text = _only(texts)
    switches: list[dict[str, str]] = []
    blocks: list[dict[str, str]] = []
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), start=1):
        words = (word.partition("=") for word in line.partition("#")[0].split())
        pairs = {key.lower(): value for key, _, value in words}
        if "switchname" in pairs:
            switches.append({"switch": pairs["switchname"], "children": pairs.get("switches", "")}
                            | {"nodes": pairs.get("nodes", "")})  # fmt: skip
        elif "blockname" in pairs:
            blocks.append({"block": pairs["blockname"], "nodes": pairs.get("nodes", "")})
        elif pairs and "blocksizes" not in pairs:
            expected = "SwitchName=, BlockName= or BlockSizes="
            raise TopologyError(f"{name}: line {number}: {line[:80]!r}; expected {expected}")
    if switches and blocks:
        raise TopologyError(f"{name}: it has switches and blocks; expected one of the two")
    return _tree(switches, name) if switches else _blocks(blocks, name)


def read_topology_yaml(texts: Mapping[str, str]) -> Draft:
    """Returns the cluster's default topology in ``topology.yaml``: a tree, or blocks.

    Args:
        texts: one file by its name.

    Raises:
        TopologyError: names the entry, and what was expected there.
    """
    name, text = _only(texts)
    document = read_yaml(text, name)
    if not isinstance(document, list) or not all(isinstance(each, dict) for each in document):
        raise TopologyError(f"{name}: expected a list of topologies")
    kinds = [each for each in document if "tree" in each or "block" in each]
    if not kinds:
        raise TopologyError(f"{name}: expected a topology with tree or block; flat has no switches")
    chosen = next((each for each in kinds if each.get("cluster_default") is True), kinds[0])
    if "tree" in chosen:
        draft = _tree(_entries(chosen["tree"], "switches", name), name)
    else:
        draft = _blocks(_entries(chosen["block"], "blocks", name), name)
    others = [str(each.get("topology"))[:80] for each in document if each is not chosen]
    if others:
        draft.notes.append(f"read {chosen.get('topology')!s:.80}, left out {some(others)}")
    return draft


def write_conf(topology: Topology) -> str:
    """Returns ``topology.conf`` for the plugin topology/tree.

    Raises:
        TopologyError: there is no switch, or a name that Slurm can't take.
    """
    lines: list[str] = []
    for group in _checked(topology):
        if len(group.switches) > 1:
            lines.append(f"# {group.name}: {compress(group.switches)}")
        below = [f"Switches={compress(each.name for each in group.groups)}"] * bool(group.groups)
        nodes = [f"Nodes={compress(group.hosts)}"] * bool(group.hosts)
        lines.append(" ".join([f"SwitchName={group.name}", *below, *nodes]))
    return "\n".join(lines) + "\n"


def write_topology_yaml(topology: Topology) -> str:
    """Returns ``topology.yaml`` with one tree; raises as :func:`write_conf`."""
    switches = []
    for group in _checked(topology):
        entry = {"switch": group.name}
        if group.groups:
            entry["children"] = compress(each.name for each in group.groups)
        if group.hosts:
            entry["nodes"] = compress(group.hosts)
        switches.append(entry)
    document = [{"topology": TREE_NAME, "cluster_default": True, "tree": {"switches": switches}}]
    return "---\n" + yaml.safe_dump(document, sort_keys=False)


def _tree(entries: Sequence[Mapping[str, str]], name: str) -> Draft:
    draft = Draft(tree=True, top="above", notes=[ONE_NODE_A_GROUP])
    children: dict[frozenset[str], tuple[str, str]] = {}
    for entry in entries:
        # A name may be a host list, too: several switches with the same nodes below.
        for switch in expand(_text(entry, "switch", name)):
            draft.switches[switch] = None
            for child in expand(_text(entry, "children", name)):
                children.setdefault(frozenset((switch, child)), (child, switch))
            for host in expand(_text(entry, "nodes", name)):
                draft.hosts.setdefault(host, [])
                children.setdefault(frozenset((switch, host)), (host, switch))
    draft.cables = [Cable(low, high) for low, high in children.values()]
    return draft


def _blocks(entries: Sequence[Mapping[str, str]], name: str) -> Draft:
    draft = Draft(
        tree=True,
        top="between_blocks",
        notes=[f"its blocks count as one switch each; {ONE_NODE_A_GROUP}"],
    )
    for entry in entries:
        block = _text(entry, "block", name)
        draft.switches[block] = None
        for host in expand(_text(entry, "nodes", name)):
            draft.hosts.setdefault(host, [])
            draft.cables.append(Cable(host, block))
    return draft


def _only(texts: Mapping[str, str]) -> tuple[str, str]:
    if len(texts) != 1:
        raise TopologyError(f"expected one file of Slurm, not {len(texts)}")
    return next(iter(texts.items()))


def _entries(part: Any, key: str, name: str) -> list[Mapping[str, str]]:
    found = part.get(key) if isinstance(part, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise TopologyError(f"{name}: expected a list of {key}")
    return found


def _text(entry: Mapping[str, Any], key: str, name: str) -> str:
    """Returns a value of an entry; a name that YAML reads as a number counts as text."""
    value = entry.get(key)
    if not isinstance(value, str | int | None):
        raise TopologyError(f"{name}: {key} is {str(value)[:80]!r}; expected names")
    return "" if value is None else str(value)


def _checked(topology: Topology) -> list[Group]:
    groups = list(hierarchy(topology).walk())
    for group in groups:
        for name in (group.name, *group.hosts):
            if not _PLAIN.fullmatch(name):
                raise TopologyError(f"Slurm can't take the name {name!r}: expected no [ ] , = #")
    return groups
