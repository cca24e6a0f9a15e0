"""A study has the same rows in this process, in two, and on two workers of Dask."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from evaluation.__main__ import evaluation


@pytest.mark.slow
def test_a_study_has_the_same_rows_wherever_it_runs() -> None:
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    few = ["variants", "--small", "3", "--testbed", "0", "--clos", "0", "--horizon", "5"]

    def rows(workers: str) -> list[object]:
        done = CliRunner().invoke(evaluation, [*few, "--workers", workers, "--json", "-"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["rows"]

    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0"
    ) as cluster:
        found = rows(cluster.scheduler_address.replace("tcp://", "dask://"))
    assert found == rows("2") == rows("1")
