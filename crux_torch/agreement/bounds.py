"""Bounds of the claims in job records, so that no tenant raises its own priority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from crux_torch.agreement.records import JobRecord
from crux_torch.logs import one_line
from crux_torch.measure.profile import JobProfile
from crux_torch.network.topology import Topology

#: More devices than any host has, ranks on a CPU included: bounds a job on hosts that nobody knows.
MAX_HOST_DEVICES = 256
#: More than any device does, in FLOP/s: bounds a job that does not say what its devices can do.
MAX_DEVICE_FLOPS = 1e17
#: Longer than any iteration: bounds the FLOPs of one that a job may claim.
MAX_PERIOD_S = 3600.0
#: More than a host's NICs do together, and less than one exchange between hosts needs: they bound
#: t_j from below.
MAX_HOST_BPS = 1e12
MIN_TRANSFER_S = 1e-6
#: A claim that is cut by less than this share is not worth a word.
SLACK = 0.99


class ContestedHost(msgspec.Struct, frozen=True):
    """A host of which records claim more devices than it has.

    Attributes:
        devices: number that the host has.
        claimed: by job: devices that it must have there, since its other hosts do not have so many,
            and one at least.
        counted: by job: devices that count as its own.
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
    """Return the GPUs of a host; ``MAX_HOST_DEVICES`` if the topology does not describe them."""
    if topology is None or host not in topology.nodes:
        return MAX_HOST_DEVICES
    return len(topology.gpus(host)) or MAX_HOST_DEVICES


class Holdings(NamedTuple):
    """The devices that jobs hold.

    Attributes:
        contested: hosts that are claimed beyond their devices, in the order of their names.
        devices: by job: number that counts, where it is less than it claims.
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
            claimed = {job: least[host][job] for job in equals if job in least[host]}
            total, has = sum(claimed.values()), left[host]
            for job, n in claimed.items():
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


def least_transfer_s(profile: JobProfile) -> float:
    """Return the time below which the flows between hosts can't end; 0 without any."""
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for flow in profile.flows:
        if flow.src != flow.dst and flow.bytes > 0:
            sent[flow.src] += flow.bytes  # type: ignore[assignment]
            received[flow.dst] += flow.bytes  # type: ignore[assignment]
    most = max([*sent.values(), *received.values()], default=0)
    return max(most / MAX_HOST_BPS, MIN_TRANSFER_S) if most else 0.0


def overclaims(record: JobRecord, topology: Topology | None = None, held: int | None = None) -> str:
    """Return the job's claims that count for less than they say, in words; empty if none does.

    ``held`` is as in :func:`claimed_devices`.
    """
    profile = record.profile
    if profile is None:
        return ""
    found = []
    if (devices := claimed_devices(record, topology, held)) < record.gpus:
        found.append(f"{record.gpus} devices as {devices}")
    if (flops := claimed_flops(record, profile, topology, held)) < profile.flops * SLACK:
        found.append(f"{profile.flops:.3g} FLOPs in an iteration as {flops:.3g}")
    if 0 < profile.t_s < (least_s := least_transfer_s(profile)) * SLACK:
        found.append(f"a transfer time of {profile.t_s:.3g} s as {least_s:.3g} s")
    return ", ".join(found)


def claimed_devices(
    record: JobRecord, topology: Topology | None = None, held: int | None = None
) -> int:
    """Return the devices of a job, at most those of the hosts that it names.

    Args:
        held: number that counts, if other records claim its hosts too. One counts in any case.
    """
    if held is not None:
        return max(1, held)
    return min(record.gpus, sum(host_devices(host, topology) for host in frozenset(record.hosts)))


def claimed_flops(
    record: JobRecord,
    profile: JobProfile,
    topology: Topology | None = None,
    held: int | None = None,
) -> float:
    """Return W_j in FLOPs, bounded by one period of the job's devices.

    That is the job's own ``peak_flops``, but for each of its :func:`claimed_devices` no more than
    the topology's ``device_flops``, or ``MAX_DEVICE_FLOPS`` if it gives none. If fewer are
    ``held``, W_j falls in the same proportion.
    """
    device = (topology.device_flops if topology is not None else 0.0) or MAX_DEVICE_FLOPS
    claimed = claimed_devices(record, topology)
    peak = claimed * device
    if record.peak_flops > 0:
        peak = min(peak, record.peak_flops)
    flops = min(profile.flops, peak * min(profile.period_s, MAX_PERIOD_S))
    return flops if held is None else flops * (max(1, held) / claimed)


def claims_in_words(
    records: Sequence[JobRecord], topology: Topology | None
) -> Iterator[tuple[str, frozenset[str], str]]:
    """Yield each claim that counts for less: a word, the jobs concerned, and a sentence."""
    contested, held = holdings(records, topology)
    for host in contested:
        yield "contested", frozenset(host.claimed), one_line(str(host))
    for record in records:
        if less := overclaims(record, topology, held.get(record.job)):
            sentence = f"the plan counts, of what job {record.job!r} claims, {less}"
            sentence += ": more than its hosts can do"
            yield "claims", frozenset((record.job,)), one_line(sentence)
