"""Chakra execution traces (mlcommons/chakra) of all ranks, one file a rank, as one job.

A file of protobuf is a row of messages, each behind its length: the trace's metadata, then nodes.
``chakra_jsonizer`` writes the same messages as JSON objects, one behind the other.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crux_torch.sim.catalogue import Collective, Group
from crux_torch.sim.importers.workload import (
    ImportedJob,
    ImportFailed,
    Task,
    TaskGraph,
    collectives_of,
    naming,
    repaired_json,
    text_of,
    without_mark,
)

#: The schema's node types by their numbers.
NODE_TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)
_SPACE = re.compile(r"[ \t\n\r]*")
#: Fields that tools leave out: what each says, and how to get it.
_FIELDS = {
    "comm_type": "which collective it is",
    "comm_size": "its bytes",
    "comm_dst": "the receiver",
    "comm_src": "the sender",
}


@dataclass(slots=True)
class Node:
    """One node of a rank, with the fields that the simulator reads."""

    id: int = 0
    type: str = "INVALID_NODE"
    after: list[int] = field(default_factory=list)
    control: list[int] = field(default_factory=list)
    duration_s: float = 0.0
    attributes: dict[str, int | float | str] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return bool(self.attributes.get("is_cpu_op", False))

    def number(self, name: str, default: int | None = None) -> int:
        """The attribute of that name.

        Raises:
            ImportFailed: it is missing and there is no default, or is no number of 0 or more.
        """
        value = self.attributes.get(name, default)
        if value is None:
            raise ImportFailed(
                f"node {self.id}: {name} is missing, which says {_FIELDS.get(name, 'a number')}; "
                "chakra_converter leaves out the ends of sends and receives, and what it does not "
                "know: give the profiler's own traces of all ranks instead (--format chrome)"
            )
        if not isinstance(value, int) or value < 0:
            raise ImportFailed(f"node {self.id}: {name}: got {value!r}, expected 0 or more")
        return value


def nodes_of(held: bytes) -> list[Node]:
    """The nodes of a trace, in the order of the file.

    Raises:
        ImportFailed: it is neither protobuf nor JSON of Chakra's schema.
    """
    held = without_mark(held)
    about, nodes = _json(held) if held.lstrip()[:1] == b"{" else _protobuf(held)
    if b"schema" not in about:  # an attribute that Chakra's converter gives a trace
        for node in nodes:
            node.after += node.control
        return nodes
    kernel: int | None = None
    for node in nodes:
        if not node.on_cpu and node.type == "COMP_NODE":
            kernel = node.id
        elif not node.on_cpu and node.type.startswith("COMM") and kernel is not None:
            node.after.append(kernel)
    return nodes


def _protobuf(held: bytes) -> tuple[bytes, list[Node]]:
    """The trace's metadata, and its nodes."""
    messages, at = [], 0
    while at < len(held):
        length, at = _varint(held, at)
        if at + length > len(held):
            raise ImportFailed(f"byte {at}: a message of {length} bytes, but the file ends")
        messages.append(held[at : at + length])
        at += length
    return b"".join(messages[:1]), [_node_of_message(one) for one in messages[1:]]


def _json(held: bytes) -> tuple[bytes, list[Node]]:
    """The trace's metadata, which are the objects without a type, and its nodes."""
    try:
        try:
            found = list(objects_in(text_of(held)))
        except json.JSONDecodeError:
            found = list(objects_in(repaired_json(held).decode()))
    except json.JSONDecodeError as error:
        raise ImportFailed(f"expected JSON objects: {error}") from None
    except RecursionError:
        raise ImportFailed("expected JSON objects, but one is nested too deeply") from None
    nodes = [_node_of_json(one) for one in found if "type" in one]
    if any("workload_graph" in one for one in found):
        raise ImportFailed(
            "got the JSON that Chakra's feeder reads, whose collectives have no bytes; give the "
            ".et files that it was made of, or what chakra_jsonizer makes of these"
        )
    if not nodes:
        raise ImportFailed("no object has a type, expected nodes of Chakra's schema")
    return json.dumps([one for one in found if "type" not in one]).encode(), nodes


def objects_in(text: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects that stand one behind the other in a text.

    Raises:
        json.JSONDecodeError: there is something else.
    """
    decoder, at = json.JSONDecoder(strict=False), 0
    while (at := _SPACE.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        value, at = decoder.raw_decode(text, at)
        if not isinstance(value, dict):
            raise json.JSONDecodeError("expected an object", text, at)
        yield value


def _node_of_json(value: Mapping[str, Any]) -> Node:
    try:
        kind = value["type"]
        node = Node(
            int(value.get("id", 0)),
            NODE_TYPES[kind] if kind in range(len(NODE_TYPES)) else str(kind),
        )
        for key in ("dataDeps", "data_deps"):
            node.after += [int(before) for before in value.get(key, ())]
        for key in ("ctrlDeps", "ctrl_deps"):
            node.control += [int(before) for before in value.get(key, ())]
        micros = value.get("durationMicros", value.get("duration_micros", 0))
        node.duration_s = int(micros) * 1e-6
        for attribute in value.get("attr", ()):
            held = {k: v for k, v in attribute.items() if k not in ("name", "docString")}
            for kind, given in held.items():
                if not isinstance(given, dict):
                    text = re.match(r"string|bytes|bool|double|float", kind)
                    node.attributes[attribute["name"]] = given if text else int(given)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ImportFailed(
            f"node {value.get('id')!r}: {error!r}, expected Chakra's schema"
        ) from None
    if node.duration_s < 0 or node.type not in NODE_TYPES:
        raise ImportFailed(f"node {node.id}: got {node.type!r}, expected a type of Chakra's schema")
    return node


def _node_of_message(message: bytes) -> Node:
    node = Node()
    for number, value in _fields(message):
        if number in (1, 3, 7) and isinstance(value, int):
            if number == 1:
                node.id = value
            elif number == 3:
                node.type = NODE_TYPES[value] if value < len(NODE_TYPES) else "INVALID_NODE"
            else:
                node.duration_s = value * 1e-6
        elif number in (4, 5):
            named = [value] if isinstance(value, int) else _packed(value)
            if number == 4:
                node.control += named
            else:
                node.after += named
        elif number == 10 and isinstance(value, bytes):
            _add_attribute(node, value)
    return node


def _add_attribute(node: Node, message: bytes) -> None:
    name = ""
    for number, value in _fields(message):
        if number == 1 and isinstance(value, bytes):
            name = value.decode(errors="replace")
        elif number == 29 and isinstance(value, bytes):
            node.attributes[name] = value.decode(errors="replace")
        elif number in (7, 9, 11, 13, 27) and isinstance(value, int):
            node.attributes[name] = value
        elif number in (15, 17) and isinstance(value, int):  # zigzag
            node.attributes[name] = (value >> 1) ^ -(value & 1)
        elif number in (19, 21, 23, 25) and isinstance(value, bytes):
            node.attributes[name] = int.from_bytes(value, "little", signed=number > 21)
        elif number in (3, 5) and isinstance(value, bytes) and len(value) in (4, 8):
            node.attributes[name] = struct.unpack("<d" if len(value) == 8 else "<f", value)[0]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field: a varint as a number, all else as bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ImportFailed(f"a field of wire type {kind}, expected protobuf")
        if at + length > len(message):
            raise ImportFailed(f"a field of {length} bytes in a shorter message, expected protobuf")
        yield key >> 3, message[at : at + length]
        at += length


def _packed(held: bytes) -> list[int]:
    found, at = [], 0
    while at < len(held):
        value, at = _varint(held, at)
        found.append(value)
    return found


def _varint(held: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(held):
            raise ImportFailed("a number is cut off, expected protobuf")
        value |= (held[at] & 0x7F) << shift
        at += 1
        if not held[at - 1] & 0x80:
            return value, at
    raise ImportFailed("a number of more than 64 bits, expected protobuf")


#: The schema's collectives by their numbers.
COLLECTIVES = {
    0: "allreduce",
    1: "reduce",
    2: "allgather",
    3: "gather",
    4: "scatter",
    5: "broadcast",
    6: "alltoall",
    7: "reduce_scatter",
    8: "reduce_scatter",
    9: "barrier",
}
#: Ranks of a group in what torch says of its process groups, which the converter hands on.
_GROUP_SIZE = re.compile(rb"""\\*["'](?:pg_size|group_size)\\*["']\s*:\s*\\*"?([0-9]{1,7})""")


def read_chakra(files: Mapping[str, bytes]) -> ImportedJob:
    """The traces of all ranks of a job as one of its iterations.

    A rank's GPU and its CPU compute one node after the other. Collectives of a process group are
    matched by their order, sends and receives by their order for equal ends and tags. Nodes without
    ``pg_name`` are of all ranks. A group has the ranks that use its name; the first of them is the
    root of its gathers and scatters. If no node has a ``pg_name``, all that the job sends moves as
    one transfer. ``comm_size`` is what a rank puts in. Where Chakra's converter made the file,
    control dependencies name callers, so they count for nothing, and communication waits for the
    kernel before it, as torch has it, which the converter leaves out.

    Args:
        files: what each file holds; those whose names don't end in ``.RANK.et`` or ``.RANK.json``
            are skipped.

    Raises:
        ImportFailed: names the file and the node.
    """
    ranks: dict[int, tuple[str, list[Node]]] = {}
    for name, held in files.items():
        found = re.search(r"\.([0-9]{1,7})\.(?:et|json)(?:\.gz)?$", name)
        if not found:
            continue
        if int(found[1]) in ranks:
            raise ImportFailed(f"{name}: another file is of rank {found[1]}, too")
        with naming(name):
            ranks[int(found[1])] = name, nodes_of(held)
    if not ranks:
        given = ", ".join(sorted(files)[:3])
        raise ImportFailed(f"{given}: expected a name that ends in .RANK.et or .RANK.json")
    if sorted(ranks) != list(range(len(ranks))):
        raise ImportFailed(f"got ranks {sorted(ranks)[:8]}, expected those of all ranks from 0 on")
    named = (int(size) for held in files.values() for size in _GROUP_SIZE.findall(held))
    if (world := max(named, default=0)) > len(ranks):
        raise ImportFailed(
            f"got the files of {len(ranks)} ranks, but they name a group of {world}; expected "
            "those of all ranks, of every host"
        )
    return _job([ranks[rank] for rank in range(len(ranks))])


def _job(ranks: Sequence[tuple[str, list[Node]]]) -> ImportedJob:
    graph = _Graph()
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, (name, nodes) in enumerate(ranks):
        with naming(name):
            for group in graph.add_rank(rank, nodes):
                groups[group].append(rank)
    if not any(node.duration_s for _, nodes in ranks for node in nodes):
        raise ImportFailed(
            "nothing is computed: no node has duration_micros; expected measured times, not only "
            "what counts operations (num_ops)"
        )
    everyone = tuple(range(len(ranks)))
    members: dict[str, Group] = {g: tuple(m) if g else everyone for g, m in groups.items()}
    for group, count in graph.counts.items():
        if len({count.get(rank, 0) for rank in members[group]}) > 1:
            raise ImportFailed(f"group {group!r}: its ranks run different numbers of collectives")
    starts_s, compute_s, messages = graph.starts()
    found: list[Collective] = []
    for task, (group, op, size) in graph.collectives.items():
        ranks_of = members[group]
        # The schema counts what one rank gives.
        payload = size * len(ranks_of) if op in ("allgather", "gather") else size
        found += collectives_of(op, payload, [ranks_of], starts_s[task] / compute_s)
    sent = (*found, *messages)
    return ImportedJob(len(ranks), compute_s, sent, _notes(graph, members), apart=any(members))


def _notes(graph: _Graph, members: Mapping[str, Group]) -> tuple[str, ...]:
    """Returns notes on what the files leave out."""
    notes = []
    total = len(graph.collectives)
    if empty := sum(not size for _, _, size in graph.collectives.values()):
        notes.append(
            f"comm_size is 0 for {empty} of {total} collectives, as where the converter does not "
            "know their tensors: they count for nothing"
        )
    unnamed = sum(not group for group, _, _ in graph.collectives.values())
    if unnamed and len(members) > 1:
        notes.append(
            f"pg_name is missing for {unnamed} of {total} collectives: they count as collectives "
            "of all ranks"
        )
    return tuple(notes)


class _Graph(TaskGraph):
    """The nodes of all ranks; one task stands for a collective on all its ranks.

    Attributes:
        collectives: group, operation and bytes of each task that is one.
        counts: collectives of each group and rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: dict[int, tuple[str, str, int]] = {}
        self.counts: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._shared: dict[tuple[str, int], int] = {}

    def add_rank(self, rank: int, nodes: Sequence[Node]) -> set[str]:
        """Adds a rank's nodes; returns the groups that it runs collectives of."""
        task_of: dict[int, int] = {}
        for node in nodes:
            if node.id in task_of:
                raise ImportFailed(f"node {node.id}: another node has this id, too")
            task_of[node.id] = self._task(rank, node)
        for node in nodes:
            for before in node.after:
                if before not in task_of:
                    raise ImportFailed(f"node {node.id}: depends on {before}, which there is not")
                self.tasks[task_of[node.id]].after.append(task_of[before])
        return {group for group, count in self.counts.items() if rank in count}

    def _task(self, rank: int, node: Node) -> int:
        # Older converters give a call on the CPU the type of the kernel that it launches.
        if not node.on_cpu or "comm_size" in node.attributes:
            if node.type == "COMM_COLL_NODE":
                return self._collective(rank, node)
            if node.type == "COMM_SEND_NODE":
                dst, tag = node.number("comm_dst"), node.number("comm_tag", 0)
                return self.send(rank, dst, tag, node.number("comm_size"))
            if node.type == "COMM_RECV_NODE":
                return self.receive(node.number("comm_src"), rank, node.number("comm_tag", 0))
        unit = (rank, node.on_cpu) if node.duration_s else None
        return self.add(Task(node.duration_s, unit))

    def _collective(self, rank: int, node: Node) -> int:
        group = str(node.attributes.get("pg_name", ""))
        op = COLLECTIVES.get(node.number("comm_type"))
        if op is None:
            raise ImportFailed(
                f"node {node.id}: comm_type: got {node.number('comm_type')}, expected one of "
                + ", ".join(f"{number} ({name})" for number, name in COLLECTIVES.items())
            )
        size = node.number("comm_size", 0 if op == "barrier" else None)
        number = self.counts[group].get(rank, 0)
        self.counts[group][rank] = number + 1
        index = self._shared.setdefault((group, number), len(self.tasks))
        if index == len(self.tasks):
            self.add(Task())
            if op != "barrier":
                self.collectives[index] = (group, op, size)
            return index
        known = self.collectives.get(index, (group, "barrier", 0))
        if known[1] != op:
            raise ImportFailed(
                f"node {node.id}: {op} is the {number + 1}th collective of group {group!r} here, "
                "expected what the other ranks run"
            )
        if op != "barrier" and size > known[2]:  # only the root of a scatter puts something in
            self.collectives[index] = (group, op, size)
        return index
