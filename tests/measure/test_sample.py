"""What ranks send: bounded, versioned, checked; and what a leader makes of point-to-point."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from measure_stream import MB, ONE_BURST, Burst, JobSpec, generate, sample_of

from crux_torch.measure.merge import merge
from crux_torch.measure.records import OP_NUMBER, GroupInfo
from crux_torch.measure.sample import MAX_RANKS, MAX_TRANSFERS, GroupRow, RankSample, SampleError


def sample(rank: int = 0, **changes: object) -> RankSample:
    return msgspec.structs.replace(sample_of(generate(JobSpec(ONE_BURST)), rank), **changes)


def test_survives_the_wire() -> None:
    sent = sample()
    assert RankSample.from_json(sent.to_json()) == sent
    assert len(sent.to_json()) < 10_000


def test_rejects_what_it_can_not_use() -> None:
    raw = msgspec.json.decode(sample().to_json())
    for broken in (
        raw | {"version": 2},
        raw | {"rank": -1},
        raw | {"iterations": 0},
        raw | {"exposed_s": -1.0},
        raw | {"host": ""},
        raw | {"surprise": 1},
        raw | {"groups": []},
        raw | {"transfers": raw["transfers"] | {"end": [1]}},
        raw | {"bursts": []},
    ):
        with pytest.raises(SampleError):
            RankSample.from_json(msgspec.json.encode(broken))
    with pytest.raises(SampleError):
        RankSample.from_json(b"[" * 100)
    with pytest.raises(SampleError, match="exceeds"):
        RankSample.from_json(b" " * (5 << 20))


def test_a_range_of_ranks_is_short_and_can_not_explode() -> None:
    assert GroupRow("g", 0, (0, 4096, 8)).ranks == tuple(range(0, 4096, 8))
    assert len(GroupRow("g", 0, (0, MAX_RANKS, 1)).ranks) == MAX_RANKS
    with pytest.raises(SampleError):
        _ = GroupRow("g", 0, (0, MAX_RANKS + 1, 1)).ranks
    with pytest.raises(SampleError):
        _ = GroupRow("g", 0, (0, 1 << 60, 1)).ranks
    with pytest.raises(SampleError):
        _ = GroupRow("g", 0, (-4, 4, 1)).ranks


@pytest.mark.parametrize(
    ("ranks", "span"),
    [
        ((0, 8, 16, 24), (0, 32, 8)),
        ((5,), (5, 6, 1)),
        ((3, 2, 1), (3, 0, -1)),
        ((0, 1, 5), None),
    ],
)
def test_a_group_is_told_as_a_range_where_it_is_one(
    ranks: tuple[int, ...], span: tuple[int, int, int] | None
) -> None:
    groups = [GroupInfo("g", ranks, 0)]
    (row,) = sample_of(generate(JobSpec(ONE_BURST)), groups=groups).groups
    assert row.ranks == ranks
    assert (row.span is None) == (span is None)
    assert span is None or range(*row.span) == range(*span)


def test_transfers_are_bounded_to_whole_iterations() -> None:
    stream = generate(JobSpec((Burst(0.02, (MB,) * 90),), iterations=40))
    found = sample_of(stream)
    assert found.iterations == 38
    assert len(found.transfers.begin) == MAX_TRANSFERS // 90 * 90
    assert len(found.transfers.bounds) == MAX_TRANSFERS // 90 + 1
    assert found.traffic[0].bytes == 38 * 90 * MB


def test_partial_iterations_at_the_edges_do_not_count() -> None:
    stream = generate(JobSpec((Burst(0.02, (MB, MB, MB)),), iterations=30))
    for cut in range(1, 6):
        found = sample_of(stream, records=stream.records[0][cut : -cut or None])
        assert found.traffic[0].bytes == found.iterations * 3 * MB


def test_failed_records_and_unknown_groups_are_left_out() -> None:
    stream = generate(JobSpec(ONE_BURST))
    records = stream.records[0].copy()
    records["status"][5] = 1
    found = sample_of(stream, records=records, groups=[])
    assert found.traffic == ()
    assert merge([found]).flows == ()


def test_a_pipeline_counts_each_send_once() -> None:
    """Rank 0 sends activations, rank 1 sends gradients back."""
    stream = generate(JobSpec((Burst(0.02, (MB,)), Burst(0.05, (3 * MB,)))))
    samples = []
    for rank in range(2):
        records = stream.records[rank].copy()
        sends = records["bytes"] == (MB if rank == 0 else 3 * MB)
        records["op"] = np.where(sends, OP_NUMBER["send"], OP_NUMBER["recv"])
        records["peer"] = 1 - rank
        groups = [GroupInfo("pp", (0, 1), rank)]
        samples.append(sample_of(stream, rank, records=records, groups=groups))
    profile = merge(samples)
    assert {(f.src, f.dst): f.bytes for f in profile.flows} == {
        ("h0", "h1"): float(MB),
        ("h1", "h0"): 3.0 * MB,
    }


def test_samples_of_two_jobs_do_not_mix() -> None:
    with pytest.raises(ValueError, match="one job"):
        merge([sample(0), sample(1, world_size=3)])
    with pytest.raises(ValueError, match="one job"):
        merge([])


def test_lost_records_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        merge([sample(0, lost=7), sample(1)])
    assert "7 records" in caplog.text


def test_the_profile_itself_imports_no_torch() -> None:
    """The package above may register the backend; what is here must stay light on its own."""
    program = (
        "import sys, types; package = types.ModuleType('crux_torch');"
        " package.__path__ = [sys.argv[1]]; sys.modules['crux_torch'] = package;"
        " import crux_torch.measure.merge, crux_torch.measure.chrome_trace, "
        "crux_torch.measure.records,"
        " crux_torch.measure.flops, crux_torch.measure.iterations; print('torch' in sys.modules)"
    )
    folder = Path(merge.__code__.co_filename).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"
