"""Hashes of switches, learned from choices that a true hash made, or none."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crux_torch.network.discover.fragment import SeenPair, SeenPath
from crux_torch.network.discover.hash_families import Flow, families
from crux_torch.network.discover.hashes import (
    Choice,
    Trace,
    check,
    choices_at,
    explain,
    explain_switches,
    next_hops_in,
    polarisation,
    ports_to_check,
    traces_of,
    traces_of_pair,
)
from crux_torch.network.loaders import load_topology
from crux_torch.network.paths import hashed_choice
from crux_torch.network.probe.prober import PathMap
from lab.fabric import Fabric, FabricSpec

PORTS = range(0xC000, 0x10000)
SIZES = (2, 3, 4, 6, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 7, 12)))
Hash = Callable[[Flow], int]


def flow(port: int, src: str = "10.0.0.2", dst: str = "10.1.0.2") -> Flow:
    return Flow(src, dst, port, 4791, 17)


def names(size: int, seed: int = 0) -> list[str]:
    """Addresses of next hops, in the order of the switch's table, which nobody knows."""
    order = [f"10.100.{i}.2" for i in range(size)]
    random.Random(seed).shuffle(order)
    return order


def seen(choice: Hash, size: int, count: int = 120, wrong: float = 0.0) -> list[Choice]:
    draw, table = random.Random(99 + size), names(size)
    return [
        Choice(f, draw.choice(table) if draw.random() < wrong else table[choice(f)])
        for f in map(flow, draw.sample(PORTS, count))
    ]


def simulated(size: int) -> Hash:
    """The choice of the simulator's switches."""
    return lambda f: hashed_choice(f.src, f.dst, f.src_port, size)


def by_family(name: str, seed: int, reduce: Callable[[int, int], int]) -> Hash:
    family = next(each for each in families() if each.name == name)
    return lambda f: reduce(family.linear(f.message) ^ seed, family.width)


@pytest.mark.parametrize("size", SIZES)
def test_the_simulators_switches_are_recognised(size: int) -> None:
    found = explain(seen(simulated(size), size))
    assert found.verdict == "explained", found.reason
    assert found.accuracy == 1.0
    assert found.chance < 1e-8
    assert found.families[0] == "CRC-32 (IEEE) over src dst sport dport proto"
    assert found.selection == f"modulo {size}"
    table = names(size)
    assert all(found.predict(flow(p)) == table[simulated(size)(flow(p))] for p in PORTS[::97])


@pytest.mark.parametrize("size", SIZES)
def test_random_choices_fit_no_hash(size: int) -> None:
    draw = random.Random(size)
    found = explain(seen(lambda f: draw.randrange(size), size))
    assert found.verdict == "none fits"
    assert "no hash" in found.reason
    assert found.predict(flow(50000)) is None
    assert found.ports_via(found.next_hops[0], flow(1), PORTS) == ()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_hash_that_is_not_linear_fits_none(size: int) -> None:
    def mixed(f: Flow) -> int:
        value = f.src_port * 0x9E3779B1 & 0xFFFFFFFF
        return (value ^ value >> 15) * 0x85EBCA6B % (1 << 32) % size

    assert explain(seen(mixed, size, 200)).verdict == "none fits"


FAMILIES = [
    "CRC-32C (Castagnoli) over src dst proto sport dport",
    "CRC-32K (Koopman) over src dst sport dport",
    "CRC-16/ARC (IBM) over src dst sport dport proto",
    "CRC-16 (CCITT) over proto src dst sport dport",
    "XOR of 16 bits over sport",
    "Toeplitz (Microsoft's key) over src dst sport dport",
    "Toeplitz (symmetric key) over src dst sport dport",
    "folded CRC-32 (IEEE) over src dst sport dport",
]


@pytest.mark.parametrize("size", [4, 6])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_found_whatever_its_seed(name: str, size: int) -> None:
    seed = zlib.crc32(name.encode()) & 0xFFFF
    found = explain(seen(by_family(name, seed, lambda value, _: value % size), size, 160))
    assert found.verdict == "explained", found.reason
    assert found.accuracy == 1.0
    assert name in found.families


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 0xFFFFFFFF), shift=st.integers(0, 29))
def test_three_bits_of_any_crc_are_predicted_whatever_the_seed(seed: int, shift: int) -> None:
    """No switch need choose by the lowest or highest bits for its ports to be computed."""
    name = "CRC-32Q over src dst sport dport proto"
    choice = by_family(name, seed, lambda value, _: value >> shift & 7)
    found = explain(seen(choice, 8))
    assert found.verdict == "explained", found.reason
    table = names(8)
    assert all(found.predict(flow(p)) == table[choice(flow(p))] for p in PORTS[::397])


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_the_high_bits_may_choose(size: int) -> None:
    name = "CRC-32 (IEEE) over src dst sport dport proto"
    choice = by_family(name, 0x5EED1234, lambda value, width: value * size >> width)
    found = explain(seen(choice, size, 160))
    assert found.verdict == "explained", found.reason
    assert found.accuracy > 0.9
    assert name in found.families
    assert found.selection == (f"scaled to {size}" if size in (3, 6) else "high bits")


def test_both_halves_of_hosts_and_ports_are_learned() -> None:
    """Addresses are bits like any other: a hash seen for some hosts holds for one among them."""
    draw, table = random.Random(1), names(4)
    flows = [
        flow(draw.choice(PORTS), f"10.0.{draw.randrange(16)}.2", f"10.1.{draw.randrange(16)}.2")
        for _ in range(200)
    ]
    choice = simulated(4)
    found = explain([Choice(f, table[choice(f)]) for f in flows])
    assert found.verdict == "explained"
    assert found.families[0] == "CRC-32 (IEEE) over src dst sport dport proto"
    assert found.coincidence < 1e-6
    new = flow(60001, "10.0.7.2", "10.1.9.2")
    assert found.predict(new) == table[choice(new)]
    assert found.predict(flow(60001, "192.168.0.1")) is None, "an address nobody saw"


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_some_wrong_answers_do_no_harm(size: int) -> None:
    found = explain(seen(simulated(size), size, 200, wrong=0.02))
    assert found.verdict == "explained", found.reason
    assert 0.9 <= found.accuracy <= 1.0
    table = names(size)
    assert all(found.predict(flow(p)) == table[simulated(size)(flow(p))] for p in PORTS[::97])


@pytest.mark.parametrize(("size", "count"), [(2, 20), (4, 20), (3, 45), (6, 45)])
def test_few_ports_tell_nothing(size: int, count: int) -> None:
    found = explain(seen(simulated(size), size, count))
    assert found.verdict == "too few"
    assert f"{count} choices among {size} next hops; about " in found.reason


@pytest.mark.slow
def test_chance_never_explains_a_switch() -> None:
    """No hash explains any of 80 switches without one; the bound lets one in 10,000 through."""
    draw = random.Random(0)
    for size in (2, 4, 8, 16) * 20:
        choices = seen(lambda f, size=size: draw.randrange(size), size, draw.randrange(30, 80))  # type: ignore[misc]
        assert explain(choices).verdict != "explained"


def test_one_next_hop_and_mixed_versions() -> None:
    one = explain([Choice(flow(p), "10.100.0.2") for p in PORTS[:50]])
    assert (one.verdict, one.reason) == (
        "too few", "one next hop: there is nothing to choose"
    )  # fmt: skip
    assert explain([]).verdict == "too few"
    both = [Choice(flow(1), "a"), Choice(flow(2, "fd00::1", "fd00::2"), "b")]
    with pytest.raises(ValueError, match="IPv4 and IPv6"):
        explain(both)


def test_ipv6() -> None:
    def choice(f: Flow) -> int:
        return hashed_choice(f.src, f.dst, f.src_port, 6)

    table = names(6)
    flows = [flow(p, "fd00::2", "fd00:1::2") for p in random.Random(2).sample(PORTS, 100)]
    found = explain([Choice(f, table[choice(f)]) for f in flows])
    assert found.families[0] == "CRC-32 (IEEE) over src dst sport dport proto"


def test_the_published_check_values_of_each_algorithm() -> None:
    """CRCs of "123456789" as zlib has it, with init and xorout undone by linearity; and RSS."""
    by_name = {family.name: family for family in families()}
    ieee = by_name["CRC-32 (IEEE) over src dst sport dport proto"]
    one, other = flow(50000).message, flow(50001).message
    assert ieee.linear(one) ^ ieee.linear(other) == zlib.crc32(one) ^ zlib.crc32(other)
    # Microsoft's verification suite for RSS, TCP over IPv4, the first line.
    rss = by_name["Toeplitz (Microsoft's key) over src dst sport dport"]
    assert rss.linear(Flow("66.9.149.187", "161.142.100.80", 2794, 1766, 6).message) == 0x51CCC178
    rss = by_name["Toeplitz (Microsoft's key) over src dst"]
    assert rss.linear(Flow("66.9.149.187", "161.142.100.80", 2794, 1766, 6).message) == 0x323E8FC2


def three_tiers(second_seed: int, sources: int = 2, size: int = 4) -> list[Trace]:
    """Paths over two tiers that choose among four next hops each, by one hash or by two."""
    traces: list[Trace] = []
    draw = random.Random(3)
    for source in range(sources):
        for port in draw.sample(PORTS, 200):
            f = flow(port, f"10.0.{source}.2")
            first = zlib.crc32(f.message) % size
            second = zlib.crc32(f.message, second_seed) >> (8 if second_seed else 0)
            traces.append((f, [f"leaf{source}", f"agg{first}", f"core{first}-{second % size}"]))
    return traces


def test_tiers_with_one_hash_are_reported() -> None:
    wanted = {f"agg{j}": 4 for j in range(4)}
    found = list(polarisation(three_tiers(0), known=wanted))
    assert {(each.before, each.switch) for each in found} == {
        (f"leaf{i}", f"agg{j}") for i in range(2) for j in range(4)
    }
    assert all((each.used, each.known) == (1, 4) for each in found)
    assert all(each.chance < 1e-10 for each in found)
    assert list(polarisation(three_tiers(99), known=wanted)) == []


def test_without_a_topology_other_flows_show_that_links_idle() -> None:
    own = [t for t in three_tiers(0) if t[0].src == "10.0.0.2"]
    assert list(polarisation(own)) == [], "nobody saw the other links"
    others = three_tiers(99)
    assert {each.before for each in polarisation([*own, *others])} == set()
    elsewhere: list[Trace] = [(f, ["leaf9", *hops[1:]]) for f, hops in others]
    assert {each.before for each in polarisation([*own, *elsewhere])} == {"leaf0"}


def test_other_next_hops_for_other_destinations_are_no_idle_links() -> None:
    traces: list[Trace] = [
        (flow(p, src=f"10.{1 - k}.0.2", dst=f"10.{k}.0.2"), [f"leaf{1 - k}", "spine", f"leaf{k}"])
        for k in range(2)
        for p in PORTS[:100]
    ]
    assert list(polarisation(traces)) == []


def test_a_topology_says_how_many_next_hops_a_switch_has(tmp_path: Path) -> None:
    written = tmp_path / "fabric.yaml"
    written.write_text(Fabric(FabricSpec(spines=3)).topology_yaml())
    topology = load_topology(written)
    spread = {"leaf0": 3, "spine0": 1, "spine1": 1, "spine2": 1}
    assert next_hops_in(topology, "10.0.0.2", "10.1.0.2") == spread
    assert next_hops_in(topology, "10.0.0.2", "10.9.9.9") == {}


def test_switches_and_their_groups() -> None:
    traces = three_tiers(99)
    groups = choices_at(traces)
    assert {switch for switch, _ in groups} == {
        "leaf0", "leaf1", *(f"agg{j}" for j in range(4))
    }  # fmt: skip
    found = explain_switches(traces)
    leaves = [fit for switch, fit in found if switch.startswith("leaf")]
    assert all(fit.selection == "modulo 4" for fit in leaves)
    silent: list[Trace] = [(f, [hops[0], None, hops[2]]) for f, hops in traces]
    assert choices_at(silent) == {}


def test_groups_of_different_destinations_stay_apart() -> None:
    traces: list[Trace] = [
        (flow(p, dst=f"10.{1 + k}.0.2"), ["leaf", f"{'ab'[k]}{p % 2}"])
        for k in range(2)
        for p in PORTS[:10]
    ]
    assert set(choices_at(traces)) == {("leaf", ("a0", "a1")), ("leaf", ("b0", "b1"))}
    assert set(choices_at(traces, lambda node: node[0])) == set()


def test_computed_ports_are_checked_by_probes() -> None:
    traces = [(f, hops[:2]) for f, hops in three_tiers(99, sources=1)]
    found = explain_switches(traces)
    known = {f.src_port for f, _ in traces}
    ports = ports_to_check(found, flow(1, "10.0.0.2"), [p for p in PORTS if p not in known])
    assert len(ports) == 8
    again: list[Trace] = []
    for port in ports:
        f = flow(port, "10.0.0.2")
        again.append((f, ["leaf0", f"agg{zlib.crc32(f.message) % 4}"]))
    assert [tuple(each) for each in check(found, again)] == [("leaf0", 8, 8)]
    wrong: list[Trace] = [(f, ["leaf0", "agg0"]) for f, _ in again]
    assert [tuple(each) for each in check(found, wrong)] == [("leaf0", 8, 2)]


def test_paths_of_a_map_and_of_a_fragment() -> None:
    found = PathMap(
        source="10.0.0.2", destination="10.1.0.2", protocol="udp", port=4791,
        hops={50000: ((1, "10.0.0.1"), (3, "10.9.0.1")), 50001: ((1, None),)},
    )  # fmt: skip
    assert traces_of(found) == [
        (flow(50000), ["10.0.0.1", None, "10.9.0.1"]),
        (flow(50001), [None]),
    ]
    pair = SeenPair(
        src="a", src_address="10.0.0.2", dst="b", dst_address="10.1.0.2",
        paths=(SeenPath(hops=("10.0.0.1", None), ports=(50000, 50001)),),
    )  # fmt: skip
    assert traces_of_pair(pair, 4791, "udp") == [
        (flow(port), ("10.0.0.1", None)) for port in (50000, 50001)
    ]
