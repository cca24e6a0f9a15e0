"""W of jobs whose products no dispatch mode sees: near the truth, or said to be too low."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure_stream import plain_sample as sample
from places import SUPPORT

from crux_torch.host.activity import DeviceActivity
from crux_torch.measure.device import DeviceUse
from crux_torch.measure.merge import merge
from crux_torch.measure.profile import JobProfile

torch = pytest.importorskip("torch")
from extension_linears import (  # noqa: E402
    ExtensionLinear,
    Model,
    TELinear,
    products,
    step,
)
from training_job import environment  # noqa: E402

from crux_torch.measure.flops import FlopMeter  # noqa: E402
from crux_torch.measure.iterations import IterationMarks  # noqa: E402
from crux_torch.measure.work import TENSOR_FACTOR, TIME_FACTOR, choose  # noqa: E402

ROWS, WIDTH, LAYERS, HEAD = 32, 64, 2, 40
BOUND_S = 300.0

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def counted(linear: Any) -> tuple[float, tuple[str, ...]]:
    """What the meter counts and names of training with these linears."""
    marks = IterationMarks()
    marks.install()
    meter = FlopMeter(marks)
    meter.install()
    model = Model(linear, WIDTH, LAYERS, HEAD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        for _ in range(4):
            step(model, optimizer, ROWS, WIDTH)
        count = meter.count()
    finally:
        meter.remove()
        marks.remove()
    assert count is not None
    return count.flops, count.uncounted_ops


def profile(flops: float, uncounted: tuple[str, ...], tensor: float | None) -> JobProfile:
    """Of a rank on a device that does 1e9 FLOP/s, in an iteration of a second."""
    activity = None if tensor is None else DeviceActivity(source="gpm", tensor=tensor, busy=0.9)
    device = DeviceUse(name="a", flops=1e9, peak_flops=1e9, tensor_flops=1e9, activity=activity)
    return merge([sample(flops=flops, uncounted_ops=uncounted, device=device)])


@pytest.mark.parametrize("linear", [TELinear, ExtensionLinear], ids=["te", "unknown"])
def test_products_in_extension_calls(linear: Any) -> None:
    unseen, head = products(ROWS, WIDTH, LAYERS, HEAD)
    flops, uncounted = counted(linear)
    assert flops == head, "only torch's own product is seen"
    assert unseen > 10 * head
    named = "transformer_engine.pytorch.module.Linear"
    assert uncounted == ((named,) if linear is TELinear else ())

    by_tensor = profile(flops, uncounted, tensor=(unseen + head) / 1e9)
    assert by_tensor.flops == pytest.approx(unseen + head)
    assert by_tensor.flops_source == "time"
    assert f"{head:.3g} FLOPs were counted" in str(by_tensor.flops_note)

    by_time = profile(flops, uncounted, tensor=None)
    assert "crux_torch.count_flops()" in str(by_time.flops_note)
    if linear is TELinear:
        assert (by_time.flops, by_time.flops_source) == (by_time.flops_by_time, "time")
        assert named in str(by_time.flops_note)
    else:
        assert (by_time.flops, by_time.flops_source) == (flops, "counted")


@given(
    st.floats(1e9, 1e18),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.one_of(st.none(), st.floats(1 / 3, 1.5)),
    st.booleans(),
)
def test_a_count_that_is_ten_times_too_low_never_passes_in_silence(
    truth: float, used: float, seen: float, tensor_error: float | None, named: bool
) -> None:
    """``used``: share of its devices that the job uses; ``seen``: share of its work counted."""
    choice = choose(
        truth * seen,
        by_tensor=None if tensor_error is None else truth * tensor_error,
        by_time=truth / used,
        uncounted=["te.Linear"] if named else [],
    )
    assert choice.flops >= truth * seen or choice.flops >= truth / 3
    assert choice.flops <= truth / used * 1.5
    if tensor_error is not None:
        least = 1 / 3 / TENSOR_FACTOR
        assert least * truth <= choice.flops * (1 + 1e-9)
        assert choice.flops <= 1.5 * truth * (1 + 1e-9)
    elif seen < 1 / TIME_FACTOR:
        assert choice.note
        assert choice.source == ("time" if named else "counted")
    elif seen * used >= 1 / TIME_FACTOR:
        assert choice == (truth * seen, "counted", "")


def test_what_the_script_says_is_never_replaced() -> None:
    for by_tensor, by_time in ((1e12, 1e13), (None, 1e13)):
        choice = choose(1e9, given=True, by_tensor=by_tensor, by_time=by_time, uncounted=["a"])
        assert (choice.flops, choice.source) == (1e9, "told")
        assert "1e+09 FLOPs were told" in choice.note


def test_where_nothing_is_counted_the_tensor_cores_tell() -> None:
    assert choose(None, by_tensor=1e12, by_time=5e12) == (1e12, "time", "")
    assert choose(None, by_tensor=0.0, by_time=5e12) == (5e12, "time", ""), "it has no use for them"
    assert choose(None, by_tensor=None, by_time=5e12) == (5e12, "time", "")


def test_no_estimate_is_beyond_the_devices() -> None:
    """Counters and time do not pass the peak either."""
    activity = DeviceActivity(source="gpm", tensor=1.0)
    device = DeviceUse(name="a", flops=1e9, peak_flops=1e9, tensor_flops=4e9, activity=activity)
    assert merge([sample(flops=1.0, device=device)]).flops == 1e9


def test_an_older_reader_accepts_what_is_shared() -> None:
    """It knows no ``flops_note`` and no other ``flops_source``, and rejects both."""
    measured = profile(1.0, ("te.Linear",), tensor=0.5)
    assert measured.flops_note
    told = msgspec.json.decode(msgspec.json.encode(measured.to_share()))
    assert "flops_note" not in told
    assert told["flops_source"] in ("counted", "told", "time")
    assert msgspec.convert(told, JobProfile) == measured.to_share()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["te", "unknown", "told"])
def test_a_job_of_two_ranks(kind: str, tmp_path: Path) -> None:
    script = SUPPORT.joinpath("extension_linears.py")
    options = ["--standalone", "--nproc-per-node=2", script, tmp_path]
    truth = 2 * sum(products(32, 64, 2, 8, 2))
    arguments = ["unknown", str(truth / 2)] if kind == "told" else [kind, "0"]
    crux = {"CRUX_STORE": "none", "CRUX_PROFILE_S": "2", "CRUX_DEVICE_FLOPS": "1e12"}
    ran = subprocess.run(
        [sys.executable, "-m", "cruxrun", *options, *arguments],
        env={**environment([SUPPORT]), **crux},
        cwd=tmp_path,
        timeout=BOUND_S,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "profile.json").read_text())
    expected = {
        "te": ("time", "Linear"),
        "unknown": ("counted", "count_flops"),
        "told": ("told", ""),
    }
    source, noted = expected[kind]
    assert found["flops_source"] == source
    assert noted in found["flops_note"]
    assert found["flops"] <= 2e12 * found["period_s"]
    if kind == "te":
        assert found["flops"] == found["flops_by_time"] > truth
    else:
        assert found["flops"] == pytest.approx(truth if kind == "told" else products_seen())


def products_seen() -> int:
    return 2 * products(32, 64, 2, 8, 2)[1]
