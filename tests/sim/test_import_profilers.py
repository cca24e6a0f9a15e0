"""``crux sim import`` of what profilers really write: hosts ahead, gaps, batches, broken bytes."""

from __future__ import annotations

import codecs
import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from places import ROOT
from profiled import (
    BATCH,
    COMPUTE_S,
    GATHERED,
    REDUCED,
    STEP_US,
    Recording,
    collective,
    event,
    kineto,
    moved,
    profiled,
)

from crux_torch.cli.sim import sim
from crux_torch.measure import traffic
from crux_torch.sim.importers import format_of
from crux_torch.sim.importers.chakra import read_chakra
from crux_torch.sim.importers.chrome import read_chrome
from crux_torch.sim.importers.workload import ImportedJob, ImportFailed, element_bytes
from crux_torch.sim.scenario import read_scenario

CASES = ROOT.parent / "shared/cases/import"


def read(events: list[dict], **about: Any) -> ImportedJob:
    return read_chrome({"trace": kineto(events, **about)})


def expect_iteration(job: ImportedJob, **sent: float) -> None:
    """The job is one iteration of ``profiled``, with ``sent`` beside it."""
    assert job.compute_s == pytest.approx(COMPUTE_S, rel=0.03)
    assert moved(job) == pytest.approx({"allreduce": REDUCED + GATHERED / 2, **sent})


# Which kernels belong to an iteration


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
@pytest.mark.parametrize("host_us", [STEP_US, 59_000, 20_000])
@pytest.mark.parametrize("seen", ["", "first", "streams"])
@pytest.mark.parametrize(
    "known", [{}, {"own": False}, {"launches": False}, {"launches": False, "own": False}]
)
def test_kernels_belong_to_the_step_that_launched_them(
    steps: int, host_us: float, seen: str, known: dict
) -> None:
    job = read(profiled(steps, host_us=host_us, seen=seen, **known))
    expect_iteration(job)
    assert job.notes == ()


@pytest.mark.parametrize("steps", [2, 3, 6])
@pytest.mark.parametrize("host_us", [STEP_US, 20_000])
@pytest.mark.parametrize("seen", ["", "first", "streams"])
def test_a_trace_without_the_host_is_read_by_the_devices_marks_or_refused(
    steps: int, host_us: float, seen: str
) -> None:
    events = profiled(steps, host_us=host_us, seen=seen, launches=False, records=False)
    if seen or host_us == STEP_US:
        expect_iteration(read(events))
        return
    with pytest.raises(ImportFailed, match=r"the trace's communication time.*ProfilerActivity.CPU"):
        read(events)


def test_a_trace_of_the_device_alone_is_read_by_its_own_marks() -> None:
    events = profiled(4, launches=False, records=False, seen="streams")
    expect_iteration(read([e for e in events if e["cat"] != "user_annotation"]))


def accumulated(marked: bool = True, steps: int = 8) -> list[dict]:
    """Four micro-batches of 58 ms for each step of the optimizer, each a step of the profiler."""
    recording, at = Recording(), 10_000
    for i in range(steps):
        recording.mark(f"ProfilerStep#{i}", at - 3_000, 58_000)
        recording.kernel("gemm", at - 2_000, at, 58_000)
        about = collective("_allgather_base", "BFloat16", 1_000_000, 16_000_000)
        recording.kernel("ncclDevKernel_AllGather_RING", at - 1_900, at + 1, 10_000, 20, about)
        if i % 4 == 3:
            about = collective("allreduce", "Float", 250_000_000, 250_000_000)
            recording.kernel("ncclDevKernel_AllReduce", at + 9, at + 30_000, 60_000, 20, about)
            if marked:
                recording.mark("Optimizer.step#AdamW.step", at + 40_000, 5_000)
            recording.kernel("multi_tensor_adam", at + 41_000, at + 91_000, 6_000)
            at += 40_000
        at += 60_000
    return recording.events


@pytest.mark.parametrize("steps", [8, 9, 11, 12])
def test_an_iteration_ends_with_the_optimizers_step(steps: int) -> None:
    job = read(accumulated(steps=steps))
    assert job.compute_s == pytest.approx(0.248, rel=0.02)  # of 0.28 s, without 0.032 s of waiting
    assert moved(job) == pytest.approx({"allreduce": REDUCED + 4 * GATHERED / 2})
    assert job.notes == (
        "an iteration of 0.28 s has 4 profiler steps and ends with a step of the optimizer",
    )


def test_a_recording_that_begins_within_an_iteration_waits_for_a_whole_one() -> None:
    events = [e for e in accumulated(steps=12) if e["ts"] >= 127_000]
    assert moved(read(events)) == pytest.approx({"allreduce": REDUCED + 4 * GATHERED / 2})


def test_steps_that_are_not_alike_are_said() -> None:
    (note,) = read(accumulated(marked=False)).notes
    assert "the iteration of median length has 5.0% of the trace's communication time" in note


def test_a_trace_without_steps_is_one_iteration() -> None:
    job = read([e for e in profiled(4) if e["cat"] != "user_annotation"])
    assert job.compute_s == pytest.approx(4 * COMPUTE_S, rel=0.01)
    assert moved(job) == pytest.approx({"allreduce": 4 * (REDUCED + GATHERED / 2)})
    assert job.notes == ("the trace marks no steps, so all of it is one iteration",)


def test_steps_of_the_optimizer_divide_a_trace_that_no_profiler_stepped() -> None:
    events = [e for e in profiled(4) if e["cat"] != "user_annotation"]
    events += [
        event("Optimizer.step#SGD.step", "user_annotation", 7_000 + STEP_US * i, 900.0)
        for i in range(5)
    ]
    # Muon for the matrices, AdamW for the rest: both step in every iteration.
    events += [e | {"name": "Optimizer.step#Muon.step", "ts": e["ts"] - 2_000} for e in events[-5:]]
    expect_iteration(read(events))


# Kernels without a record


def sendrecv(world: int, **ends: int) -> dict:
    op = "send" if "Dst Rank" in {k.replace("_", " ") for k in ends} else "recv"
    named = {key.replace("_", " "): value for key, value in ends.items()}
    return collective(op, "BFloat16", 1_000_000, 1_000_000, world, **named)


@pytest.mark.parametrize("launches", [True, False])
@pytest.mark.parametrize("sends", [1, 3])
def test_a_batch_moves_what_the_host_recorded_of_its_parts(launches: bool, sends: int) -> None:
    events = profiled(3, launches=launches)
    for i in range(3):
        host, key = 36_000 + STEP_US * i, 5_000 + i
        parts = [sendrecv(16, Dst_Rank=8)] * sends + [sendrecv(16, Src_Rank=8)]
        events += [
            event("record_param_comms", "cpu_op", host + j, 1, **{"External id": key}, **about)
            for j, about in enumerate(parts)
        ]
        number: dict[str, object] = {"correlation": 900 + i} if launches else {}
        if launches:
            events.append(event("cudaLaunchKernel", "cuda_runtime", host + 9, 2, **number))
        # Newer versions of torch record the batch itself, as nothing.
        about = collective("coalesced", "Byte", 0, 0) if i % 2 else {}
        events.append(event(BATCH, "kernel", host + 40, 500, 20, **number, **about))
    job = read(events)
    # To the eight ranks behind it; and what it receives is what those send back.
    expect_iteration(job, send=8 * 2e6 * (sends + 1))
    assert job.notes == ()


# As ROCm's profiler writes it.
def test_a_kernel_without_an_id_has_that_of_its_launch() -> None:
    events = profiled(3, own=False)
    for e in events:
        if e["cat"] == "kernel":
            del e["args"]["External id"]
    job = read(events)
    expect_iteration(job)
    assert job.notes == ()


def test_batches_of_several_collectives_without_launches_share_records_evenly() -> None:
    events = profiled(3, launches=False)
    for i in range(3):
        for j in range(4):
            about = collective("_allgather_base", "Byte", 1_000, 16_000)
            number = {"External id": 5_000 + 10 * i + j}
            # The host is far ahead.
            events.append(
                event("record_param_comms", "cpu_op", 8_000 + 100 * i + j, 1, **number, **about)
            )
        events.append(event("ncclDevKernel_AllGather", "kernel", 30_000 + STEP_US * i, 500, 20))
    job = read(events)
    assert moved(job)["allreduce"] == pytest.approx(REDUCED + GATHERED / 2 + 4 * 8_000)
    assert job.notes == ()


def test_a_kernel_takes_no_record_of_another_kind() -> None:
    events = profiled(3)
    about = collective("allreduce", "Float", 10, 10) | {"External id": 5_000}
    events.append(event("record_param_comms", "cpu_op", 136_000, 1, **about))
    events.append(event("cudaLaunchKernel", "cuda_runtime", 136_009, 2, correlation=900))
    events.append(event(BATCH, "kernel", 136_040, 500, 20, correlation=900))
    job = read(events)
    expect_iteration(job)
    assert "1 without a record" in job.notes[0]


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"graph node id": 12, "correlation": 9009}, "replayed by a CUDA graph"),
        ({"correlation": 9009}, "replayed by a CUDA graph"),
        ({"correlation": 9010}, "launched before the recording began"),
    ],
)
def test_kernels_that_nothing_tells_count_as_time_without_bytes(about: dict, reason: str) -> None:
    events = profiled(3)
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    for i in range(3):
        at = 30_000 + STEP_US * i
        number = about | {"correlation": about["correlation"] + 100 * i}
        if number["correlation"] % 100 == 9:
            graph = {"correlation": number["correlation"]}
            events.append(event("cudaGraphLaunch", "cuda_runtime", at - 20, 5, **graph))
        events.append(event(name, "kernel", at, 500, 20, **number))
    job = read(events)
    expect_iteration(job)
    (note,) = job.notes[-1:]
    assert f"1 of 3 kernels that communicate (1 {reason}), which are 1.1% of" in note


def test_what_ran_before_the_first_iteration_is_said() -> None:
    events = [*profiled(3), event("ncclDevKernel_Generic", "kernel", 8_000, 1_500, 20)]
    job = read(events)
    expect_iteration(job)
    assert "1.1% of the trace's communication time was launched before" in job.notes[0]


def test_a_trace_is_refused_if_most_of_its_communication_is_untold() -> None:
    with pytest.raises(ImportFailed, match=r"2 of 2 kernels .* 100.0% of .* torch 2.3"):
        read(profiled(3, own=False, records=False))
    events = profiled(3)
    for e in events:
        if e["name"].startswith("ncclDevKernel_AllReduce"):
            e["args"] = {"graph node id": 1, "correlation": e["args"]["correlation"]}
    with pytest.raises(ImportFailed, match=r"1 replayed by a CUDA graph\), which are 77.3%") as got:
        read([e for e in events if e["args"].get("Collective name") != "allreduce"])
    assert "torch 2.3" not in str(got.value)


def test_kernels_of_other_libraries_are_communication() -> None:
    events = profiled(3)
    for e in events:
        if e["name"].startswith("ncclDevKernel"):
            e["name"], e["args"] = "void deep_ep::internode::dispatch<false>(int4*)", {}
    with pytest.raises(ImportFailed, match="of a library that records nothing") as got:
        read([e for e in events if e["name"] != "record_param_comms"])
    assert "torch 2.3" not in str(got.value)


def test_a_collective_that_is_not_known_counts_as_untold() -> None:
    events = profiled(3)
    for i in range(3):
        about = collective("all_in_one", "Float", 10, 10)
        events.append(event("ncclDevKernel_New", "kernel", 30_000 + STEP_US * i, 500, 20, **about))
    job = read(events)
    expect_iteration(job)
    assert "1 of the unknown collective 'all_in_one'" in job.notes[0]


def test_a_trace_without_the_device_says_that_waiting_counts_as_computation() -> None:
    events = [e for e in profiled(3) if e["cat"] in ("user_annotation", "cpu_op")]
    job = read(events)
    assert moved(job) == pytest.approx({"allreduce": REDUCED + GATHERED / 2})
    assert job.compute_s == pytest.approx(STEP_US * 1e-6, rel=0.01)
    assert "record with ProfilerActivity.CUDA" in job.notes[0]


def test_a_file_of_several_ranks_is_refused() -> None:
    events = profiled(3)
    for i, e in enumerate(e for e in events if e["name"].startswith("nccl")):
        e["args"]["device"] = i % 8
    with pytest.raises(ImportFailed, match="several ranks put together"):
        read(events)


# What collectives say


@pytest.mark.parametrize("op", ["gather", "scatter"])
@pytest.mark.parametrize("root", [0, 5])
def test_gathers_and_scatters_move_what_the_live_system_counts(op: str, root: int) -> None:
    events = profiled(3)
    nelems = (1_000, 16_000) if op == "gather" else (16_000, 1_000)
    for i in range(3):
        about = collective(op, "Float", *nelems, Rank=root) | {"External id": 7_000 + i}
        events.append(event(BATCH, "kernel", 30_000 + STEP_US * i, 500, 20, **about))
    job = read(events)
    expect_iteration(job, send=15 * 4_000)
    names = [str(rank) for rank in range(16)]
    expected = traffic.flows(op, 64_000, range(16), names, peer=root)
    sends = {g: one.bytes for one in job.collectives if one.op == "send" for g in one.groups}
    assert {(str(a), str(b)): size for (a, b), size in sends.items()} == expected


def between(world: int, group: list[int], rank: int = 0, **ends: int) -> set[tuple[int, int]]:
    about = sendrecv(world, **ends) | {"Process Group Ranks": str(group), "Group size": len(group)}
    events = [
        event("ProfilerStep#0", "user_annotation", 0, 100_000),
        event("gemm", "kernel", 0, 90_000),
        event(BATCH, "kernel", 50_000, 1_000, 20, **about),
    ]
    found = read(events, world=world, rank=rank).collectives
    return {(pair[0], pair[1]) for one in found for pair in one.groups}


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("pair", [True, False])
def test_a_pipelines_sends_go_to_every_place_that_has_both_ranks(stages: int, pair: bool) -> None:
    world = 8 * stages
    group = [0, 8] if pair else list(range(world))
    expected = {(rank, rank + 8) for rank in range(world - 8)}
    assert between(world, group, Dst_Rank=8) == expected
    back = {(b, a) for a, b in expected}
    # What the first stage receives is all that its trace tells of the way back.
    assert between(world, group, Src_Rank=8) == back
    assert between(world, group[::-1], rank=8, Dst_Rank=0) == back


def test_sends_stay_in_groups_that_say_more() -> None:
    # Two pipelines of four stages, each of four ranks.
    expected = {(r + 16 * half, r + 4 + 16 * half) for half in (0, 1) for r in range(12)}
    assert between(32, [0, 4, 8, 12], Dst_Rank=4) == expected


@pytest.mark.parametrize(
    ("world", "group", "groups"),
    [
        (8, (1, 3), {(0, 2), (1, 3), (4, 6), (5, 7)}),
        (32, (0, 8), {(r + 16 * half, r + 8 + 16 * half) for half in (0, 1) for r in range(8)}),
        (16, (0, 1, 4, 5), {tuple(r + i for i in (0, 1, 4, 5)) for r in (0, 2, 8, 10)}),
        # Megatron's embeddings: of the first stage and the last.
        (32, (0, 24), {(rank, rank + 24) for rank in range(8)}),
        # Neither do pairs share a rank where they don't fill the job.
        (8, (0, 3), {(0, 3), (1, 4), (2, 5)}),
    ],
)
def test_groups_are_repeated_beside_each_other(world: int, group: tuple, groups: set) -> None:
    about = collective("allreduce", "Float", 10, 10, len(group))
    about["Process Group Ranks"] = str(list(group))
    events = [event("gemm", "kernel", 0, 90)]
    events.append(event("ncclDevKernel_AllReduce", "kernel", 90, 9, 20, **about))
    (only,) = read(events, world=world, rank=group[0]).collectives
    assert set(only.groups) == groups


@pytest.mark.parametrize("group", [[0, 1, 2], [1, 2], [0, 1, 3, 4]])
def test_groups_that_do_not_repeat_are_refused(group: list[int]) -> None:
    about = collective("allreduce", "Float", 10, 10, len(group))
    about["Process Group Ranks"] = str(group)
    events = [event("gemm", "kernel", 0, 90)]
    events.append(event("ncclDevKernel_AllReduce", "kernel", 90, 9, 20, **about))
    with pytest.raises(ImportFailed, match=r"trace: group .* expected the traces of all ranks"):
        read(events, world=8, rank=1)


def test_ranks_that_are_cut_short_are_told_by_their_distance() -> None:
    about = collective("allreduce", "Float", 10, 10, 64)
    about |= {"Process Group Ranks": "[0, 2, 4, ..., 126]", "Global rank start": 0}
    about["Global rank stride"] = 2
    events = [event("gemm", "kernel", 0, 90)]
    events.append(event("ncclDevKernel_AllReduce", "kernel", 90, 9, 20, **about))
    (only,) = read(events, world=128).collectives
    assert only.groups == (tuple(range(0, 128, 2)), tuple(range(1, 128, 2)))


def test_the_types_of_all_vendors_have_a_size() -> None:
    torch = pytest.importorskip("torch")
    types = {
        getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)
    }
    for dtype in types:
        assert element_bytes(str(dtype)) == dtype.itemsize, dtype
    sizes = {"Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "Float8_e8m0fnu": 1, "BFloat16": 2}
    sizes |= {"Float4_e2m1fn_x2": 1, "Half": 2, "UInt64": 8, "ComplexHalf": 4, "Long": 8}
    assert {name: element_bytes(name) for name in sizes} == sizes
    events = profiled(3)
    for e in events:
        if "dtype" in e["args"]:
            e["args"]["dtype"] = "Posit16"
    with pytest.raises(ImportFailed, match="dtype 'Posit16' is unknown"):
        read(events)


# Bytes that are no JSON


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text.replace(b"gemm", b"gemm \xf0("),
        lambda text: text.replace(b"gemm", b"gemm \x00\x01\x1f\t\n"),
        lambda text: text.replace(b"gemm", rb"C:\Users\new\gemm \ud800"),
        lambda text: text.replace(b'"dur"', b'"occupancy": -nan, "x": [NaN, Infinity, inf], "dur"'),
        lambda text: text.replace(b'"stream"', b'"est. achieved": nan, "stream"'),
        lambda text: codecs.BOM_UTF8 + text,
        lambda text: text.decode().encode("utf-16"),
        lambda text: codecs.BOM_UTF16_BE + text.decode().encode("utf-16-be"),
        lambda text: codecs.BOM_UTF8 + text.replace(b"gemm", b"\xff\\q"),
    ],
)
def test_what_is_broken_in_names_makes_no_difference(broken: Any) -> None:
    text = kineto(profiled(3))
    files = {"trace": broken(text)}
    assert format_of(files) == "chrome"
    assert read_chrome(files) == read_chrome({"trace": text})


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, b""])
def test_packed_traces_are_read(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(mark + kineto(profiled(3))))
    compute_s, size, _ = invoke(tmp_path / "t.json.gz", tmp_path / "o.json")
    assert compute_s == pytest.approx(COMPUTE_S)
    assert size == pytest.approx(2.29e10, rel=0.01)


@pytest.mark.parametrize("number", [{}, [1], None, 1e300])
def test_ids_that_are_none_are_as_if_they_were_missing(number: Any) -> None:
    events = profiled(3)
    events[-1]["args"] |= {"External id": number, "correlation": number}
    expect_iteration(read(events))


def test_an_event_whose_time_is_no_number_is_left_out() -> None:
    events = [*profiled(3), event("gemm", "kernel", float("nan"), 5)]
    expect_iteration(read(events))


def test_the_work_grows_with_the_size_of_a_trace() -> None:
    """Counts the lines that run: twice the file, about twice the lines."""

    def lines_of(steps: int) -> int:
        held, count = kineto(profiled(steps)), 0

        def count_lines(frame: Any, what: str, _: object) -> Any:
            nonlocal count
            count += what == "line"
            return count_lines if "crux_torch" in frame.f_code.co_filename else None

        before = sys.gettrace()
        sys.settrace(count_lines)
        try:
            read_chrome({"trace": held})
        finally:
            sys.settrace(before)
        return count

    assert lines_of(200) < 2.5 * lines_of(100)


# The inputs that outsiders gave


def invoke(path: Path, out: Path) -> tuple[float, float, str]:
    """Seconds of compute, bytes over all links, and all that the command said."""
    found = CliRunner().invoke(
        sim, ["import", f"a={path}", "--out", str(out), "--topology", "testbed"]
    )
    assert found.exit_code == 0, found.output
    job = read_scenario(out).jobs["a"]
    size = sum(sum(part.values()) for burst in job.sent for part in burst.parts)
    return job.compute_s, size, found.output


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not in a clone of the repository")
@pytest.mark.parametrize(
    ("case", "compute_s", "size", "said"),
    [
        ("reference", 0.0965, 2.29e10, ""),
        ("one-step-gpu-annotation", 0.0965, 2.29e10, ""),
        ("host-ahead-1", 0.0965, 2.29e10, ""),
        ("gradient-accumulation", 0.248, 2.39e10, "an iteration of 0.28 s"),
        ("kernel-of-step-before", 0.0965, 2.29e10, "3.3% of the communication time"),
        ("cudagraph-nccl", 0.0965, 2.29e10, "1.1% of the communication time"),
        ("batch-isend-irecv", 0.0965, 2.29e10 + 16 * 2e6 * 6, ""),
        ("gather", 0.0965, 2.29e10, ""),
        ("scatter", 0.0965, 2.29e10, ""),
        ("pipeline-send-3-stages", 0.09, 2.24e8, ""),
        ("pipeline-send-4-stages", 0.09, 3.2e8, ""),
        ("bad-utf8", 0.0965, 2.29e10, ""),
        ("control-character", 0.0965, 2.29e10, ""),
    ],
)
def test_every_case_has_its_right_value(
    tmp_path: Path, case: str, compute_s: float, size: float, said: str
) -> None:
    found = invoke(CASES / f"chrome-{case}.json", tmp_path / "o.json")
    assert found[0] == pytest.approx(compute_s, rel=0.02)
    assert found[1] == pytest.approx(size, rel=0.01)
    assert said in found[2]


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not in a clone of the repository")
def test_the_large_case_is_read(tmp_path: Path) -> None:
    script = CASES / "make_chakra_large.py"
    subprocess.run([sys.executable, str(script), "200"], cwd=tmp_path, check=True)
    job = read_chakra({str(file): file.read_bytes() for file in tmp_path.iterdir()})
    assert moved(job) == {"allreduce": 4e6}
    assert job.compute_s == pytest.approx(196 * 10e-6)
