"""A script that runs on the stock backend runs under Crux with the same results, bit for bit."""

from __future__ import annotations

import pytest
from rig.identity import Compared, World, assert_same
from rig.job import ATTACHED, CRUX, STOCK
from rig.kind import Kind
from rig.part import DEVICES, PAIR, load

PARTS = {
    name: part
    for name, part in load().items()
    if set(part.kinds) & set(DEVICES) and not part.fatal and not part.measures
}
CASES = [(name, size) for size in (PAIR, 1) for name, part in PARTS.items() if size in part.sizes]


def test_two_ranks_can_share_the_device(pair_works: str) -> None:
    """If not, every test of two ranks skips, and this one says why."""
    assert not pair_works


@pytest.mark.parametrize(("name", "size"), CASES, ids=lambda value: str(value))
def test_same_as_stock(
    name: str, size: int, kind: Kind, compared: Compared, request: pytest.FixtureRequest
) -> None:
    part = PARTS[name]
    if kind.name not in part.kinds:
        pytest.skip(f"not on this device: {part.why}")
    if size == PAIR:
        request.getfixturevalue("pair")
    expected = compared.outcomes(World(STOCK, size, part.eager), name)
    got = compared.outcomes(World(ATTACHED, size, part.eager), name)
    assert_same(got, expected, kind, name)


def test_same_under_its_own_name(named_part: str, pair: int, compared: Compared) -> None:
    """``init_process_group("crux")`` instead of a stock backend's name."""
    expected = compared.outcomes(World(STOCK, pair, False), named_part)
    got = compared.outcomes(World(CRUX, pair, False), named_part)
    assert all(mine.same_as(theirs) for mine, theirs in zip(got, expected, strict=True)), got
