"""Flows as vectors over GF(2), and the linear functions that their next hops decide."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from crux_torch.network.discover.hash_families import Flow

Ints = npt.NDArray[np.int64]


class Span:
    """A basis of vectors over GF(2), taken from those that are added."""

    def __init__(self) -> None:
        self.basis: list[int] = []
        self._rows: dict[int, tuple[int, int]] = {}

    def add(self, vector: int) -> bool:
        """Add ``vector`` to the basis. Returns True if it was independent."""
        rest, combination = self._reduced(vector)
        if rest:
            self._rows[rest.bit_length()] = (rest, combination ^ 1 << len(self.basis))
            self.basis.append(vector)
        return bool(rest)

    def coordinates(self, vector: int) -> int | None:
        """Returns the basis vectors whose sum is ``vector``, as bits; None if it is outside."""
        rest, combination = self._reduced(vector)
        return None if rest else combination

    def _reduced(self, vector: int) -> tuple[int, int]:
        combination = 0
        while vector and (row := self._rows.get(vector.bit_length())):
            vector ^= row[0]
            combination ^= row[1]
        return vector, combination


@dataclass(frozen=True)
class Sample:
    """Flows as vectors over GF(2), relative to one of them, and the next hop of each.

    Attributes:
        origin, size: a flow's message as a number, and its bytes.
        span: what the differences of the flows span; it knows flows outside of this sample, too.
        vectors: coordinates of each flow's difference to ``origin``.
        hops: number of each flow's next hop.
    """

    origin: int
    size: int
    span: Span
    vectors: tuple[int, ...]
    hops: tuple[int, ...]

    @classmethod
    def of(cls, flows: Sequence[Flow], hops: Sequence[int]) -> Sample:
        """Returns the sample of ``flows``, one at least, of one IP version."""
        messages = [int.from_bytes(flow.message, "big") for flow in flows]
        span = Span()
        for message in messages:
            span.add(message ^ messages[0])
        vectors = [span.coordinates(message ^ messages[0]) or 0 for message in messages]
        return cls(messages[0], len(flows[0].message), span, tuple(vectors), tuple(hops))

    def __len__(self) -> int:
        return len(self.hops)

    @property
    def dimension(self) -> int:
        """Independent bits in which the flows differ."""
        return len(self.span.basis)

    def without(self, held_out: Collection[int]) -> Sample:
        """Returns the sample without the flows of these numbers."""
        kept = sorted(set(range(len(self))) - set(held_out))
        vectors, hops = tuple(self.vectors[j] for j in kept), tuple(self.hops[j] for j in kept)
        return Sample(self.origin, self.size, self.span, vectors, hops)

    def bits(self, functionals: Sequence[int]) -> Ints:
        """Returns the value of each functional (column) for each flow (row)."""
        values: Ints = self._flows @ _bits(functionals, self.dimension).T & 1
        return values

    @cached_property
    def _flows(self) -> Ints:
        return _bits(self.vectors, self.dimension)


def _bits(vectors: Sequence[int], dimension: int) -> Ints:
    rows = [[vector >> j & 1 for j in range(dimension)] for vector in vectors]
    return np.array(rows, dtype=np.int64).reshape(len(vectors), dimension)


def label_of(functionals: Sequence[int], vector: int) -> int:
    """Returns the values of ``functionals`` on a vector, the first as the lowest bit."""
    return sum(((f & vector).bit_count() & 1) << bit for bit, f in enumerate(functionals))


def constant_within(sample: Sample, chosen: Sequence[int]) -> list[int]:
    """Returns functionals with one value for each next hop, and several in all, on ``chosen``."""
    first: dict[int, int] = {}
    rows: dict[int, int] = {}
    for j in chosen:
        difference = sample.vectors[j] ^ first.setdefault(sample.hops[j], sample.vectors[j])
        for pivot, row in rows.items():
            if difference >> pivot & 1:
                difference ^= row
        if difference:
            pivot = difference.bit_length() - 1
            rows = {p: r ^ difference if r >> pivot & 1 else r for p, r in rows.items()}
            rows[pivot] = difference
    values, found = Span(), []
    origin = sample.vectors[chosen[0]]
    for free in range(sample.dimension):
        if free in rows:
            continue
        functional = 1 << free | sum(1 << pivot for pivot, row in rows.items() if row >> free & 1)
        value = [label_of([functional], sample.vectors[j] ^ origin) for j in chosen]
        if values.add(sum(bit << place for place, bit in enumerate(value))):
            found.append(functional)
    return found


def reduced(vectors: Sequence[int]) -> tuple[int, ...]:
    """Returns the reduced basis of what ``vectors`` span: equal spans have equal ones."""
    rows: list[int] = []
    for vector in vectors:
        for row in rows:
            vector = min(vector, vector ^ row)
        if vector:
            top = 1 << vector.bit_length() - 1
            rows = [row ^ vector if row & top else row for row in rows]
            rows.append(vector)
            rows.sort(reverse=True)
    return tuple(rows)
