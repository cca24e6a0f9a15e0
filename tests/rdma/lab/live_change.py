"""What ``programs/live_change.cc`` did to its queue pairs, and what the wire saw of it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import groupby

from lab.capture_file import PSNS, Packet
from lab.network import FABRIC_ADDRESSES, SPINES
from lab.play import Outcome
from lab.step import Process

#: How often the tests change a live queue pair; 1,000 times take some minutes.
CHANGES = int(os.environ.get("RDMA_CHANGES", "50"))
#: For the scenario with these changes in it.
TIMEOUT_S = 250 + CHANGES
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


#: Port, TOS, and the spine that it went over.
Setting = tuple[int, int, str]


def settings_on_the_wire(outcome: Outcome, step: str, end: int) -> list[Setting]:
    """The settings of one end's requests, one after the other, in the order of their numbers.

    In the order of time, a packet that was sent twice could come late.
    """
    first: dict[int, tuple[Packet, str]] = {}
    for packet, spine in _sent_by(outcome, step, end):
        if packet.is_request:
            first.setdefault(packet.psn, (packet, spine))
    begin = next(iter(first))
    numbered = sorted(first, key=lambda psn: (psn - begin) % PSNS)
    return [run for run, _ in groupby(map(_setting, (first[psn] for psn in numbered)))]


def settings_of_answers(outcome: Outcome, step: str, end: int) -> set[Setting]:
    """All settings that one end's answers had: they go out with its address vector too."""
    sent = _sent_by(outcome, step, end)
    return {_setting(found) for found in sent if not found[0].is_request}


def _sent_by(outcome: Outcome, step: str, end: int) -> list[tuple[Packet, str]]:
    """What one end sent, and over which spine, in the order of time."""
    during = outcome.steps[step]
    seen = [
        (packet, spine)
        for spine in SPINES
        for packet in outcome.capture(spine, during)
        if packet.source == FABRIC_ADDRESSES[end]
    ]
    return sorted(seen, key=lambda found: during.wall_s(found[0].time_s))


def _setting(found: tuple[Packet, str]) -> Setting:
    packet, spine = found
    return packet.source_port, packet.tos, spine
