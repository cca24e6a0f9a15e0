"""Bytes from host to host that one collective moves, by its algorithm. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal

Algorithm = Literal["ring", "tree", "direct"]
HostPair = tuple[str, str]
#: (source, destination, bytes) between places in a sequence of hosts.
Hop = tuple[int, int, Fraction]

#: The algorithm that is assumed where none is given. NCCL and gloo run large payloads as rings
#: (broadcast and reduce as chains), and everything that is not the same for all as direct sends.
#: NCCL takes trees for small and for very wide all-reduces, whose total is the same.
DEFAULT_ALGORITHM: Mapping[str, Algorithm] = {
    "allreduce": "ring",
    "allreduce_coalesced": "ring",
    "allreduce_sparse": "ring",
    "allgather": "ring",
    "allgather_single": "ring",
    "allgather_coalesced": "ring",
    "reduce_scatter": "ring",
    "reduce_scatter_single": "ring",
    "reduce_scatter_coalesced": "ring",
    "broadcast": "ring",
    "reduce": "ring",
    "gather": "direct",
    "scatter": "direct",
    "alltoall": "direct",
    "alltoall_single": "direct",
    "send": "direct",
}

#: Each rank's record of these tells only what that rank sends; of all others one record tells all.
PER_RANK_OPS = frozenset({"alltoall", "alltoall_single", "send"})
#: Nothing to count: the sender counts a receive, a group's parts count the group.
SILENT_OPS = frozenset({"recv", "barrier", "coalesced", "unknown"})


def flows(
    op: str,
    bytes: int,
    ranks: Sequence[int],
    placement: Sequence[str] | Mapping[int, str],
    *,
    peer: int = -1,
    my_rank: int = 0,
    algorithm: Algorithm | None = None,
) -> dict[HostPair, float]:
    """Bytes from host to host of one collective; what stays on a host is left out.

    With n ranks and payload S (``docs/recorder.md`` says which size that is): a ring's hop carries
    2(n-1)/n S for an all-reduce, (n-1)/n S for all-gather and reduce-scatter; a chain's hop carries
    S. The ring is in the order of the group's ranks. A tree joins hosts, and ranks within a host,
    as NCCL's double binary tree does: each of the two carries S/2 up and down its edges. ``direct``
    sends each its share from or to the root, and S/n to every rank for all-to-all, whose uneven
    splits a record does not tell.

    Args:
        op: a name of ``record.OPS``.
        bytes: its payload.
        ranks: global ranks of the group, by group rank.
        placement: host of each global rank.
        peer: group rank of the root, or of the receiver of a send.
        my_rank: group rank whose record this is, for the operations in ``PER_RANK_OPS``.
        algorithm: None for ``DEFAULT_ALGORITHM``.

    Raises:
        ValueError: the operation has no such algorithm, or lacks its root or receiver.
    """
    if op in SILENT_OPS or bytes <= 0 or len(ranks) < 2:
        return {}
    algorithm = algorithm or DEFAULT_ALGORITHM[op]
    hosts = [placement[rank] for rank in ranks]
    size = Fraction(bytes)
    if op.startswith("allreduce"):
        hops = _allreduce(hosts, size, algorithm)
    elif op.startswith(("allgather", "reduce_scatter")) and algorithm == "ring":
        hops = _ring(hosts, size * (len(hosts) - 1) / len(hosts))
    elif op in ("broadcast", "reduce"):
        hops = _rooted(op, hosts, size, _need(op, peer, len(ranks)), algorithm)
    elif op in ("gather", "scatter") and algorithm == "direct":
        hops = _spread(op == "scatter", hosts, size / len(hosts), _need(op, peer, len(ranks)))
    elif op.startswith("alltoall") and algorithm == "direct":
        hops = ((my_rank, other, size / len(hosts)) for other in range(len(hosts)))
    elif op == "send":
        hops = iter(((my_rank, _need(op, peer, len(ranks)), size),))
    else:
        raise ValueError(f"{op} has no algorithm {algorithm!r}")
    return _by_host(hosts, hops)


def add_flows(
    total: dict[HostPair, float], part: Mapping[HostPair, float], factor: float = 1.0
) -> None:
    """Add ``part`` times ``factor`` to ``total``, in place."""
    for pair, moved in part.items():
        total[pair] = total.get(pair, 0.0) + moved * factor


def _need(op: str, peer: int, count: int) -> int:
    if not 0 <= peer < count:
        raise ValueError(f"{op} needs the group rank of its root or receiver, not {peer}")
    return peer


def _by_host(hosts: Sequence[str], hops: Iterable[Hop]) -> dict[HostPair, float]:
    total: dict[HostPair, Fraction] = defaultdict(Fraction)
    for src, dst, moved in hops:
        if hosts[src] != hosts[dst]:
            total[hosts[src], hosts[dst]] += moved
    return {pair: float(moved) for pair, moved in total.items()}


def _allreduce(hosts: Sequence[str], size: Fraction, algorithm: Algorithm) -> Iterator[Hop]:
    count = len(hosts)
    if algorithm == "ring":
        yield from _ring(hosts, 2 * size * (count - 1) / count)
    elif algorithm == "tree":
        for child, parent in _double_tree(hosts):
            yield child, parent, size / 2
            yield parent, child, size / 2
    else:
        raise ValueError(f"allreduce has no algorithm {algorithm!r}")


def _ring(hosts: Sequence[str], each: Fraction) -> Iterator[Hop]:
    return ((i, (i + 1) % len(hosts), each) for i in range(len(hosts)))


def _rooted(
    op: str, hosts: Sequence[str], size: Fraction, root: int, algorithm: Algorithm
) -> Iterator[Hop]:
    """Broadcast, and reduce as its reverse."""
    count = len(hosts)
    if algorithm == "ring":
        chain = [(root + i) % count for i in range(count)]
        pairs = list(itertools.pairwise(chain))
    elif algorithm == "direct":
        pairs = [(root, other) for other in range(count) if other != root]
    else:
        raise ValueError(f"{op} has no algorithm {algorithm!r}")
    for near, far in pairs:
        # A reduce ends at the root: it runs the chain that comes round to it.
        yield (near, far, size) if op == "broadcast" else (*_mirror(near, far, root, count), size)


def _mirror(near: int, far: int, root: int, count: int) -> tuple[int, int]:
    """The hop of a reduce: from ``far`` to ``near``, reflected so that chains run upwards."""
    return (2 * root - far) % count, (2 * root - near) % count


def _spread(outward: bool, hosts: Sequence[str], each: Fraction, root: int) -> Iterator[Hop]:
    for other in range(len(hosts)):
        if other != root:
            yield (root, other, each) if outward else (other, root, each)


def _double_tree(hosts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(child, parent) of both of NCCL's trees, over the first rank of every host.

    A host's ranks form a chain below its first one; that never leaves the host.
    """
    heads = [hosts.index(host) for host in dict.fromkeys(hosts)]
    for tree in _tree_pair(len(heads)):
        for child, parent in tree.items():
            yield heads[child], heads[parent]


def _tree_pair(count: int) -> tuple[dict[int, int], dict[int, int]]:
    """Parents in the two trees over 0..count-1 (``ncclGetDtree``).

    The second is the first one shifted by one, or mirrored, so that inner nodes of one are leaves
    of the other.
    """
    first = {n: up for n in range(count) if (up := _tree_parent(n, count)) is not None}
    if count % 2:
        return first, {(n + 1) % count: (up + 1) % count for n, up in first.items()}
    return first, {count - 1 - n: count - 1 - up for n, up in first.items()}


def _tree_parent(node: int, count: int) -> int | None:
    """Parent in NCCL's binary tree over 0..count-1 (``ncclGetBtree``); None at the root, 0."""
    if node == 0:
        return None
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < count else node ^ bit
