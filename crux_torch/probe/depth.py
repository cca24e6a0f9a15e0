"""How many routers there are on the way to a peer, and from which address packets leave."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass, field
from ipaddress import ip_address

from crux_torch.probe.error_queue import ErrorQueue, family_of
from crux_torch.probe.packets import Answer, ProbeError, ask

#: Where traceroute sends its datagrams: hardly anyone listens there, so the peer itself answers.
_CLOSED_PORT = 33434
_ATTEMPTS = 3
_ATTEMPTS_MORE = 2
#: TTLs that are asked about at once. If all of them stay silent, nobody is looked for beyond.
_STRIDE = 4


@dataclass(slots=True)
class Depth:
    """What was found on the way.

    Attributes:
        distance: the smallest TTL at which packets were seen to reach the peer; None if it does
            not answer. A peer limits its answers too, so it may be nearer.
        routers: who answered at each TTL before.
    """

    distance: int | None = None
    routers: dict[int, str] = field(default_factory=dict)
    sent: int = 0
    answered: int = 0

    @property
    def ttls(self) -> tuple[int, ...]:
        """TTLs that surely end at a router, not at the peer: up to the last that answered.

        Not up to the peer's distance: if its answer to a smaller TTL was lost, it is nearer.
        """
        return tuple(range(1, max(self.routers, default=0) + 1))


def sound(source: str, destination: str, max_ttl: int, answer_wait_s: float, until: float) -> Depth:
    """Count the routers between two addresses, by datagrams with a TTL of 1, 2, ...

    Args:
        answer_wait_s: for an answer to a first probe; twice as long for a second.
        until: what time.monotonic() will be when all ends.

    Raises:
        ProbeError: nobody answered, or as :meth:`ErrorQueue.send`.
    """
    depth = Depth()
    refusal = None
    with ErrorQueue(source, destination, "udp", _CLOSED_PORT) as packets:
        for first in range(1, max_ttl + 1, _STRIDE):
            ttls = range(first, min(first + _STRIDE, max_ttl + 1))
            answers = ask(packets, 0, ttls, answer_wait_s, until, _ATTEMPTS)
            depth.routers |= _of_kind("hop", answers)
            if ends := _of_kind("destination", answers):
                # Either routers that answer once a second, as Linux does by default, or the peer's
                # own lost answers: only patience tells.
                silent = range(max(depth.routers, default=0) + 1, min(ends))
                answers |= ask(packets, 0, silent, 4 * answer_wait_s, until, _ATTEMPTS_MORE)
            refusal = next((a for a in answers.values() if a.kind == "refusal"), refusal)
            heard = {ttl: a for ttl, a in answers.items() if a.kind != "refusal"}
            depth.answered += len(heard)
            depth.distance = min(_of_kind("destination", answers), default=None)
            depth.routers |= _of_kind("hop", answers)
            if ends or not heard or time.monotonic() >= until:
                break
        depth.sent = packets.sent
    if depth.answered:
        return depth
    if refusal is not None:
        raise ProbeError(
            errno.EHOSTUNREACH,
            f"{destination} can't be reached: {refusal.address} says {refusal.detail}. Is the "
            "address right, and the peer up?",
        )
    raise ProbeError(
        errno.ETIMEDOUT,
        f"nobody on the way to {destination} answered {depth.sent} probes: the routers don't "
        "report expired packets, or a firewall drops the answers (ICMP time exceeded, and "
        "port unreachable from the peer). If only the peer is silent, give the hops (--ttl)",
    )


def _of_kind(kind: str, answers: dict[int, Answer]) -> dict[int, str]:
    return {ttl: answer.address for ttl, answer in answers.items() if answer.kind == kind}


def resolve(name: str) -> str:
    """The address of a peer given by address or name: the first that the resolver gives."""
    try:
        return str(ip_address(name))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        said = f"{name!r} is no address and no known name: {error}"
        raise ProbeError(errno.ENOENT, said) from None
    return str(found[0][4][0])


def source_address(destination: str) -> str:
    """The address that this host's routes choose for packets to ``destination``."""
    with socket.socket(family_of(destination), socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((destination, _CLOSED_PORT))
        except OSError as error:
            why = os.strerror(error.errno or 0)
            said = f"no route to {destination} ({why}): see `ip route get {destination}`"
            raise ProbeError(error.errno, said) from None
        return str(sock.getsockname()[0])
