"""Chakra execution traces (mlcommons/chakra) of all ranks, one file a rank, as one job."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from crux_torch.sim.chakra_nodes import Node, nodes_of
from crux_torch.sim.parallelism import Collective, Group
from crux_torch.sim.task_graph import Task, starts_of
from crux_torch.sim.workload import ImportedJob, ImportFailed, collectives_of

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
    root of its gathers and scatters. ``comm_size`` is what a rank puts in. Where Chakra's converter
    made the file, control dependencies name callers, so they count for nothing, and communication
    waits for the kernel before it, as torch has it, which the converter leaves out.

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
        try:
            ranks[int(found[1])] = name, nodes_of(held)
        except ImportFailed as error:
            raise ImportFailed(f"{name}: {error}") from None
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
        try:
            for group in graph.add(rank, nodes):
                groups[group].append(rank)
        except ImportFailed as error:
            raise ImportFailed(f"{name}: {error}") from None
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
    graph.match_messages()
    starts_s, compute_s = starts_of(graph.tasks)
    found: list[Collective] = []
    for task, (group, op, size) in graph.collectives.items():
        ranks_of = members[group]
        # The schema counts what one rank gives.
        payload = size * len(ranks_of) if op in ("allgather", "gather") else size
        found += collectives_of(op, payload, [ranks_of], starts_s[task] / compute_s)
    for task, (src, dst, size) in graph.sends.items():
        if src != dst:
            found += collectives_of("send", size, [(src, dst)], starts_s[task] / compute_s)
    return ImportedJob(len(ranks), compute_s, tuple(found), _notes(graph, members))


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

    def add(self, rank: int, nodes: Sequence[Node]) -> set[str]:
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

    def _task(self, rank: int, node: Node) -> int:
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
            self.tasks.append(Task(0.0, None))
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
