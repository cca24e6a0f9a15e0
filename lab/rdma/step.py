"""What the guest did, step by step: written in the guest, read by the tests.

Runs on the standard library alone, since starting Python takes a second in the guest as it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "steps.jsonl"


@dataclass(frozen=True)
class Process:
    """A program that ran.

    Attributes:
        argv: how it was called.
        status: its exit status, negative for a signal, ``None`` where it was too slow.
        stdout: what it printed.
        stderr: what it complained of.
    """

    argv: list[str]
    status: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Step:
    """Something that the guest did between two moments of its clock, which captures go by too.

    Attributes:
        name: no other step of the run has it.
        begin_s: by the wall clock.
        end_s: by the wall clock.
        boot_s: what the wall clock said when the monotonic one was at zero.
        processes: programs that ran.
        facts: anything else that is to be known of it.
    """

    name: str
    begin_s: float
    end_s: float
    boot_s: float
    processes: list[Process]
    facts: dict[str, Any]

    def wall_s(self, captured_s: float) -> float:
        """The wall clock when a packet was captured, from the time that the capture gives it."""
        # Since Linux 6.12 a packet keeps the sender's monotonic time on its way through veth.
        return captured_s if captured_s >= self.boot_s else captured_s + self.boot_s

    def contains(self, captured_s: float) -> bool:
        """Whether a packet was captured while this went on."""
        return self.begin_s <= self.wall_s(captured_s) <= self.end_s


def write_step(folder: Path, step: Step) -> None:
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(asdict(step)) + "\n")


def read_steps(folder: Path) -> dict[str, Step]:
    """The steps by name; a guest that stopped half-way leaves those that it had ended."""
    steps = {}
    for line in (folder / FILE).read_text().splitlines():
        plain = json.loads(line)
        plain["processes"] = [Process(**process) for process in plain["processes"]]
        steps[plain["name"]] = Step(**plain)
    return steps
