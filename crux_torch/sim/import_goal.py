"""GOAL schedules in text form, as LogGOPSim and ATLAHS read them.

``num_ranks N``, then for each rank its operations: ``l1: calc 100`` (ns), ``l2: send 8b to 1 tag
0``, ``l3: recv 8b from 2``, and dependencies, ``l2 requires l1``.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field

from crux_torch.sim.parallelism import Collective
from crux_torch.sim.task_graph import Task, starts_of
from crux_torch.sim.workload import ImportedJob, ImportFailed

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


@dataclass(slots=True)
class _Messages:
    """Sends and receives that have no partner yet: the first with the first of equal ends."""

    sends: defaultdict[tuple[int, int, str], deque[int]]
    recvs: defaultdict[tuple[int, int, str], deque[int]]


@dataclass(slots=True)
class _Schedule:
    tasks: list[Task] = field(default_factory=list)
    #: CPUs and NICs of each rank, by their numbers.
    units: defaultdict[int, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    #: Sender, receiver and bytes of each task that sends.
    sent: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    messages: _Messages = field(
        default_factory=lambda: _Messages(defaultdict(deque), defaultdict(deque))
    )


def read_goal(text: str) -> ImportedJob:
    """A GOAL schedule as one iteration of a job that repeats it.

    A send starts when all that it requires is computed on a network that takes no time, where each
    rank's ``cpu`` does one ``calc`` after the other.

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
    return _job(ranks, schedule)


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
    where: str,
    line: str,
    rank: int,
    ranks: int,
    labels: dict[str, int],
    schedule: _Schedule,
) -> None:
    found = _OPERATION.fullmatch(line)
    if not found:
        raise ImportFailed(
            f"{where}: got {line[:60]!r}, expected calc, requires, or a send or recv with one rank "
            "and one tag"
        )
    index = len(schedule.tasks)
    if found["label"]:
        if found["label"] in labels:
            raise ImportFailed(f"{where}: label {found['label']!r} appears twice in this rank")
        labels[found["label"]] = index
    for kind in ("cpu", "nic"):
        if found[kind]:
            schedule.units[rank].add((kind, found[kind]))
    if found["calc"]:
        cpu = (rank, int(found["cpu"] or 0))
        schedule.tasks.append(Task(int(found["calc"]) * 1e-9, cpu))
        return
    other = int(found["to"] or found["source"])
    if other >= ranks:
        raise ImportFailed(f"{where}: got rank {other}, expected one below {ranks}")
    schedule.tasks.append(Task(0.0, None))
    tag = found["tag"] or "0"
    if found["to"]:
        schedule.sent[index] = (rank, other, int(found["sent"]))
        schedule.messages.sends[rank, other, tag].append(index)
    else:
        schedule.messages.recvs[other, rank, tag].append(index)


def _job(ranks: int, schedule: _Schedule) -> ImportedJob:
    sends, recvs = schedule.messages.sends, schedule.messages.recvs
    for key in sorted(sends.keys() | recvs.keys()):
        if len(sends[key]) != len(recvs[key]):
            src, dst, tag = key
            raise ImportFailed(
                f"rank {src} sends {len(sends[key])} messages of tag {tag} to rank {dst}, which "
                f"receives {len(recvs[key])}, expected as many"
            )
        for send, recv in zip(sends[key], recvs[key], strict=True):
            schedule.tasks[recv].after.append(send)
    starts_s, compute_s = starts_of(schedule.tasks)
    collectives = tuple(
        Collective("send", float(moved), ((src, dst),), starts_s[index] / compute_s)
        for index, (src, dst, moved) in schedule.sent.items()
        if moved and src != dst
    )
    return ImportedJob(ranks, compute_s, collectives, _notes(schedule))


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
