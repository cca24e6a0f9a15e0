"""A leader that leads in its rank's process while that takes moments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from crux_torch.agreement.leader import Leader
from crux_torch.agreement.leader_process import LeaderApart
from crux_torch.agreement.outcome import Outcome
from crux_torch.agreement.records import JobRecord
from crux_torch.agreement.registry import View
from crux_torch.agreement.snapshot import size_of
from crux_torch.errors import StoreTooLarge
from crux_torch.network.topology import Topology

_log = logging.getLogger(__name__)

#: Bytes that a training process reads from the store in one look.
MAX_BYTES = 64 << 10
#: Jobs and flows that it plans, without a topology and on one, nodes of that one, and bytes of
#: what jobs saw of the network: some milliseconds of work.
MAX_SIZE, MAX_PLACED_SIZE, MAX_NODES, MAX_SEEN_BYTES = 64, 8, 256, 16 << 10


class SmallOnly:
    """Raises StoreTooLarge for a view that takes more than a moment to parse or to plan.

    Args:
        published, own: bytes of the topology of this job's own file, and the topology. Any other
            one is parsed elsewhere, because a few bytes can describe a large network.
    """

    def __init__(self, published: bytes | None, own: Topology | None) -> None:
        self._published, self._nodes = published, len(own.nodes) if own is not None else 0

    def __call__(self, view: View) -> None:
        """Check one view."""
        seen = sum(map(len, view.fragments.values())) if view.topology is None else 0
        if seen > MAX_SEEN_BYTES:
            raise StoreTooLarge(f"{seen} bytes of what jobs saw of the network")
        given = view.topology is not None
        placed = given or seen > 0
        if given and view.topology != self._published:
            raise StoreTooLarge("a topology that is not of this job's own file")
        if given and self._nodes > MAX_NODES:
            raise StoreTooLarge(f"a topology of {self._nodes} nodes")
        size = size_of(view.jobs)
        if size > (MAX_PLACED_SIZE if placed else MAX_SIZE):
            raise StoreTooLarge(f"{size} jobs and flows")


class BoundedLeader:
    """Leads in this process while that takes moments, and from then on in one of its own.

    Args:
        leader: checks with :class:`SmallOnly`, and reads ``MAX_BYTES`` of the store at most.
        apart: makes the leader that takes over, from the job's record and outcome.
    """

    def __init__(self, leader: Leader, apart: Callable[[JobRecord, Outcome], LeaderApart]) -> None:
        self._leader: Leader | LeaderApart = leader
        self._apart = apart
        self._fragment: bytes | None = None

    @property
    def record(self) -> JobRecord:
        """The job's record as published, without fields that a process adds."""
        return self._leader.record

    @property
    def outcome(self) -> Outcome:
        """The plan's outcome for this job now."""
        return self._leader.outcome

    @property
    def store_state(self) -> str:
        """``ok``, or what is wrong with the store."""
        return self._leader.store_state

    @property
    def topology(self) -> Topology | None:
        """The cluster's topology, where this process has parsed it."""
        return self._leader.topology if isinstance(self._leader, Leader) else None

    def update(self, **changes: Any) -> None:
        """Publish other values of these fields of the record."""
        self._leader.update(**changes)

    def tell_network(self, fragment: bytes | None) -> None:
        """Publish what this job saw of the network; None: nothing more."""
        self._fragment = fragment
        self._leader.tell_network(fragment)

    def tick(self) -> None:
        """Do what is due; raises nothing."""
        leader = self._leader
        leader.tick()
        if isinstance(leader, Leader) and leader.too_large:
            _log.info("planning in a process of its own: the store holds %s", leader.too_large)
            self._leader = self._apart(leader.record, leader.outcome)
            self._leader.tell_network(self._fragment)

    def close(self) -> None:
        """Remove this job's record."""
        self._leader.close()

    def status(self) -> dict[str, Any]:
        """Return the leader's status; ``process``: pid that leads, None for this one."""
        pid = self._leader.pid if isinstance(self._leader, LeaderApart) else None
        return {**self._leader.status(), "process": pid}
