"""Choices for one request: by bandwidth, or beside the jobs that the shared store says run now."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from crux_torch.agreement.claims import DeviceClaims
from crux_torch.agreement.inputs import TopologyReader, agreed, candidate_limit, plan_inputs
from crux_torch.agreement.operator import OperatorSettings, heeding
from crux_torch.agreement.records import JobRecord
from crux_torch.agreement.registry import Registry
from crux_torch.dispatch.cluster import (
    DispatchCluster,
    DispatchError,
    Floats,
    HostTable,
    Ints,
    count,
    from_csv,
    load,
)
from crux_torch.dispatch.contention import Contention, like, star, typical, uplinks_Bps
from crux_torch.dispatch.predictor import Network, load_network, news, save_network
from crux_torch.dispatch.samples import Samples, fit_uplinks, predicted_links, read_samples
from crux_torch.dispatch.search import Choice, alternatives, in_ring_order
from crux_torch.network.loaders import load_topology
from crux_torch.network.topology import Topology
from crux_torch.schedule.model import SchedulerOptions
from crux_torch.schedule.schedulers import LIVE
from crux_torch.settings import Settings
from crux_torch.store.endpoint import open_store

TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Running:
    """Jobs of a cluster at one time.

    Attributes:
        records: of the live jobs.
        topology: the published one; None without.
        taken: by host, the devices (by number, as tables name them) that launchers claim, and for
            which job.
        operator: settings of the cluster's operator.
    """

    records: tuple[JobRecord, ...]
    topology: Topology | None
    taken: Mapping[str, Mapping[str, str]]
    operator: OperatorSettings = field(default_factory=OperatorSettings)


def measured_by_jobs(
    cluster: DispatchCluster, running: Running, *, claimed: bool = False
) -> Samples:
    """Samples of the hosts' links by the running jobs' profiles.

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


@dataclass(frozen=True, eq=False)
class Dispatcher:
    """Hosts, the devices of them that are free, and the jobs that run there.

    Attributes:
        idle: devices that may be given out, but for those that launchers claim.
        topology: in place of the published one; without either, each host's link to one switch.
        running: None without a store.
        model: the running job that the newcomer is like; by default the median one.
        policy: what computes the cluster's plan, a key of ``LIVE``.
    """

    cluster: DispatchCluster
    idle: Ints
    topology: Topology | None = None
    running: Running | None = None
    model: str | None = None
    policy: str = "crux"

    @property
    def free(self) -> Ints:
        """The devices that may be given out now: those that no launcher claims."""
        left: Ints = self.idle.copy()
        for number, table in enumerate(self.cluster.tables):
            taken = self.running.taken.get(table.host, {}) if self.running else {}
            for bit, device in enumerate(table.devices):
                if device in taken:
                    left[number] &= ~(1 << bit)
        return left

    def choices(
        self, k: int, hosts: Collection[str] | None = None, unit: int = 1
    ) -> Iterator[Choice]:
        """Choices of ``k`` free devices, each over other hosts, the best first.

        Args:
            hosts: those that may be used; default: all.
            unit: every host gives a multiple of it.

        Raises:
            DispatchError: if there is no choice at all, or see :meth:`contention`.
        """
        allowed = [hosts is None or table.host in hosts for table in self.cluster.tables]
        free = np.where(allowed, self.free, 0)
        beside = self.contention()
        if beside is None:
            yield from alternatives(self.cluster, free, k, unit)
            return
        seen: set[tuple[int, ...]] = set()
        for choice in beside.best(free, k, unit):
            involved = tuple(np.flatnonzero(choice.devices).tolist())
            if involved not in seen:
                seen.add(involved)
                yield choice

    def contention(self) -> Contention | None:
        """Scores beside the running jobs; None where no record tells of any traffic.

        The plan keeps to what the operator has set: a drained job has the lowest level, and no say.

        Raises:
            DispatchError: ``model`` is no running job with a profile, or a host with a table is not
                in the topology.
        """
        if self.running is None:
            return None
        records, operator = self.running.records, self.running.operator
        if self.model is None:
            newcomer = typical(records)
        else:
            by_name = {record.job: record for record in records}
            if self.model not in by_name:
                known = ", ".join(sorted(by_name)) or "none"
                raise DispatchError(f"no job {self.model!r} runs; there are {known}")
            newcomer = like(by_name[self.model])
        if newcomer is None:
            return None
        topology = self.topology or self.running.topology or star(self.cluster)
        jobs = plan_inputs(records, topology, candidate_limit(records), operator.weights)
        scheduler = heeding(LIVE[self.policy], operator)
        options = SchedulerOptions(tuple(agreed(records, topology).levels))
        return Contention(
            self.cluster, topology, jobs, newcomer, scheduler=scheduler, options=options
        )

    def ranks(self, devices: Ints) -> list[tuple[str, str]]:
        """Host and device of every rank of a choice, in the order of the ring."""
        known = self.topology or (self.running.topology if self.running else None)
        return in_ring_order(self.cluster, devices, known)

    def plain(self, choice: Choice) -> dict[str, object]:
        """A choice as results have it: devices by host, ranks in order, bytes/s."""
        found: dict[str, object] = {
            "devices": self.cluster.names(choice.devices),
            "ranks": [f"{host}:{device}" for host, device in self.ranks(choice.devices)],
            "bandwidth_Bps": choice.alone_Bps,
            "limit": choice.limit,
        }
        if choice.now_Bps is not None:
            found |= {"now_Bps": choice.now_Bps, "utilisation": choice.utilisation}
        return found


@dataclass(frozen=True)
class HostOptions:
    """Options on the hosts and the jobs that run there.

    Attributes:
        excluded: ``HOST`` or ``HOST:DEVICE,...`` of each part that is taken already.
        uplinks: ``GB/s`` of every host's link, or ``HOST=GB/s``.
        model: the running job that the new one is like.
    """

    tables: tuple[Path, ...] = ()
    samples: Path | None = None
    store: str | None = None
    cluster_name: str | None = None
    uplinks: tuple[str, ...] = ()
    network: Path | None = None
    topology: Path | None = None
    excluded: tuple[str, ...] = ()
    model: str | None = None


def dispatcher_of(hosts: HostOptions) -> Dispatcher:
    """Reads the hosts, and looks at the jobs that run there now.

    Raises:
        CruxError: an option can't be used, or the store does not answer.
    """
    settings, running = jobs_of(hosts)
    if hosts.model and running is None:
        raise DispatchError("--like JOB: name the store with --store, or CRUX_STORE")
    topology = load_topology(hosts.topology) if hosts.topology else None
    known = topology or (running.topology if running else None)
    cluster = _cluster(hosts, known, running)
    free = cluster.everything
    every = {table.host: list(table.devices) for table in cluster.tables}
    for text in hosts.excluded:
        host, colon, devices = text.partition(":")
        free &= ~cluster.choice({host: devices.split(",") if colon else every.get(host, [])})
    return Dispatcher(cluster, free, topology, running, hosts.model, settings.policy)


def jobs_of(hosts: HostOptions) -> tuple[Settings, Running | None]:
    """Settings of the environment, and the jobs that run; None where no store is named.

    Raises:
        StoreError: the store can't be reached or does not answer in time.
        SettingsError: its name, secret or group can't be used.
    """
    given = {"CRUX_STORE": hosts.store or os.environ.get("CRUX_STORE") or "none"}
    if hosts.cluster_name:
        given["CRUX_CLUSTER"] = hosts.cluster_name
    found = Settings.from_env({**os.environ, **given})
    if found.store == "none":
        return found, None
    store = open_store(found.store, found.store_secret, found.store_group, timeout_s=TIMEOUT_S)
    try:
        view = Registry(store, found.cluster).look()
        claims = DeviceClaims(store, found.cluster).taken()
    finally:
        store.close()
    taken = {
        host: {str(claim.index): claim.job for claim in devices.values()}
        for host, devices in claims.items()
    }
    topology = TopologyReader().read(view.topology)
    return found, Running(view.jobs, topology, taken, view.operator)


def tables_of(hosts: HostOptions) -> list[HostTable]:
    """A table of each host.

    Raises:
        DispatchError: there is none, or two are of one host.
    """
    if not hosts.tables:
        raise DispatchError("name a table of each host with --table")
    found: dict[str, HostTable] = {}
    for file in hosts.tables:
        table = from_csv(file, file.stem) if file.suffix == ".csv" else load(file)
        if table.host in found:
            raise DispatchError(f"two tables of the host {table.host!r}")
        found[table.host] = table
    return list(found.values())


def _cluster(
    hosts: HostOptions, topology: Topology | None, running: Running | None
) -> DispatchCluster:
    """The hosts. With samples, their links are fitted from these and from what jobs measured; with
    a network, they are what it predicts.
    """
    tables = tables_of(hosts)
    if hosts.network is not None:
        if hosts.samples is not None:
            raise DispatchError("--samples or --network: one of them tells of the links")
        learned, cluster = load_network(hosts.network, tables)
        return predicted_links(cluster, learned.predictor(cluster))
    names = [table.host for table in tables]
    known = uplinks_Bps(topology, names) if topology is not None else dict.fromkeys(names, 0.0)
    given = DispatchCluster(tables, _uplinks(hosts, known))
    if hosts.samples is None:
        return given
    found = read_samples(hosts.samples, given)
    return fit_uplinks(given, found.joined(measured_by_jobs(given, running)) if running else found)


def _uplinks(hosts: HostOptions, known: Mapping[str, float]) -> Floats:
    rates = dict(known)
    for text in sorted(hosts.uplinks, key=lambda text: "=" in text):
        host, _, number = text.rpartition("=")
        try:
            rate = float(number) * 1e9
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1e15:
            raise DispatchError(f"--uplink {text}: expected GB/s, or HOST=GB/s")
        if host and host not in rates:
            raise DispatchError(f"--uplink {text}: no host {host!r}; there are {', '.join(known)}")
        rates.update({host: rate} if host else dict.fromkeys(known, rate))
    missing = [host for host, rate in rates.items() if not rate]
    if hosts.samples is None and missing and len(rates) > 1:
        raise DispatchError(
            f"the link of {missing[0]} is not known: give --uplink GB/s, a --topology, measured "
            "--samples, or a --network"
        )
    return np.array(list(rates.values()))


def learn_links(
    hosts: HostOptions, file: Path, progress: Callable[[int, int | None], None] | None = None
) -> tuple[Network, DispatchCluster, Samples, int]:
    """Trains the network in ``file``, or a new one, with samples that it does not remember.

    Args:
        progress: see :meth:`Network.train`.

    Returns:
        the network, its hosts, the new samples, and how many earlier ones were replayed. Without a
        new sample the file stays as it is.

    Raises:
        CruxError: an option or the file can't be used, or there are too few samples.
    """
    import torch

    # The network is too small to gain by more.
    torch.set_num_threads(1)
    tables = tables_of(hosts)
    _, running = jobs_of(hosts)
    network, cluster = Network(), DispatchCluster(tables, np.zeros(len(tables)))
    if file.exists():
        network, cluster = load_network(file, tables)
    found = Samples(np.zeros((0, len(tables)), np.int64), np.zeros(0))
    if hosts.samples is not None:
        found = read_samples(hosts.samples, cluster)
    if running is not None:
        found = found.joined(measured_by_jobs(cluster, running, claimed=True))
    found = news(network, found)
    if network.memory is not None and not len(found):
        return network, cluster, found, 0
    replayed = network.train(cluster, found, progress=progress)
    save_network(file, network, [table.host for table in cluster.tables])
    return network, cluster, found, replayed


def labels_of(cluster: DispatchCluster) -> dict[str, dict[str, str]]:
    """Labels of each host's node: GB/s of its best sets, and of its link, in whole numbers.

    Kubernetes compares whole numbers alone (the operators Gt and Lt of a node's affinity).
    """
    found: dict[str, dict[str, str]] = {}
    for number, table in enumerate(cluster.tables):
        rates: dict[int, float] = {}
        for members, rate_Bps in enumerate(table.array.tolist()):
            size = bin(members).count("1")
            if size > 1:
                rates[size] = max(rates.get(size, 0.0), rate_Bps)
        found[table.host] = {
            f"crux-torch/gbps-{size}": f"{rate / 1e9:.0f}" for size, rate in rates.items() if rate
        }
        uplink_Bps = float(cluster.uplink_Bps[number])
        if uplink_Bps:
            found[table.host]["crux-torch/uplink-gbps"] = f"{uplink_Bps / 1e9:.0f}"
    return found
