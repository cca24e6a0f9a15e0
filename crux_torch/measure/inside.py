"""What a job moves inside its hosts: between each GPU and the NIC that its traffic leaves by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crux_torch.fabric.topology import Topology
from crux_torch.measure.sample import RankSample
from crux_torch.measure.traffic import HostPair


def inside_flows(
    matrix: Mapping[HostPair, float],
    samples: Sequence[RankSample],
    topology: Topology,
    *,
    whole_hosts: bool,
) -> dict[HostPair, float]:
    """Bytes of one iteration between GPUs and NICs of the same host.

    NCCL lets every GPU of a job carry an equal share of what the job's collectives send to and get
    from other hosts, each by a nearest NIC; GPUs that have the same nearest NICs share them evenly.
    Where it is not known which GPU a rank of the host has, nothing is told of that host.

    Args:
        matrix: bytes from host to host.
        samples: of the job's ranks.
        topology: a host whose inside it does not describe has no flows.
        whole_hosts: also those whose GPUs all belong to the job; nobody else is met there.
    """
    found: dict[HostPair, float] = {}
    for host in dict.fromkeys(sample.host for sample in samples):
        ranks = [sample for sample in samples if sample.host == host]
        gpus = topology.gpus(host)
        held = [_gpu(sample, gpus) for sample in ranks]
        own = sorted({gpu for gpu in held if gpu is not None})
        if None in held or len(own) < len(ranks) or (len(own) == len(gpus) and not whole_hosts):
            continue
        out = sum(moved for (src, dst), moved in matrix.items() if src == host != dst)
        into = sum(moved for (src, dst), moved in matrix.items() if dst == host != src)
        for gpu, nic in _nics(own, topology):
            for pair, moved in (((gpu, nic), out), ((nic, gpu), into)):
                if moved > 0:
                    found[pair] = moved / len(own)
    return found


def _gpu(sample: RankSample, gpus: Sequence[str]) -> str | None:
    number = sample.device.gpu if sample.device is not None else None
    return gpus[number] if number is not None and number < len(gpus) else None


def _nics(gpus: Sequence[str], topology: Topology) -> list[tuple[str, str]]:
    """Each GPU with its NIC."""
    taken: dict[tuple[str, ...], int] = {}
    pairs = []
    for gpu in gpus:
        nearest = topology.nearest_nics(gpu)
        if nearest:
            turn = taken.get(nearest, 0)
            taken[nearest] = turn + 1
            pairs.append((gpu, nearest[turn % len(nearest)]))
    return pairs
