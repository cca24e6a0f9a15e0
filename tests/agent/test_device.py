"""What a rank tells of its GPU, over a made-up CUDA and NVML."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from crux_torch.agent import join
from crux_torch.agreement.bounds import MAX_DEVICE_FLOPS
from crux_torch.host import activity
from crux_torch.host.activity import CudaDevice, OwnDevice
from crux_torch.host.machine import Cpu, Host
from crux_torch.host.nvml import Gpu
from crux_torch.measure.device import DeviceMeter
from crux_torch.settings import Settings

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
#: The second GPU, as CUDA shows it to a process that sees no other.
SECOND = CudaDevice(0, "1", H200)


def cuda(count: int = 2, name: str = H200, initialized: bool = True) -> Any:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: initialized,
            device_count=lambda: count,
            get_device_properties=lambda i: SimpleNamespace(name=name),
        )
    )


def gpus() -> list[FakeGpu]:
    gpm = {pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 40.0}
    return [FakeGpu(H200), FakeGpu(H200, "00000000:2C:00.0", "GPU-1", gpm=gpm)]


def meter(
    monkeypatch: pytest.MonkeyPatch,
    chosen: CudaDevice | None = SECOND,
    library: Any = None,
    told: float = 0.0,
    torch: Any = None,
    env: Mapping[str, str] | None = None,
) -> DeviceMeter:
    monkeypatch.setattr(activity, "current_device", lambda: chosen)
    library = library or FakeNvml(gpus())
    return DeviceMeter(OwnDevice(), told, library, env or {}, torch or cuda())


def measured(made: DeviceMeter, by_dtype: dict[str, float]) -> Any:
    """A measurement, with all the time at its end that a busy machine may need."""
    made.begin()
    made._activity._watch.stop.set()
    if made._activity._thread is not None:
        made._activity._thread.join(60)
    return made.finish(by_dtype)


def test_a_rank_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = meter(monkeypatch)
    for _ in range(2):
        use = measured(made, {"bf16": 989.5e12 / 2})
        assert (use.name, use.gpu) == (H200, 1)
        assert (use.flops, use.peak_flops) == (989.5e12, 1979e12)
        assert use.tensor_s == 0.5
        assert use.activity.tensor == 0.4
        assert made.last == use


@pytest.mark.parametrize(
    ("told", "name", "flops", "peak_flops"),
    [(1e12, H200, 1e12, 1e12), (0.0, "Quadro 1", 0.0, 0.0)],
    ids=["what the user says goes before the table", "an unknown model has no rate"],
)
def test_rates(
    told: float, name: str, flops: float, peak_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = measured(meter(monkeypatch, CudaDevice(0, "1", name), told=told), {"bf16": 1.0})
    assert (use.flops, use.peak_flops, use.tensor_s) == (flops, peak_flops, None)


def test_without_nvml_the_model_is_what_cuda_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made = meter(monkeypatch, CudaDevice(0, "", H100), FakeNvml(broken=["nvmlInit"]))
    use = measured(made, {})
    assert (use.name, use.gpu, use.activity) == (H100, None, None)
    assert (use.flops, use.tensor_s) == (989.5e12, None)


def test_a_rank_on_the_cpu_tells_nothing_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.active_count()
    made = meter(monkeypatch, None, torch=cuda(initialized=False))
    made.begin()
    assert threading.active_count() == before
    assert made.finish({"fp32": 1.0}) is None


@pytest.mark.parametrize(
    ("count", "env", "gpu"),
    [(1, {"CUDA_VISIBLE_DEVICES": "1"}, 1), (2, {"LOCAL_RANK": "1"}, 1), (2, {}, None)],
)
def test_a_thread_that_has_not_chosen_yet(
    count: int, env: dict[str, str], gpu: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = measured(meter(monkeypatch, None, torch=cuda(count), env=env), {})
    assert (use and (use.name, use.gpu)) == (None if gpu is None else (H200, gpu))


def test_a_torch_that_fails_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    broken = cuda()
    broken.cuda.device_count = fails
    made = meter(monkeypatch, None, torch=broken)
    monkeypatch.setattr(activity, "current_device", fails)
    made.look()
    made.begin()
    assert made.finish({}) is None


def test_a_driver_that_hangs_does_not_keep_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(gpus(), hanging=["nvmlDeviceGetCount"])
    made = meter(monkeypatch, library=fake)
    made.begin()
    use = made.finish({"bf16": 1.0})
    fake.let_go.set()
    assert (use.name, use.gpu, use.activity) == (H200, None, None)


@pytest.mark.parametrize(("here", "share"), [("4", 4), ("", 1), ("0", 1), ("many", 1)])
def test_ranks_on_a_cpu_share_it_and_none_may_claim_less_than_a_gpu_does(
    here: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = Cpu("x", 8, 2e9, 32)
    found = [Host("h0", (), cpu, ())]
    monkeypatch.setattr(join, "this_host", lambda: found[0])
    env = {"LOCAL_WORLD_SIZE": here}
    whole = 8 * 2e9 * 32
    assert join._device_flops(Settings(), env) == (whole / share, whole)
    gpu = Gpu(0, H100, "GPU-0", 80 << 30, "0000:1b:00.0", 1979e12)
    found[0] = Host("h0", (gpu,), cpu, ())
    assert join._device_flops(Settings(), env) == (whole / share, 1979e12)
    found[0] = Host("h0", (replace(gpu, name="new", peak_flops=None),), None, ())
    assert join._device_flops(Settings(), env) == (0.0, MAX_DEVICE_FLOPS)
    assert join._device_flops(Settings(device_flops=5.0), env) == (5.0, 5.0)
