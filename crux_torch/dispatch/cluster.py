"""Hosts as dispatching sees them: the bandwidth of every set of a host's devices, and its link.

A table is LiteGD's dictionary (§4.2.3). A cluster joins each host to one switch by one link.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from crux_torch.errors import CruxError
from crux_torch.files import read_file, write_file

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Bytes/s of each of some choices; a choice is a row with one set of devices (bits) for each host.
Predictor = Callable[[Ints], Floats]

#: A table has 65,536 values at most; nccl-tests' output is shorter.
MAX_FILE_BYTES = 1 << 26
#: All sets of so many devices are 65,536 values.
MAX_DEVICES = 16
#: What the paper measures with (§5.1): smaller messages give less stable or less distinct results.
MESSAGE_BYTES = 16 << 20

Bandwidth = Annotated[float, msgspec.Meta(gt=0.0, le=1e15)]


class TableError(CruxError, ValueError):
    """A table that can't be used: the file, and what was expected."""


class DispatchError(CruxError, ValueError):
    """A request that can't be met: what there is instead."""


class HostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Bandwidths of the sets of one host's devices.

    Attributes:
        host: its name.
        devices: names of its devices; bit ``i`` of a set stands for the ``i``-th.
        collective, message_bytes: operation and size of the measurement.
        bandwidth_Bps: by set, in ascending order from the empty one; None where a set was not
            measured, and for sets of fewer than two devices.
    """

    version: Literal[1] = 1
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    devices: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_DEVICES)]
    collective: Literal["all_gather", "all_reduce"] = "all_gather"
    message_bytes: Annotated[int, msgspec.Meta(ge=1)] = MESSAGE_BYTES
    bandwidth_Bps: tuple[Bandwidth | None, ...]

    def __post_init__(self) -> None:
        sets = 1 << len(self.devices)
        if len(self.bandwidth_Bps) != sets:
            raise ValueError(
                f"expected {sets} bandwidths, one for each set of {len(self.devices)} devices, "
                f"not {len(self.bandwidth_Bps)}"
            )

    @cached_property
    def array(self) -> NDArray[np.float64]:
        """Bytes/s by set: infinite for fewer than two devices, 0 where nothing was measured."""
        known = np.array([value or 0.0 for value in self.bandwidth_Bps])
        known[[0, *(1 << i for i in range(len(self.devices)))]] = np.inf
        return known

    @property
    def missing(self) -> int:
        """Number of sets of two devices or more that were not measured."""
        return int(np.count_nonzero(self.array == 0.0))


def table_of(host: str, devices: Iterable[str], found: Mapping[int, float]) -> HostTable:
    """A table from bandwidths in bytes/s by set (bit ``i``: the ``i``-th device)."""
    names = tuple(devices)
    values = tuple(found.get(members) for members in range(1 << len(names)))
    return HostTable(host=host, devices=names, bandwidth_Bps=values)


def save(table: HostTable, path: Path) -> None:
    """Write ``table`` to ``path``, whole or not at all."""
    write_file(path, msgspec.json.encode(table))


def load(path: Path) -> HostTable:
    """The table in the file ``path``.

    Raises:
        TableError: for a file that is no table of this version.
    """
    try:
        return msgspec.json.decode(read_file(path, MAX_FILE_BYTES), type=HostTable)
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TableError(f"{path}: {error}") from None


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a text file; raises TableError where it can't be read."""
    try:
        return read_file(path, MAX_FILE_BYTES).decode().splitlines()
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: {error}") from None


def from_csv(path: Path, host: str) -> HostTable:
    """The table in a file of lines ``device device …,GB/s``, as ``0 1 5,21.5``; # begins a comment.

    Raises:
        TableError: with the number of the line that is wrong.
    """
    found: dict[tuple[int, ...], float] = {}
    try:
        for number, row in enumerate(csv.reader(read_lines(path)), 1):
            if not row or row[0].lstrip().startswith("#"):
                continue
            where = f"{path}:{number}"
            wrong = f"{where}: expected `device device ...,GB/s`, as `0 1 5,21.5`, not "
            try:
                devices, rate = row
                members = tuple(sorted({int(name) for name in devices.split()}))
                rate_Bps = float(rate) * 1e9
            except ValueError:
                raise TableError(f"{wrong}{','.join(row)!r}") from None
            if len(members) < 2 or not 0 < rate_Bps <= 1e15 or members[0] < 0:
                raise TableError(f"{wrong}{','.join(row)!r}")
            _check_number(members[-1], where)
            found[members] = rate_Bps
    except csv.Error as error:
        raise TableError(f"{path}: {error}") from None
    return _from_sets(found, host, str(path))


_DEVICE = re.compile(r"^#\s+Rank\s+\d+ .*\bdevice\s+(\d+)\b")
_MESSAGE = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s")


def from_nccl_tests(
    paths: Iterable[Path], host: str, message_bytes: int = MESSAGE_BYTES
) -> HostTable:
    """A table from outputs of nccl-tests, one file for each set: the bus bandwidth, out of place.

    Raises:
        TableError: for a file that lacks its devices or the line for ``message_bytes``.
    """
    found: dict[tuple[int, ...], float] = {}
    for path in paths:
        lines = read_lines(path)
        members = tuple(sorted({int(m[1]) for line in lines if (m := _DEVICE.match(line))}))
        rows = [m for line in lines if (m := _MESSAGE.match(line))]
        rates = [float(m[4]) * 1e9 for m in rows if int(m[1]) == message_bytes]
        if len(members) < 2 or not rates or not rates[-1] > 0:
            raise TableError(
                f"{path}: expected nccl-tests' output with `# Rank ... device N` lines of two "
                f"devices or more, and a result for {message_bytes} bytes"
            )
        _check_number(members[-1], str(path))
        found[members] = rates[-1]
    return _from_sets(found, host, "nccl-tests")


def _check_number(device: int, where: str) -> None:
    if device >= MAX_DEVICES:
        raise TableError(f"{where}: device {device}: a host has {MAX_DEVICES} at most")


def _from_sets(found: Mapping[tuple[int, ...], float], host: str, where: str) -> HostTable:
    if not found:
        raise TableError(f"{where}: no bandwidths in it")
    devices = range(1 + max(members[-1] for members in found))
    sets = {sum(1 << device for device in members): rate for members, rate in found.items()}
    return table_of(host, map(str, devices), sets)


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
