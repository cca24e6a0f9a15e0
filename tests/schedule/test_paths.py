"""Path selection against its own criterion in plain Python."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from schedule_cases import clusters, select_paths

from crux_torch import _schedule
from crux_torch.schedule.arrays import ClusterError, arrays_of, traffic_matrix
from crux_torch.schedule.model import Cluster, Flow, Job
from crux_torch.schedule.papers.intensity import (
    link_traffic,
    solo_periods_s,
    unrouted_transfer_times_s,
)

WAYS = (("a",), ("b",))


def job(name: str, flops: float, *flows: Flow) -> Job:
    return Job(name, gpus=1, flops=flops, compute_s=1.0, flows=flows)


def test_intense_jobs_get_paths_of_their_own() -> None:
    # All move alike; the two most intense ones must not meet, the third goes where less is.
    cluster = Cluster(
        {"a": 10.0, "b": 10.0},
        (
            job("weak", 1.0, Flow(4.0, WAYS)),
            job("strong", 9.0, Flow(4.0, WAYS)),
            job("middle", 5.0, Flow(4.0, WAYS)),
        ),
    )
    assert select_paths(cluster) == {"strong": (0,), "middle": (1,), "weak": (0,)}
    assert select_paths(cluster, ["weak", "middle", "strong"])["weak"] == (0,)


def congestion(cluster: Cluster, load_Bps, path, rate: float) -> tuple[float, float]:
    """The criterion of section 4.1, sums in whole steps of 2^-32 so that no order matters."""
    used = [(load_Bps[e] + rate) * (1.0 / cluster.capacity_Bps[e]) for e in path]
    return max(used, default=0.0), sum(round(u * 2**32) for u in used)


def flows_and_rates(cluster: Cluster, order: list[str]) -> list[tuple[str, int, Flow, float]]:
    """Job, index, flow and bytes per second of every flow, in the order in which flows choose."""
    arrays = arrays_of(cluster)
    period_s = solo_periods_s(arrays, unrouted_transfer_times_s(arrays))
    jobs = {j.name: (j, period_s[i]) for i, j in enumerate(arrays.jobs)}
    result = []
    for name in order:
        chosen, period = jobs[name]
        for f, flow in sorted(enumerate(chosen.flows), key=lambda item: -item[1].bytes):
            result.append((name, f, flow, flow.bytes / period if period > 0 else 0.0))
    return result


def one_by_one(cluster: Cluster, order: list[str], sweeps: int) -> dict[str, tuple[int, ...]]:
    """Path selection as it reads, in plain Python."""
    load_Bps = dict.fromkeys(cluster.capacity_Bps, 0.0)
    path = {j.name: [0] * len(j.flows) for j in cluster.jobs}
    flows = flows_and_rates(cluster, order)
    for sweep in range(sweeps + 1):
        for name, f, flow, rate in flows:
            for link in flow.candidates[path[name][f]] if sweep else ():
                load_Bps[link] -= rate
            costs = [congestion(cluster, load_Bps, p, rate) for p in flow.candidates]
            path[name][f] = costs.index(min(costs))
            for link in flow.candidates[path[name][f]]:
                load_Bps[link] += rate
    return {name: tuple(chosen) for name, chosen in path.items()}


@example(
    Cluster(
        {"l0": 1.0, "l1": 1.0, "l2": 2.0},
        (
            Job("a", 1, 1.0, 0.0),
            Job("b", 1, 1.0, 0.0, (Flow(1.0, (("l0", "l2"),)),)),
            Job("c", 1, 1.0, 0.5, (Flow(1.0, (("l0", "l2", "l1"), ("l0", "l1", "l2"))),)),
        ),
    ),
    random.Random(0),
    0,
)
@given(clusters(), st.randoms(), st.integers(0, 3))
def test_every_flow_takes_what_the_criterion_says(cluster: Cluster, draw, sweeps: int) -> None:
    order = [j.name for j in cluster.jobs]
    draw.shuffle(order)
    assert select_paths(cluster, order, sweeps=sweeps) == one_by_one(cluster, order, sweeps)


def test_criterion_on_a_larger_network() -> None:
    draw = random.Random(4)
    links = [f"l{i}" for i in range(40)]
    sets = [
        tuple(tuple(draw.sample(links, draw.randint(1, 5))) for _ in range(draw.randint(1, 12)))
        for _ in range(60)
    ]
    jobs = tuple(
        Job(
            f"j{j:03d}",
            8,
            draw.uniform(1, 9),
            draw.uniform(0.1, 3),
            tuple(Flow(draw.uniform(0, 4), draw.choice(sets)) for _ in range(8)),
        )
        for j in range(100)
    )
    cluster = Cluster({link: draw.choice((1.0, 2.5, 7.0)) for link in links}, jobs)
    order = [j.name for j in jobs]
    for sweeps in (0, 2):
        assert select_paths(cluster, order, sweeps=sweeps) == one_by_one(cluster, order, sweeps)


@given(clusters())
def test_equal_names_need_not_be_the_same_object(cluster: Cluster) -> None:
    copied = Cluster(
        {"".join(list(link)): capacity for link, capacity in cluster.capacity_Bps.items()},
        tuple(
            replace(
                j,
                flows=tuple(
                    Flow(f.bytes, tuple(tuple("".join(list(e)) for e in p) for p in f.candidates))
                    for f in j.flows
                ),
            )
            for j in cluster.jobs
        ),
    )
    assert select_paths(copied) == select_paths(cluster)


@given(st.lists(st.integers(0, 9), max_size=6), st.randoms(use_true_random=False), st.data())
def test_what_was_read_before_changes_nothing(kept, draw, data) -> None:
    """Jobs come and go, links too, and candidates that can be changed are."""
    pool = [job for _ in range(3) for job in data.draw(clusters()).jobs]
    loose = [replace(f, candidates=list(map(list, f.candidates))) for j in pool for f in j.flows]
    pool += [replace(j, flows=tuple(loose)) for j in pool[:1]]  # type: ignore[arg-type]
    links = tuple(f"l{i}" for i in range(6))
    reader = _schedule.FlowReader(data.draw(st.sampled_from((None, Flow))))
    for number in kept:
        jobs = draw.sample(pool, min(number, len(pool)))
        found = reader.read(jobs, links)
        for mine, expected in zip(found, _schedule.FlowReader().read(jobs, links), strict=True):
            assert mine.tolist() == expected.tolist()
            mine[:] = 0  # whoever asked may do with it what they like
        if number % 3 == 0:
            links = links[::-1]
        for flow in loose:
            flow.candidates[0].append("l0")  # type: ignore[attr-defined]


def test_flows_of_another_type_are_read_anew() -> None:
    loose = SimpleNamespace(bytes=1.0, candidates=WAYS)
    fixed = Flow(2.0, WAYS)
    reader = _schedule.FlowReader(Flow)
    for size in (1.0, 5.0):
        loose.bytes = size
        for flows in ((loose, fixed), (fixed,)):
            jobs = (job("j", 1.0, *flows), job("k", 1.0, fixed))  # type: ignore[arg-type]
            _, sizes, *_ = reader.read(jobs, ("a", "b", "c"))
            assert sizes.tolist() == [*(f.bytes for f in flows), 2.0]


@given(clusters(), st.data())
def test_the_traffic_matrix_adds_up_what_each_job_moves(cluster: Cluster, data) -> None:
    jobs = sorted(cluster.jobs, key=lambda j: j.name)
    path = [[data.draw(st.integers(0, len(f.candidates) - 1)) for f in j.flows] for j in jobs]
    arrays = arrays_of(cluster)
    matrix = traffic_matrix(arrays, np.array([i for mine in path for i in mine], np.int64))
    for j, (one, mine) in enumerate(zip(jobs, path, strict=True)):
        row = slice(matrix.indptr[j], matrix.indptr[j + 1])
        links = [list(cluster.capacity_Bps)[i] for i in matrix.indices[row]]
        assert dict(zip(links, matrix.data[row], strict=True)) == link_traffic(one, mine)
        assert np.all(np.diff(matrix.indices[row]) > 0)


@given(clusters())
def test_unrouted_times_are_the_larger_of_two_estimates(cluster: Cluster) -> None:
    arrays = arrays_of(cluster)
    found = unrouted_transfer_times_s(arrays).tolist()
    for job, t_s in zip(arrays.jobs, found, strict=True):
        spread: dict[str, float] = {}
        alone = 0.0
        for flow in job.flows:
            slowest = [
                max((1.0 / cluster.capacity_Bps[e] for e in p), default=0.0)
                for p in flow.candidates
            ]
            alone = max(alone, flow.bytes * min(slowest))
            for path in flow.candidates:
                for link in path:
                    share = flow.bytes * (1.0 / len(flow.candidates))
                    spread[link] = spread.get(link, 0.0) + share
        used = [moved * (1.0 / cluster.capacity_Bps[e]) for e, moved in spread.items()]
        assert t_s == max(alone, *used, 0.0)


PATHS = {
    "set_start": [0, 2],
    "path_start": [0, 1, 2],
    "path_links": [0, 1],
    "capacity_Bps": [1.0, 1.0],
    "flow_set": [0],
}
PLACE = PATHS | {"rate_Bps": [1.0]}
UNROUTED = PATHS | {"flow_start": [0, 1], "flow_bytes": [3.0]}
ANY_WRONG = (
    {"set_start": []},
    {"set_start": [0, 3]},
    {"set_start": [1, 2]},
    {"path_start": [0, 2, 1]},
    {"path_links": [0, 2]},
    {"path_links": [-1, 0]},
    {"flow_set": [1]},
    {"flow_set": [-1]},
    {"set_start": [0, 2, 2], "flow_set": [1]},
    {"capacity_Bps": [[1.0, 1.0]]},
)


@pytest.mark.parametrize(
    ("name", "right", "result", "wrong"),
    [
        *(("place", PLACE, [0], w) for w in (*ANY_WRONG, {"rate_Bps": [1.0, 2.0]})),
        *(
            ("unrouted_transfer_times_s", UNROUTED, [3.0], w)
            for w in (
                *ANY_WRONG,
                {"flow_start": [0, 2]},
                {"flow_start": []},
                {"flow_bytes": [1, 2]},
            )
        ),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, right, result, wrong) -> None:
    def call(arguments) -> list[float]:
        return getattr(_schedule, name)(**{k: np.array(v) for k, v in arguments.items()}).tolist()

    assert call(right) == result
    with pytest.raises(ValueError, match=r"start|link|candidate|rate|bytes|dimension"):
        call(right | wrong)


@pytest.mark.parametrize(
    ("flows", "error"),
    [
        (7, "sequence"),
        ((Flow(1.0, 7),), "candidates"),  # type: ignore[arg-type]
        ((Flow(1.0, (7,)),), "path"),  # type: ignore[arg-type]
        ((Flow("many", WAYS),), "real number"),  # type: ignore[arg-type]
        ((7,), "bytes"),
    ],
)
def test_reading_refuses_what_is_no_flow(flows, error: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=error):
        _schedule.FlowReader().read((Job("j", 1, 1.0, 1.0, flows),), ("a", "b"))


def test_reading_refuses_an_unknown_link() -> None:
    with pytest.raises(ClusterError, match="'c', which has no capacity"):
        select_paths(Cluster({"a": 1.0}, (job("j", 1.0, Flow(1.0, (("a",), ("c",)))),)))
