"""Jobs of CASSINI's evaluation (NSDI '24, §5.1 and Table 3), its testbed, and its kinds of traces.

The paper's traces are not published. Its text fixes the models, batches, numbers of workers and
iterations, and the load; the rest is assumed:

- **Gradients** are as large as Table 3's memory, 4 bytes a parameter: that is the size of the VGG
  and ResNet models. Of a range, the lower end. FLOPs are the catalogue's by that many parameters.
- **Images**: with ``figure 3`` all image models take as much less time as brings VGG16 at the batch
  1400 of Table 2 to the 255 ms of Figure 3; with ``catalogue`` they train on images of 224 pixels.
  Batches are drawn from Table 3's range; with ``least batches`` all are its least, and images as
  with ``figure 3``.
- **DLRM** is the catalogue's: it moves megabytes an iteration, and its Table 3 memory does not.
- **Model parallel** GPTs have two pipeline stages, as GPT-2 in Figure 1(b), and workers in pairs.
- **Work**: a job's batch is its workers' batches together. With fewer workers than it asked for it
  needs as many more iterations.
- **Network**: 13 switches and 48 cables, 2:1, are 6 ToRs of four servers, 6 aggregation switches
  and a core. The six servers of Figure 16 stand in pairs below 3 ToRs, with half the rate up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import msgspec

from crux_torch.network.builders import GBPS, Cabling, GpuServer, grouped_clos, two_layer_clos
from crux_torch.network.topology import Topology
from crux_torch.sim.catalogue import Model, model
from crux_torch.sim.placement import Placer

MIB = float(1 << 20)
LINK_BPS = 50 * GBPS
#: Memory in MB and batches a GPU, by the catalogue's name of each model (Table 3).
TABLE_3: dict[str, tuple[float, int, int]] = {
    "vgg11": (507, 512, 1800),
    "vgg16": (528, 512, 1800),
    "vgg19": (549, 512, 1800),
    "wide-resnet-101": (243, 256, 1200),
    "resnet": (98, 256, 1800),
    "bert": (450, 8, 32),
    "roberta": (800, 8, 32),
    "camembert": (266, 8, 32),
    "xlm": (1116, 4, 32),
    "gpt-1": (650, 32, 80),
    "gpt-2": (1623, 32, 80),
    "gpt": (1952, 16, 48),
    "ctr": (890, 16, 1024),
}
IMAGES = ("vgg11", "vgg16", "vgg19", "wide-resnet-101", "resnet")
#: The models that Figures 12 and 14 train, in parts.
MODEL_PARALLEL = ("gpt-1", "gpt-2", "gpt", "ctr")
#: Computation of image models: see above.
COMPUTE = ("figure 3", "least batches", "catalogue")
#: VGG16's iteration in Figure 3, and its batch there as far as Table 2 tells.
FIGURE_3_S, FIGURE_3_BATCH = 0.255, 1400
#: Workers that a job asks for at most, and its iterations.
MOST_WORKERS, ITERATIONS = 12, (200, 1000)


@dataclass(frozen=True, slots=True)
class StudyJob:
    """One job; it asks for ``workers``, in whole ``unit``, and ends after ``iterations`` on them.

    ``model`` is a name for :func:`study_model`.
    """

    name: str
    model: str
    workers: int
    submit_s: float = 0.0
    iterations: float = inf
    unit: int = 1

    @property
    def kind(self) -> str:
        """The catalogue's name of its model."""
        return self.model.split("/")[0]


def testbed() -> Topology:
    """24 servers with a GPU and a NIC of 50 Gbit/s each (Figure 10)."""
    server = GpuServer(gpus=1, nics=1, pcie_switches=1, nic_Bps=LINK_BPS, nvlink_Bps=0)
    places = {f"h{i}": ("dc", f"pod{i // 8}", f"rack{i // 4}") for i in range(24)}
    return grouped_clos(places, server, Cabling(LINK_BPS, 1, LINK_BPS, 2), 1, 2, 1)


def pairs() -> Topology:
    """Six servers with two GPUs and a NIC of 50 Gbit/s each (Figure 16)."""
    server = GpuServer(gpus=2, nics=1, pcie_switches=1, nic_Bps=LINK_BPS, nvlink_Bps=0)
    return two_layer_clos(6, 3, 1, server, Cabling(LINK_BPS, 1))


@cache
def study_model(name: str) -> Model:
    """The model of a name like ``vgg16/1400/figure 3/1``: batch, computation, pipeline stages."""
    kind, batch, compute, stages = name.split("/")
    found = model(kind)
    flops, parameters = found.flops_per_sample, found.parameters
    if kind != "ctr":
        parameters = TABLE_3[kind][0] * MIB / 4
        flops *= parameters / found.parameters
    if kind in IMAGES and compute != "catalogue":
        flops *= FIGURE_3_S / study_model(f"vgg16/{FIGURE_3_BATCH}/catalogue/1").compute_s
    return msgspec.structs.replace(
        found,
        samples_per_gpu=float(batch),
        flops_per_sample=flops,
        parameters=parameters,
        gradient_bytes_per_parameter=4,
        tensor=1,
        pipeline=int(stages),
    )


def placer_of(topology: Topology) -> Placer:
    """Places the study's models on ``topology``."""
    return Placer(topology, models=study_model)


def poisson(
    kinds: Sequence[str], compute: str, count: int, load: float, placer: Placer, rng: random.Random
) -> list[StudyJob]:
    """``count`` jobs that arrive at random, each kind as likely as any other.

    Args:
        compute: a name of ``COMPUTE``.
        load: mean share of the GPUs that jobs serve, if each has the workers that it asks for and
            the network to itself.
    """
    drawn = []
    for i in range(count):
        kind = rng.choice(kinds)
        unit = unit_of(kind, kinds)
        workers = unit * rng.randint(1, MOST_WORKERS // unit)
        name = drawn_model(kind, compute, unit, rng)
        drawn.append(StudyJob(f"job{i}", name, workers, 0.0, rng.randint(*ITERATIONS), unit))
    gpu_s = sum(
        job.workers * job.iterations * placer.reference(job.model, job.workers).alone_s
        for job in drawn
    )
    gap_s = gpu_s / count / (load * len(placer.cells.gpus))
    now_s, jobs = 0.0, []
    for job in drawn:
        jobs.append(StudyJob(job.name, job.model, job.workers, now_s, job.iterations, job.unit))
        now_s += rng.expovariate(1 / gap_s)
    return jobs


def unit_of(kind: str, kinds: Sequence[str]) -> int:
    """Workers that the study gives ``kind`` at a time, where it trains ``kinds``."""
    return 2 if tuple(kinds) == MODEL_PARALLEL and kind.startswith("gpt") else 1


def drawn_model(kind: str, compute: str, stages: int, rng: random.Random) -> str:
    """A name for :func:`study_model` with one of Table 3's batches."""
    _, least, most = TABLE_3[kind]
    batch = least if compute == "least batches" else rng.randint(least, most)
    return f"{kind}/{batch}/{compute}/{stages}"


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Jobs that are there, then jobs that arrive; of each the kinds that it may be, and workers."""

    topology: Callable[[], Topology]
    there: tuple[tuple[Sequence[str], int], ...]
    arrive: tuple[tuple[str, int], ...]
    kinds: Sequence[str] = tuple(TABLE_3)


_OTHERS = ("vgg11", "vgg16", "vgg19", "wide-resnet-101", "bert", "roberta", "camembert", "xlm")
#: The dynamic traces by the paper's figure. It names those that arrive, and Figure 16's jobs.
DYNAMIC = {
    13: Dynamic(testbed, ((_OTHERS, 5), (_OTHERS, 5), (_OTHERS, 6)), (("ctr", 4), ("resnet", 4))),
    14: Dynamic(
        testbed,
        ((("gpt",), 6), (("gpt-1",), 6), (("gpt-2",), 4)),
        (("gpt-2", 4), ("ctr", 4)),
        MODEL_PARALLEL,
    ),
    16: Dynamic(pairs, ((("xlm",), 3), (("resnet",), 3), (_OTHERS, 3)), (("ctr", 3),)),
}


def dynamic(trace: Dynamic, arrive_s: float, rng: random.Random) -> list[StudyJob]:
    """Jobs of ``trace`` without an end; those that arrive do so at ``arrive_s``."""
    there = [(rng.choice(kinds), workers, 0.0) for kinds, workers in trace.there]
    jobs = []
    for i, (kind, workers, at_s) in enumerate(
        [*there, *((kind, workers, arrive_s) for kind, workers in trace.arrive)]
    ):
        unit = unit_of(kind, trace.kinds)
        name = drawn_model(kind, "figure 3", unit, rng)
        jobs.append(StudyJob(f"job{i}", name, workers, at_s, inf, unit))
    return jobs
