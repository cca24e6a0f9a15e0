"""LiteGD's evaluation: the clusters, the yardstick, and the table that it prints."""

from __future__ import annotations

import numpy as np
import pytest

from crux_torch.dispatch.cluster import count
from crux_torch.dispatch.predictor import predicted_links
from crux_torch.dispatch.search import strongest
from evaluation.commands.dispatch import efficacy_rows, storage_row, text_of, time_rows
from evaluation.dispatch import MIXED, case, efficacy, measured, methods, remembered, search_cpu_s
from evaluation.dispatch_trees import Trees


def test_a_case_is_drawn_by_its_seed_and_measured_across_hosts() -> None:
    one, again, other = (case(MIXED, seed, samples=20) for seed in (3, 3, 4))
    assert (one.free == again.free).all()
    assert (one.samples.choices == again.samples.choices).all()
    assert (one.free != other.free).any()
    assert ((one.samples.choices > 0).sum(axis=1) > 1).all()
    assert ((one.cluster.uplink_Bps >= 20e9) & (one.cluster.uplink_Bps <= 40e9)).all()
    assert 30 <= count(one.free) <= 64


def test_efficacy_is_one_for_the_best_choice_and_no_more_for_others() -> None:
    one = case(("A6000", "V100"), 0, samples=100, hosts=2)
    chosen = methods(one, 0, None) | {"best": lambda k: strongest(one.cluster, one.free, k)}
    found = efficacy(one, chosen)
    assert set(found["best"]) == {1.0}
    for name, values in found.items():
        assert len(values) == count(one.free) - 1
        assert all(0 < gbe <= 1 for gbe in values), name
    assert np.mean(found["strongest, links fitted"]) > np.mean(found["by index"])
    took = search_cpu_s(one, chosen, (2, 9, 99))
    assert all(list(by_k) == [2, 9] and min(by_k.values()) >= 0 for by_k in took.values())


def test_links_that_a_true_predictor_tells_choose_as_true_links_do() -> None:
    one = case(("4090", "A800"), 1, samples=30)
    told = predicted_links(one.cluster, one.cluster.weakest_link_Bps)
    for k in range(2, int(count(one.free)) + 1, 5):
        choice = strongest(told, one.free, k)
        best = strongest(one.cluster, one.free, k)
        rates = one.cluster.weakest_link_Bps(np.stack([choice, best]))
        assert rates[0] == rates[1]


def test_trees_learn_and_leave_a_host_to_its_table() -> None:
    one = case(MIXED, 2, samples=400)
    predict = Trees(one.cluster, one.samples).predictor(one.cluster)
    test = measured(one.cluster, 200, np.random.default_rng(7))
    error = np.abs(predict(test.choices) / test.bandwidth_Bps - 1)
    assert np.median(error) < 0.02
    inside = np.array([[0b11, 0, 0, 0, 0, 0, 0, 0]])
    assert predict(inside) == one.cluster.table[0, 0b11]


def test_what_is_remembered_is_asked_once() -> None:
    asked = []

    def predict(choices: np.ndarray) -> np.ndarray:
        asked.extend(choices.tolist())
        return choices.sum(axis=1).astype(float)

    known = remembered(predict)
    rows = np.array([[1, 2], [3, 4]])
    assert known(rows).tolist() == known(rows[::-1])[::-1].tolist() == [3.0, 7.0]
    assert asked == [[1, 2], [3, 4]]


@pytest.mark.slow
def test_the_table_names_every_cluster_beside_the_papers_figures() -> None:
    text = text_of([*efficacy_rows(seeds=1, network_seeds=0), *time_rows([2]), storage_row()])
    assert "V100, links of 20 to 40 GB/s  paper 90.45 | 70.4 54.9 50.5" in text
    assert text.count("strongest, links fitted") == 7 + 3 + 2
    assert "16 GPUs: strongest" in text
    assert "Storage: network" in text
    by_k = text[text.index("(Figure 12)") :].splitlines()[2]
    assert by_k.startswith("  strongest, links fitted")
    assert len(by_k.split()) == 3 + 9
