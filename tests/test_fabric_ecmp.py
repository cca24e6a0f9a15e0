"""The hashes against published vectors, and what hashing does to paths."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.fabric.builders import crux_testbed
from crux_torch.fabric.ecmp import EcmpHash, FiveTuple, toeplitz
from crux_torch.fabric.topology import TopologyError

# Microsoft, "Verifying the RSS Hash Calculation": source, destination, IP only, with ports.
RSS_VECTORS = [
    ("66.9.149.187", 2794, "161.142.100.80", 1766, 0x323E8FC2, 0x51CCC178),
    ("199.92.111.2", 14230, "65.69.140.83", 4739, 0xD718262A, 0xC626B0EA),
    ("24.19.198.95", 12898, "12.22.207.184", 38024, 0xD2D0A5DE, 0x5C2B394A),
    ("38.27.205.30", 48228, "209.142.163.6", 2217, 0x82989176, 0xAFC7327F),
    ("153.39.163.191", 44251, "202.188.127.2", 1303, 0x5D1809C5, 0x10E828A2),
    ("3ffe:2501:200:1fff::7", 2794, "3ffe:2501:200:3::1", 1766, 0x2CC18CD5, 0x40207D3D),
]
flows = st.builds(
    FiveTuple,
    src=st.ip_addresses(v=4).map(str),
    dst=st.ip_addresses(v=4).map(str),
    src_port=st.integers(0, 65535),
    dst_port=st.integers(0, 65535),
)
hashes = st.builds(
    EcmpHash, st.sampled_from(["crc32", "xor", "toeplitz"]), seed=st.integers(0, 2**32 - 1)
)


@pytest.mark.parametrize(("src", "src_port", "dst", "dst_port", "plain", "ports"), RSS_VECTORS)
def test_toeplitz_vectors(
    src: str, src_port: int, dst: str, dst_port: int, plain: int, ports: int
) -> None:
    flow = FiveTuple(src, dst, src_port, dst_port, protocol=6)
    assert EcmpHash("toeplitz", ("src", "dst")).digest(flow) == plain
    assert EcmpHash("toeplitz", ("src", "dst", "src_port", "dst_port")).digest(flow) == ports


def test_crc32_is_zlibs_over_the_packet_bytes() -> None:
    flow = FiveTuple("10.0.0.1", "10.0.0.2", 1, 2, 17)
    raw = bytes([10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 2, 17])
    assert EcmpHash("crc32").digest(flow) == zlib.crc32(raw)
    assert EcmpHash("crc32", seed=5).digest(flow) == zlib.crc32(raw, 5)


def test_xor_folds_into_16_bits() -> None:
    flow = FiveTuple("1.2.3.4", "5.6.7.8", 0x1111, 0x2222)
    expected = 0x0102 ^ 0x0304 ^ 0x0506 ^ 0x0708 ^ 0x1111 ^ 0x2222
    assert EcmpHash("xor", ("src", "dst", "src_port", "dst_port")).digest(flow) == expected


@given(flows)
def test_xor_is_the_same_in_both_directions(flow: FiveTuple) -> None:
    back = FiveTuple(flow.dst, flow.src, flow.dst_port, flow.src_port)
    assert EcmpHash("xor").digest(flow) == EcmpHash("xor").digest(back)


@given(hashes, flows, st.integers(1, 40))
def test_a_choice_is_an_index_and_repeats(ecmp: EcmpHash, flow: FiveTuple, paths: int) -> None:
    candidates = [(f"l{i}",) for i in range(paths)]
    chosen = ecmp.choose(flow, candidates)
    assert 0 <= chosen < paths
    assert ecmp.choose(flow, candidates) == chosen


@pytest.mark.parametrize("algorithm", ["crc32", "xor", "toeplitz"])
def test_source_ports_reach_every_path(algorithm: str) -> None:
    topology = crux_testbed()
    candidates = topology.candidate_paths("h0/nic0", "h2/nic0")
    ecmp = EcmpHash(algorithm)  # type: ignore[arg-type]
    taken = Counter(
        ecmp.choose(FiveTuple("h0/nic0", "h2/nic0", port), candidates)
        for port in range(49152, 49152 + 1024)
    )
    assert set(taken) == set(range(32))


def test_one_hash_at_every_hop_polarises() -> None:
    # Two links to each of two switches, then two links again: the second choice follows the first.
    candidates = [(a, b, c) for a in "pq" for b in ("x", "y") for c in ("1", "2")]
    ecmp = EcmpHash()
    taken = {
        candidates[ecmp.choose_by_hop(FiveTuple("a", "b", port), candidates)]
        for port in range(1024)
    }
    assert taken == {("p", "x", "1"), ("q", "y", "2")}


@given(hashes, flows)
def test_hop_by_hop_gives_a_candidate(ecmp: EcmpHash, flow: FiveTuple) -> None:
    candidates = [("u", "a", "d"), ("u", "b", "d"), ("v", "c", "d")]
    assert ecmp.choose_by_hop(flow, candidates) in range(3)


def test_seeds_change_the_choice() -> None:
    flow = FiveTuple("a", "b")
    for algorithm in ("crc32", "xor", "toeplitz"):
        digests = {EcmpHash(algorithm, seed=s).digest(flow) for s in range(16)}  # type: ignore[arg-type]
        assert len(digests) == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"algorithm": "md5"}, "hash 'md5' is unknown"),
        ({"fields": ("src", "flow_label")}, "hash fields"),
        ({"fields": ()}, "hash fields"),
        ({"seed": -1}, "hash seed is -1"),
    ],
)
def test_bad_hashes_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        EcmpHash(**arguments)  # type: ignore[arg-type]


def test_a_short_toeplitz_key_is_refused() -> None:
    with pytest.raises(TopologyError, match="can't hash 8 bytes"):
        toeplitz(bytes(8), bytes(11))
