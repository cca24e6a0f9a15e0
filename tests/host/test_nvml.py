"""GPUs, NVLinks and activity through a made-up NVML."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from crux_torch.host.activity import GPM_METRICS, ActivityMeter, Choice, DeviceActivity
from crux_torch.host.nvml import LEVELS, NVLINK_KINDS, Gpu, NvLink, bounded, read_gpus, read_nvml
from crux_torch.host.pcie import Distance

FUNCTIONS = sorted(name for name in vars(FakeNvml) if name.startswith("nvml"))
SWITCH = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
PEER = pynvml.NVML_NVLINK_DEVICE_TYPE_GPU


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_fake_has_the_real_librarys_signatures(function: str) -> None:
    real = list(inspect.signature(getattr(pynvml, function)).parameters.values())
    fake = list(inspect.signature(vars(FakeNvml)[function]).parameters.values())[1:]
    assert [(p.name, p.default) for p in real] == [(p.name, p.default) for p in fake]


def test_every_code_that_is_spelled_out_is_the_librarys() -> None:
    assert NVLINK_KINDS == {PEER: "gpu", SWITCH: "switch"}
    topology = [n for n in dir(pynvml) if n.startswith("NVML_TOPOLOGY_")]
    assert set(LEVELS) == {getattr(pynvml, name) for name in topology}
    for metric, _ in GPM_METRICS.values():
        assert isinstance(getattr(pynvml, metric), int)
    # Why P2P reads are asked for as writes.
    assert isinstance(pynvml.NVML_P2P_CAPS_INDEX_READ, tuple)


def test_a_gpu_with_its_nvlinks() -> None:
    links = [
        *[(True, "00000000:07:00.0", SWITCH)] * 5,
        *[(True, "00000000:08:00.0", SWITCH)] * 4,
        (False, "", 255),
        (True, "00000000:2C:00.0", PEER),
    ]
    (gpu,) = read_gpus(FakeNvml([FakeGpu(nvlinks=links, gpm={})]))
    assert (gpu.name, gpu.uuid) == ("NVIDIA H100 80GB HBM3", "GPU-0")
    assert (gpu.pci_address, gpu.memory_bytes) == ("0000:1b:00.0", 80 << 30)
    assert gpu.peak_flops == 1979e12
    assert gpu.nvlinks == (
        NvLink("0000:07:00.0", "switch", 5, 125e9),
        NvLink("0000:08:00.0", "switch", 4, 100e9),
        NvLink("0000:2c:00.0", "gpu", 1, 25e9),
    )
    assert (gpu.mig, gpu.gpm) == (False, True)


@pytest.mark.parametrize(
    ("capability", "Bps"),
    [
        ((6, 0), 20e9),
        ((7, 0), 25e9),
        ((7, 5), 25e9),
        ((8, 0), 25e9),
        ((8, 6), 14.0625e9),
        ((8, 9), None),
        ((9, 0), 25e9),
        ((10, 3), 50e9),
        ((42, 0), None),
        (None, None),
    ],
)
def test_an_nvlink_is_as_fast_as_its_gpu_makes_it(
    capability: tuple[int, int] | None, Bps: float | None
) -> None:
    links = [(True, "00000000:2C:00.0", PEER)]
    (gpu,) = read_gpus(FakeNvml([FakeGpu(nvlinks=links, capability=capability)]))
    assert gpu.nvlinks == (NvLink("0000:2c:00.0", "gpu", 1, Bps),)


def test_mig() -> None:
    (gpu,) = read_gpus(FakeNvml([FakeGpu(mig=True, mig_uuids=("MIG-a", "MIG-b"))]))
    assert (gpu.mig, gpu.mig_uuids) == (True, ("MIG-a", "MIG-b"))
    (old,) = read_gpus(FakeNvml([FakeGpu(mig=None)]))
    assert (old.mig, old.mig_uuids) == (None, ())


def test_pairs() -> None:
    a = FakeGpu(peers={1: (10, 0), 2: (50, 3)})
    b = FakeGpu(uuid="GPU-1", address="00000000:2C:00.0")
    c = FakeGpu(uuid="GPU-2", address="00000000:AB:00.0")
    report = read_nvml(FakeNvml([a, b, c]), pairs=True)
    assert report.driver == "580.65.06"
    told = {(p.a, p.b): (p.distance, p.peer_access) for p in report.pairs}
    assert told == {
        (0, 1): (Distance.PIX, "ok"),
        (0, 2): (Distance.SYS, "not across these PCIe root ports"),
        (1, 2): (None, None),
    }


def test_every_optional_function_may_be_broken_or_absent() -> None:
    gpu = FakeGpu(nvlinks=[(True, "00000000:07:00.0", SWITCH)], mig=True, mig_uuids=["M"])
    needed = {
        "nvmlInit",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetPciInfo",
    }
    for function in FUNCTIONS:
        fake = FakeNvml([gpu, replace(gpu, uuid="GPU-1")], broken=[function])
        report = read_nvml(fake, pairs=True)
        assert len(report.gpus) == (0 if function in needed else 2), function
        assert (report.error is None) == (function not in ("nvmlInit", "nvmlDeviceGetCount"))
        assert fake.sessions == (1 if function == "nvmlShutdown" else 0)


def test_a_gpu_whose_memory_and_model_are_not_known() -> None:
    """NVML may not tell the memory of a GPU that is split by MIG or shares the host's memory."""
    (gpu,) = read_gpus(FakeNvml([FakeGpu("Quadro 1", memory_bytes=None)]))
    assert (gpu.memory_bytes, gpu.peak_flops) == (None, None)


def test_a_link_that_is_not_there_does_not_hide_the_later_ones() -> None:
    links = [(True, "00000000:07:00.0", SWITCH), None, (True, "00000000:07:00.0", SWITCH)]
    (gpu,) = read_gpus(FakeNvml([FakeGpu(nvlinks=links)]))
    assert gpu.nvlinks == (NvLink("0000:07:00.0", "switch", 2, 50e9),)


def test_one_lost_gpu_does_not_hide_the_others() -> None:
    class OneLost(FakeNvml):
        def nvmlDeviceGetUUID(self, handle: FakeGpu | str) -> str:
            if handle is self._gpus[0]:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return super().nvmlDeviceGetUUID(handle)

    report = read_nvml(OneLost([FakeGpu(), FakeGpu(uuid="GPU-1")]), pairs=True)
    assert [gpu.index for gpu in report.gpus] == [1]
    assert report.pairs == ()


def test_without_a_driver_the_real_library_is_an_error_in_words() -> None:
    report = read_nvml()
    if report.error is None:
        pytest.skip("this host has an NVIDIA driver")
    assert report.gpus == ()
    assert "NVML" in report.error or "Driver" in report.error


def test_bounded_waits_no_longer_than_told_and_starts_no_second_call() -> None:
    fake = FakeNvml([FakeGpu()], hanging=["nvmlDeviceGetName"])
    before = threading.active_count()
    assert bounded(lambda: read_gpus(fake), timeout_s=0.05) is None
    assert bounded(lambda: 1, timeout_s=5.0) is None, "a call is overdue"
    assert threading.active_count() == before + 1
    fake.let_go.set()
    wait_for_threads(before)
    assert bounded(lambda: 1, timeout_s=5.0) == 1
    assert bounded(lambda: 1 // 0, timeout_s=5.0) is None


def first(gpus: Sequence[Gpu]) -> Gpu | None:
    return gpus[0]


def wait_for_threads(count: int) -> None:
    deadline = time.monotonic() + 10
    while threading.active_count() > count and time.monotonic() < deadline:
        time.sleep(0.01)


GPM = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: 80.0,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 50.0,
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 100.0,
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: 1000.0,
}


def test_activity_by_gpm() -> None:
    fake = FakeNvml([FakeGpu(gpm=GPM)])
    meter = ActivityMeter(fake)
    assert meter.finish() is None, "it was not begun"
    meter.begin(first)
    rates = {"pcie_sent_Bps": 100 * 2**20, "nvlink_received_Bps": 1000 * 2**20}
    assert meter.finish(10) == DeviceActivity(source="gpm", busy=0.8, tensor=0.5, **rates)
    assert meter.gpu is not None
    assert meter.gpu.pci_address == "0000:1b:00.0"
    assert (fake.sessions, fake.samples) == (0, set()), "nothing leaks"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_counters_that_make_no_sense_are_left_out(value: float) -> None:
    meter = ActivityMeter(FakeNvml([FakeGpu(gpm={**GPM, pynvml.NVML_GPM_METRIC_SM_UTIL: value})]))
    meter.begin(first)
    activity = meter.finish(10)
    assert activity is not None
    assert (activity.busy, activity.tensor) == (None, 0.5)


@pytest.mark.parametrize(
    "gpm",
    [{}, {"gpm": {}}, {"gpm": GPM, "gpm_refuses": pynvml.NVML_ERROR_NO_PERMISSION}],
    ids=["no GPM", "no metric", "no permission"],
)
def test_activity_without_gpm_is_polled(
    gpm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crux_torch.host.activity.POLL_S", 0.01)
    gpu = FakeGpu(busy_percent=60, pcie_KBps=2000, **gpm)
    fake = FakeNvml([gpu])
    meter = ActivityMeter(fake)
    meter.begin(first)
    if gpu.gpm == {}:
        # GPM is there and tells nothing, which shows at the end only: too late to poll.
        assert meter.finish(10) is None
    else:
        time.sleep(0.2)
        rates = {"pcie_sent_Bps": 2e6, "pcie_received_Bps": 2e6}
        assert meter.finish(10) == DeviceActivity(source="utilization", busy=0.6, **rates)
    assert (fake.sessions, fake.samples) == (0, set())


@pytest.mark.parametrize(
    ("gpu", "choose"),
    [
        (FakeGpu(mig=True, gpm=GPM), first),
        (FakeGpu(gpm=GPM), lambda gpus: None),
        (FakeGpu(gpm=GPM), lambda gpus: gpus[7]),
        (FakeGpu(), first),
    ],
    ids=["split by MIG", "none is chosen", "choosing fails", "nothing supported"],
)
def test_no_activity(gpu: FakeGpu, choose: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crux_torch.host.activity.POLL_S", 0.01)
    fake = FakeNvml([gpu])
    meter = ActivityMeter(fake)
    meter.begin(choose)
    time.sleep(0.05)
    assert meter.finish(10) is None
    assert fake.sessions == 0


def test_a_driver_that_hangs_costs_one_thread_and_no_time() -> None:
    fake = FakeNvml([FakeGpu(gpm=GPM)], hanging=["nvmlGpmSampleGet"])
    meter = ActivityMeter(fake)
    before = threading.active_count()
    meter.begin(first)
    assert meter.finish(0.01) is None
    meter.begin(first)
    assert meter.finish(0.01) is None
    assert threading.active_count() == before + 1
    fake.let_go.set()
    wait_for_threads(before)
    meter.begin(first)
    assert meter.finish(10) is not None, "it goes on once the driver answers"
