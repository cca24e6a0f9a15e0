"""What a rank tells of its GPU, over a made-up CUDA and NVML."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pynvml
from fake_nvml import FakeGpu, FakeNvml

from crux_torch.runtime.device import OwnDevice

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def cuda(ordinal: int = 0, uuid: str = "1", name: str = H200, initialized: bool = True) -> Any:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: initialized,
            current_device=lambda: ordinal,
            get_device_properties=lambda i: SimpleNamespace(uuid=uuid, name=name),
        )
    )


def gpus() -> list[FakeGpu]:
    gpm = {pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 40.0}
    return [FakeGpu(), FakeGpu(H200, "00000000:2C:00.0", "GPU-1", gpm=gpm)]


def test_a_rank_on_a_gpu() -> None:
    own = OwnDevice(library=FakeNvml(gpus()), env={})
    own.note(cuda())
    own.begin()
    own._activity.finish(10)
    own.begin()
    assert own._activity._thread is not None
    use = finished(own, {"bf16": 989.5e12 / 2})
    assert use is not None
    assert (use.name, use.gpu) == (H200, 1)
    assert (use.flops, use.peak_flops) == (989.5e12, 1979e12)
    assert use.tensor_s == 0.5
    assert use.activity is not None
    assert use.activity.tensor == 0.4


def finished(own: OwnDevice, by_dtype: dict[str, float]) -> Any:
    """As :meth:`OwnDevice.finish`, with all the time that a busy machine may need."""
    own._activity._stop.set()
    if own._activity._thread is not None:
        own._activity._thread.join(10)
    return own.finish(by_dtype)


def test_what_the_user_says_goes_before_the_table() -> None:
    own = OwnDevice(1e12, library=FakeNvml(gpus()), env={})
    own.note(cuda())
    own.begin()
    use = finished(own, {"bf16": 1.0})
    assert (use.flops, use.peak_flops, use.tensor_s) == (1e12, 1e12, None)


def test_without_nvml_the_model_is_what_cuda_says() -> None:
    own = OwnDevice(library=FakeNvml(broken=["nvmlInit"]), env={})
    own.note(cuda(name=H100))
    own.begin()
    use = finished(own, {})
    assert (use.name, use.gpu, use.activity) == (H100, None, None)
    assert (use.flops, use.tensor_s) == (989.5e12, None)


def test_an_unknown_model_has_no_rate() -> None:
    own = OwnDevice(library=FakeNvml(gpus()), env={})
    own.note(cuda(name="Quadro 1"))
    own.begin()
    use = finished(own, {"bf16": 1.0})
    assert (use.flops, use.peak_flops, use.tensor_s) == (0.0, 0.0, None)


def test_a_rank_on_the_cpu_tells_nothing_and_starts_nothing() -> None:
    before = threading.active_count()
    own = OwnDevice(library=FakeNvml(gpus()), env={})
    own.note(cuda(initialized=False))
    own.begin()
    assert threading.active_count() == before
    assert own.finish({"fp32": 1.0}) is None


def test_a_job_without_an_optimizer_is_on_the_only_device_if_there_is_one() -> None:
    for count, found in ((1, H200), (2, None)):
        module = cuda()
        module.cuda.device_count = lambda count=count: count
        own = OwnDevice(library=FakeNvml(gpus()), env={})
        own.begin(module)
        use = finished(own, {})
        assert (use and use.name) == found


def test_a_torch_that_fails_reaches_nobody() -> None:
    def fails() -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    module = cuda()
    module.cuda.current_device = fails
    own = OwnDevice(library=FakeNvml(gpus()), env={})
    own.note(module)
    own.begin()
    assert own.finish({}) is None


def test_a_driver_that_hangs_does_not_keep_the_measurement() -> None:
    fake = FakeNvml(gpus(), hanging=["nvmlDeviceGetCount"])
    own = OwnDevice(library=fake, env={})
    own.note(cuda())
    own.begin()
    use = own.finish({"bf16": 1.0})
    fake.let_go.set()
    assert use is not None
    assert (use.name, use.gpu, use.activity) == (H200, None, None)
