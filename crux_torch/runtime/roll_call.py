"""Every rank says where it runs; the leader compares (:mod:`crux_torch.control.places`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from crux_torch.control.job_channel import JobChannel
from crux_torch.control.places import Place, problems
from crux_torch.fabric.topology import Topology

#: Seconds between two looks at who has come, and those after which it is enough.
LOOK_S = 1.0
PATIENCE_S = 10.0
GIVE_UP_S = 120.0


class RollCall:
    """One rank's part: it says where it runs; the leader gathers what all say, and warns.

    Args:
        channel, world_size, warn: of the job, of which this rank runs at ``place``.
    """

    def __init__(
        self,
        channel: JobChannel,
        world_size: int,
        place: Place,
        warn: Callable[[str, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel, self._warn, self._clock = channel, warn, clock
        self._missing = dict.fromkeys(range(world_size))
        self._unsent: bytes | None = msgspec.json.encode(place)
        self._places: dict[int, Place] = {}
        self._since_s = self._look_at_s = clock()
        self._judged: tuple[int, Topology | None] | None = None
        self.problems: tuple[str, ...] = ()

    def say(self) -> None:
        """Say where this rank runs, until that has succeeded once."""
        if self._unsent is not None and self._channel.put_host(self._unsent):
            self._unsent = None

    def gather(self, topology: Topology | None) -> None:
        """On the leader: hear who has come, and warn of what is wrong with their hosts."""
        now = self._clock()
        waited_s = now - self._since_s
        if self._missing and now >= self._look_at_s and waited_s < GIVE_UP_S:
            self._look_at_s = now + LOOK_S
            for rank, raw in self._channel.hosts(tuple(self._missing)).items():
                self._missing.pop(rank, None)
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    self._places[rank] = msgspec.json.decode(raw, type=Place)
        state = len(self._places), topology
        if state == self._judged or (self._missing and waited_s < PATIENCE_S):
            return
        self._judged = state
        self.problems = problems(self._places, topology)
        if self.problems:
            said = "; ".join(self.problems)
            self._warn(f"hosts {said}", said)

    def status(self) -> dict[str, Any]:
        """Plain values: the ranks on each host, and what is wrong with the hosts' names."""
        ranks: dict[str, list[int]] = {}
        for rank, place in sorted(self._places.items()):
            ranks.setdefault(place.host, []).append(rank)
        return {"ranks": ranks, "problems": list(self.problems)}
