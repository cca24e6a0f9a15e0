"""Capacities and names of what was discovered: one owner has one vote."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from crux_torch.network.builders import GBPS
from crux_torch.network.discover.evidence import Nic
from crux_torch.network.discover.fragment import SeenNic

#: Assumed of every link if nobody told the speed of any interface.
DEFAULT_Bps = 100 * GBPS

_Value = TypeVar("_Value", str, float)


class Capacities:
    """Elects what several owners say of interfaces.

    Args:
        nics: what each owner says of an interface.
        routers: the routers beside each interface.

    Attributes:
        usual_Bps: of an interface, elected by all owners.
    """

    def __init__(
        self, nics: Mapping[Nic, Mapping[str, SeenNic]], routers: Mapping[Nic, Iterable[str]]
    ) -> None:
        self._nics = nics
        self.usual_Bps = DEFAULT_Bps
        self._speed: dict[Nic, float] = {}
        #: Of interfaces whose speed nobody told, what a job reached beyond the default.
        self._reached: dict[Nic, float] = {}
        votes: defaultdict[str, list[float]] = defaultdict(list)
        below: defaultdict[str, defaultdict[str, list[float]]]
        below = defaultdict(lambda: defaultdict(list))
        names: defaultdict[str, defaultdict[str, list[str]]]
        names = defaultdict(lambda: defaultdict(list))
        for nic in routers:
            claims = nics[nic]
            if speeds := [s for claim in claims.values() if (s := claimed_Bps(claim))]:
                self._speed[nic] = vote = elected(speeds)
            elif reached := [r for c in claims.values() if (r := c.reached_Bps) > DEFAULT_Bps]:
                self._reached[nic] = vote = elected(reached)
            else:
                continue
            for owner in claims:
                votes[owner].append(vote)
                for router in routers[nic]:
                    below[router][owner].append(vote)
        # Most networks tell no names.
        named = {r for nic in routers for c in nics[nic].values() if c.switch for r in routers[nic]}
        for nic, beside in routers.items():
            for router in named.intersection(beside):
                for owner, claim in nics[nic].items():
                    names[router][owner].append(claim.switch)
        self.usual_Bps = _by_owner(votes) if votes else DEFAULT_Bps
        self._below = {router: _by_owner(by_owner) for router, by_owner in below.items()}
        self._names = {router: _by_owner(by_owner) for router, by_owner in names.items()}

    def of_nic(self, nic: Nic) -> float:
        """Returns the bytes per second of an interface and its cable."""
        return self._speed.get(nic) or max(self._reached.get(nic, 0.0), self.usual_Bps)

    def is_told(self, nic: Nic) -> bool:
        """True if an owner told the interface's speed."""
        return nic in self._speed

    def between(self, a: str, b: str) -> float:
        """Returns the bytes per second assumed of a link between routers: as below them."""
        below = [self._below[key] for key in (a, b) if key in self._below]
        return max(below, default=self.usual_Bps)

    def switch_names(self) -> dict[str, str]:
        """Returns the names by LLDP of the routers beside hosts."""
        return self._names


def claimed_Bps(nic: SeenNic) -> float:
    """Returns an interface's speed as one owner tells it; 0: unknown."""
    ends = nic.speed_Bps, nic.switch_speed_Bps
    return min(ends) or max(ends)


def elected(votes: Iterable[_Value]) -> _Value:
    """Returns the value of most votes; of several the largest."""
    count = Counter(votes)
    if len(count) == 1:
        return next(iter(count))
    return max(count, key=lambda value: (count[value], value))


def _by_owner(votes: Mapping[str, Sequence[_Value]]) -> _Value:
    # Most owners say one thing only.
    return elected(v[0] if len(v) == 1 else elected(v) for v in votes.values())
