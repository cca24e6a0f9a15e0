"""Jobs on their GPUs: flows, the paths that the network gives them, and how they run alone."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from crux_torch.fabric.ecmp import hashed_choice
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.arrays import Reader
from crux_torch.schedule.intensity import link_traffic
from crux_torch.schedule.model import Job
from crux_torch.schedule.placing import alone
from crux_torch.sim.catalogue import WorkloadError, model
from crux_torch.sim.collectives import build_job
from crux_torch.sim.joined import JoinedPaths
from crux_torch.sim.placement import Allocation, Request, cells, place_hived
from crux_torch.sim.play import iteration_alone_s

#: The most paths of one flow.
CANDIDATES = 16
#: See :func:`crux_torch.sim.collectives.transfers`.
ALLTOALL_PEERS = 4
#: Source ports that a connection's own is drawn from (RFC 6335: the dynamic ones).
EPHEMERAL_PORTS = range(49152, 65536)


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A job on its GPUs.

    Attributes:
        default_path: the candidate that ECMP's hash gives to each flow.
        alone_s: seconds of an iteration on an empty network, on paths selected there.
        intensity: I_j there, in FLOP/s.
        layer_bytes: bytes of one iteration on all links of each layer of the topology; the same for
            all candidates of a flow, which cross the same kinds of link.
    """

    job: Job
    default_path: tuple[int, ...]
    alone_s: float
    intensity: float
    layer_bytes: Mapping[str, float]


class Reference(NamedTuple):
    """Seconds of one iteration alone on the nearest GPUs: of computation, and in total."""

    compute_s: float
    alone_s: float


class Placer:
    """Builds placed jobs for one topology, and caches what depends on the model and GPUs only.

    With ``rings_apart`` the rings and groups of a job move each on its own.

    Attributes:
        reference: called with a model's name and a number of GPUs; see :class:`Reference`. Raises
            WorkloadError if the cluster has fewer GPUs.
    """

    def __init__(self, topology: Topology, *, rings_apart: bool = True) -> None:
        self.topology = topology
        self._rings_apart = rings_apart
        self.cells = cells(topology)
        self._idle = Allocation(self.cells)
        self._paths = JoinedPaths(topology, CANDIDATES)
        self._reader = Reader()
        self._capacity_Bps = MappingProxyType(dict(sorted(topology.capacity_Bps.items())))
        self._build = lru_cache(maxsize=1 << 8)(self._build_alone)
        self.reference = lru_cache(maxsize=None)(self._find_reference)
        self._layer = lru_cache(maxsize=None)(topology.layer)

    def place(self, name: str, model_name: str, gpus: Sequence[str]) -> PlacedJob:
        """The job ``name`` that trains a model of the catalogue on ``gpus``."""
        found = self._build(model_name, tuple(gpus))
        job = replace(found.job, name=name)
        return replace(found, job=job, default_path=hashed_paths(job, self.topology))

    def _find_reference(self, model_name: str, gpus: int) -> Reference:
        """How the job runs alone on the GPUs that are nearest to each other."""
        request = Request(model_name, gpus)
        chosen = place_hived(request, self._idle, random.Random(0))
        if chosen is None:
            raise WorkloadError(f"a job of {gpus} GPUs; the cluster has {len(self.cells.gpus)}")
        found = self._build(model_name, chosen)
        return Reference(found.job.compute_s, found.alone_s)

    def _build_alone(self, model_name: str, gpus: tuple[str, ...]) -> PlacedJob:
        job = build_job(
            model_name,
            model(model_name),
            gpus,
            self.topology,
            paths=self._paths,
            alltoall_peers=ALLTOALL_PEERS,
            apart=self._rings_apart,
        )
        found = alone(job, self._capacity_Bps, reader=self._reader)
        layer_bytes: defaultdict[str, float] = defaultdict(float)
        for link, moved in link_traffic(job, found.path).items():
            layer_bytes[self._layer(link)] += moved
        alone_s = found.period_s
        if job.parts:
            alone_s = iteration_alone_s(job, found.path, self._capacity_Bps, alone_s)
        return PlacedJob(job, (), alone_s, found.intensity, dict(layer_bytes))


def hashed_paths(job: Job, topology: Topology, *, seed: int = 0) -> tuple[int, ...]:
    """The candidate that ECMP chooses for each flow of ``job``; each flow is one connection.

    ``seed`` is that of the source ports, which have to differ between draws. Another start value of
    the CRC would move all flows alike and leave the collisions as they are.
    """
    ports = random.Random(f"{seed}: ports of {job.name}")
    chosen = []
    for flow in job.flows:
        port = ports.choice(EPHEMERAL_PORTS)
        first = flow.candidates[0]
        src, dst = topology.ends(first[0])[0], topology.ends(first[-1])[1]
        chosen.append(hashed_choice(src, dst, port, len(flow.candidates)))
    return tuple(chosen)
