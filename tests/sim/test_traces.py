"""Traces: what is read, what is left out and said so, and the generator's marginals."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from trace_data import PHILLY, SIZES, needs_data

from crux_torch.sim.catalogue import MODELS, WorkloadError
from crux_torch.sim.traces import (
    GENERATED_SIZES,
    Trace,
    TraceJob,
    catalogue_name,
    generate,
    load_csv,
    load_hybrid,
    load_lingjun,
)

ARRIVALS = """timestamp,duration,num_gpus,gpu_time,cluster
2017-11-02 00:00:00,60.0,1,60.0,a
2017-10-31 23:59:59,60.0,1,60.0,a
2017-11-01 00:00:00,30.0,2,60.0,a
2017-11-03 00:00:00,0.0,2,60.0,a
2017-11-15 00:00:00,30.0,2,60.0,a
"""
KINDS = "model,total_gpu\nllama_30b,48\nResNet,0\nDLM,256\n"

JOBS = """job_name,model,gmt_job_submitted,gmt_job_finished
late,GPT-13b,2023/8/1 00:10,2023/8/1 02:00
early,ResNet,2023/8/1 00:00,2023/8/1 01:00
waiting,llama,2023/8/1 00:05,2023/8/1 00:06
open,llama,2023/8/1 00:20,
broken,llama,2023/8/1 00:30,2023/8/1 00:01
cpu,llama,2023/8/1 00:30,2023/8/1 00:50
"""
WORKERS = """job_name,host_ip,gmt_pod_running,RES
early,h1,2023/8/1 00:02,"{""cpu"": ""96"", ""nvidia.com/gpu"": ""8""}"
early,h0,2023/8/1 00:01,"{""nvidia.com/gpu"": ""8""}"
late,h9,2023/8/1 00:10,"{""nvidia.com/gpu"": ""4""}"
waiting,h0,,"{""nvidia.com/gpu"": ""8""}"
open,h0,2023/8/1 01:00,"{""nvidia.com/gpu"": ""2""}"
open,h0,2023/8/1 01:00,"{""nvidia.com/gpu"": ""2""}"
broken,h0,2023/8/1 00:40,"{""nvidia.com/gpu"": ""2""}"
cpu,h0,2023/8/1 00:40,
"""


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def peaks(trace: Trace) -> tuple[int, int]:
    """Most jobs and most GPUs at once, with every job starting on arrival."""
    events = [(j.submit_s, 1, j.gpus) for j in trace.jobs]
    events += [(j.submit_s + j.duration_s, -1, -j.gpus) for j in trace.jobs]
    jobs = gpus = most_jobs = most_gpus = 0
    for _, job, held in sorted(events):
        jobs, gpus = jobs + job, gpus + held
        most_jobs, most_gpus = max(jobs, most_jobs), max(gpus, most_gpus)
    return most_jobs, most_gpus


def test_hybrid_takes_times_from_one_and_sizes_from_the_other(tmp_path: Path) -> None:
    arrivals = tmp_path / "p.csv.gz"
    arrivals.write_bytes(gzip.compress(ARRIVALS.encode()))
    trace = load_hybrid(arrivals, write(tmp_path, "s.csv", KINDS))
    assert trace.kind == "hybrid"
    assert [(j.submit_s, j.duration_s) for j in trace.jobs] == [(0.0, 30.0), (86400.0, 60.0)]
    assert {(j.model, j.gpus) for j in trace.jobs} <= {("llama-30b", 48), ("transformer-nlp", 256)}
    assert trace.dropped == {"outside the window": 2, "no duration": 1, "no GPU": 1}


def test_hybrid_limits(tmp_path: Path) -> None:
    arrivals, sizes = write(tmp_path, "p.csv", ARRIVALS), write(tmp_path, "s.csv", KINDS)
    trace = load_hybrid(arrivals, sizes, jobs=1)
    assert len(trace.jobs) == trace.dropped["not drawn"] == 1
    with pytest.raises(WorkloadError, match="nothing left in 0 days from 2017-11-01"):
        load_hybrid(arrivals, sizes, days=0)


@needs_data
def test_the_real_hybrid_trace() -> None:
    trace = load_hybrid(PHILLY, SIZES, jobs=5000, seed=3)
    assert trace == load_hybrid(PHILLY, SIZES, jobs=5000, seed=3)
    assert len(trace.jobs) == 5000
    assert trace.dropped["no GPU"] == 271
    sizes = sorted(j.gpus for j in trace.jobs)
    # The file's own marginals: mean 36, median 8, maximum 400.
    assert sum(sizes) / 5000 == pytest.approx(36, rel=0.1)
    assert (sizes[2500], sizes[-1]) == (8, 400)
    assert all(0 <= j.submit_s < 14 * 86400 and j.duration_s > 0 for j in trace.jobs)


def test_lingjun(tmp_path: Path) -> None:
    jobs, workers = write(tmp_path, "job.csv", JOBS), write(tmp_path, "worker.csv", WORKERS)
    trace = load_lingjun(jobs, workers)
    assert trace.dropped == {"never ran": 1, "no GPU": 1, "impossible times": 1}
    assert trace.jobs == (
        TraceJob("early", "resnet", 16, 0.0, 59 * 60),
        TraceJob("late", "gpt-13b", 4, 600.0, 110 * 60),
        # It still ran when the recording ended, at 02:00; it has two workers.
        TraceJob("open", "llama-7b", 4, 1200.0, 60 * 60),
    )


def test_own_csv_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    text = 'name,model,gpus,submit_s,duration_s\n"b, c",bert,8,7.5,1\na,gpt,512,0,1e7\n'
    trace = load_csv(write(tmp_path, "own.csv", text))
    assert trace == Trace(
        "csv", (TraceJob("a", "gpt", 512, 0.0, 1e7), TraceJob("b, c", "bert", 8, 7.5, 1.0))
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,model,gpus,submit_s\n", "line 1: the column 'duration_s' is missing"),
        ("@", "there is no job"),
        ("@a,bert,8,0\n", "line 2: expected 5 fields"),
        ("@a,bert,8,0,1,2\n", "line 2: expected 5 fields"),
        ("@a,bert,8,0,1\nb,bert,x,0,1\n", "line 3: gpus is 'x'; expected a number"),
        ("@a,bert,1.5,0,1\n", "line 2: gpus is '1.5'; expected 1 or more"),
        ("@a,bert,8,-1,1\n", "line 2: expected submit_s of 0 or more"),
        ("@a,bert,8,0,nan\n", "line 2: duration_s is 'nan'"),
        ("@a,vgg,8,0,1\n", "line 2: model 'vgg'; expected one of bert"),
        ("@a,bert,8,0,1\na,bert,8,0,1\n", "line 3: name 'a'; expected a name of its own"),
    ],
)
def test_own_csv_errors_name_the_line(tmp_path: Path, text: str, words: str) -> None:
    header = "name,model,gpus,submit_s,duration_s\n"
    with pytest.raises(WorkloadError, match=f"own.csv: {words}"):
        load_csv(write(tmp_path, "own.csv", text.replace("@", header)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda j, w: (j.replace("2023/8/1 00:10", "yesterday"), w), "job.csv: line 2: gmt_job_s"),
        (lambda j, w: (j.replace("model,", "kind,"), w), "the column 'model' is missing"),
        (lambda j, w: (j, w.replace('"{""cpu""', '"{cpu""')), "worker.csv: line 2: RES is"),
        (lambda j, w: (j, w.split("\n")[0] + "\n"), "no job ran"),
    ],
)
def test_lingjun_errors(
    tmp_path: Path, change: Callable[[str, str], tuple[str, str]], words: str
) -> None:
    jobs, workers = change(JOBS, WORKERS)
    with pytest.raises(WorkloadError, match=words):
        load_lingjun(write(tmp_path, "job.csv", jobs), write(tmp_path, "worker.csv", workers))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.csv.*No such file"):
        load_csv(tmp_path / "none.csv")
    damaged = tmp_path / "p.csv.gz"
    damaged.write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(WorkloadError, match=r"p\.csv\.gz: expected what gzip packed"):
        load_hybrid(damaged, damaged)


@pytest.mark.parametrize("seed", range(5))
def test_generated_marginals_are_those_of_the_paper(seed: int) -> None:
    trace = generate(seed)
    assert trace == generate(seed) != generate(seed + 1)
    assert len(trace.jobs) == 5000
    large = [j for j in trace.jobs if j.gpus >= 128]
    assert len(large) / 5000 > 0.10
    assert {j.model[:3] for j in large} == {"gpt"}
    assert max(j.gpus for j in trace.jobs) == 512
    most_jobs, most_gpus = peaks(trace)
    assert most_jobs > 30
    assert most_gpus > 1000
    assert all(0 <= j.submit_s <= 14 * 86400 for j in trace.jobs)


def test_generated_shares_sum_to_one() -> None:
    assert sum(share for share, _, _ in GENERATED_SIZES) == pytest.approx(1.0)
    assert {m for _, _, models in GENERATED_SIZES for m in models} <= set(MODELS)


def test_names_of_the_published_list_have_entries() -> None:
    published = ("GPT-13B", "llama_30b", "gpt-7b", "something new")
    assert [*map(catalogue_name, published)] == ["gpt-13b", "llama-30b", "gpt-7b", "bert"]
