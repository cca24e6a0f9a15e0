"""Choices for one request: by bandwidth, or beside the jobs that run now."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from crux_torch.dispatch.alternatives import alternatives, limit
from crux_torch.dispatch.cluster import DispatchCluster, Ints
from crux_torch.dispatch.order import in_ring_order
from crux_torch.dispatch.running import Running, contention, without_taken
from crux_torch.fabric.topology import Topology


@dataclass(frozen=True, eq=False)
class Ranked:
    """A choice and what it is worth.

    Attributes:
        alone_Bps: bytes/s while no other job runs; infinite for one device.
        limit: what its weakest link is.
        now_Bps, utilisation: beside running jobs, see
            :class:`~crux_torch.dispatch.contention.Placement`; None where no traffic is known.
    """

    choice: Ints
    alone_Bps: float
    limit: str
    now_Bps: float | None = None
    utilisation: float | None = None

    @property
    def worth(self) -> float:
        """What choices are compared by."""
        return self.alone_Bps if self.utilisation is None else self.utilisation


@dataclass(frozen=True, eq=False)
class Dispatcher:
    """Hosts, what of them is free, and what runs there.

    Attributes:
        idle: devices that may be given out, but for those that launchers claim.
        topology: in place of the published one.
        running: a look at the cluster; None without a store.
        model, policy: see :func:`~crux_torch.dispatch.running.contention`.
    """

    cluster: DispatchCluster
    idle: Ints
    topology: Topology | None = None
    running: Running | None = None
    model: str | None = None
    policy: str = "crux"

    @property
    def free(self) -> Ints:
        """The devices that may be given out now."""
        if self.running is None:
            return self.idle
        return without_taken(self.cluster, self.idle, self.running)

    def choices(
        self, k: int, hosts: Collection[str] | None = None, unit: int = 1
    ) -> Iterator[Ranked]:
        """Choices of ``k`` free devices, each over other hosts, the best first.

        Args:
            hosts: those that may be used; default: all.
            unit: every host gives a multiple of it.

        Raises:
            DispatchError: if there is no choice at all.
        """
        allowed = [hosts is None or table.host in hosts for table in self.cluster.tables]
        free = np.where(allowed, self.free, 0)
        beside = None
        if self.running is not None:
            beside = contention(self.cluster, self.running, self.topology, self.model, self.policy)
        if beside is None:
            for one in alternatives(self.cluster, free, k, unit):
                yield Ranked(one.choice, one.bandwidth_Bps, one.limit)
            return
        seen: set[tuple[int, ...]] = set()
        for placed in beside.best(free, k, unit):
            involved = tuple(np.flatnonzero(placed.choice).tolist())
            if involved in seen:
                continue
            seen.add(involved)
            nominal_Bps = self.cluster.weakest_link_Bps(placed.choice[None])[0]
            slower = placed.alone_Bps < 0.999 * nominal_Bps
            why = "the network" if slower else limit(self.cluster, placed.choice)
            yield Ranked(placed.choice, placed.alone_Bps, why, placed.now_Bps, placed.utilisation)

    def ranks(self, one: Ranked) -> list[tuple[str, str]]:
        """Host and device of every rank, in the order of the ring."""
        known = self.topology or (self.running.topology if self.running else None)
        return in_ring_order(self.cluster, one.choice, known)
