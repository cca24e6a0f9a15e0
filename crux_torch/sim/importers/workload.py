"""An imported workload: one iteration of a job as collectives of its ranks, before it is placed.

Importers share :class:`TaskGraph`, which finds when tasks that depend on each other start, and
tools for text and JSON as others write them: with byte order marks, broken characters, NaN.
"""

from __future__ import annotations

import codecs
import heapq
import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import msgspec

from crux_torch.errors import CruxError
from crux_torch.sim.catalogue import Collective, Group

_T = TypeVar("_T")


class ImportFailed(CruxError, ValueError):
    """A file that can't be imported: where it is wrong, and what was expected."""


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Puts the name of ``file`` before the messages of ImportFailed."""
    try:
        yield
    except ImportFailed as error:
        raise ImportFailed(f"{file}: {error}") from None


# The marks of UTF-32 come first: the little one begins like that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL_TO_SPACE = bytes([0x20] * 0x20) + bytes(range(0x20, 256))
_NO_NUMBER = re.compile(
    rb"([:\[,]\s*)[-+]?(?:nan(?:\([^)]{0,40}\))?|inf(?:inity)?)(?=\s*[,\]}])", re.I
)
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(
    rb"(?P<good>" + _PAIR + rb'|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\"
)


def without_mark(held: bytes) -> bytes:
    """The same text in UTF-8, without a byte order mark; unchanged where there is no mark."""
    for mark, encoding in _MARKS:
        if held.startswith(mark):
            return held.decode(encoding, errors="replace").encode()
    return held


def text_of(held: bytes) -> str:
    """The text in UTF-8, or in what its byte order mark names; bytes that are no text become �."""
    return without_mark(held).decode(errors="replace")


def repaired_json(held: bytes) -> bytes:
    """The same JSON as the standard wants it, where that is possible.

    Control characters become spaces, and bytes that are no UTF-8 become �. A backslash that escapes
    nothing becomes a backslash. NaN and Infinity become null.
    """
    held = text_of(held).encode().translate(_CONTROL_TO_SPACE)
    return _NO_NUMBER.sub(rb"\1null", _ESCAPE.sub(_escape, held))


def decode_json(held: bytes, type: type[_T]) -> _T:
    """The JSON as an object of ``type``, repaired where it does not parse as it stands.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        try:
            return msgspec.json.decode(held, type=type, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(repaired_json(held), type=type, strict=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _escape(found: re.Match[bytes]) -> bytes:
    if found["good"]:
        return found["good"]
    return "\N{REPLACEMENT CHARACTER}".encode() if found["half"] else rb"\\"


@dataclass(slots=True)
class Task:
    """Work of a rank.

    Attributes:
        duration_s: seconds that it computes; 0 for what it sends or receives.
        unit: what it occupies meanwhile, one task at a time; None: nothing.
        after: tasks that have to end before it starts.
        with_start_of: tasks that have to start before it does.
    """

    duration_s: float = 0.0
    unit: Hashable | None = None
    after: list[int] = field(default_factory=list)
    with_start_of: list[int] = field(default_factory=list)


class TaskGraph:
    """Tasks of all ranks of a job that depend on each other, on a network that takes no time."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._sent: dict[int, tuple[int, int, int]] = {}
        #: Sends and receives of each two ends and tag.
        self._messages: defaultdict[tuple[int, int, int], tuple[list[int], list[int]]]
        self._messages = defaultdict(lambda: ([], []))

    def add(self, task: Task) -> int:
        """Adds a task; returns its index."""
        self.tasks.append(task)
        return len(self.tasks) - 1

    def send(self, src: int, dst: int, tag: int, size: int) -> int:
        """Adds a task that sends ``size`` bytes."""
        index = self.add(Task())
        self._messages[src, dst, tag][0].append(index)
        self._sent[index] = (src, dst, size)
        return index

    def receive(self, src: int, dst: int, tag: int) -> int:
        """Adds a task that waits for a message: the first with the first of equal ends and tag."""
        index = self.add(Task())
        self._messages[src, dst, tag][1].append(index)
        return index

    def starts(self) -> tuple[list[float], float, list[Collective]]:
        """Returns (start of each task in seconds, end of the last one, messages as collectives).

        A unit takes what is ready first, and of those ready at once what comes first in the list.

        Raises:
            ImportFailed: messages without a partner, tasks that wait for each other in a circle, or
                none that computes.
        """
        for (src, dst, tag), (sends, recvs) in sorted(self._messages.items()):
            if len(sends) != len(recvs):
                raise ImportFailed(
                    f"rank {src} sends {len(sends)} messages of tag {tag} to rank {dst}, which "
                    f"receives {len(recvs)}, expected as many"
                )
            for sent, received in zip(sends, recvs, strict=True):
                self.tasks[received].after.append(sent)
        starts_s, compute_s = _starts_of(self.tasks)
        messages = [
            Collective("send", float(size), ((src, dst),), starts_s[index] / compute_s)
            for index, (src, dst, size) in self._sent.items()
            if size and src != dst
        ]
        return starts_s, compute_s, messages


def _starts_of(tasks: Sequence[Task]) -> tuple[list[float], float]:
    waits = [len(task.after) + len(task.with_start_of) for task in tasks]
    next_after: list[list[int]] = [[] for _ in tasks]
    next_start: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for before in task.after:
            next_after[before].append(i)
        for before in task.with_start_of:
            next_start[before].append(i)
    ready_s = [0.0] * len(tasks)
    start_s = [-1.0] * len(tasks)
    free_s: dict[Hashable, float] = {}
    queue = [(0.0, i) for i, count in enumerate(waits) if not count]
    done, last_s = 0, 0.0
    while queue:
        ready, i = heapq.heappop(queue)
        task = tasks[i]
        start = ready if task.unit is None else max(ready, free_s.get(task.unit, 0.0))
        start_s[i], end = start, start + task.duration_s
        if task.unit is not None:
            free_s[task.unit] = end
        done, last_s = done + 1, max(last_s, end)
        for waiting, time_s in ((next_after[i], end), (next_start[i], start)):
            for j in waiting:
                ready_s[j] = max(ready_s[j], time_s)
                waits[j] -= 1
                if not waits[j]:
                    heapq.heappush(queue, (ready_s[j], j))
    if done < len(tasks):
        raise ImportFailed(f"{len(tasks) - done} operations wait for each other in a circle")
    if not last_s:
        raise ImportFailed("nothing is computed, expected an operation that takes time")
    return start_s, last_s


@dataclass(frozen=True, slots=True)
class ImportedJob:
    """One iteration of a job.

    Attributes:
        ranks: GPUs that it needs, one a rank.
        compute_s: seconds of an iteration in which its ranks compute.
        collectives: what it sends, with the share of the compute after which each may start.
        notes: what the reader of a result has to know of the file, one a line.
        apart: the file names the process groups, so what they send may move on its own; otherwise
            all moves as one transfer.
    """

    ranks: int
    compute_s: float
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...] = ()
    apart: bool = True


#: Payload round a ring once, where an all-reduce goes round twice.
ONE_ROUND = frozenset({"allgather", "reduce_scatter"})


def collectives_of(
    op: str, bytes: float, groups: Iterable[Group], at: float, *, root: int = 0
) -> list[Collective]:
    """One operation as the collectives that the simulator places.

    A ring carries all-reduces, all-gathers, reduce-scatters, broadcasts and reduces. Gathers and
    scatters are sends to the root and from it. Groups of one rank and empty payloads send nothing.
    Groups of different sizes become collectives of their own.

    Args:
        op: ``allreduce``, ``allgather``, ``reduce_scatter``, ``broadcast``, ``reduce``, ``gather``,
            ``scatter``, ``alltoall`` or ``send``.
        bytes: payload as docs/understand/measuring.md counts it: the output of an all-gather, the
        input of a
            reduce-scatter, what a rank gives to an all-to-all, the root's tensor of a gather.
        root: place of the root in each group, of a gather or scatter.
    """
    by_size: dict[int, list[Group]] = {}
    for group in groups:
        if len(group) > 1:
            by_size.setdefault(len(group), []).append(group)
    found = []
    for size, same in sorted(by_size.items()):
        if op in ONE_ROUND:
            kind, payload = "allreduce", bytes / 2
        elif op in ("broadcast", "reduce"):
            kind, payload = "allreduce", bytes * size / (2 * (size - 1))
        elif op in ("gather", "scatter"):
            kind, payload = "send", bytes / size
            same = [
                (rank, group[root]) if op == "gather" else (group[root], rank)
                for group in same
                for i, rank in enumerate(group)
                if i != root
            ]
        else:
            kind, payload = op, bytes
        if payload > 0:
            found.append(Collective(kind, payload, tuple(same), at))  # type: ignore[arg-type]
    return found


def in_bursts(collectives: Iterable[Collective], bursts: int) -> tuple[Collective, ...]:
    """The same collectives, with those that start close to each other starting together.

    The compute is divided into ``bursts`` equal parts. All that may start in a part starts with its
    last collective, so none starts before it is computed. Equal collectives become one that runs
    several times.
    """
    latest: dict[int, float] = {}
    listed = list(collectives)
    for one in listed:
        part = min(math.floor(one.at * bursts), bursts - 1)
        latest[part] = max(latest.get(part, 0.0), one.at)
    counts: dict[Collective, int] = {}
    for one in listed:
        moved = replace(one, at=latest[min(math.floor(one.at * bursts), bursts - 1)], count=1)
        counts[moved] = counts.get(moved, 0) + one.count
    merged = (replace(one, count=count) for one, count in counts.items())
    return tuple(sorted(merged, key=lambda one: one.at))


@lru_cache(maxsize=1 << 12)
def repeated(group: Group, world: int) -> tuple[Group, ...]:
    """The group at each place where it fits beside itself, so that each rank is in one.

    Only a pair may leave ranks out: a pipeline's first and last stages share embeddings so.
    """
    if len(group) == 1:
        return ()
    first, taken = min(group), bytearray(world)
    found: list[Group] = []
    for at in range(world - max(group) + first):
        if taken[at]:
            continue
        place = tuple(rank - first + at for rank in group)
        if not any(taken[rank] for rank in place):
            found.append(place)
            for rank in place:
                taken[rank] = 1
        elif len(group) > 2:
            break
    if group not in found or (len(group) > 2 and not all(taken)):
        raise ImportFailed(
            f"group {list(group)[:8]} does not repeat over {world} ranks, expected the traces of "
            "all ranks"
        )
    return tuple(found)


@lru_cache(maxsize=1 << 12)
def places_of_pair(group: Group, ends: Group, world: int) -> tuple[Group, ...]:
    """Sender and receiver at every place that has both: in each group of several, or in the job.

    A group of the two says nothing of the pipeline, as some make one for each pair of stages.
    """
    if ends[0] == ends[1]:
        return ()
    if len(group) == 2:
        far = ends[1] - ends[0]
        return tuple((r, r + far) for r in range(world) if 0 <= r + far < world)
    far = group.index(ends[1]) - group.index(ends[0])
    return tuple(
        (one[i], one[i + far])
        for one in repeated(group, world)
        for i in range(len(one))
        if 0 <= i + far < len(one)
    )


#: c10's types that have no width in their names, in bytes.
_TYPE_BYTES = {
    **dict.fromkeys(("bool", "byte", "char"), 1),
    **dict.fromkeys(("short", "half"), 2),
    **dict.fromkeys(("int", "float", "complexhalf"), 4),
    **dict.fromkeys(("long", "double", "complexfloat"), 8),
    "complexdouble": 16,
}
#: The others: a kind, bits, and what NVIDIA's, AMD's or another format divides them into.
_TYPE_BITS = re.compile(
    r"(?:q?u?int|b?float|b?complex|bits|fp|bf)(?P<bits>[0-9]{1,3})"
    r"(?:_?e[0-9]m[0-9])?(?:fn)?u?z?(?:_?x(?P<times>[0-9]))?"
)


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a type, by c10's name of it.

    Raises:
        ImportFailed: names the type.
    """
    name = re.sub(r"^(c10|torch|at)(::|\.)", "", dtype.strip()).lower()
    if name in _TYPE_BYTES:
        return _TYPE_BYTES[name]
    if found := _TYPE_BITS.fullmatch(name):
        return max(1, int(found["bits"]) * int(found["times"] or 1) // 8)
    raise ImportFailed(f"dtype {dtype!r} is unknown, expected a type of torch such as BFloat16")
