"""What Crux finds of this host's GPUs, against what torch knows of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_rig
from rig.job import ATTACHED, Job
from rig.kind import Kind
from rig.outcome import VALUE
from rig.part import ALONE
from rig.report import Report

from crux_torch.host.nvml import tensor_seconds


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


def _found(part: str, kind: Kind, folder: Path, **arguments: str) -> dict[str, Any]:
    """What a rank alone found."""
    env = {} if kind.is_gpu else cuda_rig.nvml()
    job = Job(kind, ATTACHED, ALONE, (part,), env=env, arguments=arguments)
    (outcome,) = job.run(folder / "job")[part]
    assert outcome.kind == VALUE, outcome.value
    found: dict[str, Any] = outcome.value
    return found


def test_this_host_is_what_torch_sees(kind: Kind, report: Report, tmp_path: Path) -> None:
    found = _found("gpus_of_this_host", kind, tmp_path)
    gpus = found["gpus"]
    report.figure("GPUs of this host", [repr(gpu) for gpu in gpus])
    assert found["names"] == sorted({gpu["name"] for gpu in gpus})
    assert found["uuid"] in [gpu["uuid"] for gpu in gpus]
    assert abs(gpus[0]["memory_bytes"] / found["memory_bytes"] - 1) < 0.05
    assert gpus[0]["peak_flops"] is not None


def test_crux_host_knows_the_gpu(kind: Kind, report: Report) -> None:
    told = json.loads(_crux("host", "--json"))
    report.figure("crux host", {key: told[key] for key in ("pcie_links", "notes", "distances")})
    if not kind.is_gpu:
        assert told["nvml"] != "ok" or told["gpus"] == []
        return
    assert told["gpus"][0]["name"] == kind.model
    assert told["driver"]


def test_the_counters_see_what_is_counted(kind: Kind, report: Report, tmp_path: Path) -> None:
    """A device without work, and one that multiplies, by its own counters and by arithmetic."""
    size = "8192" if kind.is_gpu else "256"
    found = _found("counted_activity", kind, tmp_path, size=size)
    assert found["uuid"], "this torch tells the UUID"
    activity = found["activity"]
    assert activity is not None, "NVML tells something of every data centre GPU"
    seconds = tensor_seconds(found["gpu"], {"bf16": found["flops"]})
    share = None if seconds is None else seconds / found["seconds"]
    report.figure("activity", activity | {"counted_share": share})
    assert activity["busy"] is not None
    # Beside other programs the rig's threads, which are its devices, do not always run.
    assert activity["busy"] > max(0.5 if kind.is_gpu else 0.1, 2 * found["idle"]["busy"])
    if activity["tensor"] is not None and share is not None:
        # What is counted can't take more of the tensor cores' time than they worked.
        assert share <= 1.1 * activity["tensor"] + 0.02
