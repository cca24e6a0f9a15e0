"""Jobs on their GPUs: flows, the paths that the network gives them, and how they run alone."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from crux_torch.fabric.ecmp import EcmpHash
from crux_torch.fabric.joined import JoinedPaths
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.intensity import intensity, link_traffic, transfer_time_s
from crux_torch.schedule.model import Cluster, Job
from crux_torch.schedule.paths import select_paths
from crux_torch.sim.catalogue import WorkloadError, model
from crux_torch.sim.collectives import build_job
from crux_torch.sim.hashed import hashed_paths
from crux_torch.sim.placement import Allocation, Request, cells, place_hived


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A job on its GPUs.

    Attributes:
        job: as schedulers see it.
        default_path: the candidate that ECMP's hash gives to each flow.
        own_path: what path selection gives it on an empty network.
        alone_s: seconds of an iteration on an empty network, on ``own_path``.
        intensity: I_j there, in FLOP/s.
        layer_bytes: bytes of one iteration on all links of each layer of the topology; the same
            for all candidates of a flow, which cross the same kinds of link.
    """

    job: Job
    default_path: tuple[int, ...]
    own_path: tuple[int, ...]
    alone_s: float
    intensity: float
    layer_bytes: Mapping[str, float]


class Reference(NamedTuple):
    """One iteration in the idle cluster: seconds of computation, and of all."""

    compute_s: float
    alone_s: float


class Placer:
    """Builds placed jobs for one topology; what depends on the GPUs only is kept.

    Args:
        topology: the network.
        candidate_limit: the most paths of one flow.
        alltoall_peers: see :func:`crux_torch.sim.collectives.transfers`.
        hash: the switches' choice among equal-cost paths.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        candidate_limit: int = 16,
        alltoall_peers: int | None = 4,
        hash: EcmpHash | None = None,
    ) -> None:
        self.topology = topology
        self.cells = cells(topology)
        self._paths = JoinedPaths(topology, candidate_limit)
        self._peers = alltoall_peers
        self._hash = hash
        self._build = lru_cache(maxsize=1 << 8)(self._build_alone)
        self._reference = lru_cache(maxsize=None)(self._find_reference)
        self._layer = lru_cache(maxsize=None)(topology.layer)

    def place(self, name: str, model_name: str, gpus: Sequence[str]) -> PlacedJob:
        """The job ``name`` that trains a model of the catalogue on ``gpus``."""
        found = self._build(model_name, tuple(gpus))
        job = replace(found.job, name=name)
        return replace(
            found, job=job, default_path=hashed_paths(job, self.topology, hash=self._hash)
        )

    def reference(self, model_name: str, gpus: int) -> Reference:
        """How the job runs undisturbed on GPUs that are as near to each other as can be.

        Raises:
            WorkloadError: the cluster has fewer GPUs.
        """
        return self._reference(model_name, gpus)

    def _find_reference(self, model_name: str, gpus: int) -> Reference:
        request = Request(model_name, gpus)
        chosen = place_hived(request, Allocation(self.cells), random.Random(0))
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
            alltoall_peers=self._peers,
        )
        path: tuple[int, ...] = ()
        t_s = 0.0
        layer_bytes: defaultdict[str, float] = defaultdict(float)
        if job.flows:
            capacity_Bps = self.topology.capacity_Bps
            links = {link for flow in job.flows for path in flow.candidates for link in path}
            mine = Cluster({link: capacity_Bps[link] for link in sorted(links)}, (job,))
            path = select_paths(mine)[job.name]
            traffic = link_traffic(job, path)
            t_s = transfer_time_s(traffic, capacity_Bps)
            for link, moved in traffic.items():
                layer_bytes[self._layer(link)] += moved
        return PlacedJob(
            job, (), path, alone_iteration_s(job, t_s), intensity(job, t_s), dict(layer_bytes)
        )


def alone_iteration_s(job: Job, t_s: float) -> float:
    """Seconds of one iteration of ``job`` when its transfers take ``t_s`` in all (design §6)."""
    end = 0.0
    for burst in job.bursts:
        end = max(end, burst.at * job.compute_s) + burst.share * t_s
    return max(end, job.compute_s)
