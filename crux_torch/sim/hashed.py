"""The paths that ECMP's hash gives to a job's flows."""

from __future__ import annotations

import random

from crux_torch.fabric.ecmp import hashed_choice
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.model import Job

#: Source ports that a connection's own is drawn from (RFC 6335: the dynamic ones).
EPHEMERAL_PORTS = range(49152, 65536)


def hashed_paths(job: Job, topology: Topology, *, seed: int = 0) -> tuple[int, ...]:
    """The candidate that ECMP chooses for each flow of ``job``; each flow is one connection.

    Args:
        job: on its GPUs.
        topology: has its links.
        seed: of the source ports, which have to differ between draws. Another start value of the
            CRC would move all flows alike and leave the collisions as they are.
    """
    ports = random.Random(f"{seed}: ports of {job.name}")
    chosen = []
    for flow in job.flows:
        port = ports.choice(EPHEMERAL_PORTS)
        first = flow.candidates[0]
        src, dst = topology.ends(first[0])[0], topology.ends(first[-1])[1]
        chosen.append(hashed_choice(src, dst, port, len(flow.candidates)))
    return tuple(chosen)
