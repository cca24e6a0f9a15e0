"""Networks in the formats of other tools: all that there are, and the one of a text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from crux_torch.files import parse_json
from crux_torch.network.formats.draft import Draft, Imported, some
from crux_torch.network.formats.infiniband import is_ibnetdiscover, read_ibnetdiscover
from crux_torch.network.formats.lldp import is_lldp, read_lldp
from crux_torch.network.formats.slurm import (
    is_conf,
    is_yaml,
    read_conf,
    read_topology_yaml,
    write_conf,
    write_topology_yaml,
)
from crux_torch.network.formats.topograph import (
    is_graph,
    is_node_list,
    read_graph,
    read_node_labels,
    write_graph,
)
from crux_torch.network.loaders import CSV_COLUMNS, parse_csv
from crux_torch.network.topology import Topology, TopologyError

#: Takes files by their names. Raises a TopologyError that names the file, line or entry, and says
#: what was expected there.
Reader = Callable[[Mapping[str, str]], Draft]
#: What reads each format.
READERS: dict[str, Reader] = {
    "lldp": read_lldp,
    "ibnetdiscover": read_ibnetdiscover,
    "slurm": read_conf,
    "slurm-yaml": read_topology_yaml,
    "topograph": read_graph,
    "kubernetes": read_node_labels,
}
#: The format of the paper's cluster, which leaves nothing to assume by tier.
LINGJUN = "lingjun"
#: What writes each format.
WRITERS: dict[str, Callable[[Topology], str]] = {
    "slurm": write_conf,
    "slurm-yaml": write_topology_yaml,
    "topograph": write_graph,
}
#: What tells a format by its text, or by its JSON.
_BY_TEXT: dict[str, Callable[[str], bool]] = {
    "ibnetdiscover": is_ibnetdiscover,
    "slurm": is_conf,
    "slurm-yaml": is_yaml,
    LINGJUN: lambda text: text.startswith(",".join(CSV_COLUMNS)),
}
_BY_JSON: dict[str, Callable[[Any], bool]] = {
    "lldp": is_lldp,
    "topograph": is_graph,
    "kubernetes": is_node_list,
}


def format_of(text: str) -> str:
    """Returns the format of a network that ``text`` is written in; empty if it is none."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            document = parse_json(text.encode())
        except ValueError:
            return ""
        return next((name for name, fits in _BY_JSON.items() if fits(document)), "")
    return next((name for name, fits in _BY_TEXT.items() if fits(text)), "")


def read_network(
    texts: Mapping[str, str],
    format_name: str,
    capacities: Mapping[str, float],
    switches: Collection[str] = (),
    without: Collection[str] = (),
) -> Imported:
    """Returns the network that files of one format describe together.

    Args:
        texts: the files by their names.
        format_name: a key of ``READERS``, or ``lingjun``.
        capacities: bytes per second by tier (``host-tor``), for links without a capacity.
        switches: patterns of systems that are switches, for LLDP.
        without: patterns of hosts and switches to leave out.

    Raises:
        TopologyError: names the file, and what was expected there.
    """
    if format_name == LINGJUN:
        if len(texts) != 1 or capacities or without:
            raise TopologyError("the CSV is one file with all that it needs; expected no options")
        note = "switches of a group, capacities and the inside of hosts are those of the paper"
        ((file, text),) = texts.items()
        return Imported(parse_csv(text, file), (note,))
    read = partial(read_lldp, switches=switches) if format_name == "lldp" else READERS[format_name]
    draft = read(texts)
    _leave_out(draft, without)
    return draft.to_topology(capacities)


def _leave_out(draft: Draft, patterns: Collection[str]) -> None:
    names = [name for name in (*draft.hosts, *draft.switches)
             if any(fnmatchcase(name, pattern) for pattern in patterns)]  # fmt: skip
    gone = {*names, *(nic for name in names for nic in draft.hosts.get(name, ()))}
    if names:
        draft.notes.append(f"left out as asked: {some(names)}")
    draft.cables = [c for c in draft.cables if c.a not in gone and c.b not in gone]
    draft.switches = {name: None for name in draft.switches if name not in gone}
    ends = {end for cable in draft.cables for end in (cable.a, cable.b)}
    draft.hosts = {
        host: [nic for nic in nics if nic in ends or not names]
        for host, nics in draft.hosts.items()
        if host not in gone
    }
