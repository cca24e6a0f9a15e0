"""Which choices across hosts to measure: first what tells most about the hosts' links."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from crux_torch.dispatch.cluster import Ints

#: Of choices that are not pairs, one in so many takes one device of each host.
ALONE = 3


def across_hosts(sizes: Sequence[int], number: int, rng: np.random.Generator) -> Ints:
    """Up to ``number`` different choices that span hosts, a row for each.

    First come pairs of hosts with one device each, where no link within a host is the weakest;
    of many pairs, some. The others have any number of hosts, and of devices of each; but every
    ``ALONE``-th has one device each, for the links again.

    Args:
        sizes: number of devices of each host; two hosts at least.
    """
    hosts = len(sizes)
    pairs = list(combinations(range(hosts), 2))
    first = rng.permutation(len(pairs))[: number if hosts == 2 else max(1, number // 2)]
    found: dict[bytes, Ints] = {}

    def add(involved: Sequence[int], counts: Sequence[int]) -> None:
        row = np.zeros(hosts, np.int64)
        for host, count in zip(involved, counts, strict=True):
            row[host] = (1 << rng.choice(sizes[host], count, replace=False)).sum()
        found.setdefault(row.tobytes(), row)

    for i in first.tolist():
        add(pairs[i], (1, 1))
    # A small cluster may have fewer choices than asked for.
    for drawn in range(20 * number):
        if len(found) >= number:
            break
        involved = rng.choice(hosts, rng.integers(2, hosts + 1), replace=False).tolist()
        most = [1 if drawn % ALONE == 0 else sizes[host] for host in involved]
        add(involved, [int(rng.integers(1, size + 1)) for size in most])
    return np.stack(list(found.values()))
