"""Hosts of which records claim more devices than there are, and what such claims count for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from crux_torch.control.records import JobRecord
from crux_torch.fabric.topology import Topology

#: More devices than any host has, ranks on a CPU included: bounds a job on hosts that nobody knows.
MAX_HOST_DEVICES = 256


class ContestedHost(msgspec.Struct, frozen=True):
    """A host of which records claim more devices than it has.

    Attributes:
        devices: that it has.
        claimed: by job: those that it must have there, since its other hosts do not have so many,
            and one at least.
        counted: by job: those that count as its own.
    """

    host: str
    devices: int
    claimed: dict[str, int]
    counted: dict[str, int]

    def __str__(self) -> str:
        jobs = [
            f"{job} (at least {n}, counted {self.counted[job]})" for job, n in self.claimed.items()
        ]
        return f"host {self.host} has {self.devices} devices, and is claimed by {', '.join(jobs)}"


def host_devices(host: str, topology: Topology | None) -> int:
    """The GPUs of a host; ``MAX_HOST_DEVICES`` if the topology does not describe them."""
    if topology is None or host not in topology.nodes:
        return MAX_HOST_DEVICES
    return len(topology.gpus(host)) or MAX_HOST_DEVICES


class Holdings(NamedTuple):
    """Who has which devices.

    Attributes:
        contested: hosts that are claimed beyond their devices, in the order of their names.
        devices: by job: those that count, where they are fewer than it claims.
    """

    contested: tuple[ContestedHost, ...]
    devices: Mapping[str, int]


def holdings(records: Sequence[JobRecord], topology: Topology | None) -> Holdings:
    """Give the devices of hosts to the records that claim them.

    First comes the record that claims the fewest devices in all. So a record gains nothing by
    naming hosts that others hold. Those that claim equally many share a host that is too small.

    Args:
        records: live, in any order, no two of one name. Without a profile they claim nothing.
    """
    jobs: dict[str, list[str]] = {}
    named: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda r: r.job):
        if record.profile is not None:
            jobs[record.job] = sorted(set(record.hosts))
            for host in jobs[record.job]:
                named.setdefault(host, []).append(record.job)
    shared = {host for host, those in named.items() if len(those) > 1}
    left = {host: host_devices(host, topology) for host in named}
    devices = dict(left)
    claims: dict[str, int] = {}
    least: dict[str, dict[str, int]] = {host: {} for host in shared}
    sizes: dict[int, list[str]] = {}
    for record in sorted(records, key=lambda r: r.job):
        its = jobs.get(record.job, ())
        if shared.isdisjoint(its):
            continue
        room = sum(devices[host] for host in its)
        claims[record.job] = min(record.gpus, room)
        sizes.setdefault(record.gpus, []).append(record.job)
        for host in shared.intersection(its):
            least[host][record.job] = max(1, claims[record.job] - room + devices[host])
    given: dict[str, dict[str, int]] = {job: {} for job in claims}
    for _, equals in sorted(sizes.items()):
        for host in sorted(shared.intersection(host for job in equals for host in jobs[job])):
            wanted = {job: least[host][job] for job in equals if job in least[host]}
            total, has = sum(wanted.values()), left[host]
            for job, n in wanted.items():
                given[job][host] = n * min(has, total) // total
                left[host] -= given[job][host]
        for job in equals:
            more = claims[job] - sum(given[job].values())
            for host in jobs[job]:
                taken = min(left[host], more)
                given[job][host] = given[job].get(host, 0) + taken
                left[host] -= taken
                more -= taken
    found = {job: sum(those.values()) for job, those in given.items()}
    short = {job: n for job, n in found.items() if n < claims[job]}
    contested = [
        ContestedHost(
            host, devices[host], least[host], {job: given[job][host] for job in least[host]}
        )
        for host in sorted(shared)
        if sum(least[host].values()) > devices[host] or not short.keys().isdisjoint(named[host])
    ]
    return Holdings(tuple(contested), short)
