"""Dispatching: tables of hosts, the searches against brute force, and what learns bandwidths."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from crux_torch.dispatch.cluster import (
    DispatchCluster,
    DispatchError,
    HostTable,
    Ints,
    TableError,
    count,
    from_csv,
    from_nccl_tests,
    load,
    save,
    table_of,
)
from crux_torch.dispatch.predictor import changed_hosts
from crux_torch.dispatch.samples import Samples, across_hosts, fit_uplinks
from crux_torch.dispatch.search import strongest
from crux_torch.dispatch.this_host import NVLINK_BPS, PCIE4_BPS, HostModel, rings_Bps
from evaluation.litegd import MODELS, PCIE3_BPS, host_table


def devices_of(free: Ints) -> list[tuple[int, int]]:
    return [(h, i) for h, members in enumerate(free) for i in range(16) if members >> i & 1]


def every_choice(free: Ints, k: int) -> Ints:
    rows = []
    for chosen in combinations(devices_of(free), k):
        row = np.zeros_like(free)
        for host, device in chosen:
            row[host] |= 1 << device
        rows.append(row)
    return np.stack(rows)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[DispatchCluster, Ints, int]:
    """Hosts of 1 to 4 devices with any tables of few values, so that many sets are equal."""
    rates = st.integers(1, 9).map(lambda gb: gb * 1e9)
    tables = []
    for host in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 4))
        sets = [members for members in range(1 << size) if bin(members).count("1") > 1]
        found = {members: draw(rates) for members in sets}
        tables.append(table_of(f"h{host}", map(str, range(size)), found))
    uplinks = np.array([draw(rates) for _ in tables])
    cluster = DispatchCluster(tables, uplinks)
    free = np.array([draw(st.integers(0, (1 << size) - 1)) for size in cluster.sizes])
    if not count(free):
        free[0] = 1
    return cluster, free, draw(st.integers(1, int(count(free))))


@given(clusters())
def test_strongest_is_the_best_of_all_choices(case: tuple[DispatchCluster, Ints, int]) -> None:
    cluster, free, k = case
    choice = strongest(cluster, free, k)
    assert count(choice) == k
    assert not (choice & ~free).any()
    everything = cluster.weakest_link_Bps(every_choice(free, k))
    assert cluster.weakest_link_Bps(choice[None])[0] == everything.max()


def test_small_requests_stay_within_the_best_host() -> None:
    cluster = DispatchCluster([host_table("4090"), host_table("A800")], np.array([40e9, 40e9]))
    for k in range(2, 9):
        assert set(cluster.names(strongest(cluster, cluster.everything, k))) == {"A800"}


def test_the_weakest_link_is_cannikins_law() -> None:
    """§6.1: the least within a host's part and on the way between the hosts."""
    tables = [host_table("V100"), host_table("A6000"), host_table("A800")]
    cluster = DispatchCluster(tables, np.array([20e9, 40e9, 60e9]))
    choices = np.array([[0, 0b11, 0], [0, 0b111, 0b1], [1, 0b11, 0b1], [0b10001, 0, 1], [1, 0, 0]])
    expected = [56.25e9, PCIE4_BPS, 20e9, PCIE3_BPS, np.inf]
    assert cluster.weakest_link_Bps(choices).tolist() == expected


@pytest.mark.parametrize(
    ("kind", "gpus", "expected_Bps"),
    [
        ("V100", (0, 2), 2 * NVLINK_BPS),
        ("V100", (0, 1), NVLINK_BPS),
        ("V100", (0, 4), PCIE3_BPS),
        # Two rings in either direction over the four GPUs of a socket, three over all eight.
        ("V100", (0, 1, 2, 3), 4 * NVLINK_BPS),
        ("V100", tuple(range(8)), 6 * NVLINK_BPS),
        ("A6000", (0, 1), 56.25e9),
        ("A6000", tuple(range(8)), PCIE4_BPS),
        # Without peer-to-peer, GPUs of a group share their root port: far apart is faster.
        ("4090", (0, 1), PCIE4_BPS / 2),
        ("4090", (0, 4), PCIE4_BPS),
        ("4090", tuple(range(8)), PCIE4_BPS / 4),
        ("A800", (0, 5, 7), 8 * NVLINK_BPS),
    ],
)
def test_rings_by_hand(kind: str, gpus: tuple[int, ...], expected_Bps: float) -> None:
    assert rings_Bps(MODELS[kind], gpus) == pytest.approx(expected_Bps)


def test_a_ring_crosses_the_sockets_once_in_either_direction() -> None:
    slow = HostModel((0, 0, 1, 1), pcie_Bps=10e9, socket_Bps=4e9)
    assert rings_Bps(slow, (0, 1, 2, 3)) == 4e9
    assert rings_Bps(slow, (0, 1)) == 10e9


def test_names_and_choices_are_each_others_inverse() -> None:
    cluster = DispatchCluster([host_table("A800"), host_table("H100")], np.array([1e9, 1e9]))
    wanted = {"A800": ["1", "7"], "H100": ["0"]}
    assert cluster.names(cluster.choice(wanted)) == wanted
    with pytest.raises(DispatchError, match="no host 'B200'; there are A800, H100"):
        cluster.choice({"B200": ["0"]})
    with pytest.raises(DispatchError, match="no device '8'"):
        cluster.choice({"A800": ["8"]})


def test_a_request_that_can_not_be_met_says_so() -> None:
    cluster = DispatchCluster([host_table("A800")], np.array([1e9]))
    for k in (0, 9):
        with pytest.raises(DispatchError, match=f"{k} devices asked for, and 8 are free"):
            strongest(cluster, cluster.everything, k)


def test_sets_that_were_not_measured_are_not_chosen() -> None:
    partial = table_of("h", "abc", {0b011: 5e9, 0b110: 7e9})
    assert partial.missing == 2
    cluster = DispatchCluster([partial], np.array([1e9]))
    assert cluster.names(strongest(cluster, cluster.everything, 2)) == {"h": ["b", "c"]}
    with pytest.raises(DispatchError, match="measure more sets"):
        strongest(cluster, cluster.everything, 3)


def test_a_table_survives_its_file_and_is_small(tmp_path: Path) -> None:
    path = tmp_path / "v100.json"
    save(host_table("V100"), path)
    assert load(path) == host_table("V100")
    assert path.stat().st_size <= 12_000, "the paper's dictionary"


@given(st.binary(max_size=200))
def test_foreign_bytes_are_no_table(junk: bytes) -> None:
    with pytest.raises(TableError):
        load(_file(junk))


def _file(data: bytes) -> Path:
    class Bytes(type(Path())):  # type: ignore[misc]
        def read_bytes(self) -> bytes:
            return data

    return Bytes("junk")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bandwidth_Bps": [None, None, None]}, "expected 4 bandwidths"),
        ({"bandwidth_Bps": [None, None, None, -1.0]}, "bandwidth_Bps"),
        ({"version": 2}, "version"),
        ({"devices": []}, "devices"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    table = table_of("h", "ab", {3: 1e9})
    path = tmp_path / "table.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(table), **change}))
    with pytest.raises(TableError, match=f"(?s)table.json.*{says}"):
        load(path)


def test_csv_of_sets(tmp_path: Path) -> None:
    path = tmp_path / "sets.csv"
    path.write_text("# measured elsewhere\n0 1,21.5\n2 0 1,10\n")
    table = from_csv(path, "h")
    assert table.devices == ("0", "1", "2")
    assert (table.array[0b011], table.array[0b111], table.missing) == (21.5e9, 10e9, 2)


@pytest.mark.parametrize("line", ["0 1", "0,5", "0 1,-3", "0 1,nan", "a b,1", "0 1,1,1", "-1 2,4"])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sets.csv"
    path.write_text(f"0 1,1\n{line}\n")
    with pytest.raises(TableError, match=r"sets.csv:2: expected `device device"):
        from_csv(path, "h")


@pytest.mark.parametrize(("text", "says"), [("", "no bandwidths"), ("0 99,1\n", "device 99")])
def test_a_file_without_use_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "sets.csv"
    path.write_text(text)
    with pytest.raises(TableError, match=says):
        from_csv(path, "h")


NCCL_TESTS = """\
# nThread 1 nGpus 2 minBytes 8388608 maxBytes 16777216 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid  43 on      node0 device  1 [0x1b] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid  43 on      node0 device  3 [0x43] NVIDIA A100-SXM4-80GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     8388608       1048576     float    none      -1    71.90  116.67   58.33      0    70.11  119.65   59.82      0
    16777216       2097152     float    none      -1   120.31  139.45   69.72      0   118.02  142.15   71.08      0
# Out of bounds values : 0 OK
"""  # noqa: E501


def test_output_of_nccl_tests(tmp_path: Path) -> None:
    path = tmp_path / "1_3.txt"
    path.write_text(NCCL_TESTS)
    table = from_nccl_tests([path], "node0")
    assert table.array[0b1010] == 69.72e9
    assert from_nccl_tests([path], "node0", 8 << 20).array[0b1010] == 58.33e9
    with pytest.raises(TableError, match="a result for 4096 bytes"):
        from_nccl_tests([path], "node0", 4096)


def some_samples(cluster: DispatchCluster, number: int, rng: np.random.Generator) -> Samples:
    rows = []
    while len(rows) < number:
        row = np.array([rng.integers(1 << size) for size in cluster.sizes])
        if np.count_nonzero(row) > 1:
            rows.append(row)
    choices = np.stack(rows)
    return Samples(choices, cluster.weakest_link_Bps(choices))


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_a_fitted_link_is_as_fast_as_seen_and_never_faster_than_it_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["A800", "V100"], 4)
    truth = DispatchCluster([host_table(kind) for kind in kinds], rng.uniform(20e9, 40e9, 4))
    samples = some_samples(truth, 100, rng)
    fitted = fit_uplinks(truth, samples)
    assert (fitted.uplink_Bps <= truth.uplink_Bps).all()
    assert fitted.weakest_link_Bps(samples.choices).tolist() == samples.bandwidth_Bps.tolist()
    slowest = int(np.argmin(truth.uplink_Bps))
    assert fitted.uplink_Bps[slowest] == truth.uplink_Bps[slowest]


def test_a_host_that_was_not_measured_gets_the_median() -> None:
    tables: list[HostTable] = [host_table("A800")] * 4
    truth = DispatchCluster(tables, np.array([20e9, 30e9, 40e9, 50e9]))
    choices = np.array([[1, 1, 0, 0], [0, 1, 1, 0]])
    fitted = fit_uplinks(truth, Samples(choices, truth.weakest_link_Bps(choices)))
    assert fitted.uplink_Bps.tolist() == [20e9, 30e9, 30e9, 30e9]
    with pytest.raises(DispatchError, match="measure some first"):
        fit_uplinks(truth, Samples(choices[:0], np.array([])))


@pytest.mark.slow
def test_the_network_learns_keeps_and_updates() -> None:
    torch = pytest.importorskip("torch")
    from crux_torch.dispatch.predictor import Network

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    before = DispatchCluster([host_table("A800")] * 4, np.array([15e9, 25e9, 30e9, 35e9]))
    network = Network()
    test = some_samples(before, 200, rng)

    def error_Bps(cluster: DispatchCluster, samples: Samples) -> float:
        predicted = network.predictor(cluster)(samples.choices)
        return float(np.abs(predicted - samples.bandwidth_Bps).mean())

    untrained = error_Bps(before, test)
    network.train(before, some_samples(before, 300, rng), epochs=40)
    learned = error_Bps(before, test)
    assert learned < untrained / 10
    # Host 0 gets another link. What does not involve it is not forgotten.
    after = DispatchCluster(before.tables, np.array([40e9, 25e9, 30e9, 35e9]))
    network.train(after, some_samples(after, 100, rng), epochs=40)
    others = test.choices.copy()
    others[:, 0] = 0
    others = others[(others > 0).sum(axis=1) > 1]
    assert error_Bps(after, Samples(others, after.weakest_link_Bps(others))) < 2e9
    assert error_Bps(after, some_samples(after, 200, rng)) < 2e9
    # Within a host, the table has the truth.
    inside = np.array([[0b11, 0, 0, 0]])
    assert network.predictor(after)(inside)[0] == after.table[0, 0b11]


def test_the_host_that_changed_is_found_among_its_company() -> None:
    rng = np.random.default_rng(1)
    involved = rng.random((60, 6)) < 0.6

    def changed(surprising: NDArray[np.bool_], measured_Bps: float = 2e9) -> list[int]:
        choices = involved[: len(surprising)].astype(np.int64)
        told = Samples(choices, np.where(surprising, measured_Bps, 1e9))
        return sorted(changed_hosts(told, np.full(len(told), 1e9)).tolist())

    assert changed(involved[:, 2]) == [2]
    assert changed(involved[:, 2] | involved[:, 5]) == [2, 5]
    assert changed(involved[:, 2], 0.5e9) == [2]
    assert changed(np.arange(60) % 7 == 0, 0.5e9) == [], "slowed down by chance"
    assert changed(np.ones(2, bool)) == [], "two samples are too few"


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1 / 3, 3.0]), st.sampled_from([50, 100, 200]))
def test_a_link_that_changed_is_found_although_few_choices_are_limited_by_it(
    seed: int, factor: float, number: int
) -> None:
    """Hosts within which it is slow, and a link nearly as slow, limit most of the choices."""
    rng = np.random.default_rng(seed)
    tables = [host_table(kind) for kind in ("4090", "V100", "A6000", "A800") * 2]
    before = DispatchCluster(tables, np.array([20e9, 21e9, *rng.uniform(28e9, 40e9, 6)]))
    after = DispatchCluster(tables, before.uplink_Bps * [factor, *[1.0] * 7])
    choices = across_hosts(after.sizes, number, rng)
    new = Samples(choices, after.weakest_link_Bps(choices))
    assert changed_hosts(new, before.weakest_link_Bps(choices)).tolist() == [0]


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_an_update_forgets_no_more_than_the_bound(seed: int) -> None:
    """Even where all that is new contradicts the rest."""
    torch = pytest.importorskip("torch")
    from crux_torch.dispatch.predictor import FORGOTTEN, Network

    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    cluster = DispatchCluster([host_table("A800")] * 4, rng.uniform(20e9, 40e9, 4))
    network = Network()
    network.train(cluster, some_samples(cluster, 60, rng), epochs=15)
    assert network.memory is not None
    before, new = network.memory, some_samples(cluster, 2, rng)
    known = network.error(cluster, before)
    stayed = network.train(cluster, Samples(new.choices, new.bandwidth_Bps / 10), epochs=15)
    assert stayed == len(network.memory) - 2 <= len(before)
    again = (before.choices[:, None] == new.choices).all(axis=-1).any(axis=1)
    kept = before.part(np.flatnonzero(~again))
    assert stayed == len(kept)
    allowed = known * len(before) / len(kept) + FORGOTTEN
    assert network.error(cluster, kept) <= allowed + 1e-6


def test_too_few_samples_are_refused() -> None:
    pytest.importorskip("torch")
    from crux_torch.dispatch.predictor import Network

    cluster = DispatchCluster([host_table("A800")] * 2, np.array([1e9, 1e9]))
    few = Samples(np.array([[1, 1]] * 9), np.full(9, 1e9))
    with pytest.raises(DispatchError, match="9 samples of 2 hosts: expected 10"):
        Network().train(cluster, few)
