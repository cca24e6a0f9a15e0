"""Messages between the one process that plans a discovery and the hosts that probe for it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from crux_torch.errors import CruxError
from crux_torch.network.discover.fragment import MAX_HOPS, SeenHost, SeenPair
from crux_torch.network.probe.rules import Rules
from crux_torch.network.routes import Address, NodeName

#: Peers that one task sounds at most; a host is told its next task after it.
MAX_PEERS = 16
#: Bytes of one message: the paths of one pair, or the interfaces and the inside of one host.
MAX_MESSAGE_BYTES = 1 << 20

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Rate_per_s = Annotated[float, msgspec.Meta(gt=0.0, le=1e5)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]


class DiscoverError(CruxError):
    """A discovery can't go on. Says why, and what to do."""


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """An address of another host."""

    host: NodeName
    address: Address


class Sound(msgspec.Struct, frozen=True, tag="sound"):
    """Order to count the routers to each peer, up to the first below the same leaf switch."""

    source: Peer
    peers: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=MAX_PEERS)]
    rate_per_s: Rate_per_s
    stop_at_near: bool = True


class Search(msgspec.Struct, frozen=True, tag="search"):
    """Order to find all paths to a peer, and ``ports_per_path`` source ports of each at least."""

    source: Peer
    peer: Peer
    rate_per_s: Rate_per_s
    confidence: Annotated[float, msgspec.Meta(ge=0.0, le=0.999999)]
    time_limit_s: Seconds
    ports_per_path: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1

    @property
    def rules(self) -> Rules:
        """The rules of the search.

        At most half of its probes expire at one TTL, as few as where no probe is lost, so that
        silent routers are not asked faster.
        """
        return Rules(
            self.confidence,
            self.rate_per_s,
            self.time_limit_s,
            ports_per_path=self.ports_per_path,
            count_silent=True,
            ttl_rate_per_s=max(0.5, self.rate_per_s / 2),
        )


class Sounded(msgspec.Struct, frozen=True, omit_defaults=True, tag="sounded"):
    """The routers between two addresses.

    Attributes:
        routers: their number, silent ones included; None if nobody answered.
        hops: address that answered at each TTL; None where nobody did. Packets of different TTLs
            may have taken different paths.
        problem: reason that nobody answered.
    """

    source: Peer
    peer: Peer
    routers: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    hops: Annotated[tuple[Address | None, ...], msgspec.Meta(max_length=MAX_HOPS)] = ()
    problem: Text = ""
    sent: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0

    @property
    def near(self) -> bool:
        """True if at most one router is between the two."""
        return self.routers is not None and self.routers <= 1


class Searched(msgspec.Struct, frozen=True, omit_defaults=True, tag="searched"):
    """The paths from one address to another; without ``pair`` the search failed."""

    source: Peer
    peer: Peer
    pair: SeenPair | None = None
    problem: Text = ""
    sent: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    seconds: Seconds = 0.0


class Hello(msgspec.Struct, frozen=True, omit_defaults=True, tag="hello"):
    """The first message of a process.

    Attributes:
        token: text that shows that the job's store told it where to connect.
        machine: id of the machine and its network namespace; processes with the same one are on
            the same host.
        inside: inside of the host (:class:`crux_torch.host.machine.Inside`), as plain values.
        notes: facts that the host does not tell.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    host: SeenHost
    machine: Annotated[str, msgspec.Meta(max_length=256)]
    release: Annotated[str, msgspec.Meta(max_length=64)]
    token: Annotated[str, msgspec.Meta(max_length=64)] = ""
    inside: msgspec.Raw = msgspec.Raw(b"null")
    notes: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The end of a task."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Order to end; ``problem`` is the reason if it is an error."""

    problem: Text = ""


Task = Sound | Search
Outcome = Sounded | Searched
Order = Sound | Search | Leave
Report = Hello | Sounded | Searched | Done
