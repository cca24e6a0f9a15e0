"""Rings of a measured job: flows of one part move together, those of others on their own."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from measure_stream import plain_sample

from crux_torch.measure.merge import merge
from crux_torch.measure.profile import MAX_PARTS, JobProfile
from crux_torch.measure.sample import GroupRow, RankSample, TrafficRow
from crux_torch.measure.traffic import HostPair, parts_at_hosts, parts_of

GB = 10**9


class OlderFlow(msgspec.Struct, frozen=True):
    """As releases have it that know no parts."""

    src: str
    dst: str
    bytes: float


class OlderProfile(msgspec.Struct, frozen=True):
    flows: tuple[OlderFlow, ...]


def job(world: int, *collectives: tuple[tuple[int, ...], str, int], hosts: str) -> JobProfile:
    """A job whose rank r is on host ``hosts[r]``; collectives by the ranks of their group."""
    samples: list[RankSample] = []
    for rank in range(world):
        mine = [one for one in collectives if rank in one[0]]
        groups = tuple(dict.fromkeys(ranks for ranks, _, _ in mine))
        rows: list[Any] = []
        for ranks, op, size in mine:
            peer = ranks.index(rank) + 1 if op == "send" else -1
            if op != "send" or peer < len(ranks):
                rows.append(TrafficRow(groups.index(ranks), op, peer, 10 * size))
        samples.append(
            plain_sample(
                rank,
                world,
                host=f"h{hosts[rank]}",
                groups=tuple(
                    GroupRow(f"{len(ranks)}:{ranks[0]}", ranks.index(rank), listed=ranks)
                    for ranks in groups
                ),
                traffic=tuple(rows),
            )
        )
    return merge(samples)


def parts(profile: JobProfile) -> dict[str, int]:
    return {f"{flow.src[1:]}{flow.dst[1:]}": flow.part for flow in profile.flows}


def test_two_groups_on_hosts_of_their_own_are_two_parts() -> None:
    found = job(4, ((0, 1), "allreduce", GB), ((2, 3), "allreduce", 3 * GB), hosts="0123")
    assert parts(found) == {"01": 1, "10": 1, "23": 0, "32": 0}


def test_a_little_for_all_does_not_join_the_rings_of_the_groups() -> None:
    everyone = ((0, 1, 2, 3), "allreduce", 4)
    found = job(4, everyone, ((0, 1), "allreduce", 2 * GB), ((2, 3), "allreduce", GB), hosts="0123")
    assert parts(found) == {"01": 0, "10": 0, "23": 1, "32": 1, "12": 2, "30": 2}


def test_groups_in_the_same_ring_of_hosts_are_one_part_and_the_record_is_as_before() -> None:
    """Data parallel ranks: a group for each GPU of a host."""
    found = job(4, ((0, 2), "allreduce", GB), ((1, 3), "allreduce", GB), hosts="0011")
    assert parts(found) == {"01": 0, "10": 0}
    assert b'"part"' not in msgspec.json.encode(found)


def test_each_send_of_a_pipeline_is_a_part() -> None:
    found = job(3, ((0, 1, 2), "send", GB), hosts="012")
    assert parts(found) == {"01": 0, "12": 1}


def test_an_older_reader_skips_the_parts_and_a_newer_one_takes_their_absence_for_one() -> None:
    found = job(4, ((0, 1), "allreduce", GB), ((2, 3), "allreduce", 3 * GB), hosts="0123")
    raw = msgspec.json.encode(found)
    assert msgspec.json.decode(raw, type=JobProfile) == found

    older = msgspec.json.decode(raw, type=OlderProfile)
    assert [(f.src, f.dst, f.bytes) for f in older.flows] == [
        (f.src, f.dst, f.bytes) for f in found.flows
    ]
    without = msgspec.to_builtins(found) | {"flows": msgspec.to_builtins(older.flows)}
    read = msgspec.json.decode(msgspec.json.encode(without), type=JobProfile)
    assert {flow.part for flow in read.flows} == {0}


def test_more_parts_than_the_bound_are_one() -> None:
    pairs = [(f"h{n}", f"h{n + 1}") for n in range(MAX_PARTS + 1)]
    moved = {(str(n),): {pair: 1.0 + n} for n, pair in enumerate(pairs)}
    assert parts_of(moved, MAX_PARTS + 1) == {pair: MAX_PARTS - n for n, pair in enumerate(pairs)}
    assert parts_of(moved, MAX_PARTS) == dict.fromkeys(pairs, 0)


PAIRS = st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"))


@given(
    st.dictionaries(
        st.tuples(st.sampled_from([f"g{n}" for n in range(12)])),
        st.dictionaries(PAIRS, st.floats(0.0, 1e30), max_size=6),
    ),
    st.integers(1, 5),
)
def test_every_pair_has_the_part_of_a_mover_of_most_of_its_bytes(
    moved: dict[tuple[str, ...], dict[HostPair, float]], most: int
) -> None:
    part = parts_of(moved, most)
    total: dict[HostPair, float] = {}
    for one in moved.values():
        for pair, size in one.items():
            total[pair] = total.get(pair, 0.0) + size
    assert part.keys() == total.keys()
    assert sorted(set(part.values())) == list(range(len(set(part.values()))))
    assert all(number < most for number in part.values())
    assert parts_of(dict(reversed(moved.items())), most) == part
    for mover in moved:
        own = {
            pair: size
            for pair, size in moved[mover].items()
            if all(size > other.get(pair, -1.0) for name, other in moved.items() if name != mover)
        }
        assert len({part[pair] for pair in own}) <= 1
    at = parts_at_hosts(total, part)
    assert at.keys() == {host for pair in total for host in pair}
    for host, number in at.items():
        sums: dict[int, float] = {}
        for pair, size in total.items():
            for end in pair:
                if end == host:
                    sums[part[pair]] = sums.get(part[pair], 0.0) + size
        assert number == min(sums, key=lambda n: (-sums[n], n))
