"""The process that serves one job's metrics: what it shows, and why there may be none."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import heavy3
import pytest
from control_fakes import until
from loopback import free_port
from store_server import ServerThread, secret_file

from crux_torch.agent import metrics_process
from crux_torch.agent.metrics_process import MetricsProcess
from crux_torch.agreement.registry import Registry
from crux_torch.settings import Settings

BOUND_S = 120
pytestmark = pytest.mark.slow


def process_of(store: str, port: int, **more: str) -> tuple[MetricsProcess, list[str]]:
    said: list[str] = []
    env = {"CRUX_STORE": store, "CRUX_METRICS": str(port), "CRUX_JOB": "A", **more}
    return MetricsProcess(Settings.from_env(env), lambda _, text: said.append(text)), said


def test_it_shows_its_job_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with ServerThread(b"0123456789abcdef") as server:
        registry = Registry(server.client(), "default")
        for record in heavy3.measured():
            registry.publish_job(record, 600.0)
        where = f"tcp://127.0.0.1:{server.port}"
        monkeypatch.setenv("CRUX_STORE", where)
        serving, said = process_of(where, port, CRUX_STORE_SECRET=secret_file(tmp_path))
        try:

            def text() -> str:
                try:
                    url = f"http://127.0.0.1:{port}/metrics"
                    with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
                        return answer.read().decode()
                except OSError:
                    serving.look()
                    return ""

            until(lambda: 'crux_job_gpus{job_name="A"}' in text(), BOUND_S, "the job")
            assert 'job_name="B"' not in text()
        finally:
            serving.close()
        assert said == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setenv("CRUX_STORE", store)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serving, said = process_of(store, port)

        def told() -> bool:
            serving.look()
            return bool(said)

        until(told, BOUND_S, "the reason")
        serving.close()
    where = f"no metrics at http://127.0.0.1:{port}/metrics"
    assert said == [f"{where}: [Errno 98] Address already in use"]


def test_without_a_store_or_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, said = process_of("none", 29481)
    serving.look()
    serving.close()
    monkeypatch.setattr(metrics_process, "_NEEDED", ("no_such_package",))
    serving, more = process_of("unix:", 29481)
    serving.look()
    serving.close()
    assert "without a store there is nothing to show" in said[0]
    assert "pip install 'crux-torch[metrics]' (no_such_package)" in more[0]
