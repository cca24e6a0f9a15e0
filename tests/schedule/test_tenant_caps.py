"""Caps of tenants: kept, no job rises, and nobody else's job is touched."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.agreement.operator import TenantCap
from crux_torch.schedule.default.cap import Standing, capped, highest_usable, tenant_of

PREFIXES = ("a", "ab", "b")
JOBS = st.dictionaries(
    st.text("abc", min_size=1, max_size=4),
    st.builds(Standing, st.integers(0, 7), st.integers(0, 3).map(float)),
    max_size=12,
)
CAPS = st.dictionaries(
    st.sampled_from(PREFIXES),
    st.builds(
        TenantCap,
        highest=st.integers(0, 63),
        above=st.integers(0, 63),
        share=st.integers(0, 10).map(lambda n: n / 10),
    ),
)


@given(JOBS, st.sets(st.integers(0, 7), min_size=1), CAPS)
def test_each_tenant_keeps_to_its_cap_and_to_its_order(
    jobs: dict[str, Standing], levels: set[int], caps: dict[str, TenantCap]
) -> None:
    usable = sorted(levels)
    jobs = {
        job: Standing(highest_usable(standing.level, usable), standing.priority)
        for job, standing in jobs.items()
    }
    found = capped(jobs, usable, caps)
    assert found.keys() == jobs.keys()
    for job, level in found.items():
        assert level in levels
        assert level <= jobs[job].level, "nobody rises"
        if tenant_of(job, caps) is None:
            assert level == jobs[job].level
    for tenant, cap in caps.items():
        its = [job for job in jobs if tenant_of(job, caps) == tenant]
        assert all(found[job] <= max(cap.highest, usable[0]) for job in its)
        above = sum(found[job] > max(cap.above, usable[0]) for job in its)
        assert above <= Fraction(str(cap.share)) * len(its)
        for one in its:
            for other in its:
                if jobs[one].level > jobs[other].level:
                    assert found[one] >= found[other], "their order stays"


def test_the_share_goes_to_those_with_the_highest_level_then_priority() -> None:
    jobs = {
        "t-1": Standing(3, 1.0),
        "t-2": Standing(3, 9.0),
        "t-3": Standing(2, 99.0),
        "t-4": Standing(0, 0.0),
        "other": Standing(3, 0.0),
    }
    half = TenantCap(share=0.5, above=1)
    assert capped(jobs, range(4), {"t-": half}) == {
        "t-1": 3, "t-2": 3, "t-3": 1, "t-4": 0, "other": 3,
    }  # fmt: skip
    one = TenantCap(share=0.3, above=1)
    assert capped(jobs, (0, 2, 3), {"t-": one}) == {
        "t-1": 0, "t-2": 3, "t-3": 0, "t-4": 0, "other": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("job", "tenant"), [("a1", "a"), ("ab1", "ab"), ("b", "b"), ("c-a", None), ("", None)]
)
def test_a_job_is_of_the_tenant_with_the_longest_prefix(job: str, tenant: str | None) -> None:
    assert tenant_of(job, PREFIXES) == tenant


def test_a_share_is_counted_in_whole_jobs() -> None:
    for jobs in range(1, 30):
        standings = {f"t{n}": Standing(7, 0.0) for n in range(jobs)}
        for whole in range(jobs + 1):
            cap = TenantCap(share=whole / jobs, above=0)
            found = capped(standings, range(8), {"t": cap})
            assert sum(level > 0 for level in found.values()) == whole
