"""A real Prometheus scrapes the exporter, and a job's own, while two real jobs run."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_fakes import until
from dscp_maps import MARKED_ENV
from loopback import free_port
from places import ROOT
from training_job import BOUND_S, Job, environment

pytestmark = pytest.mark.full


class Prometheus:
    """A Prometheus that scrapes ``targets`` every second and has Crux's alert rules."""

    def __init__(self, folder: Path, targets: dict[str, int]) -> None:
        scrapes = [
            {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for name, port in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "deploy" / "alerts.yml")],
            "scrape_configs": scrapes,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.port = free_port()
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml",
                 f"--storage.tsdb.path={folder}/tsdb",
                 f"--web.listen-address=127.0.0.1:{self.port}"],
                cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip

    def ask(self, query: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The values of an instant query, by their labels without those of the scrape."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?query={urllib.parse.quote(query)}"
        try:
            with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except OSError:
            return {}
        return {
            tuple(
                sorted(
                    (k, v) for k, v in each["metric"].items() if k not in ("instance", "__name__")
                )
            ): float(each["value"][1])
            for each in found
        }

    def jobs(self, query: str) -> dict[str, float]:
        """The values by job."""
        return {dict(labels)["job_name"]: value for labels, value in self.ask(query).items()}


@pytest.fixture
def running() -> Iterator[Callable[[subprocess.Popen[Any]], subprocess.Popen[Any]]]:
    started: list[subprocess.Popen[Any]] = []

    def keep(process: subprocess.Popen[Any]) -> subprocess.Popen[Any]:
        started.append(process)
        return process

    yield keep
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (apt-get install)")
def test_two_jobs_are_seen_and_their_end_too(
    tmp_path: Path, running: Callable[[subprocess.Popen[Any]], subprocess.Popen[Any]]
) -> None:
    store, own, port = (free_port() for _ in range(3))
    env = {**MARKED_ENV, "CRUX_STORE": f"tcp://127.0.0.1:{store}", "CRUX_LEASE_S": "2"}
    jobs = [
        Job("cruxrun", tmp_path / name, "--steps=100000", **{**env, "CRUX_JOB": name, **more})
        for name, more in (("one", {"CRUX_METRICS": str(own), "SLURM_JOB_ID": "4711"}), ("two", {}))
    ]
    try:
        running(
            subprocess.Popen(
                [sys.executable, "-m", "crux_torch.cli", "exporter", f"--port={port}",
                 f"--store=tcp://127.0.0.1:{store}"],
                env=environment(), cwd=ROOT,
            )
        )  # fmt: skip
        prometheus = Prometheus(tmp_path, {"cluster": port, "own": own})
        running(prometheus.process)

        def planned() -> bool:
            levels = prometheus.jobs('crux_job_level{job="cluster"}')
            steps = prometheus.jobs('crux_job_iteration_seconds{job="cluster"}')
            alone = prometheus.jobs('crux_job_alone_iteration_seconds{job="cluster"}')
            return all(set(found) == {"one", "two"} for found in (levels, steps, alone))

        until(planned, BOUND_S, "both jobs with a level, their steps now and alone")
        for step_s in prometheus.jobs('crux_job_iteration_seconds{job="cluster"}').values():
            assert step_s >= 0.05, "each step sleeps for 50 ms"
        exposed = prometheus.jobs('crux_job_exposed_communication_ratio{job="cluster"}')
        assert all(0 <= ratio <= 1 for ratio in exposed.values())
        (info,) = prometheus.ask('crux_job_info{job="cluster",slurm_job_id="4711"}')
        assert dict(info)["job_name"] == "one"
        (epoch,) = prometheus.ask('crux_plan_epoch{job="cluster"}').values()
        assert epoch >= 1
        until(
            lambda: list(prometheus.jobs('crux_job_level{job="own"}')) == ["one"],
            BOUND_S,
            "the job's own exporter, which has no other job",
        )
        assert prometheus.ask('ALERTS{alertstate="firing"}') == {}

        jobs[1].end()
        until(
            lambda: set(prometheus.jobs('crux_job_gpus{job="cluster"}')) == {"one"},
            BOUND_S,
            "the job's end",
        )
        jobs[0].end()
        until(
            lambda: list(prometheus.ask('up{job="own"}').values()) == [0.0],
            BOUND_S,
            "the end of the job's exporter with its job",
        )
        until(
            lambda: prometheus.ask('crux_jobs{job="cluster"}').popitem()[1] == 0,
            BOUND_S,
            "the cluster without jobs",
        )
        assert prometheus.ask('ALERTS{alertstate="firing"}') == {}, "an idle cluster is in order"
        for job in jobs:
            assert not [line for line in job.said() if "metrics" in line]
    finally:
        for job in jobs:
            job.kill_everything()


def test_a_taken_port_is_said_and_the_job_trains_on(tmp_path: Path) -> None:
    env = {**MARKED_ENV, "CRUX_STORE": f"tcp://127.0.0.1:{free_port()}"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = Job("cruxrun", tmp_path / "job", "--steps=100000", CRUX_METRICS=str(port), **env)
        try:
            said = (
                f"no metrics at http://127.0.0.1:{port}/metrics: [Errno 98] Address already in use"
            )
            until(lambda: any(said in line for line in job.said()), BOUND_S, "the warning")
            steps = job.steps()
            until(lambda: job.steps() > steps, BOUND_S, "more steps")
            job.end()
        finally:
            job.kill_everything()
