"""What NCCL's profiler plugin counted beside what is computed: per iteration, summed, compared."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
import pytest
from profile_stream import ONE_BURST, JobSpec, generate

from crux_torch.apply.nccl_profiler import NetworkUse
from crux_torch.profile.merge import merge
from crux_torch.profile.network import NetworkRow, NetworkTotal, disagreements, total
from crux_torch.profile.sample import RankSample, SampleError, summarize
from crux_torch.runtime.network import NetworkMeter, network_use

PERIOD_S = 0.25


class Line:
    """Two hosts on one link."""

    capacity_Bps: Mapping[str, float] = {"link": 1e9}

    def candidate_paths(self, src_host: str, dst_host: str) -> tuple[tuple[str, ...], ...]:
        return (("link",),)


def samples() -> list[RankSample]:
    stream = generate(JobSpec(ONE_BURST))
    found = [
        summarize(
            stream.records[rank],
            stream.groups[rank],
            rank=rank,
            world_size=2,
            host=f"h{rank}",
            marks_ns=stream.marks_ns[rank],
        )
        for rank in range(2)
    ]
    return [sample for sample in found if sample is not None]


def told(*rows: NetworkRow | None) -> list[RankSample]:
    """The two ranks' samples, with what the network reported in them."""
    return [
        msgspec.structs.replace(sample, network=row)
        for sample, row in zip(samples(), rows, strict=True)
    ]


def test_an_iteration_is_what_was_moved_by_the_time_that_it_took() -> None:
    now = [10.0]
    counted = [NetworkUse(sends=3, sent_bytes=1000, sending_s=0.5)]
    meter = NetworkMeter(lambda: counted[0], lambda: now[0])
    meter.begin()
    # Ten iterations, of which one is a half at either end.
    now[0] += 10 * PERIOD_S
    counted[0] = NetworkUse(sends=23, sent_bytes=9000, sending_s=1.5, untracked=2)
    measured = meter.end()
    assert measured is not None
    assert measured.per_iteration(PERIOD_S) == NetworkRow(800.0, 0.1, 2)
    assert meter.end() is None


@pytest.mark.parametrize("known", [(False, False), (False, True), (True, False)])
def test_without_counters_at_both_ends_nothing_is_told(known: tuple[bool, bool]) -> None:
    readings = iter(NetworkUse() if there else None for there in known)
    now = iter(range(10))
    meter = NetworkMeter(lambda: next(readings), lambda: float(next(now)))
    meter.begin()
    assert meter.end() is None


def test_no_plugin_no_counters() -> None:
    assert network_use() is None or isinstance(network_use(), NetworkUse)
    assert total(samples()) is None
    assert total([]) is None


def test_the_jobs_bytes_are_summed_and_its_time_is_the_busiest_ranks() -> None:
    both = told(NetworkRow(100.0, 0.2), NetworkRow(50.0, 0.3))
    assert total(both) == NetworkTotal(150.0, 0.3)
    assert total(both[:1]) == NetworkTotal(200.0, 0.2), "scaled to the missing rank"
    assert total(told(NetworkRow(100.0, 0.2), None)) is None
    assert total(told(NetworkRow(100.0, 0.2), NetworkRow(50.0, 0.3, 1))) is None


def test_a_profile_that_agrees_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    computed = merge(samples(), topology=Line())
    moved = sum(flow.bytes for flow in computed.flows)
    assert moved > 0
    assert computed.network_bytes is computed.network_s is None
    caplog.clear()
    # With LL's flags as much again, at most.
    for factor in (0.6, 1.0, 1.9):
        row = NetworkRow(moved / 2 * factor, computed.t_s * factor)
        profile = merge(told(row, row), topology=Line())
        assert profile.network_bytes == pytest.approx(moved * factor)
        assert profile.network_s == pytest.approx(computed.t_s * factor)
        assert profile.flows == computed.flows, "nothing is corrected"
        assert profile.t_s == computed.t_s
    assert [r.getMessage() for r in caplog.records if "NCCL" in r.getMessage()] == []


@pytest.mark.parametrize("factor", [0.0, 0.4, 2.5])
def test_bytes_and_time_that_are_far_off_are_said(
    factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    computed = merge(samples(), topology=Line())
    moved = sum(flow.bytes for flow in computed.flows)
    row = NetworkRow(moved / 2 * factor, computed.t_s * factor)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        merge(told(row, row), topology=Line())
    said = [r.getMessage() for r in caplog.records if "NCCL" in r.getMessage()]
    assert len(said) == 2
    assert "bytes in an iteration" in said[0]
    assert "topology" in said[1]
    # Without a topology t is measured already, and there is nothing to compare time with.
    caplog.clear()
    merge(told(row, row))
    assert len([r for r in caplog.records if "NCCL" in r.getMessage()]) == 1


def test_a_job_on_one_host_has_nothing_to_compare() -> None:
    assert list(disagreements(NetworkTotal(0.0, 0.0), computed_bytes=0.0, computed_s=0.0)) == []
    (said,) = disagreements(NetworkTotal(5e6, 0.1), computed_bytes=0.0, computed_s=None)
    assert "5e+06 bytes" in said


def test_the_row_survives_the_wire_and_is_bounded() -> None:
    (sent, _) = told(NetworkRow(1.5, 0.25, 3), None)
    assert RankSample.from_json(sent.to_json()) == sent
    raw = msgspec.json.decode(sent.to_json())
    for broken in ({"sent_bytes": -1.0, "sending_s": 0.0}, {"sent_bytes": 1.0}, {"x": 1}):
        with pytest.raises(SampleError):
            RankSample.from_json(msgspec.json.encode(raw | {"network": broken}))
