"""Paths as rows of numbers, many at a time, for numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from crux_torch.network.discover.evidence import Numbers
from crux_torch.network.discover.fragment import SILENT

#: In a row of hops, the place after a path's last one.
_ABSENT = -2
#: Bits of a number beside another one in one key.
BITS = 32


class Rows:
    """The hops of each path in a row of their own.

    Args:
        hops: of one path after the other.
        length: of each path.

    Attributes:
        first: first hop of each path.
    """

    def __init__(self, hops: Numbers, length: Numbers) -> None:
        self._length = length
        self._hops = np.full((max(2, int(length.max())), len(length)), _ABSENT, dtype=np.int64)
        row = np.repeat(np.arange(len(length)), length)
        place = np.arange(len(hops)) - np.repeat(np.cumsum(length) - length, length)
        self._hops[place, row] = hops
        self.first = self._hops[0]

    def spray(self, sprays: Numbers) -> None:
        """Forgets the hops between the ends of paths whose packets take ways of their own."""
        for place in range(1, len(self._hops) - 1):
            self._hops[place, sprays & (place < self._length - 1)] = SILENT

    def end(self, stand_in: Numbers) -> None:
        """Puts stand-ins in the place of last hops after the first that did not answer."""
        rows = np.flatnonzero(self._length > 1)
        last = self._length[rows] - 1
        answers = self._hops[last, rows]
        self._hops[last, rows] = np.where(answers < 0, stand_in[rows], answers)

    def tails(self, keys: int) -> tuple[list[tuple[int, ...]], Numbers]:
        """Returns each different tail once, and the one of each path.

        Args:
            keys: count of numbers that hops may have.
        """
        base, code, bound = keys + 2, np.zeros(len(self._length), dtype=np.int64), 1
        for hop in self._hops[1:]:
            if bound > (1 << 62) // base:
                codes, code = np.unique(code, return_inverse=True)
                bound = len(codes)
            code = code * base + (hop - _ABSENT)
            bound *= base
        codes = np.unique(code)
        which = np.searchsorted(codes, code)
        one = np.zeros(len(codes), dtype=np.int64)
        one[which] = np.arange(len(code))
        rows, lengths = self._hops[1:, one].T.tolist(), (self._length[one] - 1).tolist()
        return [tuple(row[: max(n, 0)]) for row, n in zip(rows, lengths, strict=True)], which


def begins(*columns: Numbers) -> npt.NDArray[np.bool_]:
    """Returns True for rows that differ from the one before."""
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new


def expanded(
    rows: Numbers, tail: Numbers, hops: Numbers, begin: Numbers, length: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns each row once for each hop of its tail, and the hop."""
    count = length[tail]
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(rows, count), hops[np.repeat(begin[tail], count) + place]


def joint(a: Numbers, b: Numbers) -> Numbers:
    """Returns one number for two; the second one is at least -1."""
    return (a << BITS) + b


def apart(both: Numbers) -> tuple[Numbers, Numbers]:
    return both >> BITS, both & ((1 << BITS) - 1)


def numbers(values: Sequence[int]) -> Numbers:
    return np.array(values, dtype=np.int64)


def columns(values: Sequence[int], count: int) -> Numbers:
    """Returns ``count`` columns of values that stand one row after the other."""
    columns: Numbers = numbers(values).reshape(-1, count).T
    return columns
