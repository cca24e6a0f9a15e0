"""A hash that the operator names: published values, and what happens when it is wrong."""

from __future__ import annotations

import contextlib
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fabric_ecmp import RSS_VECTORS

from crux_torch.fabric.crc import CRCS, Crc
from crux_torch.fabric.ecmp import EcmpHash, FiveTuple
from crux_torch.fabric.ecmp_hash import (
    HashError,
    SwitchHash,
    check_against,
    foretell,
    parse_hash,
)
from crux_torch.fabric.path_map import Hops, PathMap
from crux_torch.fabric.topology import Link, TopologyBuilder

# The other two IPv6 vectors of "Verifying the RSS Hash Calculation".
MORE_RSS_VECTORS = [
    ("3ffe:501:8::260:97ff:fe40:efab", 14230, "ff02::1", 4739, 0x0F0C461C, 0xDDE51BBF),
    (
        "3ffe:1900:4545:3:200:f8ff:fe21:67cf",
        44251,
        "fe80::200:f8ff:fe21:67cf",
        38024,
        0x4B61E985,
        0x02D1FEEF,
    ),
]
SPINES = tuple(frozenset({f"10.100.{j}.2"}) for j in range(4))
PORTS = random.Random(3).sample(range(49152, 65536), 16)


def probed(hash: SwitchHash, ports: list[int] | None = None, wrong: int = 0) -> PathMap:
    """What probing finds where switches use ``hash``, the first ``wrong`` ports excepted."""
    hops: dict[int, Hops] = {}
    for i, port in enumerate(ports if ports is not None else PORTS):
        flow = FiveTuple("10.0.0.2", "10.1.0.2", port, 4791, 17)
        bucket = hash.bucket(flow) + (i < wrong)
        [address] = hash.next_hop(bucket)
        hops[port] = ((hash.ttl, address),)
    return PathMap(source="10.0.0.2", destination="10.1.0.2", protocol="udp", port=4791, hops=hops)


# The check values of the catalogue of parametrised CRC algorithms.
@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("crc16", 0xBB3D),
        ("crc16-ccitt", 0x29B1),
        ("crc16-xmodem", 0x31C3),
        ("crc32", 0xCBF43926),
        ("crc32c", 0xE3069283),
        ("crc32-bzip2", 0xFC891918),
    ],
)
def test_crcs_give_their_published_check_values(name: str, check: int) -> None:
    assert CRCS[name].compute(b"123456789") == check


def test_every_crc_has_a_check_value() -> None:
    assert len(CRCS) == 6


@given(st.binary(max_size=64), st.integers(0, 2**32 - 1))
def test_crc32_is_zlibs_with_any_seed(data: bytes, seed: int) -> None:
    assert CRCS["crc32"].compute(data, seed) == zlib.crc32(data, seed)


def _bit_by_bit(crc: Crc, data: bytes) -> int:
    """Long division, bit by bit, of the message with its zeros (not reflected)."""
    register = crc.initial
    for byte in data:
        register ^= byte << crc.width - 8
        for _ in range(8):
            register <<= 1
            if register >> crc.width:
                register ^= crc.polynomial | 1 << crc.width
    return register ^ crc.final


@given(st.binary(max_size=64), st.sampled_from(["crc16-ccitt", "crc16-xmodem", "crc32-bzip2"]))
def test_crcs_are_long_division(data: bytes, name: str) -> None:
    assert CRCS[name].compute(data) == _bit_by_bit(CRCS[name], data)


@given(st.sampled_from(sorted(CRCS)), st.data())
def test_crcs_are_linear(name: str, data: st.DataObject) -> None:
    # CRC(a ^ b ^ c) = CRC(a) ^ CRC(b) ^ CRC(c), whatever its initial value and final XOR.
    size = data.draw(st.integers(0, 40))
    a, b, c = (data.draw(st.binary(min_size=size, max_size=size)) for _ in range(3))
    mixed = bytes(x ^ y ^ z for x, y, z in zip(a, b, c, strict=True))
    crc = CRCS[name]
    assert crc.compute(mixed) == crc.compute(a) ^ crc.compute(b) ^ crc.compute(c)


@pytest.mark.parametrize(
    ("src", "src_port", "dst", "dst_port", "plain", "ports"), RSS_VECTORS + MORE_RSS_VECTORS
)
def test_toeplitz_gives_the_rss_vectors(
    src: str, src_port: int, dst: str, dst_port: int, plain: int, ports: int
) -> None:
    flow = FiveTuple(src, dst, src_port, dst_port, protocol=6)
    by_default = parse_hash("toeplitz,ttl=2,buckets=1").hash
    addresses = parse_hash("toeplitz,ttl=2,buckets=1,fields=src+dst").hash
    assert by_default.digest(flow) == ports
    assert addresses.digest(flow) == plain


def test_a_key_takes_the_place_of_the_usual_one() -> None:
    from crux_torch.fabric.ecmp import RSS_KEY

    flow = FiveTuple("66.9.149.187", "161.142.100.80", 2794, 1766)
    usual = parse_hash(f"toeplitz,ttl=2,buckets=1,key={RSS_KEY.hex()}").hash
    symmetric = parse_hash(f"toeplitz,ttl=2,buckets=1,key={'6d5a' * 20}").hash
    back = FiveTuple(flow.dst, flow.src, flow.dst_port, flow.src_port)
    assert usual.digest(flow) == 0x51CCC178
    # A key that repeats every 16 bits makes both directions alike (Woo, Park, 2012).
    assert symmetric.digest(flow) == symmetric.digest(back)


@pytest.mark.parametrize("algorithm", [*CRCS, "xor", "toeplitz"])
@pytest.mark.parametrize("reduction", ["modulo", "threshold"])
def test_a_right_hash_foretells_every_port(algorithm: str, reduction: str) -> None:
    hash = SwitchHash(2, SPINES, EcmpHash(algorithm), reduction=reduction)  # type: ignore[arg-type]
    agreement = check_against(hash, probed(hash))
    assert agreement.holds
    assert agreement.checked == 16
    others = list(range(50000, 50400))
    told = foretell([hash], probed(hash), others)
    assert told.ended == "foretold"
    assert told.hops == probed(hash, others).hops
    for spine in SPINES:
        ports = told.ports_via([(2, spine)])
        assert ports == probed(hash, others).ports_via([(2, spine)])
        # XOR of ports in a row takes the spines in turn; the others are spread.
        assert 50 < len(ports) < 150 or reduction == "threshold"


def test_the_order_of_next_hops_can_be_learned() -> None:
    truth = SwitchHash(2, SPINES, buckets=16, shift=4)
    claim = parse_hash("crc32,ttl=2,buckets=16,shift=4")
    found = probed(truth, random.Random(1).sample(range(49152, 65536), 40))
    agreement = check_against(claim, found)
    assert agreement.checked == 40 - len(agreement.learned)
    others = list(range(50000, 50100))
    told = foretell([claim], found, others)
    # A bucket that no probe fell into is not guessed.
    assert told.hops == {
        port: hops for port, hops in probed(truth, others).hops.items() if port in told.hops
    }
    assert len(told.hops) > 80


@pytest.mark.parametrize(
    "claim",
    [
        "crc32c,ttl=2,next=10.100.0.2+10.100.1.2+10.100.2.2+10.100.3.2",
        "crc32,ttl=2,next=10.100.0.2+10.100.1.2+10.100.3.2+10.100.2.2",
        "crc32,ttl=2,seed=1,next=10.100.0.2+10.100.1.2+10.100.2.2+10.100.3.2",
        "crc32,ttl=2,fields=src+dst+sport,next=10.100.0.2+10.100.1.2+10.100.2.2+10.100.3.2",
        "crc32,ttl=2,reduce=threshold,next=10.100.0.2+10.100.1.2+10.100.2.2+10.100.3.2",
    ],
)
def test_a_wrong_hash_is_refused(claim: str) -> None:
    found = probed(SwitchHash(2, SPINES))
    with pytest.raises(HashError, match=r"agrees with \d+ of 16 probes at TTL 2 to 10\.1\.0\.2"):
        check_against(parse_hash(claim), found)
    with pytest.raises(HashError, match="is not the one in use"):
        foretell([parse_hash(claim)], found, range(50000, 50010))


def test_one_answer_that_disagrees_is_enough() -> None:
    hash = SwitchHash(2, SPINES)
    with pytest.raises(HashError, match="15 of 16"):
        check_against(hash, probed(hash, wrong=1))


def test_few_answers_are_not_trusted() -> None:
    hash = SwitchHash(2, SPINES)
    with pytest.raises(HashError, match=r"6 answers .* are too few .*; 7 have to agree"):
        check_against(hash, probed(hash, PORTS[:6]))
    assert check_against(hash, probed(hash, PORTS[:7])).holds
    with pytest.raises(HashError, match="0 answers at TTL 3"):
        check_against(SwitchHash(3, SPINES), probed(hash))


def test_next_hops_can_be_nodes() -> None:
    builder = TopologyBuilder()
    builder.node("h0", "host")
    builder.node("leaf", "tor")
    builder.cable("h0", "leaf", Link(1e9))
    for j in range(2):
        builder.cable("leaf", builder.node(f"spine{j}", "aggregation"), Link(1e9))
        builder.addresses[f"spine{j}"] = [f"10.100.{j}.2", f"10.100.{16 + j}.2"]
    hash = parse_hash("crc16,ttl=2,next=spine0+spine1", builder.build())
    assert hash.next_hops[1] == {"10.100.1.2", "10.100.17.2"}
    truth = SwitchHash(2, SPINES[:2], EcmpHash("crc16"))
    told = foretell([hash], probed(truth), range(50000, 50020))
    # Of a node's addresses the one that answers this source.
    assert {address for hops in told.hops.values() for _, address in hops} == {
        "10.100.0.2",
        "10.100.1.2",
    }


@given(st.integers(0, 65535), st.integers(1, 300), st.sampled_from(["modulo", "threshold"]))
def test_buckets_are_in_bounds(port: int, buckets: int, reduction: str) -> None:
    for algorithm in ("crc16", "crc32", "xor", "toeplitz"):
        hash = SwitchHash(
            2,
            hash=EcmpHash(algorithm),
            buckets=buckets,
            shift=7,
            reduction=reduction,  # type: ignore[arg-type]
        )
        assert 0 <= hash.bucket(FiveTuple("10.0.0.2", "10.1.0.2", port)) < buckets


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("md5,ttl=2,buckets=4", "hash 'md5'; expected one of crc16"),
        ("linux,ttl=2,buckets=4", "Linux's own can't be computed from outside"),
        ("crc32,buckets=4", "without ttl=N"),
        ("crc32,ttl=2", "buckets=0 for 0 next hops"),
        ("crc32,ttl=x,buckets=4", "ttl=x; expected a whole number"),
        ("crc32,ttl=99,buckets=4", "ttl=99; expected 1 to 64"),
        ("crc32,ttl=2,buckets=4,shift=32", "shift=32; expected 0 to 31"),
        ("crc16,ttl=2,buckets=4,shift=16", "shift=16; expected 0 to 15"),
        ("crc32,ttl=2,buckets=4,reduce=magic", "reduce=magic; expected one of modulo, threshold"),
        ("crc32,ttl=2,next=spine0+spine1", "next=spine0: expected an address"),
        ("crc32,ttl=2,next=10.0.0.1+10.0.0.2,buckets=1", "buckets=1 for 2 next hops"),
        ("crc32,ttl=2,buckets=4,fields=src+label", "field 'label'"),
        ("crc32,ttl=2,buckets=4,seed=-1", "hash seed is -1"),
        ("crc32,ttl=2,buckets=4,key=00", "a hash key is for toeplitz"),
        ("toeplitz,ttl=2,buckets=4,key=zz", "key=zz"),
        ("toeplitz,ttl=2,buckets=4,key=00", "key of 1 bytes can't hash"),
        ("crc32,ttl=2,buckets=4,colour=red", "option 'colour'"),
        ("crc32,ttl=2,ttl=3,buckets=4", "given twice"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, words: str) -> None:
    with pytest.raises(HashError, match=words):
        parse_hash(text)


@given(st.text(max_size=80))
def test_any_text_is_a_hash_or_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(HashError):
        parse_hash(text)


@given(st.lists(st.sampled_from(["ttl", "next", "key", "seed", "=", ",", "+", "1", "x"])))
def test_any_options_are_a_hash_or_an_error_of_ours(parts: list[str]) -> None:
    with contextlib.suppress(HashError):
        parse_hash("toeplitz," + "".join(parts))
