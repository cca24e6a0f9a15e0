"""The measured profile of one job, which its leader publishes and every schedule reads."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from crux_torch.words import seconds, si

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
NonNegative = Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
FlopsSource = Literal["counted", "told", "time"]

#: Bounds of the schema: a record from another tenant is never larger than this.
MAX_FLOWS = 4096
MAX_BURSTS = 64
#: Parts of a job's traffic that a plan tells apart.
MAX_PARTS = 64


class HostFlow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes of one iteration from one host, or one part of a host, to another.

    ``part`` is the number of the ring, or of the other collective, that moves most of them: flows
    of one part move together, those of others on their own. Without parts, as in the records of
    releases that do not know them, all flows are of one.
    """

    src: Name
    dst: Name
    bytes: NonNegative
    part: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)] = 0


class ProfileBurst(msgspec.Struct, frozen=True, omit_defaults=True):
    """One burst of communication.

    Attributes:
        at: share of the compute that is done when it starts.
        share: share of the bytes that it carries.
        least_s: seconds that it takes on an idle network; 0 where that is not known. Left out then:
            the record is that of releases which do not know it.
    """

    at: Share
    share: Share
    least_s: NonNegative = 0.0


class JobProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration of a job.

    Attributes:
        period_s: seconds from one iteration to the next, as measured.
        period_source: ``fourier`` (the communication signal), ``marks`` (optimizer steps), or
            ``both`` where the two agree.
        compute_s: seconds of an iteration in which the devices compute: period less exposed time.
        flops: W_j over all devices of the job.
        flops_source: ``counted`` from the operators, ``told`` (given by the script on some rank),
            or ``time`` (busy time of the devices or of their tensor cores, times rate).
        flops_note: why a count was not used, or why it may be too low; empty if neither. Unset in
            the shared store, because older readers reject a field that they do not know.
        flops_by_time: W_j from time, for comparison: the time in which the devices compute, times
            their rate; 0 where the rate is not known.
        device_flops: FLOP/s that the devices together could do in the data types in use; 0 where
            that is not known.
        device_busy, tensor_busy: means over the devices of how busy they and their tensor cores
            were, see :class:`~crux_torch.host.activity.DeviceActivity`; None where not known.
        uncounted_ops: operators and modules met that multiply and count nothing.
        flows: bytes from host to host; bytes that stay on one host are not listed.
        inside: bytes between GPUs and NICs, by their names in the topology, of hosts that the job
            shares with others.
        bursts: when in the iteration it communicates.
        t_s: t_j, the time that one iteration's traffic needs on its slowest link.
        t_source: ``topology`` (bytes over capacity) or ``measured`` (shortest transfers).
        t_note: reliability of ``t_s``, if the job did not hold the profiling class; unset like
            ``flops_note`` in the shared store, and where the job held that class.
        t_measured_s: seconds of transfer in an iteration, of each collective the fastest rank's.
        overlap: share of the communication that computation hides.
        exposed_s: seconds of an iteration in which the devices wait for communication.
        iterations: iterations that the figures are taken over.
        measured_alone: True if no other job was in the way: this one held the profiling class
            throughout, or none was there.
    """

    period_s: NonNegative
    period_source: Literal["fourier", "marks", "both"]
    compute_s: NonNegative
    flops: NonNegative
    flops_source: FlopsSource
    flops_note: Annotated[str, msgspec.Meta(max_length=1024)] | msgspec.UnsetType = msgspec.UNSET
    flops_by_time: NonNegative = 0.0
    device_flops: NonNegative = 0.0
    device_busy: Share | None = None
    tensor_busy: Share | None = None
    uncounted_ops: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    gpus: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    flows: Annotated[tuple[HostFlow, ...], msgspec.Meta(max_length=MAX_FLOWS)] = ()
    inside: Annotated[tuple[HostFlow, ...], msgspec.Meta(max_length=MAX_FLOWS)] = ()
    bursts: Annotated[tuple[ProfileBurst, ...], msgspec.Meta(min_length=1, max_length=MAX_BURSTS)]
    t_s: NonNegative
    t_source: Literal["topology", "measured"]
    t_note: Annotated[str, msgspec.Meta(max_length=1024)] | msgspec.UnsetType = msgspec.UNSET
    t_measured_s: NonNegative
    overlap: Share
    exposed_s: NonNegative
    iterations: Annotated[int, msgspec.Meta(ge=0)]
    measured_alone: bool

    def to_share(self) -> JobProfile:
        """The profile as the shared store has it, without what older readers reject."""
        return msgspec.structs.replace(self, flops_note=msgspec.UNSET, t_note=msgspec.UNSET)

    @property
    def achieved_flops(self) -> float:
        """FLOP/s over whole iterations; 0 without a period."""
        return self.flops / self.period_s if self.period_s > 0 else 0.0

    @property
    def utilization(self) -> float | None:
        """Achieved FLOP/s as a share of what the devices could do (model FLOPs utilisation).

        None where FLOPs were not counted, or the devices' rate is not known.
        """
        if self.flops_source == "time" or not self.device_flops:
            return None
        return self.achieved_flops / self.device_flops

    @property
    def intensity(self) -> float:
        """GPU intensity I_j = W_j / t_j in FLOP/s; infinite for a job without traffic (§3.2)."""
        return self.flops / self.t_s if self.t_s > 0 else float("inf")


def in_words(profile: JobProfile) -> str:
    """Returns what was measured, in a line."""
    exposed = profile.exposed_s / profile.period_s if profile.period_s > 0 else 0.0
    beside = "" if profile.measured_alone else ", beside other jobs"
    return (
        f"a step computes {si(profile.flops, 'FLOP')} (W), needs {seconds(profile.t_s)} of its "
        f"slowest link (t) and takes {seconds(profile.period_s)}, {exposed:.0%} of it waiting for "
        f"communication ({profile.iterations} steps{beside})"
    )
