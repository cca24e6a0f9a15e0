"""A study has the same rows in this process, in two, and on two workers of Dask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from dask_cluster import BOUND_S, DaskCluster

from evaluation.__main__ import evaluation


@pytest.mark.slow
def test_a_study_has_the_same_rows_wherever_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crux_torch.sim.workers.LIMIT_S", BOUND_S)
    few = ["variants", "--small", "3", "--testbed", "0", "--clos", "0", "--horizon", "5"]

    def rows(workers: str) -> list[object]:
        done = CliRunner().invoke(evaluation, [*few, "--workers", workers, "--json", "-"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["rows"]

    with DaskCluster(tmp_path) as cluster:
        found = rows(cluster.address)
    assert found == rows("2") == rows("1")
