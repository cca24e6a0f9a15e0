"""Which way the packets of each source port take to one destination, as probing found it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from crux_torch.errors import CruxError

if TYPE_CHECKING:
    from crux_torch.fabric.topology import Topology

SCHEMA_VERSION: Literal[1] = 1
MAX_JSON_BYTES = 1 << 20

#: Destination port of RoCEv2 (IBTA, annex A17); the source port is free and picks the path.
ROCE_V2_PORT = 4791

Transport = Literal["tcp", "udp"]
Address = Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Ttl = Annotated[int, msgspec.Meta(ge=1, le=255)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

#: One hop of one port: the TTL, and who answered there; None where nobody did.
Hop = tuple[Ttl, Address | None]
#: The answers of one port, in the order of the TTLs.
Hops = tuple[Hop, ...]
#: What a path must pass: at a TTL, one address or any of several.
WantedHop = tuple[int, "str | Collection[str]"]


class PathMapError(CruxError, ValueError):
    """A path map that can't be read: what is wrong with it."""


def draws_needed(paths: int, confidence: float) -> int:
    """How many ports must have shown no new path before ``paths`` known ones count as all.

    The smallest n with (k / (k + 1))^n <= 1 - confidence: a path that takes a share p >= 1 / (k+1)
    of the ports, the share of each if there were just one more and all were equal, is missed by n
    independent draws with probability (1 - p)^n, at most that. The hypothesis "k paths against
    k + 1" is that of the Multipath Detection Algorithm (Augustin, Friedman, Teixeira, "Multipath
    tracing with Paris traceroute", 2007; Veitch et al., INFOCOM 2009).

    Args:
        paths: known so far, 1 or more.
        confidence: 0 to less than 1.

    Raises:
        ValueError: out of these bounds.
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
    """The confidence that ``draws`` ports without a new path give to ``paths`` known ones.

    Zero where no path is known yet. See :func:`draws_needed`.
    """
    return 1 - (paths / (paths + 1)) ** draws if paths else 0.0


class PathMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What probing found between one source and one destination address.

    Attributes:
        version: of this schema.
        source: address that the probes left from.
        destination: address that they were sent to.
        protocol: ``tcp`` or ``udp``; the two may take different paths.
        port: destination port.
        hops: for each source port, in the order in which they were drawn, who answered at each
            TTL that was asked.
        inferred: TTLs that answered slowly, and that were not asked of every port any more once
            the answers of the others had foretold theirs often enough.
        distance: the smallest TTL at which packets were seen to reach the destination; None where
            it did not answer or the hops were given.
        confidence: that no path was missed which takes an equal share or more: see
            :func:`draws_needed`. It speaks of the ports whose every hop answered.
        ended: why probing stopped: ``confident``, ``found`` (enough ports over the wanted hops),
            ``time`` (out of it) or ``ports`` (out of them); ``foretold``: the ports' hops are not
            probed but computed by a hash that was checked against probes.
        repeated: ports that were probed a second time, from a new socket.
        changed: of those, how many then took another path; more than none means that something
            else than the source port picks the path, and that this map foretells nothing.
        sent: probes.
        answered: probes that were answered.
        seconds: that it took.

    Raises:
        ValueError: what should be an address is none.
    """

    version: Literal[1] = SCHEMA_VERSION
    source: Address
    destination: Address
    protocol: Transport
    port: Port
    hops: Annotated[
        dict[Port, Annotated[tuple[Hop, ...], msgspec.Meta(max_length=64)]],
        msgspec.Meta(max_length=65535),
    ]
    inferred: Annotated[tuple[Ttl, ...], msgspec.Meta(max_length=64)] = ()
    distance: Ttl | None = None
    confidence: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    ended: Literal["confident", "found", "time", "ports", "foretold"] = "confident"
    repeated: Count = 0
    changed: Count = 0
    sent: Count = 0
    answered: Count = 0
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0

    def __post_init__(self) -> None:
        answers = {address for hops in self.hops.values() for _, address in hops}
        for address in {self.source, self.destination, *answers} - {None}:
            ip_address(str(address))

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """TTLs that were asked and at which nobody ever answered."""
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
        """The other source ports: those of which a hop did not answer that answered for others."""
        return self._grouped(complete=False)

    @property
    def decides(self) -> bool:
        """Whether the source port alone decides the path, as far as repeated probes tell."""
        return self.changed == 0

    def is_complete(self, hops: Hops) -> bool:
        """Whether everyone on the way answered who ever answers."""
        return all(address or ttl in self.silent for ttl, address in hops)

    def _grouped(self, complete: bool) -> Mapping[Hops, tuple[int, ...]]:
        found: dict[Hops, list[int]] = {}
        for port, hops in self.hops.items():
            if self.is_complete(hops) == complete:
                found.setdefault(hops, []).append(port)
        ordered = sorted(found.items(), key=lambda item: -len(item[1]))
        return {hops: tuple(ports) for hops, ports in ordered}

    def ports_via(self, hops: Sequence[WantedHop]) -> tuple[int, ...]:
        """The source ports that pass all of ``hops``, in the order in which they were drawn.

        Args:
            hops: for each TTL one address, or several of which any will do. A TTL that was not
                asked, or did not answer for a port, rules that port out; no hops rule out none.
        """
        return tuple(port for port, found in self.hops.items() if passes(found, hops))

    def via_node(self, node: str, topology: Topology) -> tuple[int, ...]:
        """The source ports whose path passes ``node``, at whatever TTL."""
        addresses = set(topology.addresses.get(node, ()))
        return tuple(
            port for port, hops in self.hops.items() if addresses & {answer for _, answer in hops}
        )

    def names(self, hops: Hops, topology: Topology | None = None) -> tuple[str, ...]:
        """A path in words: the switch where the topology knows the address, else the address."""
        node_at: Mapping[str, str] = topology.node_at if topology is not None else {}
        return tuple("*" if a is None else node_at.get(a, a) for _, a in hops)

    def trimmed(self, ports_per_path: int) -> PathMap:
        """The same with at most so many ports of each path, the first drawn."""
        kept = {port for ports in self.paths.values() for port in ports[:ports_per_path]}
        hops = {port: found for port, found in self.hops.items() if port in kept}
        return msgspec.structs.replace(self, hops=hops)

    def to_json(self) -> bytes:
        """As JSON, for :meth:`from_json`.

        Raises:
            PathMapError: it would take over ``MAX_JSON_BYTES``; see :meth:`trimmed`.
        """
        raw = msgspec.json.encode(self)
        if len(raw) > MAX_JSON_BYTES:
            raise PathMapError(
                f"a path map of {len(raw)} bytes is over the limit of {MAX_JSON_BYTES}; "
                "keep fewer ports of each path"
            )
        return raw

    @classmethod
    def from_json(cls, raw: bytes) -> PathMap:
        """The map in ``raw``, from wherever it comes.

        Raises:
            PathMapError: oversize, not JSON, not of this schema or version, no addresses.
        """
        if len(raw) > MAX_JSON_BYTES:
            raise PathMapError(f"a path map of {len(raw)} bytes; the limit is {MAX_JSON_BYTES}")
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PathMapError(f"no path map: {error}") from None


def passes(hops: Hops, wanted: Sequence[WantedHop]) -> bool:
    """Whether ``hops`` has, at each TTL that is wanted, one of the addresses wanted there."""
    answers = dict(hops)
    return all(answers.get(ttl) in _canonical(given) for ttl, given in wanted)


def _canonical(given: str | Collection[str]) -> frozenset[str]:
    """As error queues name them: the shortest form of an IPv6 address."""
    return frozenset(str(ip_address(a)) for a in ([given] if isinstance(given, str) else given))
