"""Chakra execution traces (mlcommons/chakra): one file a rank, in protobuf's wire format or JSON.

A file of protobuf is a row of messages, each behind its length: the trace's metadata, then nodes.
``chakra_jsonizer`` writes the same messages as JSON objects, one behind the other.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crux_torch.sim.parallelism import Collective, Group
from crux_torch.sim.task_graph import Task, starts_of
from crux_torch.sim.workload import ImportedJob, ImportFailed, collectives_of

#: The schema's node types and collectives, by their numbers.
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
COLLECTIVES = {
    0: "allreduce",
    1: "reduce",
    2: "allgather",
    5: "broadcast",
    6: "alltoall",
    7: "reduce_scatter",
    8: "reduce_scatter",
    9: "barrier",
}


@dataclass(slots=True)
class _Node:
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
        value = self.attributes.get(name, default)
        if not isinstance(value, int) or value < 0:
            raise ImportFailed(f"node {self.id}: {name}: got {value!r}, expected 0 or more")
        return value


def read_chakra(files: Mapping[str, bytes]) -> ImportedJob:
    """The traces of all ranks of a job as one of its iterations.

    A rank's GPU and its CPU compute one node after the other. Collectives of a process group are
    matched by their order, sends and receives by their order for equal ends and tags. Nodes without
    ``pg_name`` are of all ranks. A group has the ranks that use its name. Where Chakra's converter
    made the file, control dependencies name callers, so they count for nothing, and communication
    waits for the kernel before it, as torch has it, which the converter leaves out.

    Args:
        files: what each file holds; those whose names don't end in ``.RANK.et`` or ``.RANK.json``
            are skipped.

    Raises:
        ImportFailed: names the file and the node.
    """
    ranks: dict[int, tuple[str, list[_Node]]] = {}
    for name, held in files.items():
        found = re.search(r"\.([0-9]{1,7})\.(?:et|json)(?:\.gz)?$", name)
        if not found:
            continue
        if int(found[1]) in ranks:
            raise ImportFailed(f"{name}: another file is of rank {found[1]}, too")
        try:
            ranks[int(found[1])] = name, _nodes(held)
        except ImportFailed as error:
            raise ImportFailed(f"{name}: {error}") from None
    if not ranks:
        given = ", ".join(sorted(files)[:3])
        raise ImportFailed(f"{given}: expected a name that ends in .RANK.et or .RANK.json")
    if sorted(ranks) != list(range(len(ranks))):
        raise ImportFailed(f"got ranks {sorted(ranks)[:8]}, expected those of all ranks from 0 on")
    return _job([ranks[rank] for rank in range(len(ranks))])


def _job(ranks: Sequence[tuple[str, list[_Node]]]) -> ImportedJob:
    graph = _Graph()
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, (name, nodes) in enumerate(ranks):
        try:
            for group in graph.add(rank, nodes):
                groups[group].append(rank)
        except ImportFailed as error:
            raise ImportFailed(f"{name}: {error}") from None
    everyone = tuple(range(len(ranks)))
    members: dict[str, Group] = {g: tuple(m) if g else everyone for g, m in groups.items()}
    for group, count in graph.counts.items():
        if len({count.get(rank, 0) for rank in members[group]}) > 1:
            raise ImportFailed(f"group {group!r}: its ranks run different numbers of collectives")
    graph.match_messages()
    starts_s, compute_s = starts_of(graph.tasks)
    found: list[Collective] = []
    for task, (group, op, size) in graph.collectives.items():
        ranks_of = members[group]
        # The schema's all-gather counts what one rank gives.
        payload = size * len(ranks_of) if op == "allgather" else size
        found += collectives_of(op, payload, [ranks_of], starts_s[task] / compute_s)
    for task, (src, dst, size) in graph.sends.items():
        if src != dst:
            found += collectives_of("send", size, [(src, dst)], starts_s[task] / compute_s)
    return ImportedJob(len(ranks), compute_s, tuple(found))


class _Graph:
    """The nodes of all ranks; one task stands for a collective on all its ranks."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.collectives: dict[int, tuple[str, str, int]] = {}
        self.sends: dict[int, tuple[int, int, int]] = {}
        self.counts: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._shared: dict[tuple[str, int], int] = {}
        self._open: defaultdict[tuple[int, int, int], tuple[deque[int], deque[int]]]
        self._open = defaultdict(lambda: (deque(), deque()))

    def add(self, rank: int, nodes: Sequence[_Node]) -> set[str]:
        """Adds a rank's nodes; gives the groups that it runs collectives of."""
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

    def match_messages(self) -> None:
        """Makes each receive wait for its send."""
        for (src, dst, tag), (sends, recvs) in self._open.items():
            if len(sends) != len(recvs):
                raise ImportFailed(
                    f"rank {src} sends {len(sends)} messages of tag {tag} to rank {dst}, which "
                    f"receives {len(recvs)}, expected as many"
                )
            for send, recv in zip(sends, recvs, strict=True):
                self.tasks[recv].after.append(send)

    def _task(self, rank: int, node: _Node) -> int:
        index = len(self.tasks)
        # Older converters give a call on the CPU the type of the kernel that it launches.
        launches = node.on_cpu and "comm_size" not in node.attributes
        if node.type == "COMM_COLL_NODE" and not launches:
            return self._collective(rank, node)
        if node.type in ("COMM_SEND_NODE", "COMM_RECV_NODE") and not launches:
            sends = node.type == "COMM_SEND_NODE"
            src = rank if sends else node.number("comm_src")
            dst = node.number("comm_dst") if sends else rank
            self._open[src, dst, node.number("comm_tag", 0)][0 if sends else 1].append(index)
            if sends:
                self.sends[index] = (src, dst, node.number("comm_size"))
            self.tasks.append(Task(0.0, None))
            return index
        unit = (rank, node.on_cpu)
        self.tasks.append(Task(node.duration_s, unit if node.duration_s else None))
        return index

    def _collective(self, rank: int, node: _Node) -> int:
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
            self.tasks.append(Task(0.0, None))
            if op != "barrier":
                self.collectives[index] = (group, op, size)
        elif self.collectives.get(index, (group, "barrier", 0))[1] != op:
            raise ImportFailed(
                f"node {node.id}: {op} is the {number + 1}th collective of group {group!r} here, "
                "expected what the other ranks run"
            )
        return index


def _nodes(held: bytes) -> list[_Node]:
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


def _protobuf(held: bytes) -> tuple[bytes, list[_Node]]:
    """The trace's metadata, and its nodes."""
    messages, at = [], 0
    while at < len(held):
        length, at = _varint(held, at)
        if at + length > len(held):
            raise ImportFailed(f"byte {at}: a message of {length} bytes, but the file ends")
        messages.append(held[at : at + length])
        at += length
    return b"".join(messages[:1]), [_node_of_message(one) for one in messages[1:]]


def _json(held: bytes) -> tuple[bytes, list[_Node]]:
    """The trace's metadata, which are the objects without a type, and its nodes."""
    objects = list(_objects(held))
    nodes = [_node_of_json(one) for one in objects if "type" in one]
    if not nodes:
        raise ImportFailed("no object has a type, expected nodes of Chakra's schema")
    return json.dumps([one for one in objects if "type" not in one]).encode(), nodes


def _objects(held: bytes) -> Iterator[Mapping[str, Any]]:
    try:
        text = held.decode()
        decoder, at = json.JSONDecoder(), 0
        while (at := len(text) - len(text[at:].lstrip())) < len(text):
            value, at = decoder.raw_decode(text, at)
            if not isinstance(value, dict):
                raise ImportFailed(f"character {at}: expected an object")
            yield value
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ImportFailed(f"expected JSON objects: {error}") from None


def _node_of_json(value: Mapping[str, Any]) -> _Node:
    try:
        node = _Node(int(value.get("id", 0)), str(value["type"]))
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


def _node_of_message(message: bytes) -> _Node:
    node = _Node()
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


def _add_attribute(node: _Node, message: bytes) -> None:
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
