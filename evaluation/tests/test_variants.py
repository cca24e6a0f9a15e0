"""Differences from the paper's text: single bursts, and the table of variants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.schedule.arrays import arrays_of
from crux_torch.schedule.model import Burst, Cluster, Flow, Job
from crux_torch.schedule.papers import correction, crux
from crux_torch.schedule.papers.compression import Edges
from crux_torch.schedule.papers.intensity import solo_periods_s, unrouted_transfer_times_s
from evaluation.beyond import small
from evaluation.variants import VARIANTS, measure, single_bursts, table


def one_job(compute_s: float, size: float, *bursts: Burst) -> Cluster:
    return Cluster({"l": 1.0}, (Job("a", 1, 1.0, compute_s, (Flow(size, (("l",),)),), bursts),))


def test_a_burst_that_ends_with_the_last_one() -> None:
    # Bursts of 1 s at 0 s and at 4 s of 4: an iteration of 5 s, one burst of 2 s from 3 s on.
    cluster = one_job(4.0, 2.0, Burst(0.0, 0.5), Burst(1.0, 0.5))
    assert single_bursts(cluster).jobs[0].bursts == (Burst(0.75, 1.0),)


def test_hidden_bursts_stay_hidden() -> None:
    cluster = one_job(10.0, 2.0, Burst(0.2, 0.5), Burst(0.6, 0.5))
    assert single_bursts(cluster).jobs[0].bursts[0].at == pytest.approx(0.4)
    late = one_job(10.0, 8.0, Burst(0.0, 0.5), Burst(0.6, 0.5))
    assert single_bursts(late).jobs[0].bursts[0].at == pytest.approx(0.2)


def test_one_burst_and_jobs_without_computation_stay_as_they_are() -> None:
    for cluster in (
        one_job(3.0, 2.0, Burst(0.3, 1.0)),
        one_job(0.0, 2.0, Burst(0.25, 0.5), Burst(0.75, 0.5)),
    ):
        assert single_bursts(cluster) == cluster


@given(
    st.sampled_from((0.0, 0.5, 1.0, 3.0)),
    st.sampled_from((0.0, 1.0, 2.0, 3.5)),
    st.sampled_from((((1.0, 1.0),), ((0.5, 1.0),), ((0.25, 0.5), (0.75, 0.5)))),
)
def test_an_iteration_alone_takes_as_long(
    compute_s: float, size: float, bursts: tuple[tuple[float, float], ...]
) -> None:
    cluster = one_job(compute_s, size, *(Burst(*burst) for burst in bursts))
    single = single_bursts(cluster)
    arrays, before = arrays_of(single), arrays_of(cluster)
    t_s = unrouted_transfer_times_s(before)
    assert solo_periods_s(arrays, t_s) == pytest.approx(solo_periods_s(before, t_s))
    assert all(len(job.bursts) == 1 for job in single.jobs if job.compute_s > 0)
    assert single_bursts(single) == single


ROOT = Path(__file__).parents[2]


def test_the_document_holds_the_table_of_the_results_file() -> None:
    results = json.loads((ROOT / "benchmarks/results/variants.json").read_text())
    printed = table(results["rows"])
    assert printed == (ROOT / "benchmarks/results/variants.txt").read_text()
    assert printed in (ROOT / "docs/understand/schedulers.md").read_text()


def test_every_variant_is_measured_and_undone() -> None:
    whole = (crux.reference_job, crux.correction_factors, correction.K_MAX)
    orders = Edges.random_start_times
    rows = list(measure(small(3), 30.0))
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert all(0.5 < row["ratio"] < 2.0 for row in rows)
    assert whole == (crux.reference_job, crux.correction_factors, correction.K_MAX)
    assert orders is Edges.random_start_times


def test_the_lines_of_crux_in_the_document_are_those_of_the_source() -> None:
    page = (ROOT / "docs/understand/schedulers.md").read_text()
    section = page[page.index("## The paper's §4, line by line") :].split("\n\n")[2]
    source = (ROOT / "crux_torch/schedule/papers/crux.py").read_text()
    rows = [row.split(" | ") for row in section.splitlines()[2:]]
    assert len(rows) > 10
    for _, function, line in rows:
        assert f"def {function.strip('`')}(" in source
        assert line.removesuffix(" |").strip("`") in source
