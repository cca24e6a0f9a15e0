"""A job marks nothing that its operator has not named: the kernel's values over whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dscp_maps import CLASS_SELECTORS, MARKED_ENV
from loopback import free_port
from places import SUPPORT
from training_job import BOUND_S, environment

pytestmark = pytest.mark.slow

SCRIPT = SUPPORT.joinpath("tos_job.py")
CLUSTER = {
    "CRUX_JOB": "alone",
    "CRUX_PROFILE_S": "2",
    "CRUX_TUNING": "start_s=0.1,tick_s=0.05,profile_iterations=6",
}


def played(folder: Path, **env: str) -> list[dict[str, Any]]:
    """What the two ranks of a job under ``cruxrun`` saw."""
    store = {"CRUX_STORE": f"tcp://127.0.0.1:{free_port()}"}
    done = subprocess.run(
        [sys.executable, "-m", "cruxrun", "--standalone", "--nproc-per-node=2", SCRIPT, folder],
        env={**environment(), **CLUSTER, **store, **env},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank in ranks:
        assert rank["readings"] > 100, "the test looked all the time"
        assert rank["status"]["errors"] == {}
        assert rank["status"]["plan"] is not None, "the job was planned"
        assert rank["status"]["leader"] is None or rank["status"]["leader"]["state"] == "planned"
    return ranks


def test_a_lone_job_with_default_settings_marks_nothing(tmp_path: Path) -> None:
    for rank in played(tmp_path):
        assert rank["tos"] == [0]
        status = rank["status"]
        assert (status["plan"]["level"], status["order"]["marks"]) == (0, None)
        assert status["applied"]["marked"] == 0
        assert rank["measured_on"] in ([None], [0], [None, 0], [0, None]), "no top level"
        profile = status["profile"]
        assert profile["measured_alone"], "no other job was there"
        assert "without a class above the other jobs'" in profile["t_note"]


def test_a_job_with_a_map_sends_with_its_values_and_no_others(tmp_path: Path) -> None:
    for rank in played(tmp_path, **MARKED_ENV):
        assert {0, 7 << 5} < set(rank["tos"]), "measured on the highest"
        assert {tos >> 2 for tos in rank["tos"]} <= {*CLASS_SELECTORS}
        level = rank["status"]["plan"]["level"]
        assert rank["status"]["applied"]["dscp"] == CLASS_SELECTORS[level]
        assert CLASS_SELECTORS[level] << 2 in rank["tos"]
        assert "t_note" not in rank["status"]["profile"]


def test_a_dry_run_plans_and_changes_nothing(tmp_path: Path) -> None:
    env = {**MARKED_ENV, "CRUX_DRY_RUN": "1", "CRUX_PORTS": "21000-21999"}
    for rank in played(tmp_path, **env):
        assert rank["tos"] == [0]
        status = rank["status"]
        assert status["plan"]["level"] > 0, "it shows the level that the job would have"
        order = status["order"]
        assert (order["level"], order["marks"], order["pace"]) == (None, None, None)
        assert (order["routes"], order["flows"], order["generation"]) == ([], [], 0)
        assert not set(rank["ports"]) & set(range(21000, 22000))
        assert status["profile"]["measured_alone"]
