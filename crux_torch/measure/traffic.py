"""Bytes from host to host that one collective moves, by its algorithm. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

HostPair = tuple[str, str]
#: A process group by its name, or a send of it with its two hosts.
Mover = tuple[str, ...]

#: How often the payload goes round the ring that these operations are assumed to run as. NCCL and
#: gloo run large payloads so; NCCL takes trees for small and for very wide all-reduces, whose total
#: is the same.
RING_ROUNDS: Mapping[str, int] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "allreduce_sparse"), 2),
    **dict.fromkeys(("allgather", "allgather_single", "allgather_coalesced"), 1),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single", "reduce_scatter_coalesced"), 1),
}
ALL_TO_ALL = frozenset({"alltoall", "alltoall_single"})
#: A rank's record of these counts the bytes that it sends; one of any other op counts all bytes.
PER_RANK_OPS = ALL_TO_ALL | {"send"}
#: Nothing to count: the sender counts a receive, a group's parts count the group.
SILENT_OPS = frozenset({"recv", "barrier", "coalesced", "unknown"})


def flows(
    op: str,
    bytes: float,
    ranks: Sequence[int],
    placement: Sequence[str] | Mapping[int, str],
    *,
    peer: int = -1,
    my_rank: int = 0,
) -> dict[HostPair, float]:
    """Bytes from host to host of one collective; what stays on a host is left out.

    docs/understand/measuring.md has the algorithm that each operation is taken to run as, and its
    bytes. Rings and chains are in the order of the group's ranks.

    Args:
        op: a name of ``record.OPS``.
        bytes: its payload.
        ranks: global ranks of the group, by group rank.
        placement: host of each global rank.
        peer: group rank of the root, or of the receiver of a send.
        my_rank: group rank whose record this is, for the operations in ``PER_RANK_OPS``.

    Raises:
        ValueError: the operation is unknown, or lacks its root or receiver.
        KeyError: a rank has no host.
    """
    count = len(ranks)
    if op in SILENT_OPS or bytes <= 0 or count < 2:
        return {}
    hosts = [placement[rank] for rank in ranks]
    size = Fraction(bytes)
    if op in RING_ROUNDS:
        ring = ((i, (i + 1) % count) for i in range(count))
        return _by_host(hosts, ring, RING_ROUNDS[op] * size * (count - 1) / count)
    if op in ALL_TO_ALL:
        return _by_host(hosts, ((my_rank, other) for other in range(count)), size / count)
    if not 0 <= peer < count:
        raise ValueError(f"{op} needs the group rank of its root or receiver, not {peer}")
    others = [(peer + i) % count for i in range(1, count)]
    back = others[::-1]
    moved = {
        "send": ([(my_rank, peer)], size),
        "broadcast": (zip([peer, *others], others, strict=False), size),
        "reduce": (zip(back, [peer, *back], strict=False), size),  # the ring, cut behind the root
        "gather": (((other, peer) for other in others), size / count),
        "scatter": (((peer, other) for other in others), size / count),
    }
    if op not in moved:
        raise ValueError(f"no rule says what {op} moves")
    return _by_host(hosts, *moved[op])


def add_flows(
    total: dict[HostPair, float], part: Mapping[HostPair, float], factor: float = 1.0
) -> None:
    """Add ``part`` times ``factor`` to ``total``, in place."""
    for pair, moved in part.items():
        total[pair] = total.get(pair, 0.0) + moved * factor


def parts_of(moved: Mapping[Mover, Mapping[HostPair, float]], most: int) -> dict[HostPair, int]:
    """Number of the part that each pair of hosts belongs to: the mover of most of its bytes.

    Parts are numbered by their bytes, the largest first. So groups that run in the same ring of
    hosts, such as one for each GPU of a host, are one.

    Args:
        moved: bytes of each mover from host to host.
        most: number of parts at most. If there are more, all are one: links are shared by parts, so
            a rest of many as one part would get too little.
    """
    largest: dict[HostPair, tuple[float, Mover]] = {}
    for mover in sorted(moved):
        for pair, size in moved[mover].items():
            if pair not in largest or size > largest[pair][0]:
                largest[pair] = size, mover
    total: dict[Mover, float] = {}
    for size, mover in largest.values():
        total[mover] = total.get(mover, 0.0) + size
    ranked = sorted(total, key=lambda mover: (-total[mover], mover))
    number = {mover: i if len(ranked) <= most else 0 for i, mover in enumerate(ranked)}
    return {pair: number[mover] for pair, (_, mover) in largest.items()}


def parts_at_hosts(
    matrix: Mapping[HostPair, float], part: Mapping[HostPair, int]
) -> dict[str, int]:
    """The part that moves most of the bytes that leave and enter each host."""
    at: dict[tuple[str, int], float] = {}
    for pair, moved in matrix.items():
        for host in pair:
            at[host, part[pair]] = at.get((host, part[pair]), 0.0) + moved
    # Of equal ones the first part: it comes last and stays.
    ranked = sorted(at, key=lambda place: (at[place], -place[1]))
    return dict(ranked)


def _by_host(
    hosts: Sequence[str], hops: Iterable[tuple[int, int]], each: Fraction
) -> dict[HostPair, float]:
    """The sum of hops between places in ``hosts``, rounded once."""
    between = Counter([(hosts[src], hosts[dst]) for src, dst in hops])
    moved = {n: float(each * n) for n in set(between.values())}
    return {pair: moved[n] for pair, n in between.items() if pair[0] != pair[1]}
