"""The models of §6.3, and the small cases of §4.4: few enough choices to enumerate the optimum."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from crux_torch.network.builders import GBPS, Cabling, GpuServer, two_layer_clos
from crux_torch.network.topology import Topology
from crux_torch.schedule.model import Cluster, Flow, Job
from crux_torch.sim.catalogue import MODELS, Model, WorkloadError
from crux_torch.sim.collectives import build_job

OPEN = ("bert", "gpt", "resnet", "nmt", "multi-interests")
VARIANTS = ("bert-128", "gpt-7b", "resnet-152", "nmt-base", "multi-interests-large")
STAND_INS = ("ctr", "transformer-nlp")
PAPER_MODELS = tuple(m for m in MODELS.values() if m.name in OPEN + VARIANTS + STAND_INS)
JOBS = 5
AGGREGATIONS = 2
HOSTS = range(10, 21)
TORS = range(2, 5)
#: Figure 18's rates: NICs of 200 Gbps, links between ToR and aggregation switches of 100 Gbps.
_SERVER = GpuServer(nics=1, pcie_switches=1, nic_Bps=200 * GBPS)
_CABLING = Cabling(tor_aggregation_Bps=100 * GBPS)
#: The models of §6.3 that only reduce gradients. The others exchange embeddings between all pairs
#: of hosts, a flow for each pair: too many choices of paths to enumerate.
RING_MODELS = tuple(m for m in PAPER_MODELS if not m.exchange_bytes_per_sample)


@dataclass(frozen=True, slots=True)
class SmallCase:
    """Five jobs on a two-layer Clos network.

    Attributes:
        seed: that it was drawn from.
        hosts: of 8 GPUs each.
        tors: ToR switches; there are two aggregation switches.
        cluster: its jobs; each has one flow, whose candidate i goes through aggregation switch i.
        default_path: what ECMP's hash gives to each job.
    """

    seed: int
    hosts: int
    tors: int
    cluster: Cluster
    default_path: dict[str, tuple[int, ...]]


def draw_case(seed: int) -> SmallCase:
    """Case ``seed``: the same one on any machine.

    Hosts (10 to 20) and ToRs (2 to 4) are drawn evenly. Five different models of §6.3 train on two
    hosts each; every host that is left goes to a job drawn evenly, and hosts are given out at
    random, as by the paper's "none" job scheduler. A draw in which no two jobs can meet, whatever
    paths they take, is replaced by the next; nothing else is left out.
    """
    rng = random.Random(f"small case {seed}")
    while True:
        hosts, tors = rng.choice(HOSTS), rng.choice(TORS)
        topology = two_layer_clos(hosts, tors, AGGREGATIONS, _SERVER, _CABLING)
        sizes = [2] * JOBS
        for _ in range(hosts - 2 * JOBS):
            sizes[rng.randrange(JOBS)] += 1
        shuffled = rng.sample(range(hosts), hosts)
        jobs = []
        for model, size in zip(rng.sample(RING_MODELS, JOBS), sizes, strict=True):
            mine, shuffled = sorted(shuffled[:size]), shuffled[size:]
            jobs.append(ring_job(model, [f"h{host}" for host in mine], topology))
        if _can_meet(jobs):
            break
    links = sorted({link for job in jobs for f in job.flows for p in f.candidates for link in p})
    capacity_Bps = {link: topology.capacity_Bps[link] for link in links}
    hashed = {job.name: tuple(rng.randrange(len(f.candidates)) for f in job.flows) for job in jobs}
    return SmallCase(seed, hosts, tors, Cluster(capacity_Bps, tuple(jobs)), hashed)


def ring_job(model: Model, hosts: Sequence[str], topology: Topology) -> Job:
    """The job that trains ``model`` on all GPUs of ``hosts``, with one choice to make.

    Its rings move the same bytes over every link between switches that they cross; they go
    through one aggregation switch, so that a choice of paths is a choice of switch for each job.
    A host's own links belong to one job and are faster, and nothing depends on them: only links
    between switches are kept.

    Raises:
        WorkloadError: the job's bytes differ from link to link.
    """
    gpus = [gpu for host in hosts for gpu in _gpus(host)]
    job = build_job(model.name, model, gpus, topology)
    through = []
    for switch in range(AGGREGATIONS):
        moved: dict[str, float] = {}
        for flow in job.flows:
            path = next((p for p in flow.candidates if _crosses(p, f"agg{switch}")), ())
            for link in path:
                if topology.layer(link) == "tor-aggregation":
                    moved[link] = moved.get(link, 0.0) + flow.bytes
        through.append(moved)
    amounts = {amount for moved in through for amount in moved.values()}
    if not amounts:
        return Job(job.name, job.gpus, job.flops, job.compute_s, (), job.bursts)
    most = max(amounts)
    if most - min(amounts) > 1e-9 * most:
        raise WorkloadError(f"{model.name} moves more bytes over some links than over others")
    flow = Flow(most, tuple(tuple(sorted(moved)) for moved in through))
    return Job(job.name, job.gpus, job.flops, job.compute_s, (flow,), job.bursts)


def _gpus(host: str) -> list[str]:
    return [f"{host}/gpu{i}" for i in range(_SERVER.gpus)]


def _crosses(path: Sequence[str], switch: str) -> bool:
    return any(switch in link.split("->") for link in path)


def _can_meet(jobs: Sequence[Job]) -> bool:
    return any(
        not set(p).isdisjoint(q)
        for one, other in combinations(jobs, 2)
        for f in one.flows
        for g in other.flows
        for p in f.candidates
        for q in g.candidates
    )
