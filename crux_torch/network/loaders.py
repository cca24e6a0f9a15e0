"""Topologies from files: YAML (``docs/operate/topology.md``) and the ``ip,DSW,PSW,ASW`` CSV."""

from __future__ import annotations

import csv
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from crux_torch.files import read_file
from crux_torch.network.builders import BUILDERS, Cabling, GpuServer, grouped_clos
from crux_torch.network.qos import Qos
from crux_torch.network.topology import (
    NETWORK_KINDS,
    Edge,
    Link,
    Topology,
    TopologyBuilder,
    TopologyError,
    check_size,
)

SCHEMA_VERSION = 1
CSV_COLUMNS = ("ip", "DSW", "PSW", "ASW")

#: Levels of nesting in a YAML file; a topology has five.
MAX_DEPTH = 16
#: A file that is larger has more links than a topology may have.
MAX_FILE_BYTES = 1 << 26
#: libyaml's is ten times as fast, where PyYAML has it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

HostPart = Literal["gpu", "pcie", "nic", "nvswitch"]
SwitchKind = Literal["tor", "aggregation", "core", "router"]


class _LinkEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One line of ``links``: ``between`` for both directions, ``from`` and ``to`` for one."""

    between: tuple[str, str] | None = None
    src: str | None = msgspec.field(default=None, name="from")
    dst: str | None = msgspec.field(default=None, name="to")
    name: str | None = None
    capacity_Bps: float
    delay_s: float = 0.0
    cost: int = 1
    count: int = 1


class _File(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Keys of every file, see :class:`Topology`."""

    version: int
    addresses: dict[str, tuple[str, ...]] = {}
    device_flops: float = 0.0
    tables: str = ""
    qos: Qos | None = None


class _LinksFile(_File, kw_only=True, omit_defaults=True):
    """A network written out link by link."""

    hosts: dict[str, dict[str, HostPart] | None]
    switches: dict[str, SwitchKind] = {}
    links: list[_LinkEntry]


class _BuilderFile(_File, kw_only=True):
    """A network named by its builder."""

    builder: str
    parameters: dict[str, Any] = {}


def load_topology(path: str | os.PathLike[str]) -> Topology:
    """Returns the topology in a file: ``.csv`` is read by :func:`parse_csv`, all else as YAML.

    Raises:
        TopologyError: names the place in the file, and what was expected there.
    """
    file = Path(path)
    parse = parse_csv if file.suffix.lower() == ".csv" else parse_yaml
    return parse(read_text(file), str(file))


def parse_yaml(text: str, where: str = "topology") -> Topology:
    """Returns the topology in ``text``; ``where`` names it in errors, see :func:`load_topology`."""
    document = read_yaml(text, where)
    if not isinstance(document, dict):
        raise TopologyError(f"{where}: expected a mapping with the keys version, hosts, links")
    if document.get("version") != SCHEMA_VERSION:
        raise TopologyError(
            f"{where}: version is {document.get('version')!r}; expected {SCHEMA_VERSION}"
        )
    try:
        if "builder" in document:
            # strict=False: YAML 1.1 reads 25e9 (without a point) as text.
            return _call_builder(msgspec.convert(document, _BuilderFile, strict=False))
        return _assemble(msgspec.convert(document, _LinksFile, strict=False))
    except (msgspec.ValidationError, TopologyError) as error:
        raise TopologyError(f"{where}: {error}") from None


def read_yaml(text: str, where: str) -> Any:
    """Returns the plain value of a YAML text without aliases, deep nesting or repeated keys.

    Raises:
        TopologyError: names the line of the file ``where``, and what was expected there.
    """
    try:
        _check_shape(text)
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise TopologyError(f"{where}: {line}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise TopologyError(f"{where}: {' '.join(str(error).split())}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        # What a constructor of PyYAML raises for a text that its tag does not fit.
        raise TopologyError(f"{where}: a value does not fit its tag: {error}") from None


def dump_yaml(topology: Topology) -> str:
    """Returns ``topology`` as :func:`parse_yaml` reads it: the same nodes, links and order."""
    kind: dict[str, Any] = {name: node.kind for name, node in topology.nodes.items()}
    edges = topology.edges
    links: list[_LinkEntry] = []
    names = TopologyBuilder()
    at = 0
    while at < len(edges):
        both = _is_cable(edges[at : at + 2], names)
        links.append(_link_entry(edges[at], both, names))
        at += 2 if both else 1
    file = _LinksFile(
        version=SCHEMA_VERSION,
        hosts={
            host: {n: kind[n] for n in topology.inside(host) if n != host} or None
            for host in topology.hosts
        },
        switches={name: k for name, k in kind.items() if k in NETWORK_KINDS},
        links=links,
        addresses=dict(topology.addresses),
        tables=topology.tables,
        qos=topology.qos,
    )
    # msgspec leaves a float out only if it is the default itself, not if it equals it.
    if topology.device_flops:
        file.device_flops = float(topology.device_flops)
    document = msgspec.to_builtins(file)
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100)


def parse_csv(text: str, where: str = "topology") -> Topology:
    """Returns the cluster in a CSV of ``ip,DSW,PSW,ASW``: a host a line, the switches above it.

    The columns name groups and not single switches. Their sizes are those of the paper's
    double-sided cluster (§6.1: 12 aggregation switches in three groups, 32 core switches, two ToRs
    a host, to each of which a NIC has a port).

    Args:
        text: the CSV; ASW labels repeat in every PSW group and are different switches there.
        where: names it in errors.

    Raises:
        TopologyError: names the line, and what was expected there.
    """
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise TopologyError(f"{where}: {error}") from None
    columns = ",".join(CSV_COLUMNS)
    if not rows or tuple(rows[0]) != CSV_COLUMNS:
        raise TopologyError(f"{where}: line 1: expected the columns {columns}")
    places: dict[str, tuple[str, str, str]] = {}
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(CSV_COLUMNS) or not all(row):
            raise TopologyError(f"{where}: line {number}: {','.join(row)!r}; expected {columns}")
        host, dsw, psw, asw = row
        if host in places:
            raise TopologyError(f"{where}: line {number}: host {host!r} is there twice")
        places[host] = (dsw, f"{dsw}/{psw}", f"{dsw}/{psw}/{asw}")
    if not places:
        raise TopologyError(f"{where}: there is no host; expected a line for each")
    return grouped_clos(
        places, GpuServer(), None, tors_per_group=2, aggregations_per_group=4, cores_per_group=32
    )


def _check_shape(text: str) -> None:
    """Refuse what takes long to read: deep nesting, and aliases, which stand for any amount."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        problem = ""
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            problem = f"expected at most {MAX_DEPTH} levels" if depth > MAX_DEPTH else ""
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            problem = "expected no alias: write the value out"
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)


class _UniqueKeys(_Loader):  # type: ignore[misc]
    """YAML without silent overwriting: a key that comes twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            problem = "a key is a list or a mapping; expected text"
            if isinstance(key, yaml.ScalarNode):
                problem = f"key {key.value!r} is there twice" if key.value in seen else ""
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def read_text(file: Path) -> str:
    try:
        return read_file(file, MAX_FILE_BYTES).decode()
    except OSError as error:
        raise TopologyError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TopologyError(f"{file}: {error}") from None


def _assemble(file: _LinksFile) -> Topology:
    builder = TopologyBuilder(
        addresses=dict(file.addresses),
        device_flops=file.device_flops,
        tables=file.tables,
        qos=file.qos,
    )
    for host, parts in file.hosts.items():
        builder.node(host, "host")
        for name, part in (parts or {}).items():
            builder.node(name, part, host)
    for name, switch in file.switches.items():
        builder.node(name, switch)
    for i, entry in enumerate(file.links):
        link = Link(entry.capacity_Bps, entry.delay_s, entry.cost)
        if entry.count < 1:
            raise TopologyError(f"links[{i}].count is {entry.count}; expected 1 or more")
        if entry.name is not None and entry.count > 1:
            raise TopologyError(f"links[{i}]: a link with a name can't have a count")
        if entry.between is not None and entry.src is entry.dst is entry.name is None:
            builder.cable(*entry.between, link, entry.count)
        elif entry.between is None and entry.src is not None and entry.dst is not None:
            check_size(0, len(builder.edges) + entry.count)
            for _ in range(entry.count):
                builder.arrow(entry.src, entry.dst, link, entry.name)
        else:
            expected = "expected either between: [A, B], or from and to (and perhaps name)"
            raise TopologyError(f"links[{i}]: {expected}")
    return builder.build()


def _call_builder(file: _BuilderFile) -> Topology:
    build = BUILDERS.get(file.builder)
    if build is None:
        known = ", ".join(sorted(BUILDERS))
        raise TopologyError(f"builder {file.builder!r} is unknown; expected one of {known}")
    parameters = dict(file.parameters)
    for name, kind in (("server", GpuServer), ("cabling", Cabling)):
        if name in parameters:
            try:
                parameters[name] = msgspec.convert(parameters[name], kind, strict=False)
            except msgspec.ValidationError as error:
                raise TopologyError(f"parameters.{name}: {error}") from None
    try:
        built = build(**parameters)
    except TypeError as error:
        raise TopologyError(f"parameters: {error}") from None
    if not (file.addresses or file.device_flops or file.tables or file.qos):
        return built
    more = file.addresses, file.device_flops, file.tables, file.qos
    return Topology(built.nodes, built.edges, *more)


def _own_name(edge: Edge, names: TopologyBuilder) -> str | None:
    """The name of ``edge``, if a builder that has made the links so far would give it another."""
    return None if names.next_name(edge.src, edge.dst) == edge.name else edge.name


def _is_cable(pair: Sequence[Edge], names: TopologyBuilder) -> bool:
    """True for the two directions of one cable, with names that need not be written."""
    if len(pair) < 2 or any(_own_name(edge, names) is not None for edge in pair):
        return False
    there, back = pair
    return (there.src, there.dst, there.link) == (back.dst, back.src, back.link)


def _link_entry(edge: Edge, both: bool, names: TopologyBuilder) -> _LinkEntry:
    name, link = _own_name(edge, names), edge.link
    entry = _LinkEntry(capacity_Bps=float(link.capacity_Bps), cost=link.cost)
    if link.delay_s:
        entry.delay_s = float(link.delay_s)
    names.arrow(edge.src, edge.dst, link, name)
    if both:
        names.arrow(edge.dst, edge.src, link)
        entry.between = (edge.src, edge.dst)
    else:
        entry.src, entry.dst, entry.name = edge.src, edge.dst, name
    return entry
