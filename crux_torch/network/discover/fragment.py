"""Schema of a fragment: the hosts and paths that one job, or one run of discovery, saw."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import msgspec

from crux_torch.network.routes import Address, NodeName

#: Goes up when a field changes its meaning; readers refuse other versions.
FRAGMENT_VERSION = 2
#: Routers on one path, paths of one pair, and pairs and hosts of one fragment.
MAX_HOPS, MAX_PATHS, MAX_PAIRS, MAX_HOSTS = 16, 512, 65536, 65536

#: Of an interface.
MAX_RATE_Bps = 1e15

#: Place of a hop where nobody answered.
SILENT = -1

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class SeenPath(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One path from a host to another.

    Attributes:
        hops: address that answered at TTL 1, 2, ...; None where nobody answered.
        ports: source ports that take the path, a few.
        connections: live connections of the job that take the path.
    """

    hops: Annotated[tuple[Address | None, ...], msgspec.Meta(max_length=MAX_HOPS)]
    ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=64)] = ()
    connections: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


class SeenPair(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The paths from one address to another.

    Attributes:
        src, dst: hosts of the two addresses.
        paths: every path that was seen.
        confidence: probability that no path of an equal share is missing.
        sprays: True if a source port does not keep its path.
    """

    src: NodeName
    src_address: Address
    dst: NodeName
    dst_address: Address
    paths: Annotated[tuple[SeenPath, ...], msgspec.Meta(max_length=MAX_PATHS)]
    confidence: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    sprays: bool = False


class SeenNic(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An interface of a host.

    Attributes:
        speed_Bps: of the cable in one direction; 0 if unknown.
        switch, switch_port: the neighbour's names by LLDP; empty if it told nothing.
        switch_speed_Bps: speed of the neighbour's port by LLDP; 0 if unknown.
        reached_Bps: rate at which the job sent over the interface in its transfers; 0 if unknown.
    """

    name: NodeName
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=64)]
    speed_Bps: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_RATE_Bps)] = 0.0
    switch: Annotated[str, msgspec.Meta(max_length=256)] = ""
    switch_port: Annotated[str, msgspec.Meta(max_length=256)] = ""
    switch_speed_Bps: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_RATE_Bps)] = 0.0
    reached_Bps: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_RATE_Bps)] = 0.0


class SeenHost(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A host and its interfaces to the network."""

    name: NodeName
    nics: Annotated[tuple[SeenNic, ...], msgspec.Meta(max_length=256)]


class PairPaths(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The paths from one address to another, each address by its place in the fragment's table.

    Attributes:
        lengths, hops: of each path its count of hops; the hops of one path after the other, see
            :class:`SeenPath`.
        confidence, sprays: see :class:`SeenPair`.
    """

    src: Annotated[int, msgspec.Meta(ge=0)]
    dst: Annotated[int, msgspec.Meta(ge=0)]
    lengths: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_HOPS)], ...],
        msgspec.Meta(max_length=MAX_PATHS),
    ]
    hops: tuple[Annotated[int, msgspec.Meta(ge=SILENT)], ...]
    confidence: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    sprays: bool


class Fragment(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The part of the network that one job, or one run of discovery, saw.

    Attributes:
        addresses: each address of ``seen`` once; many paths have the same ones.
        seen: the pairs.

    Raises:
        ValueError: a pair has a place that the table does not have, or other hops than it says.
    """

    version: int = FRAGMENT_VERSION
    hosts: Annotated[tuple[SeenHost, ...], msgspec.Meta(max_length=MAX_HOSTS)] = ()
    addresses: tuple[Address, ...] = ()
    seen: Annotated[tuple[PairPaths, ...], msgspec.Meta(max_length=MAX_PAIRS)] = ()

    def __post_init__(self) -> None:
        for pair in self.seen:
            if max(pair.src, pair.dst, *pair.hops) >= len(self.addresses):
                raise ValueError("a path has an address that the table of addresses does not have")
            if sum(pair.lengths) != len(pair.hops):
                raise ValueError("the hops of a pair's paths are not as many as their lengths say")

    @classmethod
    def of(cls, hosts: Iterable[SeenHost], pairs: Iterable[SeenPair]) -> Fragment:
        """Returns the fragment of hosts and pairs, without the ports and connections of paths."""
        place: dict[str | None, int] = {None: SILENT}

        def at(address: str | None) -> int:
            return place.setdefault(address, len(place) - 1)

        seen = tuple(
            PairPaths(
                at(pair.src_address),
                at(pair.dst_address),
                tuple(len(path.hops) for path in pair.paths),
                tuple(at(hop) for path in pair.paths for hop in path.hops),
                pair.confidence,
                pair.sprays,
            )
            for pair in pairs
        )
        addresses = tuple(address for address in place if address is not None)
        return cls(hosts=tuple(hosts), addresses=addresses, seen=seen)

    @property
    def pairs(self) -> tuple[SeenPair, ...]:
        """The pairs, with the names of their hosts; empty for an address of no host."""
        host_at: dict[str, str] = {}
        for host in self.hosts:
            for nic in host.nics:
                for address in nic.addresses:
                    host_at.setdefault(address, host.name)
        names: tuple[str | None, ...] = (*self.addresses, None)
        found = []
        for pair in self.seen:
            src, dst = self.addresses[pair.src], self.addresses[pair.dst]
            hops = map(names.__getitem__, pair.hops)
            found.append(
                SeenPair(
                    host_at.get(src, ""),
                    src,
                    host_at.get(dst, ""),
                    dst,
                    tuple(SeenPath(tuple(islice(hops, length))) for length in pair.lengths),
                    pair.confidence,
                    pair.sprays,
                )
            )
        return tuple(found)
