"""What NCCL moves over TCP, and in which class, with two ranks on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rig.job import ATTACHED, Job
from rig.kind import Kind
from rig.network import DSCP
from rig.outcome import VALUE
from rig.report import Report

from crux_torch.apply import preload
from crux_torch.settings import Settings

NBYTES = 16 << 20


def _values(kind: Kind, part: str, report: Report, folder: Path) -> list[Any]:
    # What arithmetic expects: other protocols add flags to the payload.
    env = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    env |= preload.environment(Settings(), {})
    job = Job(kind, ATTACHED, 2, (part,), arguments={"nbytes": str(NBYTES)}, env=env)
    outcomes = job.run(folder / "job")[part]
    values = [outcome.value for outcome in outcomes]
    report.figure(part, values)
    assert all(outcome.kind == VALUE for outcome in outcomes), values
    return values


def test_a_ring_sends_each_byte_of_the_payload_once(
    kind: Kind, pair: int, report: Report, tmp_path: Path
) -> None:
    """Each of n ranks sends 2(n-1)/n of the payload; here n is 2."""
    for found in _values(kind, "bytes_of_sockets", report, tmp_path):
        assert abs(found["acked_bytes"] / found["payload"] - 1) < 0.05, found


def test_connections_of_nccl_get_the_class_and_lose_it(
    kind: Kind, pair: int, report: Report, tmp_path: Path
) -> None:
    for found in _values(kind, "class_of_sockets", report, tmp_path):
        assert found["error"] == ""
        assert found["dscp"] == [0, DSCP, 0], found
