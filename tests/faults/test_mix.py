"""Whatever happens to the store and to other jobs, a job trains on, and is planned again.

``make soak MINUTES=60 SEED=5`` runs the same for longer, or with other faults.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from control_fakes import until
from etcd_server import needs_etcd
from training_job import BOUND_S, Job

from faults.mix import STEPS, Mix

MINUTES = float(os.environ.get("CRUX_SOAK_MINUTES", "3"))
SEED = int(os.environ.get("CRUX_SOAK_SEED", "1"))


@needs_etcd
@pytest.mark.full
@pytest.mark.timeout(60 * MINUTES + 1200)
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_jobs_recover_from_every_fault(tmp_path: Path) -> None:
    with Mix(tmp_path, SEED) as mix:
        try:
            mix.run(60 * MINUTES)
            mix.end()
        except BaseException as error:
            raise AssertionError(f"seed {SEED}: {mix.schedule}") from error
        steps, losses = mix.stays.steps(), mix.stays.losses()
        assert mix.stays.status()["errors"] == {}
    print(f"seed {SEED}: {len(mix.schedule)} faults, {steps} steps")
    alone = Job("torch.distributed.run", tmp_path / "alone", f"--steps={STEPS}", "--sleep-s=0")
    try:
        until(lambda: alone.steps() >= steps, BOUND_S + steps, "the undisturbed losses")
        assert alone.losses()[:steps] == losses
    finally:
        alone.kill_everything()
