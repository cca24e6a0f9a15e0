"""What Crux finds of this host's GPUs, against what torch knows of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch
from rig.kind import Kind
from rig.report import Report


def _crux(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from crux_torch.cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_the_doctor_names_the_gpu(kind: Kind, report: Report) -> None:
    said = _crux("doctor")
    report.figure("crux doctor", said.splitlines())
    if kind.is_gpu:
        assert kind.model in said
    else:
        assert "GPU" in said


def test_this_host_is_what_torch_sees(kind: Kind, report: Report) -> None:
    if not kind.is_gpu:
        pytest.skip("not on the rig: NVML knows nothing of it")
    from crux_torch.host.machine import this_host

    gpus = this_host().gpus
    report.figure("GPUs of this host", [repr(gpu) for gpu in gpus])
    (name,) = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    assert {gpu.name for gpu in gpus} == {name}
    total = torch.cuda.get_device_properties(0).total_memory
    memory_bytes = gpus[0].memory_bytes
    assert memory_bytes is not None
    assert abs(memory_bytes / total - 1) < 0.05
    assert gpus[0].peak_flops is not None


def test_crux_host_knows_the_gpu(kind: Kind, report: Report) -> None:
    told = json.loads(_crux("host", "--json"))
    report.figure("crux host", {key: told[key] for key in ("pcie_links", "notes", "distances")})
    if not kind.is_gpu:
        assert told["nvml"] != "ok" or told["gpus"] == []
        return
    assert told["gpus"][0]["name"] == kind.model
    assert told["driver"]


def test_the_counters_see_what_is_counted(kind: Kind, report: Report) -> None:
    """A device that multiplies all the time, by its own counters and by arithmetic."""
    if not kind.is_gpu:
        pytest.skip("not on the rig: NVML knows nothing of it")
    from crux_torch.host.activity import ActivityMeter
    from crux_torch.host.nvml_device import current_device, own_gpu
    from crux_torch.host.peak import tensor_seconds

    size = 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    chosen = current_device()
    assert chosen is not None
    assert chosen.uuid, "this torch tells the UUID"
    meter = ActivityMeter()
    torch.cuda.synchronize()
    meter.begin(lambda gpus: own_gpu(gpus, chosen.ordinal, chosen.uuid))
    begin, products = time.monotonic(), 0
    while time.monotonic() - begin < 3.0:
        for _ in range(20):
            a @ a
        products += 20
        torch.cuda.synchronize()
    elapsed_s = time.monotonic() - begin
    activity = meter.finish(10.0)
    assert meter.gpu is not None
    assert meter.gpu.name == kind.model
    assert activity is not None, "NVML tells something of every data centre GPU"
    seconds = tensor_seconds(kind.model, {"bf16": products * 2.0 * size**3})
    report.figure(
        "activity",
        {
            "source": activity.source,
            "busy": activity.busy,
            "tensor": activity.tensor,
            "counted_share": None if seconds is None else seconds / elapsed_s,
        },
    )
    assert activity.busy is not None
    assert activity.busy > 0.5
    if activity.tensor is not None and seconds is not None:
        # What is counted can't take more of the tensor cores' time than they worked.
        assert seconds / elapsed_s <= 1.1 * activity.tensor + 0.02
