"""Networks that spread the packets of each flow over all its paths."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

from crux_torch.schedule.model import Cluster, Flow, Job, Path


def sprayed(cluster: Cluster) -> Cluster:
    """The cluster on a network that sprays packets: no flow has a path to choose.

    The bytes of each flow are spread evenly over its candidates. Schedulers then give classes,
    rates and shifts only. As everywhere in this simulator, a job moves at the pace of its slowest
    link, so a packet that is late holds up its flow.
    """
    return replace(cluster, jobs=tuple(map(_spread, cluster.jobs)))


def _spread(job: Job) -> Job:
    moved: dict[tuple[int, Path], float] = {}
    for part, flow in zip(job.parts or repeat(0), job.flows, strict=False):
        for path in flow.candidates:
            moved[part, path] = moved.get((part, path), 0.0) + flow.bytes / len(flow.candidates)
    return replace(
        job,
        flows=tuple(Flow(size, (path,)) for (_, path), size in moved.items()),
        parts=tuple(part for part, _ in moved) if job.parts else (),
    )
