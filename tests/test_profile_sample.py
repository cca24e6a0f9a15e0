"""What ranks send: bounded, versioned, checked; and what a leader makes of point-to-point."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from profile_stream import MB, ONE_BURST, Burst, JobSpec, generate

from crux_torch.profile.group import GroupInfo
from crux_torch.profile.merge import merge
from crux_torch.profile.record import OP_NUMBER
from crux_torch.profile.sample import (
    MAX_TRANSFERS,
    GroupRow,
    RankSample,
    SampleError,
    summarize,
)


def sample(rank: int = 0, **changes: object) -> RankSample:
    stream = generate(JobSpec(ONE_BURST))
    found = summarize(
        stream.records[rank],
        stream.groups[rank],
        rank=rank,
        world_size=2,
        host=f"h{rank}",
        marks_ns=stream.marks_ns[rank],
    )
    assert found is not None
    return msgspec.structs.replace(found, **changes)


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
        raw | {"overlap": 1.5},
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
    with pytest.raises(SampleError):
        _ = GroupRow("g", 0, (0, 1 << 60, 1)).ranks
    with pytest.raises(SampleError):
        _ = GroupRow("g", 0, (-4, 4, 1)).ranks


def test_transfers_are_bounded_to_whole_iterations() -> None:
    stream = generate(JobSpec((Burst(0.02, (MB,) * 90),), iterations=40))
    found = summarize(
        stream.records[0],
        stream.groups[0],
        rank=0,
        world_size=2,
        host="h0",
        marks_ns=stream.marks_ns[0],
    )
    assert found is not None
    assert found.iterations == 38
    assert len(found.transfers.begin) == MAX_TRANSFERS // 90 * 90
    assert len(found.transfers.bounds) == MAX_TRANSFERS // 90 + 1
    assert found.traffic[0].bytes == 38 * 90 * MB


def test_partial_iterations_at_the_edges_do_not_count() -> None:
    stream = generate(JobSpec((Burst(0.02, (MB, MB, MB)),), iterations=30))
    for cut in range(1, 6):
        found = summarize(
            stream.records[0][cut : -cut or None],
            stream.groups[0],
            rank=0,
            world_size=2,
            host="h0",
            marks_ns=stream.marks_ns[0],
        )
        assert found is not None
        assert found.traffic[0].bytes == found.iterations * 3 * MB


def test_failed_records_and_unknown_groups_are_left_out() -> None:
    stream = generate(JobSpec(ONE_BURST))
    records = stream.records[0].copy()
    records["status"][5] = 1
    found = summarize(records, [], rank=0, world_size=2, host="h0", marks_ns=stream.marks_ns[0])
    assert found is not None
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
        found = summarize(
            records,
            {0: GroupInfo("pp", (0, 1), rank)},
            rank=rank,
            world_size=2,
            host=f"h{rank}",
            marks_ns=stream.marks_ns[rank],
        )
        assert found is not None
        samples.append(found)
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
        " import crux_torch.profile.merge, crux_torch.profile.trace, crux_torch.profile.window,"
        " crux_torch.profile.flops, crux_torch.profile.iterations; print('torch' in sys.modules)"
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
