"""Plays a scenario in the guest, and reads what it left."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import dpkt

from lab.rdma.capture_file import CaptureError, Packet, read_capture
from lab.rdma.guest import Completed, Guest
from lab.rdma.step import Step, read_steps

_ROOT = Path(__file__).resolve().parents[2]
#: Where scenarios find lab, their own package and dpkt.
_IMPORTED = (_ROOT, _ROOT / "tests" / "rdma", Path(dpkt.__file__).parents[1])


class ScenarioError(RuntimeError):
    """A scenario did not come to its end: which one, and what it said."""


@dataclass(frozen=True)
class Outcome:
    """What a scenario did.

    Attributes:
        completed: the run of the guest.
        steps: what happened, by name.
    """

    completed: Completed
    steps: dict[str, Step]

    def capture(self, name: str, step: Step | None = None) -> list[Packet]:
        """The packets of one capture; of one step only, where that is given.

        Raises:
            CaptureError: it is not there whole.
        """
        packets = _captured(self.completed.out / f"{name}.pcap")
        if step is None:
            return packets
        return [packet for packet in packets if step.contains(packet.time_s)]

    def remove(self) -> None:
        shutil.rmtree(self.completed.out)


@cache
def _captured(file: Path) -> list[Packet]:
    said = file.with_suffix(".tcpdump").read_text()
    dropped = re.findall(r"(\d+) packets? dropped by kernel", said)
    if not said.endswith("dropped by kernel\n") or any(map(int, dropped)):
        raise CaptureError(f"{file}: tcpdump was too slow, or did not end: {said}")
    return read_capture(file)


def play(guest: Guest, scenario: str, *args: str, timeout_s: float) -> Outcome:
    """Run the module ``scenarios.NAME`` in the guest; the output folder is the caller's to remove.

    Raises:
        GuestError: the guest broke down.
        ScenarioError: the scenario did.
    """
    # Without "site" Python starts three times as fast, and scenarios need nothing from there.
    argv = ["python3", "-B", "-S", "-m", f"scenarios.{scenario}", *args]
    path = shlex.quote(":".join(map(str, _IMPORTED)))
    completed = guest.run(f"PYTHONPATH={path} {shlex.join(argv)}\n", timeout_s)
    if completed.status != 0:
        how = f"no end in {timeout_s} s" if completed.status is None else completed.stderr
        raise ScenarioError(f"{scenario} ({completed.out}): {how}")
    return Outcome(completed, read_steps(completed.out))
