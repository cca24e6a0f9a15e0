"""Links of this host as semaphores: lower levels give way (paper §5, Figure 3b).

A process takes its places with the first order of its leader, and its operations look at a link
only while another job has a place there, too. docs/pcie.md explains the protocol (``csrc/links``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crux_torch.errors import SettingsError
from crux_torch.host.nvml import Gpu
from crux_torch.host.pcie import PcieTree
from crux_torch.measure.record import GroupInfo
from crux_torch.own_folders import usable_folder
from crux_torch.warn_once import WarnOnce

_log = logging.getLogger(__name__)

#: ``LinkGate.set_level`` for a job without a place in the order.
NO_LEVEL = -1
#: Groups that the gate knows: ``LinkGate::kMaxGroups``. Operations of later ones never give way.
MAX_GROUPS = 4096
#: Seconds between two looks for what links there are, until it is known.
LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class StandInRoutes:
    """Links by agreement: every operation with another rank crosses all of them.

    Attributes:
        names: of the links; jobs that name the same one on a host share it.
        obstacle: as :attr:`PcieRoutes.obstacle`.
    """

    names: tuple[str, ...]
    obstacle: str | None = None

    def __call__(self, group: GroupInfo) -> tuple[str, ...]:
        return self.names if len(group.ranks) != 1 else ()


@dataclass(frozen=True, slots=True)
class PcieRoutes:
    """PCIe links, from where this process's GPU and those of its neighbours are.

    A group that spans hosts crosses the links between the GPU and its NIC. A group with other ranks
    on this host crosses the links between the GPU and those of its neighbours in the group's order,
    as a ring does, unless an NVLink joins them.

    Attributes:
        gpu, nic: PCI addresses of this process's own, and of the NIC for its traffic, if known.
        local: PCI address of the GPU of each global rank on this host; None if unknown.
        nvlinked: GPUs that an NVLink or NVSwitch joins to this process's own.
        direct: whether the NIC reads the GPU's memory. If not, traffic goes through the host's
            memory, and crosses all links between either of them and the root complex.
    """

    tree: PcieTree
    gpu: str
    nic: str | None
    local: Mapping[int, str | None]
    nvlinked: frozenset[str]
    direct: bool = True

    @property
    def obstacle(self) -> str | None:
        """Why the links are not known, in words; None if they are."""
        return self.tree.obstacle

    def __call__(self, group: GroupInfo) -> tuple[str, ...]:
        if len(group.ranks) < 2:
            return ()
        ends: set[str] = set()
        found: set[str] = set()
        here = [rank for rank in group.ranks if rank in self.local]
        if len(here) < len(group.ranks) and self.nic is not None:
            if self.direct:
                ends.add(self.nic)
            else:
                for end in (self.gpu, self.nic):
                    found |= {link.name for link in self.tree.links_above(end)}
        mine = group.ranks[group.my_rank]
        if mine in here:
            place = here.index(mine)
            around = (here[place - 1], here[(place + 1) % len(here)])
            addresses = {self.local[rank] for rank in around}
            ends |= {a for a in addresses if a is not None and a not in self.nvlinked}
        found |= {link.name for end in ends for link in self.tree.path(self.gpu, end)}
        return tuple(sorted(found))


#: Which links of this host the operations of a process group cross, by name.
LinkRoutes = StandInRoutes | PcieRoutes


def nvlinked_with(gpu: Gpu, gpus: Sequence[Gpu]) -> frozenset[str]:
    """PCI addresses of the GPUs that reach ``gpu`` without PCIe: by a link, or through NVSwitch."""

    def switched(one: Gpu) -> bool:
        return any(link.kind == "switch" for link in one.nvlinks)

    joined = {link.peer for link in gpu.nvlinks if link.kind == "gpu"}
    joined |= {one.pci_address for one in gpus if switched(gpu) and switched(one)}
    return frozenset(joined - {gpu.pci_address})


class HostLinks:
    """Keeps this process's gate in step with its groups, its level and its neighbours.

    One background thread calls it; any thread may call :meth:`status`. Raises nothing: if a link
    can't be joined, it warns once and tries again.

    Args:
        gate: gives a ``crux_torch._C.LinkGate``; called when the first place is taken.
        cluster: its name; clusters share no links.
        wait_s: how long an operation gives way at most.
        folder: says where the tables are: memory that the user's processes share, or a group's.
    """

    def __init__(
        self,
        gate: Callable[[], Any],
        routes: Callable[[], LinkRoutes | None],
        cluster: str,
        wait_s: float,
        *,
        folder: Callable[[], Path] = usable_folder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_gate, self._make_routes = gate, routes
        self._cluster, self._wait_s, self._folder = cluster, wait_s, folder
        self._clock = clock
        self._look_at_s = float("-inf")
        self._gate: Any = None
        self._routes: LinkRoutes | None = None
        self._known: dict[GroupInfo, tuple[str, ...]] = {}
        self._job = ""
        self._level: int | None = None
        self._priority = 0.0
        # The gate's index of each link that this process has a place on, and those links on which
        # another job has one too.
        self._joined: dict[str, int] = {}
        self._shared: frozenset[str] = frozenset()
        self._crossed: dict[int, tuple[int, ...]] = {}
        self._errors: dict[str, str] = {}
        self._warn = WarnOnce(_log)

    def follow(self, job: str, level: int | None, priority: float = 0.0) -> None:
        """The level that the leader gives the job, from now on.

        Args:
            level: None: it gives way to nobody, and nobody to it.
            priority: orders jobs of one level, as the network's few levels can't.
        """
        if job != self._job:
            self.revert()
        self._job, self._level, self._priority = job, level, priority
        self._set_level()

    def tick(self, groups: Sequence[GroupInfo]) -> None:
        """Take places for new groups, and gate operations on links that other jobs share."""
        if not self._job:
            return
        if self._routes is None and self._clock() >= self._look_at_s:
            self._look_at_s = self._clock() + LOOK_S
            self._routes = self._make_routes()
        if self._routes is None or self._routes.obstacle is not None:
            return
        for new in set(groups) - self._known.keys():
            self._known[new] = self._routes(new)
        for name in [n for n, index in self._joined.items() if self._gate.lost(index)]:
            self._warn(f"lost {name}", f"the file of link {name} was cut short: starting it anew")
            del self._joined[name]
        routes = [self._known[group] for group in groups[:MAX_GROUPS]]
        self._join({name for route in routes for name in route})
        if self._gate is None:
            return
        shared = (name for name, index in self._joined.items() if self._gate.shared(index))
        self._shared = frozenset(shared)
        for group, route in enumerate(routes):
            crossed = tuple(self._joined[name] for name in route if name in self._shared)
            if self._crossed.get(group, ()) != crossed:
                self._gate.cross(group, list(crossed))
                self._crossed[group] = crossed
        self._gate.install(any(self._crossed.values()))

    def revert(self) -> None:
        """Leave all links: give way to nobody, and nobody gives way to this process."""
        self._job, self._level = "", None
        self._joined, self._shared, self._crossed, self._errors = {}, frozenset(), {}, {}
        if self._gate is not None:
            self._gate.install(False)
            self._gate.retire()

    def status(self) -> dict[str, Any]:
        """Plain values: ``active``, ``why_not``, ``waits`` and each of the ``links``.

        ``device_refuses`` is the call without which operations on the device neither wait nor
        count; None if none failed.
        """
        gate, joined, shared = self._gate, self._joined, self._shared
        waited, ran_out, total_ns, longest_ns = (0, 0, 0, 0) if gate is None else gate.waits
        return {
            "active": gate is not None and gate.installed,
            "why_not": self._why_not(self._routes),
            "level": self._level,
            "priority": self._priority,
            "wait_ms": self._wait_s * 1e3,
            "waits": {
                "operations": waited,
                "ran_out": ran_out,
                "total_s": total_ns / 1e9,
                "longest_s": longest_ns / 1e9,
            },
            "links": {
                name: {"shared": name in shared, "holders": _holders(gate, index)}
                for name, index in sorted(joined.items())
            },
            "refused": dict(self._errors),
            "device_refuses": None if gate is None else gate.device_refusal or None,
        }

    def _why_not(self, routes: LinkRoutes | None) -> str | None:
        if not self._job:
            return "no order of the job's leader yet"
        if routes is None:
            return "not known yet which links this process crosses"
        if routes.obstacle is not None:
            return routes.obstacle
        return None if self._shared else "no other job is on this process's links"

    def _join(self, names: set[str]) -> None:
        for name in sorted(names - self._joined.keys()):
            try:
                if self._gate is None:
                    gate = self._make_gate()
                    gate.set_wait_s(self._wait_s)
                    self._gate = gate
                index = self._gate.join(str(self._folder()), self._cluster, name, self._job)
            except (ImportError, OSError, RuntimeError, SettingsError) as error:
                self._errors[name] = str(error)
                self._warn(name, f"operations do not give way on link {name}: {error}")
                continue
            self._errors.pop(name, None)
            self._joined[name] = index
        self._set_level()

    def _set_level(self) -> None:
        if self._gate is not None:
            level = NO_LEVEL if self._level is None else self._level
            self._gate.set_level(level, self._priority)


def _holders(gate: Any, link: int) -> list[dict[str, Any]]:
    now_ns = time.monotonic_ns()
    return [
        {
            "pid": holder.pid,
            "level": None if holder.level == NO_LEVEL else holder.level,
            "operations": holder.operations,
            "since_s": max(0, now_ns - holder.changed_ns) / 1e9,
            "same_job": holder.same_job,
        }
        for holder in gate.holders(link)
    ]
