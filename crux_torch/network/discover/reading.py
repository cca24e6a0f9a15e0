"""Reads fragments: each pair and each new tail by itself, and then all that was seen at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

import numpy as np

from crux_torch.network.discover.evidence import (
    MAX_OWNERS,
    Evidence,
    Nic,
    Notes,
    Numbers,
    Sure,
    Tail,
    Witness,
    canonical,
    split,
    witnesses,
)
from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic
from crux_torch.network.discover.shares import cost
from crux_torch.network.topology import TopologyError

#: Paths of one owner that are read.
MAX_OWN_PATHS = 1 << 16
#: An owner is sure of a pair from this confidence on.
SURE = 0.9

_Hops = tuple["str | None", ...]
_FIRST, _AFTER = itemgetter(0), itemgetter(slice(1, None))


def read(fragments: Mapping[str, Fragment], most: float = math.inf) -> Evidence:
    """Returns what the fragments say, by the name of their owner (a job, or a run of discovery).

    Paths count only if they lead from an interface of the fragment's own hosts to another one.

    Two kinds of stand-ins are no addresses: ``?`` and an interface is the first router from there,
    and the last one toward it if that does not answer; ``=`` and an interface is a bridge, or a
    tunnel, where no router is between two hosts.

    Raises:
        TopologyError: the interfaces and routers cost more than ``most``.
    """
    owners = sorted(fragments)
    reader = _Reader()
    for number, owner in enumerate(owners):
        reader.read(number, owner, fragments[owner])
        if reader.cost > most:
            raise TopologyError("jobs saw a larger network than there may be")
    return reader.evidence(owners)


class _Keys(dict["str | None", int]):
    """Numbers of addresses by their spelling; -1 of what is no address that one machine has.

    Attributes:
        names: by number, addresses in their shortest form, and stand-ins.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._number: dict[str, int] = {}

    def __missing__(self, spelled: str | None) -> int:
        short = None if spelled is None else canonical(spelled)
        self[spelled] = number = -1 if short is None else self.number(short)
        return number

    def number(self, name: str) -> int:
        """Returns the number of an address in its shortest form, or of a stand-in."""
        number = self._number.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


class _Reader:
    """Reads one fragment after the other, in the order of their owners.

    A group is what one owner saw after one first router on the paths of a pair; a row is a tail in
    a group. Everything has a number, so that numpy can sort it.
    """

    def __init__(self) -> None:
        self._notes = Notes()
        self._keys = _Keys()
        self._claims: dict[Nic, dict[str, SeenNic]] = {}
        self._nics: list[Nic] = []
        self._nic_number: dict[Nic, int] = {}
        # Of each interface, the first router from there.
        self._first: list[int] = []
        self._tails: list[Tail] = []
        self._number: dict[Tail, int] = {}
        # By spelling, where both ends of the tail answered.
        self._known: dict[_Hops, int] = {}
        # The hops of one tail after the other; -1 where nobody answered.
        self._hops: list[int] = []
        self._in_tails: set[int] = set()
        # Of the fragment that is read: interface of each address; True if one is in a tail.
        self._nic_at: dict[int, int] = {}
        self._crossed = False
        self._circular: set[int] = set()
        # Of each group: owner, both interfaces, first router, count of rows.
        self._groups: list[int] = []
        self._rows: list[int] = []
        self._refused: list[int] = []
        # First routers, addresses and owners; apart those of groups that were refused.
        self._answers: list[int] = []
        self._vain: list[int] = []
        # Of each pair: both interfaces, fewest routers, owner.
        self._sure: list[int] = []

    def read(self, owner: int, name: str, fragment: Fragment) -> None:
        """Reads what the owner of this name says."""
        self._nic_at = nic_at = self._interfaces(name, fragment.hosts)
        self._crossed = not self._in_tails.isdisjoint(nic_at)
        keys, nics, left = self._keys, self._nics, MAX_OWN_PATHS
        for pair in fragment.pairs:
            src = nic_at.get(keys[pair.src_address], -1)
            dst = nic_at.get(keys[pair.dst_address], -1)
            ends = pair.src, pair.dst
            if min(src, dst) < 0 or (nics[src].host, nics[dst].host) != ends:
                what = f"{pair.src_address} of {pair.src} to {pair.dst_address} of {pair.dst}"
                self._notes.add("refused, not between interfaces of hosts that saw it", what)
            elif pair.src != pair.dst:
                paths = [path.hops for path in pair.paths]
                if pair.sprays:
                    where = f"{pair.src} to {pair.dst}"
                    self._notes.add("packets are sprayed, so paths can't be chosen", where)
                elif pair.confidence >= SURE and paths:
                    self._sure += src, dst, min(map(len, paths)), owner
                if len(paths) > left:
                    self._notes.add(f"more than {MAX_OWN_PATHS} paths, the rest ignored", name)
                self._read_pair(owner, src, dst, paths[:left], pair.sprays)
                left = max(0, left - len(paths))

    @property
    def cost(self) -> int:
        """See :func:`~crux_torch.network.discover.shares.cost`; links are not counted yet."""
        return cost(len(self._nics) + len(self._in_tails), len(self._tails))

    def evidence(self, owners: Sequence[str]) -> Evidence:
        """Returns what all fragments say; ``owners`` are their names."""
        of_group, src, dst, first, count = _columns(self._groups, 5)
        group, tail = np.repeat(np.arange(len(count)), count), _numbers(self._rows)
        owner = of_group[group]
        several: list[Witness] = [*owners, None]
        _, by = witnesses(tail, owner, len(owners))
        tail_witness = [several[n] for n in by.tolist()]
        known_to = self._known_to(tail, owner, (first, of_group), owners)
        kept = np.ones(len(tail), dtype=bool)
        kept[self._refused] = False
        tail, group, owner = tail[kept], group[kept], owner[kept]
        src, dst, first = src[group], dst[group], first[group]
        hops, begin, length = self._layout()
        ended = np.append(hops, -1)  # an empty tail has no hops, so it may begin at the end
        second = np.where(length > 0, ended[begin], -1)[tail]
        last = np.where(length > 0, ended[begin + length - 1], -1)[tail]
        beside = (
            np.append(src, dst),
            np.append(first, np.where(last < 0, first, last)),
            np.append(owner, owner),
        )
        follows = second >= 0
        router, address, of_answer = _columns(self._answers, 3)
        sure_src, sure_dst, fewest, by_owner = _columns(self._sure, 4)
        names = self._keys.names

        def claims(of: Numbers, claim: Numbers, by: Numbers) -> dict[int, dict[int, Witness]]:
            return _claims(of, claim, by, several)

        def named(found: Mapping[int, Mapping[int, Witness]]) -> dict[int, dict[str, Witness]]:
            return {of: {names[n]: by for n, by in each.items()} for of, each in found.items()}

        alone = ~np.isin(src * len(self._nics) + dst, dst * len(self._nics) + src)
        pairs = zip(first[alone].tolist(), tail[alone].tolist(), strict=True)
        return Evidence(
            nics=self._claims,
            numbered=self._nics,
            tails=self._tails,
            tail_witness=tail_witness,
            first_address={
                names[n]: found for n, found in named(claims(router, address, of_answer)).items()
            },
            leads={names[n]: found for n, found in claims(first, tail, owner).items()},
            one_way={(names[n], number) for n, number in pairs},
            beside={self._nics[n]: found for n, found in named(claims(*beside)).items()},
            second={
                names[n]: found
                for n, found in named(
                    claims(first[follows], second[follows], owner[follows])
                ).items()
            },
            sure=Sure(sure_src, sure_dst, fewest, by_owner, len(owners)),
            owners=known_to,
            notes=self._notes,
        )

    def _interfaces(self, owner: str, hosts: Iterable[SeenHost]) -> dict[int, int]:
        """Returns the interface of each address."""
        nic_at: dict[int, int] = {}
        for host in hosts:
            for given in host.nics:
                nic = Nic(host.name, given.name)
                number = self._nic_number.setdefault(nic, len(self._nics))
                if number == len(self._nics):
                    self._nics.append(nic)
                    self._first.append(self._keys.number(f"?{nic}"))
                    self._claims[nic] = {}
                self._claims[nic][owner] = given
                for address in given.addresses:
                    nic_at.setdefault(self._keys[address], number)
        nic_at.pop(-1, None)
        return nic_at

    def _read_pair(
        self,
        owner: int,
        src: int,
        dst: int,
        paths: Sequence[_Hops],
        sprays: bool,
    ) -> None:
        # This runs for every path of every job: most tails are known already.
        numbers = list(map(self._known.get, map(_AFTER, paths)))
        found = [number for number in numbers if number is not None]
        if len(found) < len(paths) or sprays or not all(paths):
            bridged: dict[int, list[int]] = {}
            found = []
            for hops, known in zip(paths, numbers, strict=True):
                if known is None or not hops or sprays:
                    first, known = self._new(hops, src, dst, sprays)
                    (found if hops else bridged.setdefault(first, [])).append(known)
                else:
                    found.append(known)
            for first, empty in bridged.items():
                self._add(owner, src, dst, first, set(), empty)
            paths = [hops for hops in paths if hops]
        if found:
            # Of strings a set has another order in each process, and numbers must not.
            addresses = {self._keys[spelled] for spelled in dict.fromkeys(map(_FIRST, paths))}
            addresses.discard(-1)
            self._add(owner, src, dst, self._first[src], addresses, found)

    def _new(self, hops: _Hops, src: int, dst: int, sprays: bool) -> tuple[int, int]:
        """Returns the first router of a path, and its tail."""
        ends = self._nics[src], self._nics[dst]
        first, tail = split([hop and canonical(hop) for hop in hops], *ends, sprays)
        number = self._number.setdefault(tail, len(self._tails))
        if number == len(self._tails):
            self._tails.append(tail)
            keys = [-1 if key is None else self._keys.number(key) for key in tail]
            self._hops += keys
            answered = [key for key in keys if key >= 0]
            self._in_tails.update(answered)
            self._crossed |= not self._nic_at.keys().isdisjoint(answered)
            if len(set(answered)) < len(answered):
                self._circular.add(number)
        if hops and hops[-1] is not None and tail[-1:] != (f"?{ends[1]}",) and not sprays:
            self._known[hops[1:]] = number
        return self._keys.number(first), number

    def _add(
        self,
        owner: int,
        src: int,
        dst: int,
        first: int,
        addresses: set[int],
        numbers: Sequence[int],
    ) -> None:
        answers, own = self._answers, self._nic_at.keys()
        clean = self._in_tails.isdisjoint(addresses) and own.isdisjoint(addresses)
        if not clean or self._crossed or self._circular:
            possible = self._possible(addresses, numbers)
            if not possible.issuperset(numbers):
                where = f"{self._nics[src].host} to {self._nics[dst].host}"
                self._notes.add("refused, a router is there twice, or is a host", where)
                begin = len(self._rows)
                self._refused += [begin + n for n, t in enumerate(numbers) if t not in possible]
            answers = answers if possible else self._vain
        for address in addresses:
            answers += first, address, owner
        self._groups += owner, src, dst, first, len(numbers)
        self._rows += numbers

    def _possible(self, addresses: set[int], numbers: Sequence[int]) -> set[int]:
        """Returns the tails that lead neither twice to a router nor through an owner's host."""
        own, key_of = self._nic_at.keys(), self._keys.number
        if not own.isdisjoint(addresses):
            return set()
        possible = set()
        for number in set(numbers) - self._circular:
            keys = {key_of(name) for name in self._tails[number] if name is not None}
            if keys.isdisjoint(addresses) and own.isdisjoint(keys):
                possible.add(number)
        return possible

    def _layout(self) -> tuple[Numbers, Numbers, Numbers]:
        """Returns the hops of all tails, where each tail begins in them, and its length."""
        length = _numbers([len(tail) for tail in self._tails])
        return _numbers(self._hops), np.cumsum(length) - length, length

    def _known_to(
        self,
        tail: Numbers,
        owner: Numbers,
        firsts: tuple[Numbers, Numbers],
        owners: Sequence[str],
    ) -> dict[str, list[str]]:
        """Returns ``MAX_OWNERS`` at most that saw each address or first router."""
        tail, owner = _few(tail, owner, len(owners))
        hops, begin, length = self._layout()
        count = length[tail]
        place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        key = hops[np.repeat(begin[tail], count) + place]
        _, address, by = _columns(self._answers + self._vain, 3)
        key, owner = _few(
            np.concatenate((key, firsts[0], address)),
            np.concatenate((np.repeat(owner, count), firsts[1], by)),
            len(owners),
        )
        found: dict[str, list[str]] = {}
        for n, by_owner in zip(key.tolist(), owner.tolist(), strict=True):
            if n >= 0:
                found.setdefault(self._keys.names[n], []).append(owners[by_owner])
        return found


def _claims(
    of: Numbers, claim: Numbers, owner: Numbers, names: Sequence[Witness]
) -> dict[int, dict[int, Witness]]:
    """Returns the claims of each, with their witnesses; ``names`` end with that of several."""
    span = int(claim.max(initial=0)) + 1
    each, by = witnesses(of * span + claim, owner, len(names) - 1)
    of, claim = np.divmod(each, span)
    begins = np.flatnonzero(np.diff(of, prepend=-1))
    claims, witness = claim.tolist(), [names[n] for n in by.tolist()]
    ends = itertools.pairwise([*begins.tolist(), len(claims)])
    return {
        n: dict(zip(claims[begin:end], witness[begin:end], strict=True))
        for n, (begin, end) in zip(of[begins].tolist(), ends, strict=True)
    }


def _few(keys: Numbers, owners: Numbers, count: int) -> tuple[Numbers, Numbers]:
    """Returns each key with the first ``MAX_OWNERS`` of its owners, in ascending order."""
    both = np.sort(keys * count + owners)
    keys, owners = np.divmod(both[np.diff(both, prepend=both[:1] - 1) > 0], max(count, 1))
    new = np.diff(keys, prepend=keys[:1] - 1) > 0
    begins = np.flatnonzero(new)
    few = np.arange(len(keys)) - begins[np.cumsum(new) - 1] < MAX_OWNERS
    return keys[few], owners[few]


def _numbers(values: Sequence[int]) -> Numbers:
    return np.array(values, dtype=np.int64)


def _columns(values: Sequence[int], count: int) -> Numbers:
    """Returns ``count`` columns of values that stand one row after the other."""
    columns: Numbers = _numbers(values).reshape(-1, count).T
    return columns
