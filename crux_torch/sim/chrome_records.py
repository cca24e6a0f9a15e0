"""Reads a Chrome trace's record of one collective: its kind, bytes and ranks."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from crux_torch.sim.chrome_file import Args, Event, Origin
from crux_torch.sim.parallelism import Group
from crux_torch.sim.workload import ImportFailed

#: What a collective's name begins with, without underscores, in the order in which it is tried.
OPS = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "reducescatter": "reduce_scatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
#: Names that move nothing of their own: parts count a whole.
_SILENT = re.compile(r"barrier|coalesced|pointtopoint|^(wait|groupend|init|start|end|batch)")
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


def op_of(event: Event, args: Args) -> str | None:
    """The collective, by a name of ``record.OPS``; None if the record moves nothing of its own.

    Raises:
        ImportFailed: the name is unknown.
    """
    given = str(args.get("Collective name", event.name))
    name = re.sub(r"^(\w+:|ncclDevKernel_?|ncclKernel_?)|_", "", given).replace("_", "").lower()
    for start, op in OPS.items():
        if name.startswith(start):
            return op
    if _SILENT.search(name):
        return None
    raise ImportFailed(f"collective {given!r} is unknown, expected one of {', '.join(OPS)}")


def payload_of(event: Event, args: Args, op: str) -> float:
    """Bytes of a collective as docs/recorder.md counts them.

    Raises:
        ImportFailed: the record does not tell them, or its type of element is unknown.
    """
    # The root's tensor is that of a rank, times the ranks.
    key = "Out msg nelems" if op in ("allgather", "scatter") else "In msg nelems"
    try:
        if "dtype" in args:
            moved = float(args[key]) * element_bytes(str(args["dtype"]))
            if op in ("gather", "scatter"):
                moved *= int(args["Group size"])
        else:  # Crux's own: the payload as a tensor of bytes
            moved = float(args["Input Dims"][0][0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ImportFailed):
            raise ImportFailed(f"{event.name}: {error}") from None
        raise ImportFailed(f"{event.name}: expected dtype and {key}, or Input Dims") from None
    if not 0 <= moved < float("inf"):
        raise ImportFailed(f"{event.name}: got {moved} bytes, expected 0 or more")
    return moved


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


def group_of(args: Args, origin: Origin) -> Group:
    """Global ranks of the group.

    Raises:
        ImportFailed: nothing tells them, or this rank is not one of them.
    """
    ranks = (
        _ranks(args.get("Process Group Ranks"))
        or _configured(args.get("Process Group Name"), origin.groups)
        or _even(args)
    )
    if ranks is None and args.get("Group size") == origin.world:
        ranks = tuple(range(origin.world))
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks):
        raise ImportFailed(
            f"group {args.get('Process Group Name')!r}: nothing tells its ranks, expected Process "
            "Group Ranks in its record, or pg_config in distributedInfo"
        )
    if max(ranks) >= origin.world or origin.rank not in ranks:
        raise ImportFailed(f"group {list(ranks)[:8]}: expected ranks of the job, with this one")
    return ranks


def ends_of(args: Args, group: Group, rank: int, op: str) -> Group:
    """Global ranks of the sender and the receiver.

    Raises:
        ImportFailed: the record does not name the other end, or one outside of the group.
    """
    # Kineto has the other end's global rank, Crux its rank in the group.
    named = "Dst Rank" if op == "send" else "Src Rank"
    peer = args.get(named)
    if peer is None and isinstance(index := args.get("Peer"), int) and 0 <= index < len(group):
        peer = group[index]
    if not isinstance(peer, int) or peer not in group:
        what = "receiver" if op == "send" else "sender"
        raise ImportFailed(f"{op}: got {what} {peer!r}, expected {named} to be one of the group")
    return (rank, peer) if op == "send" else (peer, rank)


def root_of(args: Args, group: Group) -> int:
    """The root's place in the group; the first where nothing tells it, as is torch's default."""
    root = args.get("Rank", args.get("Peer"))
    return root if isinstance(root, int) and 0 <= root < len(group) else 0


def _configured(name: Any, config: Any) -> Group | None:
    for entry in config if isinstance(config, list) else ():
        if isinstance(entry, dict) and str(entry.get("pg_name")) == str(name):
            return _ranks(entry.get("ranks"))
    return None


def _even(args: Args) -> Group | None:
    """The ranks of a group that lie at equal distances, as Kineto describes one of many ranks."""
    start, stride, size = (
        args.get(key) for key in ("Global rank start", "Global rank stride", "Group size")
    )
    if not (isinstance(start, int) and isinstance(stride, int) and isinstance(size, int)):
        return None
    if start < 0 or stride < 1 or not 0 < size <= 1 << 20:
        return None
    return tuple(range(start, start + stride * size, stride))


def _ranks(given: Any) -> Group | None:
    """The ranks in a list or its text; None where it is cut short, or is neither."""
    if isinstance(given, str):
        return _ranks_in(given)
    if isinstance(given, list) and given and all(isinstance(rank, int) for rank in given):
        return tuple(given)
    return None


@lru_cache(maxsize=1 << 10)
def _ranks_in(text: str) -> Group | None:
    if "..." in text:
        return None
    return tuple(map(int, re.findall(r"[0-9]{1,7}", text))) or None
