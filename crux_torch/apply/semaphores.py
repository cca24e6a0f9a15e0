"""PCIe links of this host as semaphores: lower levels give way (paper §5, Figure 3b).

A process takes its places with the first order of its leader, and its operations look at a link
only while another job has a place there, too. docs/understand/host.md explains the protocol
(``csrc/links``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crux_torch.apply.nccl import NcclVariables
from crux_torch.errors import SettingsError
from crux_torch.host.activity import OwnDevice, own_gpu, visible_gpus
from crux_torch.host.interfaces import Nic, read_nics
from crux_torch.host.machine import usable_nics
from crux_torch.host.nvml import Gpu, bounded, read_gpus
from crux_torch.host.pcie import PcieTree
from crux_torch.logs import WarnOnce
from crux_torch.measure.records import GroupInfo
from crux_torch.own_folders import group_id, usable_folder
from crux_torch.settings import Settings

_log = logging.getLogger(__name__)

#: ``LinkGate.set_level`` for a job without a place in the order.
NO_LEVEL = -1
#: Groups that the gate knows: ``LinkGate::kMaxGroups``. Operations of later ones never give way.
MAX_GROUPS = 4096
#: Period of looking for this process's links until they are known.
LOOK_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True)
class NamedLinks:
    """Links by agreement: every operation with another rank crosses all of them.

    Attributes:
        names: of the links; jobs that name the same one on a host share it.
        obstacle: as :attr:`PcieLinks.obstacle`.
    """

    names: tuple[str, ...]
    obstacle: str | None = None

    def __call__(self, group: GroupInfo) -> tuple[str, ...]:
        return self.names if len(group.ranks) != 1 else ()


@dataclass(frozen=True, slots=True)
class PcieLinks:
    """PCIe links, from where this process's GPU and those of its neighbours are.

    A group that spans hosts crosses the links between the GPU and its NIC. A group with other ranks
    on this host crosses the links between the GPU and those of its neighbours in the group's order,
    as a ring does, unless an NVLink joins them.

    Attributes:
        gpu, nic: PCI addresses of this process's own, and of the NIC for its traffic, if known.
        local: PCI address of the GPU of each global rank on this host; None if unknown.
        nvlinked: GPUs that an NVLink or NVSwitch joins to this process's own.
        direct: True if the NIC reads the GPU's memory. If not, traffic goes through the host's
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
        """The reason why the links are not known, in words; None if they are."""
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


#: Returns the names of this host's links that the operations of a process group cross.
CrossedLinks = NamedLinks | PcieLinks


def nvlinked_with(gpu: Gpu, gpus: Sequence[Gpu]) -> frozenset[str]:
    """Returns the PCI addresses of the GPUs that reach ``gpu`` by NVLink or NVSwitch."""
    switched = {g.pci_address for g in gpus if any(link.kind == "switch" for link in g.nvlinks)}
    joined = {link.peer for link in gpu.nvlinks if link.kind == "gpu"}
    if any(link.kind == "switch" for link in gpu.nvlinks):
        joined |= switched
    return frozenset(joined - {gpu.pci_address})


class HostSemaphores:
    """Keeps this process's gate in step with its groups, its level and its neighbours.

    Raises nothing: if a link can't be joined, it warns once and tries again.

    Thread safety: one background thread calls it; any thread may call :meth:`status`.

    Args:
        gate: gives a ``crux_torch._C.LinkGate``; called when the first place is taken.
        cluster: its name; clusters share no links.
        wait_s: limit of giving way, for each operation.
        folder: gives the folder of the tables: memory shared by the user's processes, or a group's.
    """

    def __init__(
        self,
        gate: Callable[[], Any],
        routes: Callable[[], CrossedLinks | None],
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
        self._routes: CrossedLinks | None = None
        self._known: dict[GroupInfo, tuple[str, ...]] = {}
        self._job = ""
        self._level: int | None = None
        self._priority = 0.0
        # The gate's index of each link that this process has a place on, and the links on which
        # another job has one, too.
        self._joined: dict[str, int] = {}
        self._shared: frozenset[str] = frozenset()
        self._crossed: dict[int, tuple[int, ...]] = {}
        self._errors: dict[str, str] = {}
        self._warn = WarnOnce(_log)

    def follow(self, job: str, level: int | None, priority: float = 0.0) -> None:
        """Take over the level that the leader gives the job.

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
            self._look_at_s = self._clock() + LOOK_PERIOD_S
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
        """Returns plain values: ``active``, ``why_not``, ``waits`` and each of the ``links``.

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

    def _why_not(self, routes: CrossedLinks | None) -> str | None:
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


def make_semaphores(settings: Settings, device: OwnDevice) -> HostSemaphores:
    """Returns this process's semaphores by ``CRUX_LINKS``."""

    def routes() -> CrossedLinks | None:
        if settings.links == ("none",):
            return NamedLinks((), "switched off: CRUX_LINKS=none")
        if settings.links == ("auto",):
            return pcie_links(device, os.environ)
        return NamedLinks(settings.links)

    def folder() -> Path:
        return usable_folder(group_id(settings.store_group))

    wait_s = settings.link_wait_ms / 1e3
    return HostSemaphores(_process_gate, routes, settings.cluster, wait_s, folder=folder)


def pcie_links(device: OwnDevice, env: Mapping[str, str]) -> CrossedLinks | None:
    """Returns the PCIe links of this process; None while its GPU is not known."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_available() or not cuda.is_initialized():
        return None
    gpus = bounded(read_gpus) or ()
    chosen = device.device(cuda.device_count(), env)
    gpu = own_gpu(gpus, chosen.ordinal, chosen.uuid, env) if chosen else None
    if gpu is None:
        return None
    tree = PcieTree.read()
    nic = tree.nic_of(gpu.pci_address, usable_nics(read_nics(), tree))
    return PcieLinks(
        tree,
        gpu.pci_address,
        nic.pci_address if nic is not None else None,
        local_gpus(gpu, visible_gpus(gpus, env), env),
        nvlinked_with(gpu, gpus),
        direct=nic is not None and reads_gpu(nic, env),
    )


def reads_gpu(nic: Nic, env: Mapping[str, str]) -> bool:
    """Returns True if NCCL lets a NIC below a GPU's switch read the GPU's memory itself.

    With RDMA it does, unless its variables say otherwise; that the driver can is taken for granted.
    """
    variables = NcclVariables(env)
    net, level = variables.get("NCCL_NET"), variables.get("NCCL_NET_GDR_LEVEL")
    if nic.rdma_device is None or (net is not None and net.text.lower() == "socket"):
        return False
    if variables.integer("NCCL_IB_DISABLE"):
        return False
    return level is None or level.text not in ("LOC", "0")


def local_gpus(
    own: Gpu, visible: tuple[Gpu | None, ...], env: Mapping[str, str]
) -> dict[int, str | None]:
    """Returns the PCI address of the GPU of each global rank on this host, as torchrun counts."""
    try:
        rank, local, count = (int(env[k]) for k in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError):
        return {}
    # With one GPU visible to each process nobody tells which the others have.
    gpus = visible if len(visible) >= count else ()
    found = {
        rank - local + i: gpu.pci_address if gpu is not None else None
        for i, gpu in enumerate((*gpus, *[None] * count)[:count])
    }
    return found | {rank: own.pci_address}


def _process_gate() -> object:
    from crux_torch import _C

    return _C.link_gate()
