"""The scheduler's view of job records and topology.

Levels are those that mean the same DSCP for all jobs (:func:`agreed`), and jobs with bounded claims
meet on links (:func:`plan_inputs`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from types import MappingProxyType

from crux_torch.agreement.bounds import (
    MAX_PERIOD_S,
    claimed_devices,
    claimed_flops,
    holdings,
    least_transfer_s,
)
from crux_torch.agreement.records import JobRecord
from crux_torch.agreement.seen_network import is_seen, network_in
from crux_torch.files import read_file
from crux_torch.logs import WarnOnce
from crux_torch.measure.profile import HostFlow, JobProfile
from crux_torch.network.discover.fragment import SeenPair
from crux_torch.network.discover.seen_paths import taken_candidate
from crux_torch.network.loaders import MAX_FILE_BYTES, dump_yaml, load_topology, parse_yaml
from crux_torch.network.topology import CANDIDATE_LIMIT, Topology
from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, Path
from crux_torch.schedule.papers.intensity import unrouted_transfer_times_s
from crux_torch.settings import Marks

_log = logging.getLogger(__name__)


class TopologyReader:
    """Reads this job's topology file and the store's topology, usually of the same bytes.

    Thread safety: what was read last is replaced at once, so two threads read twice at worst.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes | None, Topology | None] = (None, None)
        self._warn = WarnOnce(_log)

    def load(self, path: FilePath) -> tuple[Topology, bytes]:
        """Return the topology in a file, and its bytes for the shared store: always YAML.

        Raises:
            OSError: the file can't be read.
            ValueError: it is no topology (:class:`~crux_torch.network.topology.TopologyError`).
        """
        if path.suffix.lower() == ".csv":
            topology = load_topology(path)
            raw = dump_yaml(topology).encode()
        else:
            raw = read_file(path, MAX_FILE_BYTES)
            topology = parse_yaml(raw.decode(), str(path))
        self._last = raw, topology
        return topology, raw

    def read(self, raw: bytes | None) -> Topology | None:
        """Return the topology in ``raw``; None without, or with one warning if it is unreadable.

        All leaders read the same bytes, so all of them plan alike.
        """
        if raw is None:
            return None
        if raw != self._last[0]:
            topology = None
            try:
                topology = network_in(raw) if is_seen(raw) else parse_yaml(raw.decode())
            except (ValueError, RecursionError) as error:
                self._warn("topology", f"planning without the cluster's topology: {error}")
            self._last = raw, topology
        return self._last[1]


@dataclass(frozen=True, slots=True)
class Agreed:
    """The levels that the planner may give.

    Attributes:
        levels: that it may assign, ascending; level 0 alone where a level has no effect.
        unmarked: jobs whose traffic is not marked, and the level that their packets are on.
        why: why no level has an effect; empty if levels have.
    """

    levels: Sequence[int]
    unmarked: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


Agree = Callable[[Sequence[JobRecord], Topology | None], Agreed]


def agreed(records: Sequence[JobRecord], topology: Topology | None) -> Agreed:
    """Return the levels that the jobs' DSCP maps allow; a ``qos`` of the topology decides.

    A job without a map, or with another than the topology's, is planned as what it is: traffic of
    the network's default class. If maps differ and no ``qos`` says whose is right, no job gets a
    level: one job's high level may be another's low one.
    """
    planned = [record for record in records if record.profile is not None]
    stated = {record.marks for record in planned if record.marks and record.marks.are_sound}
    operators = topology.qos.marks if topology is not None and topology.qos is not None else None
    if operators is not None:
        stated &= {operators}
    if len(stated) != 1:
        return Agreed((0,), why=_why_not(planned, operators))
    (marks,) = stated
    low = _default_level(marks)
    unmarked = {record.job: low for record in planned if record.marks != marks}
    return Agreed(marks.plan_levels, unmarked)


def every_level(_records: Sequence[JobRecord], _topology: Topology | None) -> Agreed:
    """Return all levels, whatever the jobs say."""
    return Agreed(range(64))


def _default_level(marks: Marks) -> int:
    """Return the level whose DSCP value is 0 if plans use that level; else the lowest one."""
    levels = marks.plan_levels
    values = marks.tcp or marks.rdma
    return next((n for n in levels if n < len(values) and values[n] == 0), levels[0])


def _why_not(planned: Sequence[JobRecord], operators: Marks | None) -> str:
    if operators is not None:
        return "no job has the topology's qos as its DSCP map"
    by_map: dict[Marks, str] = {}
    for record in planned:
        if record.marks and record.marks.are_sound:
            by_map.setdefault(record.marks, record.job)
    if not by_map:
        return "no DSCP map is given (CRUX_DSCP_MAP, or qos in the topology)"
    first, second = list(by_map.values())[:2]
    return f"jobs have different DSCP maps: {first} and {second}"


#: The link that all flows share whose place in the network is not known.
UNLOCATED = "unlocated"
#: Its capacity (100 Gb/s). It counts only for a job whose t_j was not measured either.
UNLOCATED_BPS = 12.5e9
#: What a flow moves at least, if it moves anything: keeps what is computed of claims finite.
MIN_FLOW_BYTES = 1.0
#: Flows of all jobs together that are planned one by one, those of the smallest jobs first.
MAX_PLANNED_FLOWS = 1 << 15
#: Candidates of all flows together; the more flows, the fewer each has.
MAX_CANDIDATES = 1 << 20


def plan_inputs(
    records: Sequence[JobRecord],
    topology: Topology | None,
    limit: int = CANDIDATE_LIMIT,
    weights: Mapping[str, float] = MappingProxyType({}),
) -> Cluster:
    """Return the profiled jobs, and the capacities of the links that they share.

    - A flow between hosts that the topology knows gets that topology's candidates.
    - All other flows between hosts cross one link, ``unlocated``. So jobs whose place is unknown
      are ordered against each other and against nobody else. Without a topology these are all
      flows: the link stands for one core that everyone shares. In a network that nobody gave, these
      are the flows between hosts whose paths were not seen yet.
    - A flow between a GPU and a NIC of one host takes the first path between the two if the
      topology describes the host's inside, and counts for nothing otherwise.
    - If t_j was measured, or if a path is not known, the profile's t_j stands: the flows' bytes
      are scaled in one proportion until the links give that time.
    - W_j, t_j and the number of devices are bounded by :func:`claimed_flops`,
      :func:`least_transfer_s` and :func:`claimed_devices`, so that no tenant raises its own
      priority. Of hosts that records claim beyond their devices, what
      :func:`~crux_torch.agreement.bounds.holdings` gives to each counts.
    - Flows beyond ``MAX_PLANNED_FLOWS`` count as one over ``unlocated`` for each job.
    - A job has the parts of its profile if all its paths are known; otherwise its traffic is one.

    Args:
        records: live, in any order, no two of one name.
        limit: of the candidates of a pair, see :func:`candidate_limit`.
        weights: of jobs other than 1: W_j, as bounded, is multiplied by it.
    """
    known = frozenset(topology.hosts if topology is not None else ())
    capacity_Bps = dict(topology.capacity_Bps) if topology is not None else {}
    capacity_Bps[UNLOCATED] = UNLOCATED_BPS

    def between(src: str, dst: str, job: str) -> tuple[Path, ...]:
        if src == dst:
            return ((),)
        if topology is None or not known.issuperset((src, dst)):
            return ((UNLOCATED,),)
        view = topology.as_seen_by(job)
        return view.candidate_paths(src, dst, limit) if view.sees(src, dst) else ((UNLOCATED,),)

    planned = _planned(records)
    held = holdings(records, topology).devices
    jobs = []
    for record in sorted(records, key=lambda r: r.job):
        profile = record.profile
        if profile is None:
            continue
        inside = _inside_flows(profile, topology)
        flows: tuple[Flow, ...] = (
            *(Flow(_moved(f), between(f.src, f.dst, record.job)) for f in profile.flows),
            *(flow for flow, _ in inside),
        )
        parts = (*(f.part for f in profile.flows), *(part for _, part in inside))
        if record.job not in planned:
            flows = (Flow(math.fsum(map(_moved, profile.flows)), ((UNLOCATED,),)),)
        placed = record.job in planned and all(flow.candidates != ((UNLOCATED,),) for flow in flows)
        job = Job(
            name=record.job,
            gpus=claimed_devices(record, topology, held.get(record.job)),
            flops=claimed_flops(record, profile, topology, held.get(record.job))
            * weights.get(record.job, 1.0),
            compute_s=profile.compute_s,
            flows=flows,
            bursts=_bursts(profile),
            period_s=min(profile.period_s, MAX_PERIOD_S),
            parts=parts if placed and len(set(parts)) > 1 else (),
        )
        measured = profile.t_source == "measured" or topology is None or not placed
        told_s = profile.t_s if measured else 0.0
        jobs.append(_scaled(job, capacity_Bps, told_s, least_transfer_s(profile)))
    return Cluster(capacity_Bps, tuple(jobs))


def paths_taken(
    cluster: Cluster,
    records: Sequence[JobRecord],
    topology: Topology | None,
    limit: int = CANDIDATE_LIMIT,
    *,
    whole: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Return the candidates that jobs' flows take while they are left to the network.

    A flow that was not seen has its first candidate.

    Args:
        cluster, records, topology, limit: result and arguments of :func:`plan_inputs`.
        whole: leave out jobs with a flow that has a choice and was not seen.
    """
    if topology is None:
        return {}
    seen = {record.job: record for record in records if record.seen}
    planned = _planned(records)
    found = {}
    for job in cluster.jobs:
        record = seen.get(job.name)
        if record is None or record.profile is None or job.name not in planned:
            continue
        by_hosts: dict[tuple[str, str], list[SeenPair]] = {}
        for pair in record.seen or ():
            by_hosts.setdefault((pair.src, pair.dst), []).append(pair)
        inside = len(job.flows) - len(record.profile.flows)
        hosts = [*((f.src, f.dst) for f in record.profile.flows), *[("", "")] * inside]
        taken = [
            taken_candidate(by_hosts.get(pair, ()), topology.as_seen_by(job.name), limit)
            if len(flow.candidates) > 1
            else 0
            for flow, pair in zip(job.flows, hosts, strict=True)
        ]
        if not (whole and None in taken):
            found[job.name] = tuple(index or 0 for index in taken)
    return found


def candidate_limit(records: Sequence[JobRecord]) -> int:
    """Return the candidates of a flow: a power of two, so that a job more changes little.

    All flows together have ``MAX_CANDIDATES`` at most, and each has at least 32.
    """
    planned = _planned(records)
    flows = sum(len(r.profile.flows) for r in records if r.profile and r.job in planned)
    return min(CANDIDATE_LIMIT, 1 << (MAX_CANDIDATES // max(flows, 1)).bit_length() - 1)


def _planned(records: Sequence[JobRecord]) -> frozenset[str]:
    """Return the jobs whose flows are planned one by one: the smallest, within the limit."""
    sizes = sorted(
        (len(r.profile.flows) + len(r.profile.inside), r.job) for r in records if r.profile
    )
    total = itertools.accumulate(size for size, _ in sizes)
    within = zip(sizes, total, strict=True)
    return frozenset(job for (_, job), so_far in within if so_far <= MAX_PLANNED_FLOWS)


def _inside_flows(profile: JobProfile, topology: Topology | None) -> list[tuple[Flow, int]]:
    """Return the flows within hosts, each on the one path that it can take, and their parts."""
    if topology is None:
        return []
    return [
        (Flow(_moved(flow), topology.candidate_paths(flow.src, flow.dst)[:1]), flow.part)
        for flow in profile.inside
        if topology.nodes.keys() >= {flow.src, flow.dst}
        and topology.host_of(flow.src) is not None
        and topology.host_of(flow.src) == topology.host_of(flow.dst)
    ]


def _moved(flow: HostFlow) -> float:
    return max(flow.bytes, MIN_FLOW_BYTES) if flow.bytes > 0 else 0.0


def _bursts(profile: JobProfile) -> tuple[Burst, ...]:
    """Return the profile's bursts in ascending order, with shares that sum to 1.

    Together they take no longer than the iteration that they were measured in.
    """
    total = math.fsum(b.share for b in profile.bursts)
    if total <= 0:
        return (Burst(1.0, 1.0),)
    ordered = sorted(profile.bursts, key=lambda b: (b.at, b.share, b.least_s))
    claimed_s = math.fsum(b.least_s for b in ordered)
    cut = min(1.0, min(profile.period_s, MAX_PERIOD_S) / claimed_s) if claimed_s else 0.0
    return tuple(Burst(b.at, b.share / total, cut * b.least_s) for b in ordered)


def _scaled(job: Job, capacity_Bps: Mapping[str, float], t_s: float, least_s: float) -> Job:
    """Scale the job's bytes to need ``t_s`` if that is known, and ``least_s`` at least."""
    # Of the whole cluster's links it would take as long for each job as for all of them.
    sets = {id(flow.candidates): flow.candidates for flow in job.flows}.values()
    links = dict.fromkeys(link for paths in sets for path in paths for link in path)
    own = Cluster({link: capacity_Bps[link] for link in links}, (job,))
    alone_s = float(unrouted_transfer_times_s(arrays_of(own))[0])
    if alone_s <= 0:
        return job
    t_s = max(t_s or alone_s, least_s)
    if t_s == alone_s:
        return job
    factor = t_s / alone_s
    return replace(job, flows=tuple(replace(f, bytes=f.bytes * factor) for f in job.flows))
