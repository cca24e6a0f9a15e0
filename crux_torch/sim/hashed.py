"""The paths that ECMP's hash gives to a job's flows."""

from __future__ import annotations

import random

from crux_torch.fabric.ecmp import EcmpHash, FiveTuple
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.model import Job

#: Source ports that a connection's own is drawn from (RFC 6335: the dynamic ones).
EPHEMERAL_PORTS = range(49152, 65536)


def hashed_paths(
    job: Job, topology: Topology, *, seed: int = 0, hash: EcmpHash | None = None
) -> tuple[int, ...]:
    """The candidate that each flow of ``job`` takes by itself, a connection for every flow.

    Args:
        job: on its GPUs.
        topology: where its links are.
        seed: of the source ports. It is the ports that have to differ between draws: another
            start value of a CRC moves all flows alike, and collisions stay what they were.
        hash: of the switches; default: CRC32 of the 5-tuple.
    """
    hash = hash or EcmpHash()
    ports = random.Random(f"{seed}: ports of {job.name}")
    chosen = []
    for flow in job.flows:
        port = ports.choice(EPHEMERAL_PORTS)
        first = flow.candidates[0]
        if not first:
            chosen.append(0)
            continue
        src, dst = topology.ends(first[0])[0], topology.ends(first[-1])[1]
        chosen.append(hash.choose(FiveTuple(src, dst, src_port=port), flow.candidates))
    return tuple(chosen)
