"""Evidence that fragments give the join: interfaces, and traces with their witnesses.

One owner is one witness. A claim about routers that other owners saw counts only if two owners make
it, or if nobody else's paths change by it (docs/understand/discovery.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crux_torch.network.addresses import ipv4
from crux_torch.network.discover.fragment import SeenNic
from crux_torch.words import listed

#: Owner of a claim that only one owner makes; None: two owners or more make it.
Witness = str | None
#: The routers after the first one: addresses, None where nobody answered, and at the end perhaps a
#: stand-in (:func:`~crux_torch.network.discover.reading.read`).
Tail = tuple["str | None", ...]
#: Notes of one kind that are listed.
MAX_NOTES = 8
#: Owners of an address that are named: two besides a suspect.
MAX_OWNERS = 3

Numbers = npt.NDArray[np.int64]


class Nic(NamedTuple):
    """An interface of a host, by the names of both."""

    host: str
    name: str

    def __str__(self) -> str:
        return f"{self.host}/{self.name}"


class Sure(NamedTuple):
    """Pairs of which an owner is confident to have seen all paths; a row for each.

    Attributes:
        src, dst: the interfaces, by their place in :attr:`Evidence.numbered`.
        fewest: routers on the shortest path.
        owner: by its place in the order of names, of which there are ``owners``.
    """

    src: Numbers
    dst: Numbers
    fewest: Numbers
    owner: Numbers
    owners: int


@dataclass(frozen=True)
class Evidence:
    """All that the fragments say.

    The first router of a path is its host's own. It is known by the host's interface, whatever
    address it answers from, so a path is kept as a stand-in for it and the number of its tail.

    Attributes:
        nics: what each owner says of an interface.
        numbered: the interfaces, in the order in which they were read.
        tails: every tail once.
        tail_witness: of each tail, whatever came before it.
        first_address: by first router: the addresses that it answered from.
        leads: by first router: the tails that were seen after it.
        one_way: first routers and tails of pairs of which the way back was not seen.
        beside: by interface: its first routers, and the last ones of paths toward it.
        second: by first router: the routers that follow it.
        sure: pairs that no other path may join.
        owners: of each router's address, ``MAX_OWNERS`` at most that saw it.
        notes: what was refused, and what the network hides.
    """

    nics: dict[Nic, dict[str, SeenNic]]
    numbered: list[Nic]
    tails: list[Tail]
    tail_witness: list[Witness]
    first_address: dict[str, dict[str, Witness]]
    leads: dict[str, dict[int, Witness]]
    one_way: set[tuple[str, int]]
    beside: dict[Nic, dict[str, Witness]]
    second: dict[str, dict[str, Witness]]
    sure: Sure
    owners: dict[str, list[str]]
    notes: Notes


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
            found.append(f"{kind}: {listed(examples, MAX_NOTES)}")
        return tuple(found)


def split(hops: Sequence[str | None], src: Nic, dst: Nic, sprays: bool = False) -> tuple[str, Tail]:
    """Returns the stand-in for the first router of a path, and the tail after it."""
    if not hops:
        return f"={min(src, dst)}", ()
    if len(hops) == 1:
        return f"?{src}", ()
    return f"?{src}", (*(sprayed(hops) if sprays else hops)[1:-1], hops[-1] or f"?{dst}")


def sprayed(hops: Sequence[str | None]) -> Sequence[str | None]:
    """Returns the ends of a path, as each packet of a sprayed pair takes a way of its own."""
    return (*hops[:1], *[None] * (len(hops) - 2), *hops[1:][-1:])


def combined(before: Witness, owner: Witness) -> Witness:
    """Returns the witness of a claim that both make."""
    return before if before == owner else None


def witnesses(keys: Numbers, owners: Numbers, count: int) -> tuple[Numbers, Numbers]:
    """Returns each key once, in ascending order, and its owner; -1: two owners or more.

    Args:
        keys, owners: of each claim.
        count: of all owners.
    """
    # Sorting numbers is much faster than sorting the places of numbers.
    keys, owners = np.divmod(np.sort(keys * count + owners), max(count, 1))
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    lowest, highest = owners[begins], owners[np.append(begins, len(keys))[1:] - 1]
    return keys[begins], np.where(lowest == highest, lowest, -1)


@lru_cache(maxsize=1 << 17)
def canonical(address: str) -> str | None:
    """Returns an address in its shortest form; None if it is none that one machine alone has."""
    found = ipv4(address)
    if found is not None and found[0] not in (0, 127) and not 224 <= found[0] < 240:
        return address
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    unusable = parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified
    return None if unusable else str(parsed)
