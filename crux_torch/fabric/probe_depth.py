"""How many routers there are on the way to a peer, and from which address packets leave."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass, field
from ipaddress import ip_address

from crux_torch.fabric.error_queue import Answer, ErrorQueue, Probe, ProbeError, family_of

#: Where traceroute sends its datagrams: hardly anyone listens there, so the peer itself answers.
_CLOSED_PORT = 33434
_ATTEMPTS = 3
#: TTLs that are asked about at once; where all of them stay silent, nobody is looked for beyond.
_STRIDE = 4


@dataclass(slots=True)
class Depth:
    """What was found on the way.

    Attributes:
        distance: the smallest TTL at which packets were seen to reach the peer; None where it does
            not say. A peer limits its answers too, so it may be nearer.
        routers: who answered at each TTL before.
        sent: probes.
        answered: probes that were answered.
    """

    distance: int | None = None
    routers: dict[int, str] = field(default_factory=dict)
    sent: int = 0
    answered: int = 0

    @property
    def ttls(self) -> tuple[int, ...]:
        """TTLs that surely end at a router, not at the peer: up to the last that answered.

        Not up to the peer's distance: where its answer to a smaller TTL was lost, it is nearer. A
        router that is silent and the last one would tell nothing anyway.
        """
        return tuple(range(1, max(self.routers, default=0) + 1))


def sound(source: str, destination: str, max_ttl: int, answer_wait_s: float, until: float) -> Depth:
    """Count the routers between two addresses, by datagrams with a TTL of 1, 2, ...

    Args:
        source: address of this host.
        destination: address of the peer.
        max_ttl: TTLs to try at most.
        answer_wait_s: for an answer to a first probe; twice as long for a second.
        until: what time.monotonic() will be when all ends.

    Raises:
        ProbeError: nobody answered, or as :meth:`ErrorQueue.send`.
    """
    depth = Depth()
    refusals: list[Answer] = []
    with ErrorQueue(source, destination, "udp", _CLOSED_PORT) as packets:
        for first in range(1, max_ttl + 1, _STRIDE):
            ttls = range(first, min(first + _STRIDE, max_ttl + 1))
            before = depth.answered
            _ask(packets, ttls, depth, refusals, answer_wait_s, until)
            if depth.distance is not None or depth.answered == before or time.monotonic() >= until:
                break
        gap = range(max(depth.routers, default=0) + 1, depth.distance or 0)
        if gap:
            _ask(packets, gap, depth, refusals, answer_wait_s, until)
    if depth.answered:
        return depth
    if refusals:
        raise ProbeError(
            errno.EHOSTUNREACH,
            f"{destination} can't be reached: {refusals[0].address} says "
            f"{refusals[0].detail}. Is the address right, and the peer up?",
        )
    raise ProbeError(
        errno.ETIMEDOUT,
        f"nobody on the way to {destination} answered {depth.sent} probes: the routers don't "
        "report expired packets, or a firewall drops the answers (ICMP time exceeded, and "
        "port unreachable from the peer). Give the hops to ask about if only the peer is silent",
    )


def _ask(
    packets: ErrorQueue,
    ttls: range,
    depth: Depth,
    refusals: list[Answer],
    answer_wait_s: float,
    until: float,
) -> None:
    open_ttls = set(ttls)
    for attempt in range(_ATTEMPTS):
        probes = {Probe(0, ttl) for ttl in open_ttls}
        for probe in sorted(probes, key=lambda p: p.ttl):
            depth.sent += packets.send(probe)
        deadline = min(until, time.monotonic() + answer_wait_s * 2**attempt)
        while open_ttls and (left := deadline - time.monotonic()) > 0:
            for answer in packets.receive(left):
                ttl = answer.probe.ttl
                open_ttls.discard(ttl)
                if answer.kind == "refusal":
                    refusals.append(answer)
                    continue
                depth.answered += 1
                if answer.kind == "destination" or answer.address == packets.destination:
                    depth.distance = min(ttl, depth.distance or ttl)
                else:
                    depth.routers[ttl] = answer.address
            if depth.distance is not None:
                open_ttls -= set(range(depth.distance, max(ttls) + 1))
        for probe in probes:
            packets.forget(probe)
        if depth.distance is not None:
            depth.routers = {t: a for t, a in depth.routers.items() if t < depth.distance}
            if attempt or not open_ttls:
                return


def resolve(name: str) -> str:
    """The address of a peer given by address or name; the first that its resolver gives.

    Raises:
        ProbeError: nobody knows the name.
    """
    try:
        return str(ip_address(name))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise ProbeError(
            errno.ENOENT, f"{name!r} is no address and no known name: {error}"
        ) from None
    return str(found[0][4][0])


def source_address(destination: str) -> str:
    """The address that this host's routes choose for packets to ``destination``.

    Raises:
        ProbeError: no route.
    """
    with socket.socket(family_of(destination), socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((destination, _CLOSED_PORT))
        except OSError as error:
            raise ProbeError(
                error.errno,
                f"no route to {destination} ({os.strerror(error.errno or 0)}): see "
                f"`ip route get {destination}`",
            ) from None
        return str(sock.getsockname()[0])
