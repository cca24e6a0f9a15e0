"""Reads fragments into one table of interfaces, tails and paths, many paths at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

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
    witnesses,
)
from crux_torch.network.discover.fragment import SILENT, Fragment, PairPaths, SeenHost, SeenNic
from crux_torch.network.discover.path_rows import (
    BITS,
    Rows,
    apart,
    begins,
    columns,
    expanded,
    joint,
    numbers,
)
from crux_torch.network.discover.shares import cost
from crux_torch.network.topology import TopologyError

#: Paths of one owner that are read.
MAX_OWN_PATHS = 1 << 16
#: An owner is sure of a pair from this confidence on.
SURE = 0.9
#: Paths that are numbered at once, so that memory has a bound.
BATCH_PATHS = 1 << 18


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
        if reader.read(number, owner, fragments[owner]) >= BATCH_PATHS:
            reader.number_paths()
        if reader.cost > most:
            break
    reader.number_paths()
    if reader.cost > most:
        raise TopologyError("jobs saw a larger network than there may be")
    return reader.evidence(owners)


class _Keys(dict[str, int]):
    """Numbers of addresses by their spelling; ``SILENT`` for what no single machine has.

    Attributes:
        names: by number, addresses in their shortest form, and stand-ins.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._number: dict[str, int] = {}

    def __missing__(self, spelled: str) -> int:
        short = canonical(spelled)
        self[spelled] = number = SILENT if short is None else self.number(short)
        return number

    def number(self, name: str) -> int:
        """Returns the number of an address in its shortest form, or of a stand-in."""
        number = self._number.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


class _Batch:
    """Paths that are read, and not numbered yet.

    Attributes:
        pairs: of each pair its owner, its two interfaces, its count of paths, the place of its
            fragment's table of addresses in ``tables``, and 2 if it sprays, plus 1 if its owner is
            sure of it.
        count: of paths.
        lengths, hops: see :class:`PairPaths`.
        tables: numbers of addresses.
        own: owners with the addresses of their interfaces, see :func:`joint`.
    """

    def __init__(self) -> None:
        self.pairs: list[int] = []
        self.count = 0
        self.lengths: list[tuple[int, ...]] = []
        self.hops: list[tuple[int, ...]] = []
        self.tables: list[int] = []
        self.own: list[int] = []


class _Reader:
    """Reads one fragment after the other, in the order of their owners.

    Everything has a number, so that numpy can sort it. A group is the paths of one pair; those
    without a router are a group of their own.
    """

    def __init__(self) -> None:
        self._notes = Notes()
        self._keys = _Keys()
        self._claims: dict[Nic, dict[str, SeenNic]] = {}
        self._nics: list[Nic] = []
        self._nic_number: dict[Nic, int] = {}
        # Of each interface, the first router from there.
        self._first: list[int] = []
        self._batch = _Batch()
        self._tails: list[Tail] = []
        self._number: dict[tuple[int, ...], int] = {}
        # The hops of one tail after the other.
        self._hops: list[int] = []
        self._in_tails: set[int] = set()
        # Columns: owner, both interfaces, first router, tail, and 1 if the path counts.
        self._rows: list[Numbers] = [np.zeros((6, 0), dtype=np.int64)]
        # First routers, addresses and owners; apart those of groups that were refused.
        self._answers: list[Numbers] = [np.zeros((3, 0), dtype=np.int64)]
        self._vain: list[Numbers] = [np.zeros((3, 0), dtype=np.int64)]
        # Of each pair: both interfaces, fewest routers, owner.
        self._sure: list[Numbers] = [np.zeros((4, 0), dtype=np.int64)]

    @property
    def cost(self) -> int:
        """See :func:`~crux_torch.network.discover.shares.cost`; links are not counted yet."""
        return cost(len(self._nics) + len(self._in_tails), len(self._tails))

    def read(self, owner: int, name: str, fragment: Fragment) -> int:
        """Reads what the owner of this name says; returns the paths that wait for their numbers."""
        nic_at = self._interfaces(name, fragment.hosts)
        batch, nics, left = self._batch, self._nics, MAX_OWN_PATHS
        begin = len(batch.tables)
        table = list(map(self._keys.__getitem__, fragment.addresses))
        batch.tables += table
        batch.own += [(owner << BITS) + key for key in nic_at]
        for pair in fragment.seen:
            src, dst = nic_at.get(table[pair.src], -1), nic_at.get(table[pair.dst], -1)
            if min(src, dst) < 0:
                what = f"{fragment.addresses[pair.src]} to {fragment.addresses[pair.dst]}"
                self._notes.add("refused, not between interfaces of hosts that saw it", what)
            elif nics[src].host != nics[dst].host:
                lengths, hops = pair.lengths, pair.hops
                if len(lengths) > left:
                    self._notes.add(f"more than {MAX_OWN_PATHS} paths, the rest ignored", name)
                    lengths = lengths[:left]
                    hops = hops[: sum(lengths)]
                left -= len(lengths)
                kind = self._kind(pair, nics[src], nics[dst])
                batch.pairs += owner, src, dst, len(lengths), begin, kind
                batch.count += len(lengths)
                batch.lengths.append(lengths)
                batch.hops.append(hops)
        return batch.count

    def number_paths(self) -> None:
        """Numbers the tails of the paths that were read, and refuses those that can't be."""
        batch, self._batch = self._batch, _Batch()
        if not batch.count:
            return
        owner, src, dst, count, begin, kind = columns(batch.pairs, 6)
        length = np.fromiter(itertools.chain.from_iterable(batch.lengths), np.int64, batch.count)
        hops = np.fromiter(itertools.chain.from_iterable(batch.hops), np.int64, length.sum())
        pair = np.repeat(np.arange(len(count)), count)
        at = np.repeat(begin[pair], length) + hops
        hops = np.where(hops == SILENT, SILENT, numbers([*batch.tables, SILENT])[at])
        routers = Rows(hops, length)
        routers.spray(kind[pair] >= 2)
        first = numbers(self._first)
        routers.end(first[dst[pair]])
        tail = self._number_tails(routers)
        self._note_sure(kind & 1, (owner, src, dst, count), length)

        group, first = pair, first[src]
        bridged = np.unique(pair[length == 0])
        if len(bridged):
            group = np.where(length == 0, pair + len(count), pair)
            owner, src, dst = (np.tile(values, 2) for values in (owner, src, dst))
            first = np.tile(first, 2)
            for n in bridged.tolist():
                ends = self._nics[src[n]], self._nics[dst[n]]
                first[len(count) + n] = self._keys.number(f"={min(ends)}")
        answered = np.flatnonzero(begins(group, routers.first) & (routers.first >= 0))
        of_group, address = apart(np.unique(joint(group[answered], routers.first[answered])))
        refused = self._refused((group, tail), (of_group, address), owner, numbers(batch.own))
        for n in np.unique(group[refused]).tolist():
            where = f"{self._nics[src[n]].host} to {self._nics[dst[n]].host}"
            self._notes.add("refused, a router is there twice, or is a host", where)
        counts = np.zeros(len(first), dtype=bool)
        counts[group[~refused]] = True
        answers = np.stack((first[of_group], address, owner[of_group]))
        self._answers.append(answers[:, counts[of_group]])
        self._vain.append(answers[:, ~counts[of_group]])
        self._rows.append(
            np.stack((owner[group], src[group], dst[group], first[group], tail, ~refused))
        )

    def evidence(self, owners: Sequence[str]) -> Evidence:
        """Returns what all fragments say; ``owners`` are their names."""
        owner, src, dst, first, tail, counts = np.concatenate(self._rows, axis=1)
        answers, vain = (np.concatenate(each, axis=1) for each in (self._answers, self._vain))
        sure_src, sure_dst, fewest, by_owner = np.concatenate(self._sure, axis=1)
        several: list[Witness] = [*owners, None]
        _, by = witnesses(tail, owner, len(owners))
        tail_witness = [several[n] for n in by.tolist()]
        known_to = self._known_to(tail, owner, first, (answers, vain), owners)
        kept = counts > 0
        owner, src, dst, first, tail = (each[kept] for each in (owner, src, dst, first, tail))
        hops, begin, length = self._layout()
        ended = np.append(hops, SILENT)  # an empty tail has no hops, so it may begin at the end
        second = np.where(length > 0, ended[begin], SILENT)[tail]
        last = np.where(length > 0, ended[begin + length - 1], SILENT)[tail]
        of_pair = begins(first, src, owner)
        beside = (
            np.append(src[of_pair], dst),
            np.append(first[of_pair], np.where(last < 0, first, last)),
            np.append(owner[of_pair], owner),
        )
        follows = second >= 0
        router, address, of_answer = answers
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
        nic_at.pop(SILENT, None)
        return nic_at

    def _kind(self, pair: PairPaths, src: Nic, dst: Nic) -> int:
        if pair.sprays:
            where = f"{src.host} to {dst.host}"
            self._notes.add("packets are sprayed, so paths can't be chosen", where)
            return 2
        return 1 if pair.confidence >= SURE else 0

    def _note_sure(self, sure: Numbers, pairs: Sequence[Numbers], length: Numbers) -> None:
        owner, src, dst, count = pairs
        begin = np.cumsum(count) - count
        some = count > 0
        fewest = np.zeros(len(count), dtype=np.int64)
        fewest[some] = np.minimum.reduceat(length, begin[some])
        found = np.stack((src, dst, fewest, owner))
        self._sure.append(found[:, some & (sure > 0)])

    def _number_tails(self, routers: Rows) -> Numbers:
        """Returns the tail of each path; each new one gets the next number."""
        tails, which = routers.tails(len(self._keys.names))
        found = []
        for keys in tails:
            number = self._number.setdefault(keys, len(self._tails))
            if number == len(self._tails):
                names = self._keys.names
                self._tails.append(tuple(None if key < 0 else names[key] for key in keys))
                self._hops += keys
                self._in_tails.update(key for key in keys if key >= 0)
            found.append(number)
        return numbers(found)[which]

    def _refused(
        self,
        rows: tuple[Numbers, Numbers],
        answers: tuple[Numbers, Numbers],
        owner: Numbers,
        own: Numbers,
    ) -> Numbers:
        """Returns True for paths that lead twice to a router, or through one of the owner's hosts.

        Args:
            rows: group and tail of each path.
            answers: groups, with addresses of their first router.
            owner: of each group.
            own: owners, with addresses of their interfaces.
        """
        (group, tail), (of_group, address) = rows, answers
        hops, begin, length = self._layout()
        in_tail, of_host = (np.zeros(len(self._keys.names), dtype=bool) for _ in range(2))
        in_tail[list(self._in_tails)] = True
        of_host[apart(own)[1]] = True
        # Most addresses are of one kind, so few paths need to be compared hop by hop.
        doubted = np.zeros(len(owner), dtype=bool)
        doubted[of_group[in_tail[address]]] = True
        within = np.repeat(np.arange(len(length)), length)
        answered = hops >= 0
        places = np.sort(joint(within, hops)[answered])
        twice = np.zeros(len(length), dtype=bool)
        twice[apart(places[1:][np.diff(places) == 0])[0]] = True
        crossing = np.zeros(len(length), dtype=bool)
        crossing[within[answered][of_host[hops[answered]]]] = True

        refused = twice[tail]
        host = of_host[address]
        mine = np.isin(joint(owner[of_group[host]], address[host]), own)
        refused |= np.isin(group, of_group[host][mine])
        asked = np.flatnonzero(~refused & (crossing[tail] | doubted[group]))
        row, key = expanded(asked, tail[asked], hops, begin, length)
        again = np.isin(joint(group[row], key), joint(of_group, address))
        again |= np.isin(joint(owner[group[row]], key), own)
        refused[row[again & (key >= 0)]] = True
        return refused

    def _layout(self) -> tuple[Numbers, Numbers, Numbers]:
        """Returns the hops of all tails, where each tail begins in them, and its length."""
        length = numbers([len(tail) for tail in self._tails])
        return numbers(self._hops), np.cumsum(length) - length, length

    def _known_to(
        self,
        tail: Numbers,
        owner: Numbers,
        first: Numbers,
        answers: tuple[Numbers, Numbers],
        owners: Sequence[str],
    ) -> dict[str, list[str]]:
        """Returns ``MAX_OWNERS`` at most that saw each address or first router."""
        of_pair = begins(first, owner)
        first, of_first = _few(first[of_pair], owner[of_pair], len(owners))
        tail, owner = _few(tail, owner, len(owners))
        row, key = expanded(np.arange(len(tail)), tail, *self._layout())
        _, address, by = np.concatenate(answers, axis=1)
        key, owner = _few(
            np.concatenate((key, first, address)),
            np.concatenate((owner[row], of_first, by)),
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
