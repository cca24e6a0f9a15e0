"""Questions to the routers on the way: who drops a packet after so many hops?"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

from crux_torch.errors import CruxError

Kind = Literal["hop", "destination", "refusal"]


class ProbeError(CruxError, OSError):
    """Probing is impossible: what failed, for which destination, and what to do about it."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class PortTaken(ProbeError):
    """A socket of this host uses the source port."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One question: who drops a packet that leaves from ``port`` (0: any) with this TTL?"""

    port: int
    ttl: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        address: who answered.
        kind: ``hop``: a router, where the TTL ran out; ``destination``: the packet arrived there;
            ``refusal``: a router or this host does not forward it.
        detail: of a refusal, in words.
    """

    probe: Probe
    address: str
    kind: Kind
    detail: str = ""


class Packets(Protocol):
    """What sends probes and hears answers."""

    def send(self, probe: Probe) -> bool:
        """Send; False if the source port is taken."""

    def receive(self, timeout_s: float) -> list[Answer]:
        """The answers that come within ``timeout_s``; returns as soon as there are any."""

    def forget(self, probe: Probe) -> None:
        """Wait no longer for an answer to ``probe``."""


def ask(
    packets: Packets,
    port: int,
    ttls: Iterable[int],
    answer_wait_s: float,
    until: float,
    attempts: int,
) -> dict[int, Answer]:
    """Ask about all TTLs at once, until each answers; nobody is asked beyond the destination.

    Args:
        port: source port; 0: any.
        answer_wait_s: for an answer to the first attempt; each later one waits twice as long.
        until: what time.monotonic() will be when all ends.
        attempts: at most, for each TTL.

    Raises:
        PortTaken: a socket of this host uses ``port``.
    """
    answers: dict[int, Answer] = {}

    def missing() -> list[int]:
        end = min((t for t, answer in answers.items() if answer.kind == "destination"), default=inf)
        return [ttl for ttl in ttls if ttl not in answers and ttl < end]

    for attempt in range(attempts):
        probes = [Probe(port, ttl) for ttl in missing()]
        for probe in probes:
            if not packets.send(probe):
                raise PortTaken(f"port {port} is taken")
        deadline = min(until, time.monotonic() + answer_wait_s * 2**attempt)
        while missing() and (left := deadline - time.monotonic()) > 0:
            answers |= {answer.probe.ttl: answer for answer in packets.receive(left)}
        for probe in probes:
            packets.forget(probe)
        if not missing() or time.monotonic() >= until:
            break
    return answers
