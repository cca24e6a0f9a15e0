"""``crux exporter``: over HTTP and TLS, through an outage of the store, and to a file."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import heavy3
import msgspec
import pytest
from control_fakes import until
from places import ROOT
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from store_server import ServerThread
from training_job import environment

from crux_torch.agreement.records import OnTrial, PathCounts, TriedPlan
from crux_torch.agreement.registry import Registry
from crux_torch.errors import Cause, StoreError
from crux_torch.report.exporter import Exporter, registry_of
from crux_torch.report.page.server import PageServer, WebConfig

BOUND_S = 120
PASSWORD, HASH = "U*U", "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW"


class FakeReader:
    """A reader of a cluster whose store may be away."""

    topology = heavy3.topology()

    def __init__(self) -> None:
        plan = heavy3.one_level(dict.fromkeys(heavy3.JOBS, 1), heavy3.measured())
        self.status = heavy3.status_of(heavy3.measured(), plan, {"A": 2.5})
        self.error: Exception | None = None
        self.opened = 0

    def open(self) -> FakeReader:
        self.opened += 1
        return self

    def read(self):
        if self.error is not None:
            raise self.error
        return self.status

    def audit(self):
        return ()

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def served(exporter: Exporter, config: WebConfig | None = None) -> Iterator[str]:
    server = PageServer(exporter.routes(), ("127.0.0.1", 0), config)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"://localhost:{server.server_port}"
    finally:
        exporter.end()
        server.shutdown()
        thread.join()
        server.server_close()


def get(url: str, password: str = "", context: ssl.SSLContext | None = None) -> str:
    request = urllib.request.Request(url)
    if password:
        told = base64.b64encode(f"ops:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {told}")
    with urllib.request.urlopen(request, timeout=BOUND_S, context=context) as answer:
        return answer.read().decode()


def status_of(url: str, password: str = "", context: ssl.SSLContext | None = None) -> int:
    try:
        get(url, password, context)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def value(text: str, name: str) -> float:
    return next(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)
    )


def test_metrics_health_and_the_page_over_http() -> None:
    reader = FakeReader()
    exporter = Exporter(reader.open)  # type: ignore[arg-type]
    exporter.refresh()
    with served(exporter) as where:
        text = get(f"http{where}/metrics")
        assert value(text, "crux_jobs ") == 4
        assert value(text, 'crux_job_iteration_seconds{job_name="A"}') == 2.5
        assert get(f"http{where}/healthz") == "ok\n"
        assert "<html" in get(f"http{where}/")
        assert status_of(f"http{where}/nothing") == 404


def test_one_job_s_exporter_has_no_page() -> None:
    exporter = Exporter(FakeReader().open, "A")  # type: ignore[arg-type]
    exporter.refresh()
    with served(exporter) as where:
        assert 'job_name="B"' not in get(f"http{where}/metrics")
        assert status_of(f"http{where}/") == 404
        assert status_of(f"http{where}/api/state") == 404


def test_an_outage_of_the_store_is_counted_and_survived() -> None:
    now = [0.0]
    reader = FakeReader()
    exporter = Exporter(reader.open, clock=lambda: now[0])  # type: ignore[arg-type]
    exporter.refresh()
    now[0] = 7.0
    assert exporter.reading().renewed_s == 7.0, "nobody was seen to renew it"
    reader.error = StoreError("away", Cause.CUT)
    exporter.refresh()
    exporter.refresh()
    away = exporter.reading()
    assert (away.store_up, away.errors["store"], away.errors["state"]) == (False, 2, 0)
    reader.error = None
    exporter.refresh()
    assert exporter.reading().store_up
    assert reader.opened == 3, "each failure opens anew"
    reader.error = ZeroDivisionError("a mistake of ours")
    exporter.refresh()
    assert exporter.reading().errors["state"] == 1


def test_it_is_not_healthy_while_nothing_is_tried() -> None:
    now = [0.0]
    exporter = Exporter(FakeReader().open, clock=lambda: now[0])  # type: ignore[arg-type]
    with served(exporter) as where:
        assert status_of(f"http{where}/healthz") == 200
        now[0] = 61.0
        assert status_of(f"http{where}/healthz") == 503
        exporter.refresh()
        assert status_of(f"http{where}/healthz") == 200


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-days", "2", "-keyout", "web.key", "-out", "web.crt"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    return tmp_path / "web.crt"


def test_tls_and_passwords(certificate: Path) -> None:
    file = certificate.with_name("web.yml")
    file.write_text(
        "tls_server_config: {cert_file: web.crt, key_file: web.key}\n"
        f"basic_auth_users:\n  ops: {HASH}\n"
    )
    exporter = Exporter(FakeReader().open)  # type: ignore[arg-type]
    exporter.refresh()
    trusting = ssl.create_default_context(cafile=str(certificate))
    with served(exporter, WebConfig.load(file)) as where:
        for path in ("/metrics", "/healthz", "/", "/api/state"):
            assert status_of(f"https{where}{path}", context=trusting) == 401
            assert status_of(f"https{where}{path}", "wrong", trusting) == 401
            assert status_of(f"https{where}{path}", PASSWORD, trusting) == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            get(f"https{where}/metrics", PASSWORD)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(f"http{where}/metrics", PASSWORD)
        assert status_of(f"https{where}/metrics", PASSWORD, trusting) == 200


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "crux_torch.cli", "exporter", *arguments]
    process = subprocess.Popen(
        argv, env=environment(), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_command_reads_a_store_and_ends_at_sigterm() -> None:
    with ServerThread() as server:
        registry = Registry(server.client(), "default")
        for record in heavy3.measured():
            registry.publish_job(record, 60.0)
        with command(f"--store=tcp://127.0.0.1:{server.port}", "--port=0") as process:
            assert process.stdout is not None
            where = process.stdout.readline().split()[-1]
            until(lambda: "crux_jobs 4.0" in get(where), BOUND_S, "the jobs")
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0


@pytest.mark.slow
def test_a_file_for_node_exporter(tmp_path: Path) -> None:
    with ServerThread() as server:
        where = f"--store=tcp://127.0.0.1:{server.port}"
        with command(where, f"--textfile={tmp_path}") as process:
            file = tmp_path / "crux.prom"
            until(file.exists, BOUND_S, "the file")
            assert "crux_store_up 1.0" in file.read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_wrong_config_are_named(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text("basic_auth_users: {ops: secret}")
    with ServerThread() as server:
        where = f"--store=tcp://127.0.0.1:{server.port}"
        with command(where, f"--port={server.port}") as process:
            assert f"127.0.0.1:{server.port}: Address already in use" in process.communicate()[1]
        with command(where, f"--web-config={file}", "--port=0") as process:
            said = process.communicate()[1]
            assert "web.yml: " in said
            assert "bcrypt hashes" in said
            assert "secret" not in said


DEPLOY = ROOT / "deploy"


def dashboard() -> tuple[dict, list[tuple[str, str]]]:
    """The dashboard, and its expressions with what their legends show."""
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [(t["expr"], t["legendFormat"]) for panel in board["panels"] for t in panel["targets"]]
    asked += [(each["expr"], "") for each in board["annotations"]["list"] if "expr" in each]
    return board, asked


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    reader = FakeReader()
    tried = (TriedPlan(name="t", jobs=("A", "B"), state="worse"),)
    counts = PathCounts(as_planned=3, elsewhere=1)
    jobs = [msgspec.structs.replace(r, paths=counts, tried=tried) for r in reader.status.jobs]
    trial = OnTrial(name="t", judge=jobs[0].job, jobs=2, on=False)
    plan = reader.status.plan
    entries = tuple(msgspec.structs.replace(entry, trial=trial) for entry in plan.entries)
    plan = msgspec.structs.replace(plan, entries=entries)
    reader.status = replace(reader.status, jobs=tuple(jobs), plan=plan)
    exporter = Exporter(reader.open)  # type: ignore[arg-type]
    exporter.refresh()
    text = generate_latest(registry_of(exporter.reading)).decode()
    known = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    board, asked = dashboard()
    rules = (DEPLOY / "alerts.yml").read_text()
    assert set(re.findall(r"\bcrux_[a-z_]+", " ".join([rules, *(e for e, _ in asked)]))) <= known
    for expr, legend in asked:
        found = re.findall(r"\b(crux_[a-z_]+)(?:\{([^}]*)\})?", expr)
        for name, matchers in found:
            used = set(re.findall(r"(\w+)=", matchers)) | set(re.findall(r"\{\{(\w+)\}\}", legend))
            assert used <= labels[name], expr
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in places)


def test_the_dashboard_is_one_by_grafana_s_own_models() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board, _ = dashboard()
    decoded = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(board)))
    # Fields of Prometheus and of the editor, which the models leave out.
    assert set(left_out(board, decoded)) == {
        "/annotations/list/0/step",
        "/annotations/list/0/titleFormat",
        "/templating/list/1/definition",
    }


def left_out(before: object, after: object, path: str = "") -> Iterator[str]:
    """Paths of what ``after`` lacks, or has with another value."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from left_out(value, after.get(key), f"{path}/{key}")
    elif before != after:
        yield path


@pytest.mark.slow
def test_alert_rules_and_the_dashboard_s_expressions(tmp_path: Path) -> None:
    if not any(os.access(f"{folder}/promtool", os.X_OK) for folder in os.get_exec_path()):
        pytest.skip("no promtool: apt-get install prometheus")
    subprocess.run(["promtool", "test", "rules", "alerts-test.yml"], cwd=DEPLOY, check=True)
    _, asked = dashboard()
    rules = [
        {"record": f"r{n}", "expr": expr.replace("$job", ".*")} for n, (expr, _) in enumerate(asked)
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, check=True)
