"""A cluster as dispatching sees it: hosts' tables, and one link of each host to the switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from crux_torch.dispatch.table import HostTable
from crux_torch.errors import CruxError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Bytes/s of each of some choices; a choice is a row with one set of devices (bits) for each host.
Predictor = Callable[[Ints], Floats]


class DispatchError(CruxError, ValueError):
    """A request that can't be met. Says what there is instead."""


@dataclass(frozen=True, eq=False)
class DispatchCluster:
    """Hosts whose devices a job may get.

    Attributes:
        tables: one for each host.
        uplink_Bps: one direction of each host's link to the switch.
    """

    tables: Sequence[HostTable]
    uplink_Bps: Floats

    def __post_init__(self) -> None:
        if len(self.tables) != len(self.uplink_Bps) or not len(self.tables):
            raise DispatchError(
                f"{len(self.uplink_Bps)} uplinks of {len(self.tables)} hosts: expected one each"
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of devices of each host."""
        return tuple(len(table.devices) for table in self.tables)

    @cached_property
    def table(self) -> Floats:
        """Bytes/s by host and set; sets that a smaller host does not have are 0."""
        stacked = np.zeros((len(self.tables), 1 << max(self.sizes)))
        for row, table in zip(stacked, self.tables, strict=True):
            row[: len(table.array)] = table.array
        return stacked

    @property
    def everything(self) -> Ints:
        """All devices of all hosts."""
        return np.array([(1 << size) - 1 for size in self.sizes])

    def choice(self, devices: Mapping[str, Sequence[str]]) -> Ints:
        """The choice of ``devices``, by names of hosts and of their devices.

        Raises:
            DispatchError: for a name that is not in the cluster.
        """
        chosen = np.zeros(len(self.tables), np.int64)
        numbers = {table.host: i for i, table in enumerate(self.tables)}
        for host, names in devices.items():
            if host not in numbers:
                raise DispatchError(f"no host {host!r}; there are {', '.join(sorted(numbers))}")
            known = self.tables[numbers[host]].devices
            for name in names:
                if name not in known:
                    raise DispatchError(f"host {host!r} has no device {name!r}: {', '.join(known)}")
                chosen[numbers[host]] |= 1 << known.index(name)
        return chosen

    def names(self, choice: Ints) -> dict[str, list[str]]:
        """The devices of ``choice`` by host, of hosts that have any."""
        return {
            table.host: [name for i, name in enumerate(table.devices) if members >> i & 1]
            for table, members in zip(self.tables, choice.tolist(), strict=True)
            if members
        }

    def inside_Bps(self, choices: Ints) -> Floats:
        """Bytes/s within each host, a row for each choice; infinite where it is not involved."""
        return self.table[np.arange(len(self.tables)), choices]

    def weakest_link_Bps(self, choices: Ints) -> Floats:
        """Bytes/s of each choice: the least within a host or on the way between hosts (§6.1)."""
        involved = choices > 0
        several = involved.sum(axis=1, keepdims=True) > 1
        links = np.where(involved & several, self.uplink_Bps, np.inf)
        weakest: Floats = np.minimum(self.inside_Bps(choices), links).min(axis=1)
        return weakest


def count(choices: Ints) -> Ints:
    """Number of devices of each choice (or of one, for a single row)."""
    bits = choices[..., None] >> np.arange(16) & 1
    return np.asarray(bits.sum(axis=(-1, -2)))
