"""Fits hashes to choices by linear algebra: over GF(2) without knowing the hash, then family by
family over GF(3), GF(5) or GF(7), or by the hash's high bits."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import numpy.typing as npt

from crux_torch.network.discover.hash_families import (
    Family,
    Flow,
    Ints,
    Sample,
    constant_within,
    families,
    label_of,
    reduced,
)

#: Subsets of the choices that are tried, because some of the answers may be wrong.
_LINEAR_TRIES, _MODULAR_TRIES = 200, 20
#: Families x labellings x subsets, so that a group of seven takes a second or two as well.
_MODULAR_EFFORT = 20_000
#: Agreement with the choices that a model is fitted to, below which it is none.
_AGREEMENT = 0.85
#: Agreement of a remainder from which on scaled selection is not tried.
_EXACT = 0.97
#: Leading bits of a hash that scaled selection looks at. Next hops change between two values of
#: them, so that of n next hops n in 2048 predictions are wrong.
_LEADING = 10
#: The same for a first look at all families, and how many are looked at again.
_SCREEN, _KEPT = 6, 8
#: Prime factors other than 2 that a group's size may have once, and assignments of next hops to
#: remainders to try.
_ODD = (1, 3, 5, 7)
_MOST_LABELLINGS = 1000
_WIDEST = 32
#: Flows by which the weights are solved for: some more than weights, so that these are determined.
_EQUATIONS = 48

#: A family that agrees this improbably is the one: no more subsets are tried.
_SURE = 1e-9

Ints16 = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Model:
    """A rule from a flow's bits to a key, and the next hop of each key.

    Attributes:
        functionals: bits of the flow whose sums are the bits of the key's first part.
        weights, modulus: of the hash's bits, for the key's second part.
        families, selection, coincidence: as in ``HashFit``.
        agreement: share of the sample that it is right about, where others were tried as well.
    """

    sample: Sample
    next_hops: Sequence[str]
    functionals: Sequence[int]
    table: dict[tuple[int, int], int]
    families: tuple[str, ...]
    selection: str
    coincidence: float
    agreement: float = 1.0
    rows: Sequence[int] = ()
    rest: Rest | None = None

    def predict(self, flow: Flow) -> str | None:
        """Returns the next hop of ``flow``; None if it is outside of what was seen."""
        message = flow.message
        if len(message) != self.sample.size:
            return None
        vector = self.sample.span.coordinates(int.from_bytes(message, "big") ^ self.sample.origin)
        found = None if vector is None else self.table.get(self._key(vector))
        return None if found is None else self.next_hops[found]

    def index(self, sample: Sample, number: int) -> int | None:
        """Returns the number of the next hop that is predicted for a flow of ``sample``."""
        return self.table.get(self._key(sample.vectors[number]))

    def _key(self, vector: int) -> tuple[int, int]:
        rest = 0 if self.rest is None else self.rest.of(label_of(self.rows, vector))
        return label_of(self.functionals, vector), rest


@dataclass(frozen=True)
class Rest:
    """The part of a choice that is not linear over GF(2).

    Attributes:
        modulus: the odd factor of the group's size, for ``weights`` of each bit of the hash, the
            constant last; 0 for scaled selection.
        constant: XORed to the hash's leading bits, which alone are asked for, in scaled selection.
        count, width: next hops, and these bits.
    """

    modulus: int = 0
    weights: tuple[int, ...] = ()
    constant: int = 0
    count: int = 0
    width: int = 0

    def of(self, hashed: int) -> int:
        """Returns the remainder, or the slot, of a hash that lacks its constant part."""
        if self.modulus:
            bits = (weight for bit, weight in enumerate(self.weights[:-1]) if hashed >> bit & 1)
            return (self.weights[-1] + sum(bits)) % self.modulus
        return (hashed ^ self.constant) * self.count >> self.width


def fit(sample: Sample, next_hops: Sequence[str]) -> Model | None:
    """Returns the model that agrees best with ``sample``; None if none agrees well enough."""
    count = len(next_hops)
    functionals = _functionals(sample, count)
    odd, remains = divmod(count, 1 << len(functionals))
    if odd == 1:
        return _linear(sample, next_hops, functionals)
    known = _distinct(sample)
    found: list[Model] = []
    if not remains and odd in _ODD:
        found += _modular(sample, next_hops, functionals, odd, known)
    # A remainder's weights can come near to scaled selection, but not reach it.
    if not found or found[0].agreement < _EXACT:
        found += _scaled(sample, next_hops, known)
    return max(found, key=lambda model: model.agreement, default=None)


def _functionals(sample: Sample, count: int) -> list[int]:
    """The independent linear functions of a flow's bits that its next hop decides.

    Two flows with one next hop have equal values of them, so each is zero on the difference. If
    choices are random, the differences soon span everything, and there is none. Some answers may
    be wrong: then a subset without a wrong one is looked for.
    """
    chance = random.Random(0)
    everything = range(len(sample))
    size = min(len(sample), sample.dimension + count + 4)
    most = (count & -count).bit_length() - 1
    best: list[int] = []
    for trial in range(_LINEAR_TRIES):
        if len(best) == most:
            break
        chosen = everything if trial == 0 else chance.sample(everything, size)
        found = constant_within(sample, chosen)
        if not len(best) < len(found) <= most:
            continue
        if _agreement(_keys(sample.bits(found)), sample.hops) >= _AGREEMENT:
            best = found
    return best


def _keys(bits: Ints) -> list[int]:
    return [int(key) for key in bits @ (1 << np.arange(bits.shape[1]))]


def _agreement(keys: Sequence[int], hops: Sequence[int]) -> float:
    """The share of flows whose next hop has the key that most flows with that next hop have."""
    by_hop: dict[int, Counter[int]] = defaultdict(Counter)
    for key, hop in zip(keys, hops, strict=True):
        by_hop[hop][key] += 1
    return sum(max(each.values()) for each in by_hop.values()) / len(hops)


def _distinct(sample: Sample) -> dict[tuple[int, ...], list[Family]]:
    """The families that differ on the flows of ``sample``, by the rows of their matrices."""
    basis = [vector.to_bytes(sample.size, "big") for vector in sample.span.basis]
    found: dict[tuple[int, ...], list[Family]] = defaultdict(list)
    for family in families():
        found[family.rows(basis)].append(family)
    return {rows: same for rows, same in found.items() if any(rows)}


def _linear(sample: Sample, next_hops: Sequence[str], functionals: list[int]) -> Model:
    """A choice that is linear over GF(2); its name is that of any hash with the same bits."""
    size = len(functionals)
    wanted = reduced(functionals)
    names, tried = dict[str, list[str]](), set[tuple[int, ...]]()
    for rows, same in _distinct(sample).items():
        for selection, part in (("modulo", rows[:size]), ("high bits", rows[-size:])):
            tried.add(bits := reduced(part))
            if bits == wanted:
                names.setdefault(selection, []).extend(family.name for family in same)
    selection = next(iter(names), "linear")
    if selection == "modulo":
        selection = f"modulo {len(next_hops)}"
    others = [name for each in names.values() for name in each]
    return Model(
        sample,
        next_hops,
        functionals,
        _table(sample, [(key, 0) for key in _keys(sample.bits(functionals))]),
        tuple(dict.fromkeys(others)),
        selection,
        min(1.0, len(tried) / _subspaces(sample.dimension, size)),
    )


def _subspaces(dimension: int, size: int) -> float:
    """The number of subspaces of that size of a space over GF(2)."""
    return math.prod(
        ((1 << dimension - i) - 1) / ((1 << size - i) - 1) for i in range(min(size, dimension))
    )


def _table(sample: Sample, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    by_key: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for key, hop in zip(keys, sample.hops, strict=True):
        by_key[key][hop] += 1
    return {key: each.most_common(1)[0][0] for key, each in by_key.items()}


def tail(hits: int, draws: int, share: float) -> float:
    """Returns the probability of ``hits`` of ``draws`` or more, each of probability ``share``."""
    terms = range(max(0, hits), draws + 1)
    return sum(math.comb(draws, k) * share**k * (1 - share) ** (draws - k) for k in terms)


def _modular(
    sample: Sample,
    next_hops: Sequence[str],
    functionals: list[int],
    odd: int,
    known: dict[tuple[int, ...], list[Family]],
) -> Iterator[Model]:
    """A hash modulo an odd prime, times the power of two that ``functionals`` stand for.

    Bit i of the hash is a sum y over GF(2), or its complement, so it adds 2^i y or 2^i - 2^i y to
    the hash. Modulo the prime that is a constant plus plus-or-minus 2^i y: linear in unknown
    weights of the bits y of a family, whatever the seed.
    """
    size = len(functionals)
    wanted = reduced(functionals)
    possible = {rows: same for rows, same in known.items() if reduced(rows[:size]) == wanted}
    if not possible:
        return
    labels = _keys(sample.bits(functionals))
    labellings = list(_labellings(sample, labels, odd, 1 << size))
    if not labellings:
        return
    padded = [rows + (0,) * (_WIDEST - len(rows)) for rows in possible]
    terms = np.ones((len(possible), len(sample), _WIDEST + 1), dtype=np.int16)
    for number, rows in enumerate(padded):
        terms[number, :, :-1] = sample.bits(rows)
    remainders = np.array([[each[hop] for each in labellings] for hop in sample.hops], np.int16)
    best = _best_weights(terms, remainders, odd)
    if best.agreement < _AGREEMENT:
        return
    names = dict.fromkeys(
        family.name for j in best.families for family in possible[list(possible)[j]]
    )
    rest = Rest(modulus=odd, weights=best.weights)
    rows = padded[best.families[0]]
    remains = [rest.of(label_of(rows, vector)) for vector in sample.vectors]
    yield Model(
        sample,
        next_hops,
        functionals,
        _table(sample, list(zip(labels, remains, strict=True))),
        tuple(names),
        f"modulo {len(next_hops)}",
        best.coincidence,
        best.agreement,
        rows,
        rest,
    )


def _labellings(sample: Sample, labels: list[int], odd: int, groups: int) -> Iterator[list[int]]:
    """Assignments of next hops to remainders, but for those that other weights make up for.

    ``odd`` next hops share each value of ``labels``. Of the first of these groups two next hops
    are fixed: x -> a x + b takes them wherever they were.
    """
    members: dict[int, set[int]] = defaultdict(set)
    for label, hop in _votes(labels, sample):
        members[label].add(hop)
    if len(members) != groups or any(len(each) != odd for each in members.values()):
        return
    first, *others = (sorted(each) for each in members.values())
    if math.factorial(odd - 2) * math.factorial(odd) ** len(others) > _MOST_LABELLINGS:
        # Routers keep their next hops in the order of addresses as a rule.
        yield [hop % odd for hop in range(odd * groups)]
        return
    for fixed in permutations(range(2, odd)):
        for rest in product(permutations(range(odd)), repeat=len(others)):
            made = [0] * (odd * groups)
            for hops, remainders in zip((first, *others), ((0, 1, *fixed), *rest), strict=True):
                for hop, remainder in zip(hops, remainders, strict=True):
                    made[hop] = remainder
            yield made


def _votes(labels: list[int], sample: Sample) -> list[tuple[int, int]]:
    """The label that most flows of each next hop have, and the next hop."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for label, hop in zip(labels, sample.hops, strict=True):
        votes[hop][label] += 1
    return [(each.most_common(1)[0][0], hop) for hop, each in votes.items()]


@dataclass(frozen=True)
class _Weights:
    """The weights that agree best, and the families that have them.

    Attributes:
        coincidence: probability that any family agrees as well with choices that it did not make.
    """

    agreement: float = 0.0
    coincidence: float = 1.0
    families: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()


def _best_weights(terms: Ints16, remainders: Ints16, prime: int) -> _Weights:
    """Solves each family's equations by as many flows as it needs, and counts those that agree.

    Args:
        terms: for each family, flow and weight.
        remainders: for each flow and labelling.
    """
    chance = np.random.default_rng(0)
    best = _Weights()
    combinations = terms.shape[0] * remainders.shape[1]
    for trial in range(min(_MODULAR_TRIES, max(3, _MODULAR_EFFORT // combinations))):
        order = np.arange(len(remainders)) if trial == 0 else chance.permutation(len(remainders))
        order = order[:_EQUATIONS]
        weights, ranks = _solved(terms[:, order], remainders[order], prime)
        # Floats, because numpy multiplies matrices of integers slowly; they are exact here.
        sums = terms.astype(np.float32) @ weights.astype(np.float32)
        agree = ((sums - remainders) % prime == 0).mean(axis=1)
        family, labelling = np.unravel_index(int(agree.argmax()), agree.shape)
        if agree[family, labelling] > best.agreement:
            top = float(agree[family, labelling])
            equal = np.flatnonzero(agree.max(axis=1) >= top)
            found = tuple(int(weight) for weight in weights[family, :, labelling])
            # As many flows as there are weights agree in any case.
            free = len(remainders) - int(ranks[family])
            by_chance = tail(round(top * len(remainders)) - int(ranks[family]), free, 1 / prime)
            coincidence = min(1.0, agree.size * by_chance)
            best = _Weights(top, coincidence, tuple(int(j) for j in equal), found)
        if best.agreement > 0.9 and best.coincidence < _SURE:
            break
    return best


def _solved(terms: Ints16, remainders: Ints16, prime: int) -> tuple[Ints16, Ints]:
    """Gauss-Jordan elimination over GF(prime), for all families and labellings at once.

    Returns:
        Weights for each family, weight and labelling, of the first equations that are independent,
        and the number of these equations for each family.
    """
    count, flows, size = terms.shape
    right = np.broadcast_to(remainders, (count, *remainders.shape))
    matrix = np.concatenate([terms % prime, right % prime], axis=2).astype(np.int16)
    inverse = np.array([pow(value, prime - 2, prime) for value in range(prime)], dtype=np.int16)
    ranks, every = np.zeros(count, dtype=np.int64), np.arange(count)
    weights = np.zeros((count, size, remainders.shape[1]), dtype=np.int16)
    pivots = np.full((count, size), -1)
    for column in range(size):
        usable = (matrix[:, :, column] != 0) & (np.arange(flows) >= ranks[:, None])
        exists, at = usable.any(axis=1), usable.argmax(axis=1)
        mine, to, source = every[exists], ranks[exists], at[exists]
        rows = matrix[mine, source]
        matrix[mine, source] = matrix[mine, to]
        rows = rows * inverse[rows[:, column]][:, None] % prime
        factors = matrix[mine, :, column]
        matrix[mine] = (matrix[mine] - factors[:, :, None] * rows[:, None, :]) % prime
        matrix[mine, to] = rows
        pivots[mine, column] = to
        ranks[exists] += 1
    families, columns = np.nonzero(pivots >= 0)
    weights[families, columns] = matrix[families, pivots[families, columns], size:]
    return weights, ranks


def _scaled(
    sample: Sample, next_hops: Sequence[str], known: dict[tuple[int, ...], list[Family]]
) -> Iterator[Model]:
    """Hash x next hops / 2^width: the leading bits decide, and their constant part is tried."""
    count = len(next_hops)
    chosen = np.eye(count, dtype=np.float32)[list(sample.hops)]
    alike: dict[tuple[int, ...], list[Family]] = defaultdict(list)
    for rows, same in known.items():
        alike[rows[-_LEADING:]] += same
    best = [(0.0, leading, 0) for leading in alike]
    for size, kept in ((_SCREEN, _KEPT), (_LEADING, 1)):
        scored = []
        for _, leading, _ in best:
            width = min(size, len(leading))
            hashed = sample.bits(leading[-width:]) @ (1 << np.arange(width))
            slots = (hashed ^ np.arange(1 << width)[:, None]) * count >> width
            agree = sum(((slots == slot) @ chosen).max(axis=1) for slot in range(count))
            scored.append((float(agree.max()) / len(sample), leading, int(agree.argmax())))
        best = sorted(scored, reverse=True)[:kept]
    agreement, leading, constant = best[0]
    if agreement < _AGREEMENT:
        return
    rest = Rest(constant=constant, count=count, width=len(leading))
    tried = len(alike) * float(1 << _LEADING) * math.factorial(count)
    yield Model(
        sample,
        next_hops,
        [],
        _table(sample, [(0, rest.of(label_of(leading, vector))) for vector in sample.vectors]),
        tuple(dict.fromkeys(family.name for family in alike[leading])),
        f"scaled to {count}",
        min(1.0, tried * tail(round(agreement * len(sample)), len(sample), 1 / count)),
        agreement,
        leading,
        rest,
    )
