"""Which path the packets of each source port take to one destination, as probing found it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from ipaddress import ip_address
from typing import Literal

import msgspec

from crux_torch.fabric.topology import Topology

Transport = Literal["tcp", "udp"]
#: One hop of one port: the TTL, and who answered there; None if nobody did.
Hop = tuple[int, str | None]
#: The answers of one port, in the order of the TTLs.
Hops = tuple[Hop, ...]
#: What a path must pass: at a TTL, one address or any of several.
WantedHop = tuple[int, "str | Collection[str]"]


def draws_needed(paths: int, confidence: float) -> int:
    """How many ports must have shown no new path before ``paths`` known ones count as all.

    The smallest n with (k / (k + 1))^n <= 1 - confidence: docs/probing.md says why. The hypothesis
    "k paths against k + 1" is that of the Multipath Detection Algorithm (Augustin, Friedman,
    Teixeira, "Multipath tracing with Paris traceroute", 2007; Veitch et al., INFOCOM 2009).

    Raises:
        ValueError: fewer than 1 path, or a confidence that is not from 0 to less than 1.
    """
    if paths < 1 or not 0 <= confidence < 1:
        raise ValueError(f"{paths} paths, confidence {confidence}; expected >= 1 and 0 to < 1")
    if confidence == 0:
        return 0
    needed = max(1, math.ceil(math.log(1 - confidence) / math.log(paths / (paths + 1))))
    # The logarithms may end a hair beside a whole number: settle it by the inequality itself.
    while needed > 1 and confidence_after(paths, needed - 1) >= confidence:
        needed -= 1
    while confidence_after(paths, needed) < confidence:
        needed += 1
    return needed


def confidence_after(paths: int, draws: int) -> float:
    """The confidence that ``draws`` ports without a new path give to ``paths`` known ones."""
    return 1 - (paths / (paths + 1)) ** draws if paths else 0.0


class PathMap(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What probing found between one source and one destination address.

    Attributes:
        hops: for each source port, in the order in which they were drawn, who answered at each
            TTL that was asked.
        inferred: slow TTLs that were asked for some ports only. The answers for the other ports
            follow from those of the other TTLs.
        distance: the smallest TTL at which packets reached the destination; None if it did not
            answer, or if the TTLs were given.
        confidence: that no path with an equal share or more is missing, among the ports for
            which every hop answered.
        ended: why probing stopped: ``confident``, ``found`` (enough ports over the wanted hops),
            ``time`` (the limit was reached) or ``ports`` (every port was probed).
        repeated: ports that were probed a second time, from a new socket.
        changed: how many of those took another path the second time. If any did, the source port
            does not decide the path, and this map predicts nothing.
        sent, answered: probes, and those of them that were answered.
    """

    version: int = 1
    source: str
    destination: str
    protocol: Transport
    port: int
    hops: dict[int, Hops]
    inferred: tuple[int, ...] = ()
    distance: int | None = None
    confidence: float = 0.0
    ended: Literal["confident", "found", "time", "ports"] = "confident"
    repeated: int = 0
    changed: int = 0
    sent: int = 0
    answered: int = 0
    seconds: float = 0.0

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """TTLs that were asked and never answered."""
        asked = {ttl for hops in self.hops.values() for ttl, _ in hops}
        spoke = {ttl for hops in self.hops.values() for ttl, address in hops if address}
        return tuple(sorted(asked - spoke))

    @cached_property
    def paths(self) -> Mapping[Hops, tuple[int, ...]]:
        """The source ports of each path, for ports whose every hop answered (but silent ones).

        The path with the most ports first; equal ones in the order in which they were found.
        """
        return self._grouped(complete=True)

    @cached_property
    def partial(self) -> Mapping[Hops, tuple[int, ...]]:
        """The other ports: a hop that answered for some ports did not answer for these."""
        return self._grouped(complete=False)

    def _grouped(self, complete: bool) -> Mapping[Hops, tuple[int, ...]]:
        found: dict[Hops, list[int]] = {}
        for port, hops in self.hops.items():
            if all(address or ttl in self.silent for ttl, address in hops) == complete:
                found.setdefault(hops, []).append(port)
        ordered = sorted(found.items(), key=lambda item: -len(item[1]))
        return {hops: tuple(ports) for hops, ports in ordered}

    def ports_via(self, hops: Sequence[WantedHop]) -> tuple[int, ...]:
        """The source ports that pass all of ``hops``, in the order in which they were drawn.

        A port is left out if one of these TTLs was not asked, or did not answer for it.
        """
        return tuple(port for port, found in self.hops.items() if passes(found, hops))

    def names(self, hops: Hops, topology: Topology | None = None) -> tuple[str, ...]:
        """The name of each hop: the topology's for a known address, else the address itself."""
        node_at: Mapping[str, str] = topology.node_at if topology is not None else {}
        return tuple("*" if a is None else node_at.get(a, a) for _, a in hops)


def passes(hops: Hops, wanted: Sequence[WantedHop]) -> bool:
    """Whether ``hops`` has, at each TTL that is wanted, one of the addresses wanted there."""
    answers = dict(hops)
    several = [(ttl, [given] if isinstance(given, str) else given) for ttl, given in wanted]
    # As error queues name them: the shortest form of an IPv6 address.
    return all(answers.get(ttl) in {str(ip_address(a)) for a in given} for ttl, given in several)
