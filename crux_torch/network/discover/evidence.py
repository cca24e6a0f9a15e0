"""Reads fragments into what the join needs: interfaces, and traces with their witnesses.

One owner is one witness. A claim about routers that other owners saw counts only if two owners make
it, or if nobody else's paths change by it (docs/understand/discovery.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple

from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenNic, SeenPair

#: Owner of a claim that only one owner makes; None: two owners or more make it.
Witness = str | None
#: The routers after the first one: addresses, None where nobody answered, and at the end perhaps a
#: stand-in (:func:`read`).
Tail = tuple["str | None", ...]
#: Paths of one owner that are read, and notes of one kind that are listed.
MAX_OWN_PATHS, MAX_NOTES = 1 << 16, 8
#: Owners of an address that are named: two besides a suspect.
MAX_OWNERS = 3
#: An owner is sure of a pair from this confidence on.
SURE = 0.9
#: No owner has this name.
_NOBODY = "\0"


class Nic(NamedTuple):
    """An interface of a host, by the names of both."""

    host: str
    name: str

    def __str__(self) -> str:
        return f"{self.host}/{self.name}"


@dataclass
class Evidence:
    """All that the fragments say.

    The first router of a path is its host's own. It is known by the host's interface, whatever
    address it answers from, so a path is kept as a stand-in for it and the number of its tail.

    Attributes:
        nics: what each owner says of an interface.
        tails: every tail once.
        tail_witness: of each tail, whatever came before it.
        first_address: by first router: the addresses that it answered from.
        seen: by first router: who saw which tails after it.
        pairs: by interfaces of both ends: first routers, and the tails after each.
        beside: by interface: its first routers, and the last ones of paths toward it.
        second: by first router: the routers that follow it.
        sure: pairs of which an owner is confident to have seen all paths, and the fewest routers.
        owners: of each router's address, ``MAX_OWNERS`` at most that saw it.
        notes: what was refused, and what the network hides.
    """

    nics: dict[Nic, dict[str, SeenNic]] = field(default_factory=dict)
    tails: list[Tail] = field(default_factory=list)
    tail_witness: list[Witness] = field(default_factory=list)
    first_address: dict[str, dict[str, Witness]] = field(default_factory=dict)
    seen: dict[str, list[tuple[str, set[int]]]] = field(default_factory=dict)
    pairs: dict[tuple[Nic, Nic], list[tuple[str, set[int]]]] = field(default_factory=dict)
    beside: dict[Nic, dict[str, Witness]] = field(default_factory=dict)
    second: dict[str, dict[str, Witness]] = field(default_factory=dict)
    sure: list[tuple[Nic, Nic, str, int]] = field(default_factory=list)
    owners: dict[str | None, list[str]] = field(default_factory=dict)
    notes: Notes = field(default_factory=lambda: Notes())


class Notes:
    """Notes by kind; of each kind a few examples are listed, and the others counted."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, None]] = {}

    def add(self, kind: str, example: str) -> None:
        """Add one example of a kind."""
        self._of.setdefault(kind, {})[example] = None

    def lines(self) -> tuple[str, ...]:
        """Returns a line for each kind, the same whatever order they came in."""
        found = []
        for kind in sorted(self._of):
            examples = sorted(self._of[kind])
            more = len(examples) - MAX_NOTES
            listed = ", ".join(examples[:MAX_NOTES]) + (f" and {more} more" if more > 0 else "")
            found.append(f"{kind}: {listed}")
        return tuple(found)


def read(fragments: Mapping[str, Fragment]) -> Evidence:
    """Returns what the fragments say, by the name of their owner (a job, or a run of discovery).

    Paths count only if they lead from an interface of the fragment's own hosts to another one.

    Two kinds of stand-ins are no addresses: ``?`` and an interface is the first router from there,
    and the last one toward it if that does not answer; ``=`` and an interface is a bridge, or a
    tunnel, where no router is between two hosts.
    """
    reader = _Reader()
    for owner in sorted(fragments):
        reader.read(owner, fragments[owner])
    return reader.evidence


def split(hops: Sequence[str | None], src: Nic, dst: Nic, sprays: bool = False) -> tuple[str, Tail]:
    """Returns the stand-in for the first router of a path, and the tail after it."""
    if not hops:
        return f"={min(src, dst)}", ()
    if len(hops) == 1:
        return f"?{src}", ()
    # Each packet of a sprayed pair takes a way of its own: only the ends are the same.
    middle = [None] * (len(hops) - 2) if sprays else hops[1:-1]
    return f"?{src}", (*middle, hops[-1] or f"?{dst}")


def combined(before: Witness, owner: Witness) -> Witness:
    """Returns the witness of a claim that both make."""
    return before if before == owner else None


@lru_cache(maxsize=1 << 17)
def canonical(address: str) -> str | None:
    """Returns an address in its shortest form; None if it is none that one machine alone has."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    unusable = parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified
    return None if unusable else str(parsed)


class _Reader:
    def __init__(self) -> None:
        self.evidence = Evidence()
        # By spelling, where both ends of the tail answered.
        self._known: dict[tuple[str | None, ...], int] = {}
        self._number: dict[Tail, int] = {}
        # Of each tail, so that no path has to be looked at.
        self._second: list[str | None] = []
        self._last: list[str | None] = []
        self._keys: set[str | None] = set()
        self._circular: set[int] = set()
        # Those of which three owners are known, so that others need no look.
        self._known_tails: set[int] = set()
        self._known_keys: set[str | None] = set()
        self._tail_owners: list[int] = []

    def read(self, owner: str, fragment: Fragment) -> None:
        evidence = self.evidence
        nic_at = self._interfaces(owner, fragment.hosts)
        left = MAX_OWN_PATHS
        found: list[tuple[Nic, Nic, str, set[str], set[int]]] = []
        for pair in fragment.pairs:
            src, dst = self._end(pair.src_address, nic_at), self._end(pair.dst_address, nic_at)
            if src is None or dst is None or (src.host, dst.host) != (pair.src, pair.dst):
                what = f"{pair.src_address} of {pair.src} to {pair.dst_address} of {pair.dst}"
                evidence.notes.add("refused, not between interfaces of hosts that saw it", what)
            elif src.host != dst.host:
                if pair.sprays:
                    where = f"{src.host} to {dst.host}"
                    evidence.notes.add("packets are sprayed, so paths can't be chosen", where)
                if len(pair.paths) > left:
                    evidence.notes.add(f"more than {MAX_OWN_PATHS} paths, the rest ignored", owner)
                found += self._paths(pair, src, dst, left)
                left = max(0, left - len(pair.paths))
                if pair.confidence >= SURE and pair.paths and not pair.sprays:
                    fewest = min(len(path.hops) for path in pair.paths)
                    evidence.sure.append((src, dst, owner, fewest))
        for src, dst, first, addresses, numbers in found:
            possible = self._possible(addresses, numbers, nic_at)
            if len(possible) < len(numbers):
                where = f"{src.host} to {dst.host}"
                evidence.notes.add("refused, a router is there twice, or is a host", where)
            if possible:
                self._add(owner, src, dst, first, possible)
                _witness(evidence.first_address.setdefault(first, {}), addresses, owner)
        self._count(owner, found)

    def _count(self, owner: str, found: Sequence[tuple[Nic, Nic, str, set[str], set[int]]]) -> None:
        """Makes an owner a witness of its tails, and of all addresses on its paths."""
        evidence, witnesses = self.evidence, self.evidence.tail_witness
        used = set[int]().union(*[numbers for *_, numbers in found]) - self._known_tails
        for number in used:
            witnesses[number] = owner if witnesses[number] in (_NOBODY, owner) else None
            self._tail_owners[number] += 1
            if self._tail_owners[number] == MAX_OWNERS:
                self._known_tails.add(number)
        keys = set[str | None]().union(
            *[evidence.tails[n] for n in used], *[{f, *given} for _, _, f, given, _ in found]
        )
        for key in keys - self._known_keys:
            owners = evidence.owners.setdefault(key, [])
            owners.append(owner)
            if len(owners) == MAX_OWNERS:
                self._known_keys.add(key)

    def _interfaces(self, owner: str, hosts: Iterable[SeenHost]) -> dict[str, Nic]:
        nic_at: dict[str, Nic] = {}
        for host in hosts:
            for given in host.nics:
                nic = Nic(host.name, given.name)
                self.evidence.nics.setdefault(nic, {})[owner] = given
                for address in map(canonical, given.addresses):
                    if address is not None:
                        nic_at.setdefault(address, nic)
        return nic_at

    def _end(self, address: str, nic_at: Mapping[str, Nic]) -> Nic | None:
        return nic_at.get(canonical(address) or "")

    def _paths(
        self, pair: SeenPair, src: Nic, dst: Nic, left: int
    ) -> list[tuple[Nic, Nic, str, set[str], set[int]]]:
        """Returns a pair's paths by their first router, with its addresses."""
        bridged: dict[str, set[int]] = {}
        paths = [path.hops for path in pair.paths[:left]]
        # This runs for every path of every job: most tails are known already.
        found = set(map(self._known.get, [hops[1:] for hops in paths]))
        numbers = {number for number in found if number is not None}
        if len(numbers) < len(found) or () in paths or pair.sprays:
            numbers = set()
            for hops in paths:
                first, number = self._new(hops, src, dst, pair.sprays)
                (numbers if hops else bridged.setdefault(first, set())).add(number)
        addresses = {hops[0] for hops in paths if hops}
        of_first = {short for a in addresses if a is not None and (short := canonical(a))}
        first_known = [(src, dst, f"?{src}", of_first, numbers)] if numbers else []
        return first_known + [(src, dst, first, set(), empty) for first, empty in bridged.items()]

    def _new(
        self, hops: tuple[str | None, ...], src: Nic, dst: Nic, sprays: bool
    ) -> tuple[str, int]:
        first, tail = split([hop and canonical(hop) for hop in hops], src, dst, sprays)
        number = self._number.setdefault(tail, len(self._number))
        if number == len(self.evidence.tails):
            self.evidence.tails.append(tail)
            self.evidence.tail_witness.append(_NOBODY)
            self._tail_owners.append(0)
            self._last.append(tail[-1] if tail else None)
            self._second.append(tail[0] if tail else None)
            self._keys.update(tail)
            answered = [key for key in tail if key is not None]
            if len(set(answered)) < len(answered):
                self._circular.add(number)
        if hops and hops[-1] is not None and tail[-1:] != (f"?{dst}",) and not sprays:
            self._known[hops[1:]] = number
        return first, number

    def _possible(
        self, addresses: set[str], numbers: set[int], nic_at: Mapping[str, Nic]
    ) -> set[int]:
        """Returns the tails that lead neither twice to a router nor through an owner's host."""
        if not nic_at.keys().isdisjoint(addresses):
            return set()
        once = {*addresses, *nic_at}
        if not self._keys.isdisjoint(once):
            tails = self.evidence.tails
            numbers = {number for number in numbers if once.isdisjoint(tails[number])}
        return numbers - self._circular if self._circular else numbers

    def _add(self, owner: str, src: Nic, dst: Nic, first: str, numbers: set[int]) -> None:
        evidence = self.evidence
        evidence.seen.setdefault(first, []).append((owner, numbers))
        evidence.pairs.setdefault((src, dst), []).append((first, numbers))
        _witness(evidence.beside.setdefault(src, {}), (first,), owner)
        lasts = {last or first for last in set(map(self._last.__getitem__, numbers))}
        _witness(evidence.beside.setdefault(dst, {}), lasts, owner)
        seconds = set(map(self._second.__getitem__, numbers))
        _witness(evidence.second.setdefault(first, {}), seconds, owner)


def _witness(claims: dict[str, Witness], keys: Iterable[str | None], owner: str) -> None:
    for key in keys:
        if key is not None:
            # As :func:`combined`, which costs more than all else here.
            claims[key] = owner if claims.get(key, owner) == owner else None
