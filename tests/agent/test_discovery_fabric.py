"""Two real jobs that nobody told the network find it, are moved apart, and see a spine vanish."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from lab import netns
from lab.job import ROOT
from lab.paths import PathStudy, Study, fabric_of, most_on_one
from lab.twins import Workload

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.full, pytest.mark.skipif(not _OK, reason=_REASON)]

TINY = ("--accelerator-ms", "30", "--width", "96", "--batch", "4")
STUDY = Study(
    "discovery",
    (Workload("A", "mlp", TINY), Workload("B", "mlp", (*TINY, "--seed", "1"))),
    rate_mbit=200.0,
    settings={
        "CRUX_PROFILE_S": "4",
        "CRUX_LEASE_S": "3",
        "CRUX_TUNING": "tick_s=0.05,profile_iterations=8,plan_valid_s=6",
    },
)


def test_jobs_find_the_network_and_what_vanishes_from_it(tmp_path: Path) -> None:
    with fabric_of(STUDY) as fabric:
        study = PathStudy(STUDY, fabric, tmp_path, lambda *_: None, topology=None)
        try:
            study.start()
            study.collide()
            study.separate()
            assert most_on_one(study.seen.spines["before"]) == 2
            assert set(study.seen.spines["crux"].values()) == {0, 1}
            (said,) = study.status["network"]
            # Each pair of hosts has two links to leaves; each leaf two to spines, both ways.
            assert said == "nobody gives a topology: the network is as its jobs saw it, 16 links"
            # What was seen before the plan parted them is the hardest to forget.
            fabric.cut(study.seen.spines["before"]["A"])
            cut_s = time.monotonic()
            study.plan(lambda: not any(e["paths"] for e in study.status["plan"]["entries"]))
            print(f"the plan left the spine that vanished after {time.monotonic() - cut_s:.0f} s")
            argv = [sys.executable, "-m", "crux_torch.cli", "cluster", "audit", "--json"]
            argv += ["--store", study._store, "--cluster", "paths"]
            secret = f"CRUX_STORE_SECRET={study._secret}"
            out = fabric.run(fabric.host(0, 0), ["env", "-C", str(ROOT), secret, *argv])
            lines = [line for entry in json.loads(out) for line in entry["why"]]
            assert any("jobs saw another network: gone: " in line for line in lines), lines
        finally:
            study.close()
