"""Slurm's ``topology.conf`` and ``topology.yaml``, and its host lists, read and written.

The format is that of ``man topology.conf`` and ``man topology.yaml`` (Slurm 25.05). Its trees have
one node for all switches of a group and no parallel cables. A host list such as
``tux[0-3,12],login`` stands for six names (``man slurm.conf``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import yaml

from crux_torch.network.formats.draft import Cable, Draft, some
from crux_torch.network.formats.groups import Group, hierarchy
from crux_torch.network.loaders import read_yaml
from crux_torch.network.topology import MAX_NODES, Topology, TopologyError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)
#: The longest number in a range; longer ones are no number of a node.
MAX_DIGITS = 18


def expand(text: str) -> list[str]:
    """Returns the names that a host list stands for, in its order.

    Raises:
        TopologyError: it is no host list, or stands for over ``MAX_NODES`` names.
    """
    names: list[str] = []
    # Split at the commas outside of brackets.
    for entry in filter(None, map(str.strip, re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text))):
        parts = [_choices(match, text) for match in _matches(entry, text)]
        count = 1
        for part in parts:
            count *= len(part)
            if len(names) + count > MAX_NODES:
                raise TopologyError(f"host list {text[:80]!r} stands for over {MAX_NODES} names")
        names += ("".join(chosen) for chosen in product(*parts))
    return names


def compress(names: Iterable[str]) -> str:
    """Returns a host list for ``names``: those that differ in one number share brackets."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name in dict.fromkeys(names):
        match = _NUMBERED.fullmatch(name)
        prefix, digits, suffix = match.groups() if match else (name, "", "")
        if len(digits) > MAX_DIGITS:
            prefix, digits, suffix = name, "", ""
        groups.setdefault((prefix, suffix, bool(digits)), []).append(digits)
    return ",".join(
        f"{prefix}{_brackets(digits)}{suffix}" for (prefix, suffix, _), digits in groups.items()
    )


def _matches(entry: str, text: str) -> list[re.Match[str]]:
    matches = list(_PART.finditer(entry))
    if sum(len(match[0]) for match in matches) != len(entry) or len(matches) > 16:
        raise TopologyError(f"{text[:80]!r} is no host list; expected one such as node[1-8,12]")
    return matches


def _choices(match: re.Match[str], text: str) -> list[str]:
    """Returns the names that one part of an entry may be."""
    if match[1] is None:
        return [match[2]]
    chosen: list[str] = []
    for item in match[1].split(","):
        pair = _RANGE.fullmatch(item.strip())
        if pair is None or max(map(len, pair.group(1, 2) if pair[2] else [pair[1]])) > MAX_DIGITS:
            raise TopologyError(f"{text[:80]!r}: {item[:40]!r} is no number or range")
        first, last = int(pair[1]), int(pair[2] or pair[1])
        if last < first or last - first >= MAX_NODES - len(chosen):
            raise TopologyError(f"{text[:80]!r}: {item[:40]!r} is empty or over {MAX_NODES} names")
        chosen += (str(number).zfill(len(pair[1])) for number in range(first, last + 1))
    return chosen


def _brackets(digits: list[str]) -> str:
    """Returns numbers as ranges; names of different widths (9 and 010) are no range."""
    if len(digits) == 1:
        return digits[0]
    ranges: list[list[str]] = []
    for text in sorted(digits, key=lambda d: (len(d), d)):
        last = ranges[-1][-1] if ranges else ""
        if last and int(text) == int(last) + 1 and _follows(last, text):
            ranges[-1][1:] = [text]
        else:
            ranges.append([text])
    return f"[{','.join('-'.join(each) for each in ranges)}]"


def _follows(last: str, text: str) -> bool:
    """True if Slurm writes ``text`` after ``last`` in one range that may be padded by zeros."""
    return len(last) == len(text) or (last[0] != "0" and text[0] != "0")


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
    """Returns the tree, or the blocks, of ``topology.conf``."""
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
    """Returns the cluster's default topology in ``topology.yaml``: a tree, or blocks."""
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
