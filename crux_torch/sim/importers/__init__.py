"""Imported workloads as the jobs of a scenario: on the GPUs of one topology."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from crux_torch.measure import traffic
from crux_torch.network.topology import Topology
from crux_torch.schedule.model import Cluster, Flow, Job
from crux_torch.schedule.papers.intensity import part_traffic
from crux_torch.sim.collectives import (
    ALLTOALL_PEERS,
    PATHS_OF_FLOW,
    JoinedPaths,
    Transfers,
    contended_by_mover,
    hashed_paths,
)
from crux_torch.sim.importers.chakra import read_chakra
from crux_torch.sim.importers.chrome import read_chrome
from crux_torch.sim.importers.goal import read_goal
from crux_torch.sim.importers.simai import read_simai
from crux_torch.sim.importers.workload import (
    ImportedJob,
    ImportFailed,
    in_bursts,
    naming,
    text_of,
    without_mark,
)
from crux_torch.sim.placement import PLACEMENTS, Allocation, Request, cells
from crux_torch.sim.play import sprayed
from crux_torch.sim.scenario import Scenario, ScenarioJob, ScenarioLink, TrafficBurst

Files = Mapping[str, bytes]
#: A job with more parts moves as one transfer. The few largest apart and the rest as one would be
#: worse: links are shared by parts, so the rest would get too little.
MOST_PARTS = 256


def _one(read: Callable[[str], ImportedJob]) -> Callable[[Files], ImportedJob]:
    """A reader of text for a job of one file."""

    def read_file(files: Files) -> ImportedJob:
        if len(files) != 1:
            raise ImportFailed(f"got {len(files)} files, expected one")
        ((name, held),) = files.items()
        with naming(name):
            return read(text_of(held))

    return read_file


#: Readers by the name of the format.
FORMATS: dict[str, Callable[[Files], ImportedJob]] = {
    "simai": _one(read_simai),
    "chrome": read_chrome,
    "chakra": read_chakra,
    "goal": _one(read_goal),
}


def format_of(files: Files) -> str:
    """The name of the format in which the first of the files begins, a key of ``FORMATS``.

    Raises:
        ImportFailed: there is no file, or it is of no format that is known.
    """
    for name, held in files.items():
        held = without_mark(held)
        start = held[: 1 << 16].lstrip()
        if name.endswith((".et", ".et.gz")):
            return "chakra"
        if start.startswith(b"HYBRID_"):
            return "simai"
        if start.startswith((b"num_ranks", b"//", b"/*")):
            return "goal"
        if start.startswith(b"{"):
            # A Chrome trace is one object; Chakra's JSON begins with the trace's metadata.
            if b'"traceEvents"' in held:
                return "chrome"
            if b'"nodes"' in held:
                raise ImportFailed(
                    f"{name}: got an execution trace of PyTorch, expected one of Chakra, as "
                    "chakra_trace_link and chakra_converter make it of that"
                )
            return "chakra"
        known = ", ".join(FORMATS)
        raise ImportFailed(f"{name}: its format is not known, expected one of {known}")
    raise ImportFailed("there are no files")


def scenario_of(
    jobs: Mapping[str, ImportedJob],
    topology: Topology,
    *,
    placement: str,
    bursts: int,
    seed: int,
    horizon_s: float,
    flops_per_s: float = 1e14,
    spray: bool = False,
) -> tuple[Scenario, dict[str, tuple[str, ...]]]:
    """The jobs on one network, on the paths that its hash gives them.

    Each hop is one connection. As for schedulers, each burst carries the same share of the bytes on
    every link of each part of a job. If the file names the process groups, their rings and
    all-to-alls and the sends between each two hosts are parts; otherwise there is one.

    Args:
        placement: a name of ``PLACEMENTS``; jobs get GPUs in their order.
        bursts: most bursts of an iteration, see ``workload.in_bursts``.
        seed: of random placement and of source ports.
        flops_per_s: what a GPU computes, which the workloads don't tell. Only jobs' ratios matter.
        spray: the network sprays packets over all paths of a flow, and hashes no flow onto one.

    Returns:
        The scenario, and notes on jobs that it has more coarsely than their files.

    Raises:
        ImportFailed: the topology has too few GPUs for a job.
    """
    allocation = Allocation(cells(topology))
    paths = JoinedPaths(topology, PATHS_OF_FLOW)
    placed: dict[str, ScenarioJob] = {}
    notes: dict[str, tuple[str, ...]] = {}
    for name, job in jobs.items():
        request = Request(name, job.ranks, job.compute_s)
        rng = random.Random(f"{seed}: {name}")
        gpus = PLACEMENTS[placement](request, allocation, rng)
        if gpus is None:
            raise ImportFailed(
                f"{name}: needs {job.ranks} GPUs, of {len(allocation.root.gpus)} of the topology "
                f"{len(allocation.free())} are free"
            )
        allocation.take(request, gpus)
        movers: dict[Hashable, Transfers] = {}
        sent_at: defaultdict[float, float] = defaultdict(float)
        for one in in_bursts(job.collectives, bursts):
            found = contended_by_mover(one, gpus, topology, ALLTOALL_PEERS, apart=job.apart)
            for mover, moved in found.items():
                if job.apart and one.op == "send":
                    ((src, dst),) = moved
                    mover = topology.host_of(src) or src, topology.host_of(dst) or dst
                traffic.add_flows(movers.setdefault(mover, {}), moved)
                sent_at[one.at] += sum(moved.values())
        parts = list(movers.values())
        if len(parts) > MOST_PARTS:
            notes[name] = (
                f"it has {len(parts)} parts that move on their own, more than {MOST_PARTS}: all "
                "moves as one transfer",
            )
            parts = [_sum(parts)]
        flows = tuple(Flow(size, paths(*ends)) for part in parts for ends, size in part.items())
        numbers = tuple(number for number, part in enumerate(parts) for _ in part)
        full = Job(name, job.ranks, 0.0, job.compute_s, flows, parts=numbers)
        if spray:
            (full,) = sprayed(Cluster({}, (full,))).jobs
        on_links = part_traffic(full, hashed_paths(full, topology, seed=seed))
        whole = sum(sent_at.values())
        placed[name] = ScenarioJob(
            gpus=job.ranks,
            compute_s=job.compute_s,
            flops=flops_per_s * job.compute_s * job.ranks,
            bursts=[
                TrafficBurst(at=at, traffic=_scaled(on_links, share / whole))
                for at, share in sorted(sent_at.items())
                if share
            ],
        )
    used = sorted(
        {
            link
            for job in placed.values()
            for burst in job.sent
            for part in burst.parts
            for link in part
        }
    )
    links = {link: ScenarioLink(capacity_Bps=topology.capacity_Bps[link]) for link in used}
    return Scenario(links=links, jobs=placed, horizon_s=horizon_s), notes


def _sum(parts: Iterable[Transfers]) -> Transfers:
    total: Transfers = {}
    for part in parts:
        traffic.add_flows(total, part)
    return total


def _scaled(
    parts: Sequence[Mapping[str, float]], share: float
) -> dict[str, float] | list[dict[str, float]]:
    """A share of the bytes on each link, of each part where there are several."""
    scaled = [{link: moved * share for link, moved in part.items()} for part in parts]
    return scaled if len(scaled) > 1 else scaled[0]
