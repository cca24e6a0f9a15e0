"""Choices across hosts that were measured, and links of hosts that explain them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from crux_torch.dispatch.cluster import (
    DispatchCluster,
    DispatchError,
    Floats,
    Ints,
    Predictor,
    TableError,
    read_lines,
)


@dataclass(frozen=True, eq=False)
class Samples:
    """Choices that were measured, and their bytes/s; every one of them spans hosts."""

    choices: Ints
    bandwidth_Bps: Floats

    def __len__(self) -> int:
        return len(self.choices)

    def joined(self, other: Samples) -> Samples:
        """These samples, then those of ``other``."""
        return Samples(
            np.concatenate([self.choices, other.choices]),
            np.concatenate([self.bandwidth_Bps, other.bandwidth_Bps]),
        )

    def part(self, rows: Ints) -> Samples:
        """Some of these samples."""
        return Samples(self.choices[rows], self.bandwidth_Bps[rows])


def read_samples(file: Path, cluster: DispatchCluster) -> Samples:
    """The samples in ``file``, a line ``HOST:DEVICE,DEVICE HOST:DEVICE;GB/s`` for each.

    # begins a comment.

    Raises:
        DispatchError: with the number of the line that is wrong.
        TableError: the file can't be read.
    """
    choices, rates = [], []
    try:
        for number, row in enumerate(csv.reader(read_lines(file), delimiter=";"), 1):
            if not row or row[0].lstrip().startswith("#"):
                continue
            where = f"{file}:{number}"
            try:
                devices, rate = row
                choice = cluster.choice(dict(_named(part) for part in devices.split()))
                rates.append(float(rate) * 1e9)
            except ValueError as error:
                raise DispatchError(
                    f"{where}: expected `HOST:DEVICE,... HOST:DEVICE,...;GB/s`: {error}"
                ) from None
            if np.count_nonzero(choice) < 2 or not 0 < rates[-1] < 1e15:
                raise DispatchError(f"{where}: expected a rate, and devices of several hosts")
            choices.append(choice)
    except csv.Error as error:
        raise TableError(f"{file}: {error}") from None
    return Samples(np.array(choices).reshape(-1, len(cluster.tables)), np.array(rates))


def sample_line(devices: dict[str, list[str]], rate_Bps: float) -> str:
    """One line of such a file."""
    where = " ".join(f"{host}:{','.join(names)}" for host, names in devices.items())
    return f"{where};{rate_Bps / 1e9:.6g}\n"


def _named(text: str) -> tuple[str, list[str]]:
    host, colon, devices = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} names no devices")
    return host, devices.split(",")


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


def fit_uplinks(tables_only: DispatchCluster, samples: Samples) -> DispatchCluster:
    """The cluster whose hosts' links explain ``samples``: each as fast as it was ever seen.

    A choice is as fast as its weakest link. So a host's link has at least the most that any choice
    with it had, and exactly that once it was the weakest. Noise makes it too fast by as much as the
    largest error. A host without a sample gets the median of the others.

    Args:
        tables_only: the hosts; its uplinks are not looked at.

    Raises:
        DispatchError: if there is no sample.
    """
    if not len(samples):
        raise DispatchError("no measured choice that spans hosts: measure some first")
    seen = np.where(samples.choices > 0, samples.bandwidth_Bps[:, None], 0.0).max(axis=0)
    seen[seen == 0] = np.median(seen[seen > 0])
    return DispatchCluster(tables_only.tables, seen)


def predicted_links(tables_only: DispatchCluster, predict: Predictor) -> DispatchCluster:
    """The cluster whose hosts' links explain what is predicted for one device each of two hosts.

    Args:
        tables_only: the hosts; its uplinks are not looked at.
    """
    pairs = list(combinations(range(len(tables_only.sizes)), 2))
    if not pairs:
        return tables_only
    choices = np.zeros((len(pairs), len(tables_only.sizes)), np.int64)
    for row, pair in zip(choices, pairs, strict=True):
        row[list(pair)] = 1
    return fit_uplinks(tables_only, Samples(choices, predict(choices)))
