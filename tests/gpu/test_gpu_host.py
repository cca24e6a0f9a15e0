"""What Crux finds of this host's GPUs, against what torch knows of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rig.kind import Kind
from rig.report import Report


def _crux(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from crux_torch.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_the_doctor_names_the_gpu(kind: Kind, report: Report) -> None:
    said = _crux("doctor")
    report.figure("crux doctor", said.splitlines())
    if kind.is_cuda:
        assert kind.model in said
    else:
        assert "GPU" in said


def test_this_host_is_what_torch_sees(kind: Kind, report: Report) -> None:
    if not kind.is_cuda:
        pytest.skip("not on a fake device: NVML knows nothing of it")
    from crux_torch.fabric.host import this_host

    gpus = this_host().gpus
    report.figure("GPUs of this host", [repr(gpu) for gpu in gpus])
    (name,) = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    assert {gpu.name for gpu in gpus} == {name}
    total = torch.cuda.get_device_properties(0).total_memory
    assert abs(gpus[0].memory_bytes / total - 1) < 0.05
    assert gpus[0].peak_flops is not None
