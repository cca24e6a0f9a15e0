"""The profile of synthetic jobs against what they were made of."""

from __future__ import annotations

import logging

import msgspec
import pytest
from measure_stream import (
    JOBS,
    MB,
    MULTI_BURST,
    ONE_BURST,
    Burst,
    JobSpec,
    Stream,
    generate,
    sample_of,
    samples_of,
)

from crux_torch.measure.merge import _largest, merge
from crux_torch.measure.profile import MAX_FLOWS, JobProfile
from crux_torch.measure.sample import summarize
from crux_torch.schedule.papers.crux import link_time_s

FLOPS = [3.0e12, 5.0e12, 7.0e12, 11.0e12]


class Line:
    """Hosts on one switch, each behind one link in either direction."""

    def __init__(self, capacity_Bps: float, hosts: int) -> None:
        links = [f"h{i}:{way}" for i in range(hosts) for way in ("up", "down")]
        self.capacity_Bps = dict.fromkeys(links, capacity_Bps)

    def candidate_paths(self, src_host: str, dst_host: str) -> tuple[tuple[str, ...], ...]:
        return ((f"{src_host}:up", f"{dst_host}:down"),)

    def gpus(self, host: str) -> tuple[str, ...]:
        return ()


def profile_of(stream: Stream, *, marks: bool = True, topology: bool = False) -> JobProfile:
    samples = samples_of(stream, marks=marks, flops=FLOPS)
    return merge(
        samples, topology=Line(1e9, len(samples)) if topology else None, link_time_s=link_time_s
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("marks", [True, False], ids=["marks", "signal"])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
@pytest.mark.parametrize("job", JOBS)
def test_known_truth(job: str, jitter: float, marks: bool, seed: int) -> None:
    stream = generate(JobSpec(JOBS[job], jitter=jitter), seed)
    profile = profile_of(stream, marks=marks)
    truth = stream.truth
    assert profile.period_s == pytest.approx(truth.period_s, rel=0.02)
    assert profile.period_source == ("both" if marks else "fourier")
    both_ways = dict.fromkeys((("h0", "h1"), ("h1", "h0")), float(truth.bytes))
    assert {(f.src, f.dst): f.bytes for f in profile.flows} == both_ways
    assert profile.flops == FLOPS[0] + FLOPS[1]
    assert profile.t_source == "measured"
    assert profile.t_s == pytest.approx(truth.t_s, rel=0.03)
    assert profile.compute_s == pytest.approx(truth.compute_s, rel=0.04)


@pytest.mark.parametrize("job", JOBS)
def test_topology_and_transfers_tell_the_same_t(job: str) -> None:
    stream = generate(JobSpec(JOBS[job], ranks=4, jitter=0.2), 1)
    profile = profile_of(stream, topology=True)
    assert profile.t_source == "topology"
    assert profile.t_s == pytest.approx(stream.truth.t_s, rel=1e-9)
    assert profile.t_measured_s == pytest.approx(profile.t_s, rel=0.03)
    assert sum(f.bytes for f in profile.flows) == pytest.approx(6 * stream.truth.bytes, rel=1e-12)


def test_a_topology_that_contradicts_the_transfers_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = samples_of(generate(JobSpec(ONE_BURST)))
    with caplog.at_level(logging.WARNING):
        merge(samples, topology=Line(4e9, 2), link_time_s=link_time_s)
    assert "4.00 times what the topology says" in caplog.text


@pytest.mark.parametrize(("capacity_Bps", "told"), [(1e9, False), (1.9e9, False), (0.4e9, True)])
def test_a_topology_that_agrees_within_a_factor_of_two_is_not_questioned(
    capacity_Bps: float, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    samples = samples_of(generate(JobSpec(ONE_BURST)))
    with caplog.at_level(logging.WARNING):
        merge(samples, topology=Line(capacity_Bps, 2), link_time_s=link_time_s)
    assert ("what the topology says" in caplog.text) == told


@pytest.mark.parametrize(
    ("alone", "quiet", "capacity_Bps", "questioned", "note"),
    [
        (True, False, 4e9, True, None),
        (False, True, 4e9, True, "from the links' capacities, and checked, as no other job ran"),
        (False, False, 4e9, False, "capacities, unchecked, as others may have run"),
        (False, False, 0.4e9, True, "unchecked"),  # nothing is faster than its links
    ],
)
def test_without_a_top_class_t_is_checked_in_the_quiet_and_the_profile_says_so(
    alone: bool,
    quiet: bool,
    capacity_Bps: float,
    questioned: bool,
    note: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = samples_of(generate(JobSpec(ONE_BURST)))
    line = Line(capacity_Bps, 2)
    with caplog.at_level(logging.WARNING):
        found = merge(
            samples, topology=line, link_time_s=link_time_s, measured_alone=alone, quiet=quiet
        )
    assert ("what the topology says" in caplog.text) == questioned
    assert found.measured_alone == (alone or quiet)
    assert (found.t_note or "") == "" if note is None else note in (found.t_note or "")
    assert found.to_share().t_note is msgspec.UNSET
    assert found.t_s == merge(samples, topology=line, link_time_s=link_time_s).t_s
    measured = merge(samples, measured_alone=alone, quiet=quiet)
    assert ("t may be too long" in (measured.t_note or "")) == (not (alone or quiet))


def test_only_the_largest_flows_are_in_the_profile_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = {(f"h{n}", "h"): float(n) for n in range(MAX_FLOWS + 2)}
    with caplog.at_level(logging.WARNING):
        kept = _largest(many, dict.fromkeys(many, 1))
    assert f"{MAX_FLOWS + 2} flows: only" in caplog.text
    assert {flow.bytes for flow in kept} == set(map(float, range(2, MAX_FLOWS + 2)))
    assert {flow.part for flow in kept} == {1}
    caplog.clear()
    assert len(_largest(dict(list(many.items())[:MAX_FLOWS]), dict.fromkeys(many, 0))) == MAX_FLOWS
    assert not caplog.records


def test_stragglers_do_not_inflate_t() -> None:
    spec = JobSpec(ONE_BURST, ranks=4, jitter=0.2, straggler={2: 1.6})
    stream = generate(spec, 3)
    samples = samples_of(stream)
    profile = merge(samples)
    assert samples[0].comm_s > 1.4 * stream.truth.t_s, "the leader does wait"
    assert profile.t_s == pytest.approx(stream.truth.t_s, rel=0.03)
    assert profile.exposed_s == pytest.approx(stream.truth.t_s, rel=0.05)
    assert profile.compute_s == pytest.approx(stream.truth.compute_s, rel=0.03)


def test_bursts_and_overlap() -> None:
    profile = profile_of(generate(JobSpec(MULTI_BURST)))
    assert [b.share for b in profile.bursts] == pytest.approx([1 / 3] * 3)
    compute = 0.002 + 0.170
    expected = [0.092 / compute, 0.132 / compute, 1.0]
    # The optimizer's step ends before the mark, so it lies at the end of the iteration.
    expected = [(e * compute - 0.002) / compute for e in expected]
    assert [b.at for b in profile.bursts] == pytest.approx(expected, abs=0.01)
    assert profile.overlap == pytest.approx(0.0, abs=0.01)
    hidden = profile_of(generate(JobSpec(JOBS["overlapped"])))
    # Four buckets of 30 ms leave at 80, 100, 120, 140 ms and end at 200 ms: 60 ms are exposed.
    assert hidden.exposed_s == pytest.approx(0.060, rel=0.02)
    assert hidden.overlap == pytest.approx(60 / 120, rel=0.02)
    assert hidden.bursts[0].at == pytest.approx(0.080 / 0.142, abs=0.02)


def test_missing_ranks_are_scaled_for_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    stream = generate(JobSpec(ONE_BURST, ranks=4))
    samples = samples_of(stream, flops=FLOPS)[1:]
    with caplog.at_level(logging.WARNING):
        profile = merge(samples)
    assert "3 of 4 ranks" in caplog.text
    assert profile.gpus == 4
    assert profile.flops == pytest.approx(sum(FLOPS[1:]) * 4 / 3)
    assert "have no known flows" in caplog.text, "nobody knows where rank 0 runs"
    assert profile.flows == ()


def test_work_from_time_where_nothing_was_counted() -> None:
    samples = samples_of(generate(JobSpec(ONE_BURST)), marks=False)
    profile = merge(samples, device_flops=1e12)
    assert profile.flops_source == "time"
    assert profile.gpus == 2
    assert profile.flops == pytest.approx(2e12 * profile.compute_s)


def test_too_little_data_is_no_sample() -> None:
    stream = generate(JobSpec(ONE_BURST, iterations=3))
    arguments = {"rank": 0, "world_size": 2, "host": "h0"}
    assert summarize(stream.records[0], stream.groups[0], **arguments) is None
    assert summarize(stream.records[0][:0], stream.groups[0], **arguments) is None


def test_an_unequal_layout_counts_every_collective_once() -> None:
    """Two ranks on each of two hosts: the ring leaves each host once."""
    stream = generate(JobSpec((Burst(0.05, (8 * MB,)),), ranks=4))
    samples = [sample_of(stream, rank, host=f"h{rank // 2}") for rank in range(4)]
    profile = merge(samples)
    both_ways = dict.fromkeys((("h0", "h1"), ("h1", "h0")), 1.5 * 8 * MB)
    assert {(f.src, f.dst): f.bytes for f in profile.flows} == both_ways


@pytest.mark.parametrize("jitter", [0.0, 0.2])
@pytest.mark.parametrize("job", JOBS)
def test_bursts_take_what_their_transfers_take(job: str, jitter: float) -> None:
    stream = generate(JobSpec(JOBS[job], jitter=jitter, straggler={1: 1.3}), 3)
    found = profile_of(stream)
    assert all(burst.least_s > 0 for burst in found.bursts)
    if job != "overlapped":
        for burst in found.bursts:
            assert burst.least_s == pytest.approx(burst.share * stream.truth.t_s, rel=1e-3)
    else:
        # Four buckets of 30 ms follow each other once the first is there.
        assert found.bursts[0].least_s == pytest.approx(stream.truth.t_s, rel=0.01)


def test_a_burst_that_computation_paces_is_slower_than_its_link() -> None:
    """Six buckets of 3 ms, one each 5 ms: an arc of 28 ms."""
    paced = (Burst(0.120, ()), Burst(0.030, (3 * MB,) * 6, True))
    (burst,) = profile_of(generate(JobSpec(paced))).bursts
    assert burst.least_s == pytest.approx(0.028, rel=0.01)


def test_durations_that_others_may_have_lengthened_are_not_told() -> None:
    samples = samples_of(generate(JobSpec(ONE_BURST)))
    assert all(b.least_s == 0 for sample in samples for b in sample.bursts), "with its waiting"
    assert all(b.least_s > 0 for b in merge(samples, measured_alone=False, quiet=True).bursts)
    beside = merge(samples, measured_alone=False)
    assert all(b.least_s == 0 for b in beside.bursts)
    assert b"least_s" not in msgspec.json.encode(beside)
    # One rank alone can't tell transfer from waiting.
    assert all(b.least_s == 0 for b in merge(samples[:1]).bursts)
