"""The Chrome trace, read by torch-tb-profiler's own parser and against the format's rules."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from measure_stream import MB, ONE_BURST, OVERLAPPED, JobSpec, generate

from crux_torch.measure.chrome_trace import chrome_trace, write_trace
from crux_torch.measure.records import OP_NUMBER


def trace_of(
    rank: int = 0, job: Any = OVERLAPPED, backend: str = "gloo", device: bool = False
) -> dict[str, Any]:
    stream = generate(JobSpec(job, iterations=6))
    records = stream.records[rank].copy()
    if device:
        records["device_ns"] = (records["end_ns"] - records["start_ns"]) // 2
    who = {"rank": rank, "world_size": 2, "backend": backend, "clock_offset_ns": 0}
    return chrome_trace(records, stream.groups[rank], marks_ns=stream.marks_ns[rank], **who)


def test_follows_the_chrome_trace_format(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "traces", "node-1.example_x", trace_of())
    assert path.name == f"node-1.example-x_{os.getpid()}.pt.trace.json"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    trace = json.loads(path.read_text())
    assert {"traceEvents", "distributedInfo", "deviceProperties"} <= set(trace)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in tracks.values():
        spans.sort()
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert begin >= end - 1e-3, "events of one track follow one another"
    assert max(len({t for p, t in tracks if t >= 100}), 1) > 1, "overlapping ones have tracks"


@pytest.mark.parametrize(("backend", "device"), [("gloo", False), ("nccl", True)])
def test_torch_tb_profiler_finds_the_communication(
    tmp_path: Path, backend: str, device: bool
) -> None:
    data = pytest.importorskip("torch_tb_profiler.profiler.data")
    path = write_trace(tmp_path, "host", trace_of(0, OVERLAPPED, backend, device))
    profile = data.RunProfileData.parse("host_1000", None, str(path), str(tmp_path))
    assert profile.has_communication
    assert profile.steps_names == [str(n) for n in range(6)]
    assert {lib.name.lower() for lib in profile.comm_lib} == {backend}
    assert profile.distributed_info == {"backend": backend, "rank": 0, "world_size": 2}
    assert len(profile.comm_node_list) == 6 * 4
    assert {node.name for node in profile.comm_node_list} == {f"{backend}:all_reduce"}
    assert all(node.step_name is not None for node in profile.comm_node_list)


def test_the_distributed_view_appears(tmp_path: Path) -> None:
    loader_module = pytest.importorskip("torch_tb_profiler.profiler.loader")
    data = pytest.importorskip("torch_tb_profiler.profiler.data")
    loader = loader_module.RunLoader.__new__(loader_module.RunLoader)
    loader.run_name = "run"
    ranks = []
    for rank in range(2):
        path = write_trace(tmp_path, "host", trace_of(rank, ONE_BURST))
        profile = data.RunProfileData.parse(f"host_{rank}", None, str(path), str(tmp_path))
        ranks.append(data.DistributedRunProfileData(profile))
    view = loader._process_distributed_profiles(ranks, None)
    assert view is not None
    rows = view.comm_ops["data"]["host_0"]["rows"]
    assert [row[:3] for row in rows] == [["gloo:all_reduce", 12, 12 * 25 * MB]]


def test_unfinished_and_unknown_records_do_no_harm() -> None:
    stream = generate(JobSpec(ONE_BURST, iterations=3))
    records = stream.records[0].copy()
    records["end_ns"][1] = -1
    records["status"][2] = 2
    records["op"][3] = OP_NUMBER["barrier"]
    records["op"][4] = 250
    records["group"][5] = 99
    trace = chrome_trace(records, [], rank=0, world_size=2, backend="gloo")
    names = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and ":" in e["name"]]
    assert names == ["gloo:all_reduce", "gloo:barrier", "gloo:unknown", "gloo:all_reduce"]
    empty = chrome_trace(records[:0], [], rank=0, world_size=2, backend="gloo")
    assert all(event["ph"] == "M" for event in empty["traceEvents"])
