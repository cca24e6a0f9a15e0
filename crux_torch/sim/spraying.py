"""Networks that spread the packets of each flow over all its paths."""

from __future__ import annotations

from dataclasses import replace

from crux_torch.schedule.model import Cluster, Flow, Job, Path


def sprayed(cluster: Cluster) -> Cluster:
    """The cluster on a network that sprays packets: no flow has a path to choose.

    The bytes of each flow are spread evenly over its candidates. Schedulers then give classes,
    rates and shifts only. As everywhere in this simulator, a job moves at the pace of its slowest
    link, so a packet that is late holds up its flow.
    """
    return replace(cluster, jobs=tuple(map(_spread, cluster.jobs)))


def _spread(job: Job) -> Job:
    moved: dict[Path, float] = {}
    for flow in job.flows:
        for path in flow.candidates:
            moved[path] = moved.get(path, 0.0) + flow.bytes / len(flow.candidates)
    return replace(job, flows=tuple(Flow(size, (path,)) for path, size in moved.items()))
