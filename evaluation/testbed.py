"""The paper's testbed (§6.1, Figure 18) and the jobs that it ran there (§6.2, Figures 19-22).

The paper gives job kinds and GPU counts only. What is left open is decided once, for every case
and scheduler alike:

* A job trains with the global batch of the publication that introduced its model, whatever its
  number of GPUs, and reduces gradients as its reference implementation does (``RECIPES``).
* A job has the same number of GPUs on each of its hosts, and its hosts stand under ToRs of their
  own: the fragmentation of Figure 3, and the layout that §2.2 describes for Figure 7 (GPT on whole
  hosts, BERT on four GPUs a host). Jobs are placed in the order of a case on the fullest hosts
  with room, of equals the first (:func:`place`). Where the contention is to be on network paths a
  job takes PCIe switches as a whole; where it is to be on PCIe, one GPU of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from crux_torch.network.builders import GBPS, TESTBED_CABLING, GpuServer, crux_testbed
from crux_torch.network.topology import Topology
from crux_torch.schedule.model import Cluster, Job
from crux_torch.sim.catalogue import Model, WorkloadError, model
from crux_torch.sim.collectives import build_job


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training of a model on the testbed.

    Attributes:
        model: its name in the catalogue.
        global_batch: samples of one iteration over all GPUs.
        gradient_bytes_per_parameter: as they are reduced.
        gradient_start: share of the compute that is done when the reduction may start.
        source: of the three.
    """

    model: str
    global_batch: int
    gradient_bytes_per_parameter: int
    gradient_start: float
    source: str

    def model_on(self, gpus: int, setup: Setup) -> Model:
        """The model as ``gpus`` GPUs train it."""
        return msgspec.structs.replace(
            model(self.model),
            samples_per_gpu=setup.batch_scale * self.global_batch / gpus,
            gradient_bytes_per_parameter=setup.gradient_bytes_per_parameter
            or self.gradient_bytes_per_parameter,
        )


RECIPES = {
    # Brown et al. (GPT-3), 2020, Table 2.1: the row of 24 layers of width 1024 trains with 0.5M
    # tokens, 256 sequences of 2048. Megatron-LM in bf16 reduces in FP32, once the backward passes
    # of all microbatches are done (megatron/arguments.py: "bfloat16 requires gradient accumulation
    # and all-reduce to be done in fp32"; overlapping is an option of later versions).
    "gpt": Recipe("gpt", 256, 4, 1.0, "Brown et al. 2020, Table 2.1; Megatron-LM, bf16"),
    # Devlin et al., 2019, A.2: 256 sequences of 512 tokens. DeepLearningExamples' run_pretraining
    # .sh reduces in FP16 after accumulation (allreduce_post_accumulation and _fp16 are "true").
    "bert": Recipe("bert", 256, 2, 1.0, "Devlin et al. 2019, A.2; DeepLearningExamples"),
    # He et al., 2016, §3.4: 256 images. DistributedDataParallel with native AMP reduces in FP32
    # while the backward pass runs; from half of the computation, as the paper's Example 2 has it.
    "resnet": Recipe("resnet", 256, 4, 0.5, "He et al. 2016, §3.4; torch DDP with AMP"),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """Assumptions that the sensitivity analysis varies; the defaults are the evaluation's.

    Attributes:
        batch_scale: times the recipes' batch: more computation for the same communication.
        tor_aggregation_links: of 100 Gbps between each ToR and aggregation switch; with 2 a ToR
            has as much upwards as downwards, with 1 half of it.
        nic_Gbps: of each of a host's four NICs.
        connections: flows, each with a path of its own, that a hop of a ring is split into. NCCL
            runs every ring that it finds twice (graph/connect.cc: "duplicate the channels"), each
            over one queue pair (NCCL_IB_QPS_PER_CONNECTION is 1).
        rings_apart: whether each ring of a job moves on its own.
        gradient_start: for all jobs; None: the recipes'.
        gradient_bytes_per_parameter: for all jobs; None: the recipes'.
    """

    batch_scale: float = 1.0
    tor_aggregation_links: int = 2
    nic_Gbps: float = 200.0
    connections: int = 2
    rings_apart: bool = True
    gradient_start: float | None = None
    gradient_bytes_per_parameter: int | None = None

    def topology(self) -> Topology:
        """The testbed's network."""
        cabling = replace(TESTBED_CABLING, tor_aggregation_links=self.tor_aggregation_links)
        return crux_testbed(GpuServer(nic_Bps=self.nic_Gbps * GBPS), cabling)


@dataclass(frozen=True, slots=True)
class Part:
    """One job of a case.

    Attributes:
        kind: its recipe.
        gpus: all of them.
        per_host: of them on each host.
    """

    kind: str
    gpus: int
    per_host: int


@dataclass(frozen=True, slots=True)
class Paper:
    """Figures of the paper: (lowest, highest) in percent.

    Attributes:
        gain_pct: GPU utilisation with Crux against without.
        jct_pct: change of completion time by kind of job.
    """

    gain_pct: tuple[float, float]
    jct_pct: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Case:
    """Jobs that share the testbed: one group of bars of a figure.

    Attributes:
        figure: 19 to 22.
        name: of the case.
        parts: the jobs, in the order in which they are placed.
        on_pcie: whether jobs share PCIe switches.
        paper: what the paper reports for the whole figure.
    """

    figure: int
    name: str
    parts: tuple[Part, ...]
    on_pcie: bool
    paper: Paper


_NETWORK = Paper((8.3, 12.9), {"gpt": (-25.0, -11.0), "bert": (0.0, 3.0)})
_MIXED = Paper((13.9, 13.9), {"gpt": (-18.0,) * 2, "bert": (-15.0,) * 2, "resnet": (2.0,) * 2})
_PCIE = Paper((9.5, 14.8), {"bert": (-33.0, -7.0), "resnet": (1.0, 3.0)})
_GPT = Part("gpt", 32, 8)


def _cases() -> tuple[Case, ...]:
    found = [
        Case(19, f"GPT-32 + {n} BERT-8", (_GPT, *[Part("bert", 8, 4)] * n), False, _NETWORK)
        for n in (1, 2, 3, 4)
    ]
    mixed = (Part("gpt", 48, 8), *[Part("resnet", 8, 4)] * 2, *[Part("bert", 16, 4)] * 2)
    found.append(Case(20, "GPT-48 + 2 ResNet-8 + 2 BERT-16", mixed, False, _MIXED))
    found += [
        Case(
            21,
            f"BERT-16 + {n} ResNet-4",
            (Part("bert", 16, 4), *[Part("resnet", 4, 2)] * n),
            True,
            _PCIE,
        )
        for n in (1, 2, 3, 4)
    ]
    found += [
        Case(22, f"ResNet-8 + BERT-{g}", (Part("resnet", 8, 4), Part("bert", g, 4)), True, _PCIE)
        for g in (8, 16, 24)
    ]
    return tuple(found)


#: Figures 19 to 22. Up to four of the smaller jobs find room beside the large one's hosts.
CASES = _cases()


def place(case: Case, topology: Topology) -> list[tuple[str, ...]]:
    """The GPUs of every job of ``case``: see this module's rule.

    Raises:
        WorkloadError: a job finds no room.
    """
    below: dict[str, list[str]] = {}
    for edge in topology.edges:
        if topology.nodes[edge.dst].kind == "tor" and (host := topology.host_of(edge.src)):
            hosts = below.setdefault(edge.dst, [])
            if host not in hosts:
                hosts.append(host)
    order = {host: i for i, host in enumerate(topology.hosts)}
    free = {host: _in_turn(topology, host, case.on_pcie) for host in topology.hosts}
    placed = []
    for part in case.parts:
        wanted = part.gpus // part.per_host
        with_room = [
            min(fitting, key=lambda h: len(free[h]))
            for hosts in below.values()
            if (fitting := [h for h in hosts if len(free[h]) >= part.per_host])
        ]
        chosen = sorted(
            sorted(with_room, key=lambda h: len(free[h]))[:wanted], key=order.__getitem__
        )
        if len(chosen) < wanted:
            raise WorkloadError(
                f"{case.name}: no room for {part.kind} of {part.gpus} GPUs: {wanted} ToRs with "
                f"{part.per_host} free GPUs on a host are needed, {len(chosen)} have them"
            )
        gpus: list[str] = []
        for host in chosen:
            gpus += sorted(free[host][: part.per_host])
            free[host] = free[host][part.per_host :]
        placed.append(tuple(gpus))
    return placed


def _in_turn(topology: Topology, host: str, on_pcie: bool) -> list[str]:
    """A host's GPUs in the order in which jobs take them."""
    gpus = topology.gpus(host)
    if not on_pcie:
        return list(gpus)
    switches: dict[tuple[str, ...], list[str]] = {}
    for gpu in gpus:
        switches.setdefault(topology.nearest_nics(gpu), []).append(gpu)
    return [gpu for row in zip(*switches.values(), strict=True) for gpu in row]


def jobs_of(case: Case, topology: Topology, setup: Setup) -> tuple[Job, ...]:
    """The jobs of ``case`` on their GPUs, named ``gpt0``, ``bert0``, ``bert1`` and so on."""
    count: dict[str, int] = {}
    jobs = []
    for part, gpus in zip(case.parts, place(case, topology), strict=True):
        recipe = RECIPES[part.kind]
        number = count[part.kind] = count.get(part.kind, -1) + 1
        start = recipe.gradient_start if setup.gradient_start is None else setup.gradient_start
        jobs.append(
            build_job(
                f"{part.kind}{number}",
                recipe.model_on(part.gpus, setup),
                gpus,
                topology,
                gradient_start=start,
                connections=setup.connections,
                apart=setup.rings_apart,
            )
        )
    return tuple(jobs)


def cluster_of(jobs: Sequence[Job], topology: Topology) -> Cluster:
    """The jobs with the links that they could use."""
    flows = [flow for job in jobs for flow in job.flows]
    links = {link for flow in flows for path in flow.candidates for link in path}
    return Cluster({link: topology.capacity_Bps[link] for link in sorted(links)}, tuple(jobs))
