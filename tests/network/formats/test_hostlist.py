"""Slurm's host lists: examples of its manual, a round trip of any names, and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.network.formats.slurm import compress, expand
from crux_torch.network.topology import MAX_NODES, TopologyError

NAMES = st.text("abz09-._", min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        # man topology.conf
        ("tux[0-3,12,18-20]", "tux0 tux1 tux2 tux3 tux12 tux18 tux19 tux20"),
        ("s[0-1],t", "s0 s1 t"),
        # man slurm.conf: several brackets, and zeros that stay
        ("rack[0-1]n[08-10]x", "rack0n08x rack0n09x rack0n10x rack1n08x rack1n09x rack1n10x"),
        ("", ""),
    ],
)
def test_examples(text: str, names: str) -> None:
    assert expand(text) == names.split()


@given(st.lists(NAMES, max_size=30))
def test_a_list_stands_for_the_names_that_it_was_made_of(names: list[str]) -> None:
    assert sorted(expand(compress(names))) == sorted(set(names))


@pytest.mark.parametrize("count", [1, 9, 100])
def test_numbered_names_share_one_bracket(count: int) -> None:
    assert compress(f"node{i:03}" for i in range(count)).count("[") == (count > 1)


@pytest.mark.parametrize(
    "text",
    [
        *("a[", "a]", "a[1-", "a[x]", "a[3-1]", "a[[1]]", f"a[0-{MAX_NODES}]", "a[0-9]" * 20),
        *("a[0-999][0-999]", "a[1-99999999999999999999]", ",".join(["a[0-99999]"] * 3)),
    ],
)
def test_what_is_none_or_stands_for_too_many_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match=r"host list|number or range|empty or over"):
        expand(text)
