"""CASSINI's traces: their jobs, the schedulers that share workers out, and what is counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from math import inf

import pytest

from crux_torch.network.builders import Cabling, GpuServer, two_layer_clos
from evaluation import cassini as study
from evaluation import cassini_jobs
from evaluation.cassini_jobs import (
    DYNAMIC,
    LINK_BPS,
    MIB,
    TABLE_3,
    StudyJob,
    dynamic,
    pairs,
    placer_of,
    poisson,
    study_model,
)
from evaluation.cassini_play import SCHEMES, Run
from evaluation.cassini_shares import Bid, fitness, pollux, themis, unfairness
from evaluation.snapshots import SNAPSHOTS

SWITCHES = ("tor", "aggregation", "core")
VGG16 = "vgg16/1400/figure 3/1"


def bid(name: str, held: int = 0, wanted: int = 12, waited_s: float = 0.0, unit: int = 1) -> Bid:
    return Bid(name, held, wanted, waited_s, 100.0, 100.0, float, unit)


def cassinis_network() -> Counter[tuple[str, ...]]:
    topology = cassini_jobs.testbed()
    kinds = Counter(
        tuple(sorted((topology.nodes[e.src].kind, topology.nodes[e.dst].kind)))
        for e in topology.edges
    )
    return Counter({pair: count // 2 for pair, count in kinds.items() if set(pair) & {*SWITCHES}})


def test_the_testbed_has_the_papers_switches_cables_and_oversubscription() -> None:
    topology = cassini_jobs.testbed()
    assert len(topology.hosts) == len(topology.gpus()) == 24
    assert sum(node.kind in SWITCHES for node in topology.nodes.values()) == 13
    cables = cassinis_network()
    assert cables.total() == 48
    assert cables["nic", "tor"] == 2 * cables["aggregation", "tor"]
    assert len(pairs().hosts) == 6
    assert len(pairs().gpus()) == 12


def test_models_have_the_sizes_and_times_that_the_paper_prints() -> None:
    assert study_model(VGG16).compute_s == pytest.approx(0.255)
    assert study_model(VGG16).gradient_bytes == 528 * MIB
    # 224 pixels take longer, and as much longer for each image model.
    longer = study_model("vgg16/1400/catalogue/1").compute_s / 0.255
    resnet = [study_model(f"resnet/512/{how}/1").compute_s for how in ("catalogue", "figure 3")]
    assert longer == pytest.approx(resnet[0] / resnet[1])
    assert study_model("gpt-2/32/figure 3/2").pipeline == 2


@pytest.mark.parametrize("load", [0.8, 1.0])
def test_poisson_jobs_ask_for_the_load_and_each_model_is_as_likely(load: float) -> None:
    placer = placer_of(cassini_jobs.testbed())
    jobs = poisson(tuple(TABLE_3), "least batches", 3000, load, placer, random.Random(1))
    wanted = sum(
        job.workers * job.iterations * placer.reference(job.model, job.workers).alone_s
        for job in jobs
    )
    assert wanted / (24 * jobs[-1].submit_s) == pytest.approx(load, rel=0.08)
    assert all(1 <= job.workers <= 12 and 200 <= job.iterations <= 1000 for job in jobs)
    counts = Counter(job.kind for job in jobs)
    assert min(counts.values()) > 0.7 * len(jobs) / 13


def test_themis_offers_free_workers_to_who_is_worst_off() -> None:
    late, fresh = bid("late", held=4, waited_s=300.0), bid("fresh", held=4)
    assert unfairness(late, 4, 12) > unfairness(fresh, 4, 12)
    assert themis([fresh, late], 12, random.Random(0)) == {"fresh": 0, "late": 4}
    # It has all that it wants then; the rest is for the other.
    assert themis([fresh, late], 24, random.Random(0)) == {"fresh": 8, "late": 8}
    # A job without workers never ends: it goes first.
    waiting = bid("waiting", wanted=3)
    assert themis([late, waiting], 7, random.Random(0)) == {"late": 0, "waiting": 3}


def test_finish_time_fairness_is_the_finish_over_that_in_a_fair_cluster() -> None:
    # 100 units of work: 50 s so far and 25 s to come with 4 workers; fair, 10 s with 10.
    assert unfairness(bid("a", waited_s=50.0), 4, 10) == pytest.approx(75 / 10)
    assert unfairness(bid("a"), 0, 10) == inf
    endless = Bid("e", 2, 12, 50.0, inf, inf, float)
    assert unfairness(endless, 4, 8) == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_whole_units_within_what_is_free_and_asked_for(seed: int) -> None:
    rng = random.Random(seed)
    bids = []
    for i in range(rng.randint(1, 7)):
        unit = rng.choice((1, 2))
        wanted = unit * rng.randint(1, 6)
        bids.append(bid(f"j{i}", min(unit, wanted), wanted, rng.uniform(0, 500), unit))
    won = themis(bids, 24, rng)
    for has in (pollux(bids, 24), {b.name: b.held + won[b.name] for b in bids}):
        assert sum(has.values()) <= 24
        assert all(0 <= has[b.name] <= b.wanted and has[b.name] % b.unit == 0 for b in bids)
        left = 24 - sum(has.values())
        assert all(has[b.name] + b.unit > b.wanted or b.unit > left for b in bids)


def test_pollux_finds_the_largest_fitness_and_moves_nobody_for_little() -> None:
    def rate(slow: float) -> object:
        return lambda workers: workers / (1 + slow * workers)

    bids = [Bid(f"j{i}", 0, 6, 0.0, 1.0, 1.0, rate(i / 10), 1) for i in range(3)]  # type: ignore[arg-type]
    best = max(
        fitness(bids, dict(zip(("j0", "j1", "j2"), split, strict=True)), 10)
        for split in product(range(7), repeat=3)
        if sum(split) <= 10
    )
    assert fitness(bids, pollux(bids, 10), 10) == pytest.approx(best)
    near = [bid("a", held=6), bid("b", held=6)]
    assert pollux(near, 12) == {"a": 6, "b": 6}
    assert pollux([bid("a", held=11), bid("b", held=1)], 12) == {"a": 6, "b": 6}
    uneven = [bid("a", held=13, wanted=24), bid("b", held=11, wanted=24)]
    assert pollux(uneven, 24) == {"a": 13, "b": 11}


class Checked(Run):
    """A run that looks at each assignment of GPUs."""

    def _places(
        self, workers: Mapping[str, int], gained: Sequence[str], renewed: Sequence[str]
    ) -> dict[str, tuple[str, ...]]:
        found = super()._places(workers, gained, renewed)
        held = [gpu for gpus in found.values() for gpu in gpus]
        assert len(held) == len(set(held)) <= 24
        assert {name: len(gpus) for name, gpus in found.items()} == workers
        return found


@pytest.mark.parametrize("name", SCHEMES)
def test_all_work_is_done_on_gpus_of_ones_own_and_never_faster_than_alone(name: str) -> None:
    placer = placer_of(cassini_jobs.testbed())
    jobs = poisson(tuple(TABLE_3), "least batches", 12, 1.0, placer, random.Random(3))
    outcome = Checked(jobs, placer, SCHEMES[name], 0).play()
    for job in jobs:
        work = job.iterations * job.workers
        assert work - 1e-6 <= outcome.done[job.name] < work + job.workers
    seen = Counter[str]()
    for each in outcome.seen:
        seen[each.kind] += each.count * each.workers
        assert each.time_s >= each.alone_s * (1 - 1e-6)
        if name == "ideal":
            assert each.time_s == pytest.approx(each.alone_s)
    done = Counter[str]()
    for job in jobs:
        done[job.kind] += round(outcome.done[job.name])
    assert seen == done
    assert 0.0 <= outcome.shifted <= outcome.met <= 1.0
    if not SCHEMES[name].cassini:
        assert outcome.shifted == 0.0
        assert outcome.score is None


def test_two_jobs_across_one_rack_take_turns_under_cassini() -> None:
    """Each has a half of the middle rack, and sends 118 of the 255 ms over its links."""
    server = GpuServer(gpus=1, nics=1, pcie_switches=1, nic_Bps=LINK_BPS, nvlink_Bps=0)
    placer = placer_of(two_layer_clos(6, 3, 1, server, Cabling(LINK_BPS, 1)))
    jobs = [StudyJob("a", VGG16, 3), StudyJob("b", VGG16, 3)]
    plain, shifted, ideal = (
        Run(jobs, placer, SCHEMES[name], tick_s=1e-3, until_s=20.0, watch_s=5.0).play()
        for name in ("themis", "th+cassini", "ideal")
    )
    sent_s = 4 / 3 * 528 * MIB / LINK_BPS
    assert plain.quantities()["mean_s"] == pytest.approx(0.255 / 2 + 2 * sent_s, rel=0.01)
    assert ideal.quantities()["mean_s"] == pytest.approx(0.255)
    assert shifted.quantities()["mean_s"] < 1.06 * 0.255
    assert shifted.shifted == pytest.approx(1.0)
    assert shifted.score == pytest.approx(1.0)
    # All bytes of a link on which both send are contended, or hardly any.
    assert plain.marked_per_iteration()["vgg16"] == pytest.approx(sent_s * LINK_BPS, rel=0.03)
    assert shifted.marked_per_iteration()["vgg16"] < 0.05 * sent_s * LINK_BPS
    assert ideal.marked_per_iteration()["vgg16"] == 0.0


def test_dynamic_jobs_fill_the_cluster_when_the_last_have_arrived() -> None:
    for figure, trace in DYNAMIC.items():
        jobs = dynamic(trace, 20.0, random.Random(figure))
        assert sum(job.workers for job in jobs) == len(trace.topology().gpus())
        assert [job.kind for job in jobs if job.submit_s] == [kind for kind, _ in trace.arrive]


def test_a_cell_has_a_row_for_each_scheme_and_the_table_the_papers_gains() -> None:
    rows = study.cell(12, "figure 3", 0, 6)
    assert [row["scheme"] for row in rows] == list(SCHEMES)
    assert rows[-1]["mean_slowdown"] == pytest.approx(1.0)
    of = {row["scheme"]: row for row in rows}
    gain = of["themis"]["mean_slowdown"] / of["th+cassini"]["mean_slowdown"]
    assert study.gains(rows, "themis", "mean_slowdown") == [pytest.approx(gain)]
    text = study.table(rows)
    (line,) = [line for line in text.splitlines() if line.startswith("  themis  ") and "(" in line]
    assert line.endswith("1.2, 1.6")
    assert f"{gain:.2f} ({gain:.2f} to {gain:.2f})" in line


def test_the_links_of_a_snapshot_carry_the_same_and_are_less_often_full() -> None:
    plain, shifted = study.utilisation(SNAPSHOTS[0])
    assert len(plain["used"]) == len(shifted["used"]) == study.DRAWN * study.STEPS
    assert all(0.0 <= used <= 1.001 for row in (plain, shifted) for used in row["used"])
    # Two jobs of one period: each asks for `demand` of the link, one after the other.
    assert shifted["full"] < 0.05
    assert max(shifted["used"]) == pytest.approx(shifted["demand"], abs=0.02)
    assert plain["full"] > 0.2
    assert "Figure 15" in study.table([plain, shifted])


def test_jobs_fit_one_grid_if_their_iterations_are_in_a_simple_ratio() -> None:
    placer = placer_of(cassini_jobs.testbed())
    names = [VGG16, VGG16, "gpt-2/80/figure 3/1"]
    jobs = [StudyJob(name, name, 3) for name in names]
    assert study.fit(jobs, placer) == pytest.approx(1 / 3)
    # One worker alone sends nothing.
    assert study.fit([*jobs, StudyJob("one", VGG16, 1)], placer) == pytest.approx(1 / 3)
