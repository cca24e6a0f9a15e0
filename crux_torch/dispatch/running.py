"""What runs in a cluster now, as its shared store has it, and scores beside that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from crux_torch.control.agreed_marks import agreed
from crux_torch.control.claims import DeviceClaims
from crux_torch.control.inputs import candidate_limit, plan_inputs
from crux_torch.control.operator import OperatorSettings, heeding
from crux_torch.control.records import JobRecord
from crux_torch.control.registry import Registry
from crux_torch.control.topology_reader import TopologyReader
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Ints, count
from crux_torch.dispatch.contention import Contention
from crux_torch.dispatch.newcomer import like, star, typical
from crux_torch.dispatch.predictor import Samples
from crux_torch.fabric.topology import Topology
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.scheduler import LIVE
from crux_torch.store.endpoint import open_store

TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Running:
    """A look at a cluster.

    Attributes:
        records: of the live jobs.
        topology: the published one; None without.
        taken: by host, the devices (by number, as tables name them) that launchers claim, and for
            which job.
        operator: what the cluster's operator has set.
    """

    records: tuple[JobRecord, ...]
    topology: Topology | None
    taken: Mapping[str, Mapping[str, str]]
    operator: OperatorSettings = field(default_factory=OperatorSettings)


def look(endpoint: str, secret: str, cluster: str, group: str = "") -> Running:
    """Read the store once.

    Raises:
        StoreError: it can't be reached or does not answer in time.
        SettingsError: ``endpoint``, ``secret`` or ``group`` can't be used.
    """
    store = open_store(endpoint, secret, group, timeout_s=TIMEOUT_S)
    try:
        view = Registry(store, cluster).look()
        claims = DeviceClaims(store, cluster).taken()
    finally:
        store.close()
    taken = {
        host: {str(claim.index): claim.job for claim in devices.values()}
        for host, devices in claims.items()
    }
    return Running(view.jobs, TopologyReader().read(view.topology), taken, view.operator)


def measured_by_jobs(
    cluster: DispatchCluster, running: Running, *, claimed: bool = False
) -> Samples:
    """What the running jobs' profiles say of the hosts' links: live samples.

    Over each hop of a ring go the same bytes, in the time that the job's transfers took while it
    was measured alone. That is at most the rate of each link on the way. Of a job whose devices
    nobody claims, the first of each host stand for them, since a fit looks at the hosts alone.

    Args:
        claimed: leave out the jobs whose devices are not all known by claims.
    """
    numbers = {table.host: i for i, table in enumerate(cluster.tables)}
    choices, rates = [], []
    for record in running.records:
        profile = record.profile
        if profile is None or not profile.measured_alone or profile.t_measured_s <= 0:
            continue
        largest = max((flow.bytes for flow in profile.flows), default=0.0)
        if not largest or not numbers.keys() >= set(record.hosts):
            continue
        row = np.zeros(len(numbers), np.int64)
        for host in record.hosts:
            table, jobs = cluster.tables[numbers[host]], running.taken.get(host, {})
            mine = [i for i, name in enumerate(table.devices) if jobs.get(name) == record.job]
            row[numbers[host]] = sum(1 << i for i in mine) or not claimed
        if claimed and count(row) != record.gpus:
            continue
        choices.append(row)
        rates.append(largest / profile.t_measured_s)
    return Samples(np.array(choices).reshape(-1, len(numbers)), np.array(rates))


def without_taken(cluster: DispatchCluster, free: Ints, running: Running) -> Ints:
    """``free`` less the devices that launchers claim."""
    left: Ints = free.copy()
    for number, table in enumerate(cluster.tables):
        for bit, device in enumerate(table.devices):
            if device in running.taken.get(table.host, {}):
                left[number] &= ~(1 << bit)
    return left


def contention(
    cluster: DispatchCluster,
    running: Running,
    topology: Topology | None = None,
    model: str | None = None,
    policy: str = "crux",
) -> Contention | None:
    """Scores beside the running jobs; None where no record tells of any traffic.

    The plan keeps to what the operator has set: a drained job has the lowest level, and no say.

    Args:
        topology: in place of the published one; without either, each host's link to one switch.
        model: the running job that the newcomer is like; by default the median one.
        policy: what computes the cluster's plan, a key of ``LIVE``.

    Raises:
        DispatchError: ``model`` is no running job with a profile, or a host with a table is not in
            the topology.
    """
    if model is None:
        newcomer = typical(running.records)
    else:
        by_name = {record.job: record for record in running.records}
        if model not in by_name:
            known = ", ".join(sorted(by_name)) or "none"
            raise DispatchError(f"no job {model!r} runs; there are {known}")
        newcomer = like(by_name[model])
    if newcomer is None:
        return None
    topology = topology or running.topology or star(cluster)
    limit, operator = candidate_limit(running.records), running.operator
    jobs = plan_inputs(running.records, topology, limit, operator.weights)
    scheduler = heeding(LIVE[policy], operator)
    options = SchedulerOptions(tuple(agreed(running.records, topology).levels))
    return Contention(cluster, topology, jobs, newcomer, scheduler=scheduler, options=options)
