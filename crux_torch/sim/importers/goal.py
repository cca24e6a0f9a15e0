"""GOAL schedules in text form, as LogGOPSim and ATLAHS read them.

``num_ranks N``, then for each rank its operations: ``l1: calc 100`` (ns), ``l2: send 8b to 1 tag
0``, ``l3: recv 8b from 2``, and dependencies, ``l2 requires l1``.
"""

from __future__ import annotations

import re
from collections import defaultdict

from crux_torch.sim.importers.workload import ImportedJob, ImportFailed, Task, TaskGraph

_NUMBER = r"[0-9]{1,18}"
_OPERATION = re.compile(
    rf"(?:(?P<label>[a-zA-Z]\w*)\s*:\s*)?(?:calc\s+(?P<calc>{_NUMBER})"
    rf"|send\s+(?P<sent>{_NUMBER})\s*b\s+to\s+(?P<to>{_NUMBER})"
    rf"|recv\s+(?P<got>{_NUMBER})\s*b\s+from\s+(?P<source>{_NUMBER}))"
    rf"(?:\s+tag\s+(?P<tag>{_NUMBER}))?(?:\s+cpu\s+(?P<cpu>{_NUMBER}))?(?:\s+nic\s+(?P<nic>{_NUMBER}))?"
)
_DEPENDENCY = re.compile(r"([a-zA-Z]\w*)\s+(i?requires)\s+([a-zA-Z]\w*)")
# What is not closed goes on to the end, so that no text is searched twice.
_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
#: Ranks of a schedule that is read; more is taken for a broken file.
MOST_RANKS = 1 << 20


class _Schedule(TaskGraph):
    """The tasks of all ranks, and the CPUs and NICs of each rank by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.units: defaultdict[int, set[tuple[str, str]]] = defaultdict(set)


def read_goal(text: str) -> ImportedJob:
    """A GOAL schedule as one iteration of a job that repeats it.

    A send starts when all that it requires is computed on a network that takes no time, where each
    rank's ``cpu`` does one ``calc`` after the other. A schedule does not say which messages are of
    one process group, so they move as one transfer.

    Raises:
        ImportFailed: names the line; no receive, or no send, belongs to a message; the
            dependencies are a circle; nothing is computed.
    """
    # Comments leave their line breaks, so that lines keep their numbers.
    text = _COMMENT.sub(lambda found: "\n" * found.group().count("\n"), text)
    schedule = _Schedule()
    ranks: int | None = None
    rank: int | None = None
    labels: dict[str, int] = {}
    seen: set[int] = set()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line:
            continue
        where = f"line {number}"
        if ranks is None:
            found = re.fullmatch(rf"num_ranks\s+({_NUMBER})", line)
            if not found or not 1 <= int(found[1]) <= MOST_RANKS:
                raise ImportFailed(
                    f"{where}: got {line[:60]!r}, expected num_ranks and a number up to "
                    f"{MOST_RANKS}"
                )
            ranks = int(found[1])
        elif rank is None:
            found = re.fullmatch(rf"rank\s+({_NUMBER})\s*{{", line)
            if not found or int(found[1]) >= ranks or int(found[1]) in seen:
                raise ImportFailed(
                    f"{where}: got {line[:60]!r}, expected `rank R {{` with a new R below {ranks}"
                )
            rank, labels = int(found[1]), {}
            seen.add(rank)
        elif line == "}":
            rank = None
        elif dependency := _DEPENDENCY.fullmatch(line):
            _depend(where, dependency, labels, schedule)
        else:
            _operation(where, line, rank, ranks, labels, schedule)
    if ranks is None or rank is not None:
        missing = "num_ranks" if ranks is None else "a closing bracket"
        raise ImportFailed(f"the file ends, expected {missing}")
    _, compute_s, messages = schedule.starts()
    return ImportedJob(ranks, compute_s, tuple(messages), _notes(schedule), apart=False)


def _depend(where: str, found: re.Match[str], labels: dict[str, int], schedule: _Schedule) -> None:
    for label in (found[1], found[3]):
        if label not in labels:
            raise ImportFailed(f"{where}: no operation {label!r} stands above it in this rank")
    after, before = schedule.tasks[labels[found[1]]], labels[found[3]]
    if found[2] == "requires":
        after.after.append(before)
    else:
        after.with_start_of.append(before)


def _operation(
    where: str, line: str, rank: int, ranks: int, labels: dict[str, int], schedule: _Schedule
) -> None:
    found = _OPERATION.fullmatch(line)
    if not found:
        raise ImportFailed(
            f"{where}: got {line[:60]!r}, expected calc, requires, or a send or recv with one rank "
            "and one tag"
        )
    for kind in ("cpu", "nic"):
        if found[kind]:
            schedule.units[rank].add((kind, found[kind]))
    other = int(found["to"] or found["source"] or 0)
    if other >= ranks:
        raise ImportFailed(f"{where}: got rank {other}, expected one below {ranks}")
    tag = int(found["tag"] or 0)
    if found["calc"]:
        unit = (rank, int(found["cpu"] or 0))
        index = schedule.add(Task(int(found["calc"]) * 1e-9, unit))
    elif found["to"]:
        index = schedule.send(rank, other, tag, int(found["sent"]))
    else:
        index = schedule.receive(other, rank, tag)
    if found["label"]:
        if found["label"] in labels:
            raise ImportFailed(f"{where}: label {found['label']!r} appears twice in this rank")
        labels[found["label"]] = index


def _notes(schedule: _Schedule) -> tuple[str, ...]:
    """A note on ranks that seem to be whole hosts."""
    for kind, name in (("nic", "NICs"), ("cpu", "CPUs")):
        counts = (sum(k == kind for k, _ in units) for units in schedule.units.values())
        most = max(counts, default=0)
        if most > 1:
            return (
                f"a rank uses {most} {name}, so it seems to be a host with several GPUs, as ATLAHS "
                "writes NCCL's traffic; each rank takes one GPU here: give a --topology with one "
                "GPU in each host",
            )
    return ()
