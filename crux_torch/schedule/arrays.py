"""A cluster as integer arrays, on which every algorithm of this package computes.

Jobs are held in the order of their names, so that no result depends on the order they came in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from scipy import sparse

from crux_torch import _schedule
from crux_torch.errors import CruxError
from crux_torch.schedule.model import Cluster, Flow, Job, Link, Memory

IntArray = npt.NDArray[np.int64]
LinkArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]
_Number = TypeVar("_Number", np.int64, np.float64)


class ClusterError(CruxError, ValueError):
    """A cluster that contradicts itself: which job or link, and what was expected."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """A cluster's jobs, flows, candidate paths and links by index.

    Flows that hold the same ``candidates`` object share one candidate set, which is read once: a
    topology that hands out one tuple for each pair of places is read in time of those pairs.

    Attributes:
        capacity_Bps: one more entry at the end, infinite, stands for the link of an empty path, so
            that every path has a link.
        flow_start: flows of job j are ``flow_start[j]`` to ``flow_start[j + 1]``.
        flow_set: candidate set of each flow.
        set_start: paths of set s are ``set_start[s]`` to ``set_start[s + 1]``.
        path_start: entries of path p in ``path_links``, likewise.
    """

    jobs: tuple[Job, ...]
    capacity_Bps: FloatArray
    flow_start: IntArray
    flow_bytes: FloatArray
    flow_set: IntArray
    set_start: IntArray
    path_start: IntArray
    path_links: LinkArray

    @property
    def candidates(self) -> dict[str, Any]:
        """Candidate sets, paths and links, as the loops in C++ take them."""
        return {
            "set_start": self.set_start,
            "path_start": self.path_start,
            "path_links": self.path_links,
            "capacity_Bps": self.capacity_Bps,
        }

    @property
    def flows(self) -> dict[str, Any]:
        """Flows, as the loops in C++ take them."""
        return {
            "flow_start": self.flow_start,
            "flow_set": self.flow_set,
            "flow_bytes": self.flow_bytes,
        }

    @property
    def flow_job(self) -> IntArray:
        """The job of each flow."""
        return np.repeat(np.arange(len(self.jobs)), np.diff(self.flow_start))

    def by_name(self, values: npt.NDArray[_Number]) -> dict[str, Any]:
        """A value of each job, as :class:`Decision` holds it."""
        return dict(zip((job.name for job in self.jobs), values.tolist(), strict=True))


class _Links(NamedTuple):
    """A mapping of capacities, the names in it, and their capacities with the infinite one."""

    source: Mapping[Link, float] | None
    names: tuple[Link, ...]
    capacity_Bps: FloatArray


class Reader:
    """Reads clusters into arrays, and reads links and candidate paths that it knows only once.

    Links in a read-only mapping are not read again while it is the same mapping.
    """

    def __init__(self) -> None:
        self._flows = _schedule.FlowReader(Flow)
        self._links = _Links(None, (), np.zeros(0))

    def read(self, cluster: Cluster) -> Arrays:
        """As :func:`arrays_of`."""
        jobs = in_order(cluster.jobs)
        links = self._links_of(cluster.capacity_Bps)
        try:
            flows = self._flows.read(jobs, links.names)
        except KeyError as error:
            raise ClusterError(f"a path crosses link {error}, which has no capacity") from None
        arrays = Arrays(jobs, links.capacity_Bps, *flows)
        _check(arrays)
        return arrays

    def _links_of(self, capacity_Bps: Mapping[Link, float]) -> _Links:
        links = self._links
        if capacity_Bps is links.source:
            return links
        names = tuple(capacity_Bps)
        given = chain(capacity_Bps.values(), (np.inf,))
        found = _Links(None, names, np.fromiter(given, np.float64, len(names) + 1))
        if not (found.capacity_Bps > 0).all():
            link = names[int(np.argmin(found.capacity_Bps > 0))]
            raise ClusterError(f"link {link!r} needs a capacity above 0 bytes per second")
        if isinstance(capacity_Bps, MappingProxyType):
            found.capacity_Bps.flags.writeable = False
            self._links = found._replace(source=capacity_Bps)
        return found


def in_order(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """``jobs`` in the order of their names.

    Raises:
        ClusterError: two jobs of one name.
    """
    found = tuple(sorted(jobs, key=lambda job: job.name))
    for one, other in pairwise(found):
        if one.name == other.name:
            raise ClusterError(f"two jobs are named {one.name!r}: names must be unique")
    return found


def arrays_of(cluster: Cluster, memory: Memory | None = None) -> Arrays:
    """Reads ``cluster`` into arrays.

    Raises:
        ClusterError: two jobs of one name, a flow without candidates or with a size that is not
            a finite number of bytes, a path over an unknown link, a link without capacity.
    """
    if memory is None:
        return Reader().read(cluster)
    if memory.reader is None:
        memory.reader = Reader()
    arrays: Arrays = memory.reader.read(cluster)
    return arrays


def _check(arrays: Arrays) -> None:
    bad = (np.diff(arrays.set_start) == 0)[arrays.flow_set]
    if bad.any():
        job = arrays.jobs[arrays.flow_job[bad][0]].name
        raise ClusterError(f"a flow of job {job!r} has no candidate path: give at least one")
    bad = ~(np.isfinite(arrays.flow_bytes) & (arrays.flow_bytes >= 0))
    if bad.any():
        job = arrays.jobs[arrays.flow_job[bad][0]].name
        raise ClusterError(f"a flow of job {job!r} needs a finite number of bytes, 0 or more")


def choice_of(arrays: Arrays, path: Mapping[str, tuple[int, ...]] | None) -> IntArray:
    """The candidate index of every flow by ``path``; jobs not in it take their first candidates.

    Raises:
        ClusterError: an index that the flow does not have, or not one index for each flow.
    """
    choice = np.zeros(len(arrays.flow_set), np.int64)
    for j, job in enumerate(arrays.jobs if path else ()):
        chosen = (path or {}).get(job.name)
        if chosen is None:
            continue
        if len(chosen) != len(job.flows):
            raise ClusterError(
                f"job {job.name!r} has {len(job.flows)} flows but {len(chosen)} chosen paths"
            )
        choice[arrays.flow_start[j] : arrays.flow_start[j + 1]] = chosen
    alternatives = np.diff(arrays.set_start)[arrays.flow_set]
    bad = (choice < 0) | (choice >= alternatives)
    if bad.any():
        name = arrays.jobs[arrays.flow_job[bad][0]].name
        raise ClusterError(f"job {name!r} takes a path that is not among its flow's candidates")
    return choice


def paths_of(arrays: Arrays, choice: IntArray) -> dict[str, tuple[int, ...]]:
    """``choice`` as a :class:`Decision` holds it."""
    chosen = choice.tolist()
    start = arrays.flow_start.tolist()
    return {job.name: tuple(chosen[start[j] : start[j + 1]]) for j, job in enumerate(arrays.jobs)}


def path_links(arrays: Arrays, choice: IntArray) -> LinkArray:
    """The links of every flow's chosen path, one after the other."""
    path = arrays.set_start[arrays.flow_set] + choice
    begin, end = arrays.path_start[path].tolist(), arrays.path_start[path + 1].tolist()
    each = [arrays.path_links[slice(*ends)] for ends in zip(begin, end, strict=True)]
    return np.concatenate([np.zeros(0, np.int32), *each])


def traffic_entries(arrays: Arrays, choice: IntArray) -> tuple[FloatArray, LinkArray, LinkArray]:
    """The entries of :func:`traffic_matrix`: bytes, links, and the first entry of each job."""
    return _schedule.traffic(**arrays.candidates, **arrays.flows, choice=choice)


def traffic_matrix(arrays: Arrays, choice: IntArray) -> Any:
    """M_{j,e}: bytes of one iteration of every job (row) on every link (column), sparse CSR.

    Only links that can be contended count: those of finite capacity that carry any byte.
    """
    shape = (len(arrays.jobs), len(arrays.capacity_Bps))
    return sparse.csr_array(traffic_entries(arrays, choice), shape=shape)


def check_levels(levels: Sequence[int]) -> IntArray:
    """``levels`` as an array.

    Raises:
        ValueError: there are none, or they do not ascend.
    """
    usable = np.array(levels, np.int64)
    if not len(usable) or (np.diff(usable) <= 0).any():
        raise ValueError(f"levels must be one or more ascending numbers, not {tuple(levels)}")
    return usable
