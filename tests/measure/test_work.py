"""W over a job's devices: by count, by time, and never beyond what the devices can do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure_stream import plain_sample as sample

from crux_torch.host.activity import DeviceActivity
from crux_torch.host.nvml import PEAKS, flops_in_use, peak_flops, tensor_flops, tensor_seconds
from crux_torch.measure.device import DeviceUse
from crux_torch.measure.merge import merge
from crux_torch.measure.sample import RankSample
from crux_torch.measure.work import Work, work

H100 = "NVIDIA H100 80GB HBM3"


def device(**changes: Any) -> DeviceUse:
    return DeviceUse(**{"name": H100, "flops": 1e15, "peak_flops": 2e15, **changes})


def work_of(samples: Sequence[RankSample], device_flops: float = 0.0) -> Work:
    return work(samples, period_s=1.0, compute_s=0.75, device_flops=device_flops)


def test_flops_by_time_are_each_devices_own_rate_while_it_computes() -> None:
    samples = [
        sample(0, 2, device=device()),
        sample(1, 2, device=device(name="NVIDIA L4", flops=1e14, peak_flops=2e14)),
    ]
    found = work_of(samples)
    assert (found.flops, found.flops_source) == (0.75 * 1.1e15, "time")
    assert found.device_flops == 1.1e15


def test_ranks_that_do_not_tell_count_as_the_others_do() -> None:
    assert work_of([sample(0, 2, device=device()), sample(1, 2)]).device_flops == 2e15
    assert work_of([sample(0, 2)], 5e14).device_flops == 2 * 5e14, "and so do absent ones"
    assert work_of([sample(0, 4, device=device())]).device_flops == 4e15
    assert work_of([sample()]).device_flops == 0.0


def test_counted_flops_go_before_time_and_give_the_utilisation() -> None:
    profile = merge([sample(flops=4e14, device=device())])
    assert (profile.flops, profile.flops_source) == (4e14, "counted")
    assert profile.flops_by_time == 0.75e15
    assert profile.achieved_flops == 4e14
    assert profile.utilization == pytest.approx(0.4)
    by_time = merge([sample(device=device())])
    assert by_time.utilization is None, "nothing was counted, so nothing was achieved"
    assert merge([sample(flops=4e14)]).utilization is None, "the device's rate is not known"


def test_what_the_script_says_is_named_so() -> None:
    profile = merge([sample(flops=4e14, flops_given=True, device=device())])
    assert (profile.flops, profile.flops_source) == (4e14, "told")
    assert profile.utilization == pytest.approx(0.4)


def test_a_count_beyond_the_devices_is_clamped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = work_of([sample(flops=3e15, device=device())])
    assert found.flops == 2e15
    assert "device can do 2e+15" in caplog.text


def test_one_rank_can_not_claim_what_the_devices_of_others_could_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = [(0, 1e14), (1, 1e20), (2, 2e14)]
    samples = [sample(rank, 3, flops=flops, device=device()) for rank, flops in ranks]
    assert work_of(samples).flops == 1e14 + 2e15 + 2e14
    assert "rank 1: 1e+20 FLOPs" in caplog.text


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.floats(0, 1e20)), st.floats(0, 1e16)),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 1e16),
    st.floats(0, 100),
    st.floats(0, 1),
)
def test_no_mix_of_samples_claims_more_than_its_devices_can_do(
    ranks: list[tuple[float | None, float]], default: float, period_s: float, share: float
) -> None:
    samples = [
        sample(i, len(ranks), flops=flops, device=device(flops=peak, peak_flops=peak))
        for i, (flops, peak) in enumerate(ranks)
    ]
    found = work(samples, period_s=period_s, compute_s=share * period_s, device_flops=default)
    best = max(peak for _, peak in ranks)
    most = best * len(ranks) * period_s * (1 + 1e-9)
    if best:
        assert found.flops <= most
    assert found.flops_by_time <= most
    assert found.flops >= 0


@pytest.mark.parametrize(
    ("tensor_s", "flops", "activity", "warns"),
    [
        (0.4, 4e14, DeviceActivity(source="gpm", tensor=0.42, busy=0.9), False),
        (0.4, 4e14, DeviceActivity(source="gpm", tensor=0.39, busy=0.9), False),
        (0.4, 4e14, DeviceActivity(source="gpm", tensor=0.2, busy=0.9), True),
        (0.0, 4e14, DeviceActivity(source="gpm", tensor=0.0, busy=0.9), False),
        (0.0, 4e14, DeviceActivity(source="gpm", tensor=0.0, busy=0.2), True),
        (0.4, 4e14, DeviceActivity(source="utilization", busy=0.2), True),
        (0.4, 4e14, DeviceActivity(source="utilization", busy=1.0), False),
        (0.4, 4e14, DeviceActivity(source="gpm"), False),
        (0.4, 4e14, None, False),
        (None, None, DeviceActivity(source="gpm", tensor=0.0, busy=0.0), False),
    ],
)
def test_a_count_is_held_against_the_counters(
    tensor_s: float | None,
    flops: float | None,
    activity: DeviceActivity | None,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = work_of([sample(flops=flops, device=device(tensor_s=tensor_s, activity=activity))])
    assert ("is its W right?" in caplog.text) == warns
    if activity is not None:
        assert (found.device_busy, found.tensor_busy) == (activity.busy, activity.tensor)


def test_the_rate_in_use_is_that_of_the_mix() -> None:
    bf16, fp32 = peak_flops(H100, "bf16"), peak_flops(H100, "fp32")
    assert bf16 is not None
    assert fp32 is not None
    assert flops_in_use(H100, {"bf16": 1e15}) == pytest.approx(bf16)
    assert flops_in_use(H100, {"bf16": bf16, "fp32": fp32}) == pytest.approx((bf16 + fp32) / 2)
    assert tensor_seconds(H100, {"bf16": bf16, "fp32": fp32}) == pytest.approx(1.0)
    assert flops_in_use(H100, {}) == bf16, "what jobs most likely train in"
    assert flops_in_use("Tesla T4", {}) == 65e12
    assert flops_in_use(H100, {"": 1e15}) == peak_flops(H100), "an unknown type can't claim less"
    assert flops_in_use("Tesla V100-SXM2-16GB", {"tf32": 1e15}) == 15.7e12, "it has no TF32"
    assert tensor_seconds("Tesla V100-SXM2-16GB", {"tf32": 1e15, "fp16": 125e12}) == 1.0
    assert flops_in_use("NVIDIA B200", {"fp4": 1e15}) == 9000e12
    assert tensor_seconds("NVIDIA B200", {"fp4": 9000e12, "fp8": 4500e12}) == 2.0
    assert flops_in_use("Tesla K80", {"bf16": 1.0}) is None
    assert tensor_seconds("Tesla K80", {"bf16": 1.0}) is None
    assert tensor_flops(H100, {}) == bf16
    assert tensor_flops(H100, {"fp32": 1e15, "tf32": 1e15}) == bf16, "what is not counted is"
    assert tensor_flops(H100, {"fp8": 1e15}) == peak_flops(H100, "fp8")
    assert tensor_flops("Tesla K80", {"bf16": 1.0}) is None


DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "")


@given(
    st.sampled_from(PEAKS),
    st.dictionaries(st.sampled_from(DTYPES), st.floats(1, 1e18), min_size=1),
)
def test_the_rate_in_use_lies_between_the_slowest_and_the_fastest(
    entry: Any, by_dtype: dict[str, float]
) -> None:
    name = entry.pattern.replace(r"\b", "").replace("G?", "").replace("[18]", "1").split("(?")[0]
    rate = flops_in_use(name, by_dtype)
    assert rate is not None
    assert min(entry.flops.values()) * (1 - 1e-9) <= rate <= max(entry.flops.values()) * (1 + 1e-9)
