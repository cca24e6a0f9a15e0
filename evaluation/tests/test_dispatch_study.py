"""LiteGD's evaluation: the clusters, the yardstick, and the table that it prints."""

from __future__ import annotations

from itertools import combinations
from random import Random

import msgspec
import numpy as np
import pytest

from crux_torch.agreement.inputs import plan_inputs
from crux_torch.dispatch.cluster import DispatchCluster, Ints, count
from crux_torch.dispatch.samples import predicted_links
from crux_torch.dispatch.search import strongest
from evaluation.dispatch import MIXED, case, efficacy, measured, methods, remembered, search_cpu_s
from evaluation.dispatch_contention import (
    HELD,
    HOSTS,
    RULES,
    choices,
    compact,
    contended_Bps,
    contention_row,
    merged_best,
    scene,
)
from evaluation.dispatch_contention import text_of as contention_text
from evaluation.dispatch_tables import (
    efficacy_rows,
    storage_row,
    text_of,
    time_rows,
    weight_bytes,
)
from evaluation.litegd import MODELS, Trees, bidirectional, by_topology, connection, host_table
from evaluation.litegd_network import GpuTokens


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
    assert text.count("strongest, links fitted") == 7 + 3 + 2 + 2
    assert "16 GPUs: strongest" in text
    assert "Storage: network" in text
    assert 500e3 < storage_row()["network_bytes"] < 642e3, "at most the paper's"
    by_k = text[text.index("(Figure 12)") :].splitlines()[2]
    assert by_k.startswith("  strongest, links fitted")
    assert len(by_k.split()) == 3 + 9


@pytest.mark.parametrize("k", [1, 2, 9, 30])
def test_the_searches_and_baselines_choose_k_free_devices(k: int) -> None:
    one = case(MIXED, 5, samples=20)
    best = one.cluster.weakest_link_Bps(strongest(one.cluster, one.free, k)[None])[0]
    for name, choose in methods(one, 0, None).items():
        choice = choose(k)
        assert count(choice) == k, name
        assert not (choice & ~one.free).any(), name
        assert one.cluster.weakest_link_Bps(choice[None])[0] <= best, name


def devices_of(free: Ints) -> list[tuple[int, int]]:
    return [(h, i) for h, members in enumerate(free) for i in range(16) if members >> i & 1]


def literal_bottom_up(cluster: DispatchCluster, free: Ints, k: int) -> float:
    """Lines 2 to 12 of Algorithm 1, device by device."""
    pairs = []
    for chosen in combinations(devices_of(free), 2):
        pairs.append(np.zeros_like(free))
        for host, device in chosen:
            pairs[-1][host] |= 1 << device
    chosen = pairs[int(np.argmax(cluster.weakest_link_Bps(np.stack(pairs))))]
    while count(chosen) < k:
        rows = []
        for host, device in devices_of(free & ~chosen):
            row = chosen.copy()
            row[host] |= 1 << device
            rows.append(row)
        chosen = rows[int(np.argmax(cluster.weakest_link_Bps(np.stack(rows))))]
    return float(cluster.weakest_link_Bps(chosen[None])[0])


def test_on_dgx_1_the_search_is_no_worse_than_algorithm_1_device_by_device() -> None:
    cluster = DispatchCluster([host_table("V100")] * 2, np.array([20e9, 40e9]))
    for k in range(2, 17):
        found = bidirectional(cluster, cluster.everything, k)
        literal = literal_bottom_up(cluster, cluster.everything, k)
        assert cluster.weakest_link_Bps(found[None])[0] >= literal


def test_at_the_bottleneck_the_search_gives_up_hosts_with_slow_links() -> None:
    """Removing one device of an A800 host changes no bandwidth: the whole host has to go."""
    one = case(("A800",), 0, samples=20)
    chosen = methods(one, 0, None)
    found = efficacy(
        one, {n: chosen[f"Algorithm 1, {n}"] for n in ("true", "at bottleneck")}, step=5
    )
    assert set(found["at bottleneck"]) == {1.0}
    assert min(found["true"]) < 0.95


def test_as_printed_a_token_is_a_chosen_gpu() -> None:
    pytest.importorskip("torch")
    cluster = DispatchCluster([host_table("V100"), host_table("A800")], np.array([20e9, 30e9]))
    network = GpuTokens()
    assert weight_bytes(network) == 642_052, "the paper's 642 KB"
    choices = np.array([[0b101, 0b1], [0b1, 0b11110000]])
    features, number, mask = network.tokens(cluster, choices)
    assert number[0, :3].tolist() == [0, 2, 8]
    assert number[1].tolist() == [0, 12, 13, 14, 15]
    assert mask.tolist() == [[False] * 3 + [True] * 2, [False] * 5]
    rates = np.exp(features[..., 0].numpy()) * 1e9
    assert rates[0, 0] == pytest.approx(cluster.table[0, 0b101])
    assert rates[1, 1] == pytest.approx(cluster.table[1, 0b11110000])
    assert features[0, :3, 1].tolist() == [0, 0, 1], "a host's only GPU has no bandwidth inside"
    # What is masked has no say, and neither have the other choices of a batch.
    both, alone = network.predictor(cluster)(choices), network.predictor(cluster)(choices[:1])
    assert both[0] == pytest.approx(alone[0], rel=1e-5)


def test_the_hosts_have_the_connections_of_appendix_a() -> None:
    v100, a6000, a800 = MODELS["V100"], MODELS["A6000"], MODELS["A800"]
    assert [connection(v100, 0, other) for other in range(1, 8)] == [
        *("NV1", "NV2", "NV1", "SYS", "SYS", "SYS", "NV2")
    ]
    assert all(sum(v100.links(gpu, g) for g in range(8)) == 6 for gpu in range(8))
    assert [connection(a6000, 0, other) for other in (1, 2, 4)] == ["NV4", "PXB", "SYS"]
    assert {connection(a800, 0, other) for other in range(1, 8)} == {"NV8"}


def test_the_topology_baseline_begins_with_the_best_connected_pair() -> None:
    cluster = DispatchCluster([host_table("4090"), host_table("V100")], np.array([1e9, 1e9]))
    assert cluster.names(by_topology(cluster, cluster.everything, 2)) == {"V100": ["0", "2"]}
    assert len(cluster.names(by_topology(cluster, cluster.everything, 9))) == 2


def test_a_scene_is_drawn_by_its_seed_and_its_records_tell_of_its_jobs() -> None:
    one, again = scene(3), scene(3)
    assert (one.free == again.free).all()
    assert count(one.free) <= (1 - HELD) * 8 * HOSTS
    assert one.k <= count(one.free)
    planned = {job.name: job for job in plan_inputs(one.records, one.topology).jobs}
    for job in one.jobs:
        between = [f.bytes for f in job.flows if f.candidates[0][0] in one.topology.capacity_Bps]
        assert sum(f.bytes for f in planned[job.name].flows) == pytest.approx(sum(between))


def test_compact_takes_few_hosts() -> None:
    one = scene(0)
    everything = np.full(HOSTS, 0xFF)
    assert np.count_nonzero(compact(one.topology, everything, 16)) == 2
    assert np.count_nonzero(compact(one.topology, everything, 3)) == 1


def test_jobs_that_share_a_host_and_cross_hosts_are_merged() -> None:
    tables = [msgspec.structs.replace(host_table("A800"), host=f"h{n}") for n in range(4)]
    cluster = DispatchCluster(tables, np.array([8.0, 4.0, 2.0, 1.0]) * 1e9)
    choice = np.array([3, 3, 0, 0])
    assert contended_Bps(cluster, choice, []) == 4e9
    within, elsewhere, across = np.array([[12, 0, 0, 0], [0, 0, 3, 3], [0, 12, 3, 0]])
    assert contended_Bps(cluster, choice, [within, elsewhere]) == 4e9
    assert contended_Bps(cluster, choice, [within, elsewhere, across]) == 2e9 / 2
    # On one host nothing crosses a link that others use.
    alone = np.array([3, 0, 0, 0])
    assert contended_Bps(cluster, alone, [across]) == cluster.weakest_link_Bps(alone[None])[0]


def test_the_merge_finds_hosts_that_nobody_crosses() -> None:
    one = scene(3)
    best = contended_Bps(one.cluster, merged_best(one, Random(0)), one.held)
    assert best >= contended_Bps(one.cluster, choices(one, 0)["bandwidth alone"], one.held)


@pytest.mark.slow
def test_beside_running_jobs_the_aware_choice_is_the_best() -> None:
    rows = [contention_row(seed) for seed in range(1, 4)]
    for row in rows:
        utilisation = row["utilisation"]
        assert utilisation["contention-aware"] >= max(utilisation[r] for r in RULES) - 1e-9
    assert "the best, or as good, in 3 of 3" in contention_text(rows)
