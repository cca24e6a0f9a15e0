"""What ``programs/live_change.cc`` did to its queue pairs, and what the wire saw of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby

from lab.capture_file import Packet
from lab.network import FABRIC_ADDRESSES, SPINES
from lab.play import Outcome
from lab.step import Process

#: ``how`` of a change by RESET, INIT, RTR, RTS, as crux_transport.h has it.
BY_RESET = 5


@dataclass(frozen=True)
class Change:
    """One change of one end.

    Attributes:
        end: 0 or 1.
        port: UDP source port that was asked for.
        dscp: class that was asked for.
        how: by which means it was made.
        error: errno, of the change or of holding the peer.
        applied: whether the new setting is in force; else the old one is.
        took_ms: with the hold of the peer.
        reason: why it is not in force.
    """

    end: int
    port: int
    dscp: int
    how: int
    error: int
    applied: bool
    took_ms: float
    reason: str

    @property
    def setting(self) -> tuple[int, int]:
        """Port and TOS on the wire."""
        return self.port, self.dscp << 2


@dataclass(frozen=True)
class Direction:
    """Messages from one end to the other: how many, and what was wrong with them."""

    sent: int
    received: int
    misplaced: int
    altered: int
    failed: int

    @property
    def is_whole(self) -> bool:
        return self.sent == self.received and not self.misplaced + self.altered + self.failed


@dataclass(frozen=True)
class LiveChange:
    """One run of the program."""

    process: Process
    changes: list[Change]
    directions: list[Direction]


def read_live_change(process: Process) -> LiveChange:
    """Its output; where it ended early there are no directions."""
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    return LiveChange(
        process,
        [
            Change(
                end=line["change"] % 2,
                port=line["port"],
                dscp=line["dscp"],
                how=line["how"],
                error=line["held"] or line["error"],
                applied=line["applied"],
                took_ms=line["took_ms"],
                reason=line["reason"],
            )
            for line in lines
            if "change" in line
        ],
        [
            Direction(*(line[k] for k in ("sent", "received", "misplaced", "altered", "failed")))
            for line in lines
            if "from" in line
        ],
    )


def settings_on_the_wire(outcome: Outcome, step: str, end: int) -> list[tuple[int, int, str]]:
    """Port, TOS and spine of what one end sent, one after the other.

    Requests and answers alike: both go out with the end's own address vector.
    """
    during = outcome.steps[step]
    seen: list[tuple[float, Packet, str]] = []
    for spine in SPINES:
        for packet in outcome.capture(spine, during):
            if packet.source == FABRIC_ADDRESSES[end]:
                seen.append((during.wall_s(packet.time_s), packet, spine))
    seen.sort(key=lambda found: found[0])
    runs = groupby((packet.source_port, packet.tos, spine) for _, packet, spine in seen)
    return [run for run, _ in runs]
