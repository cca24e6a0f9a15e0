"""Manifests of ``deploy/`` for Kubernetes, against the schemas that Kubeflow Trainer publishes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from places import ROOT, SUPPORT

from crux_torch.cli.main import main
from crux_torch.job_name import NAMESPACE

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = json.loads((SUPPORT / "kubeflow_schemas.json").read_text())
RUNTIME = ROOT / "deploy/kubeflow/runtime.yaml"
TRAINJOB = ROOT / "deploy/kubeflow/trainjob.yaml"
STORE = ("--crux-store", "tcp://10.0.0.1:29410")


def closed(schema: Any) -> Any:
    """The schema, which now refuses fields that Kubernetes would drop."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def check(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, closed(SCHEMAS[manifest["kind"]]))


def patched(file: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(
        main, ["env", "--patch", str(file), *arguments, *STORE], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    manifest: dict[str, Any] = yaml.safe_load(result.stdout)
    return manifest


def names(env: list[dict[str, Any]]) -> list[str]:
    return [entry["name"] for entry in env]


@pytest.mark.parametrize("file", [RUNTIME, TRAINJOB], ids=lambda file: file.stem)
def test_manifests_are_as_published(file: Path) -> None:
    check(yaml.safe_load(file.read_text()))


def test_a_field_that_is_not_published_is_seen() -> None:
    manifest = yaml.safe_load(TRAINJOB.read_text())
    manifest["spec"]["trainer"]["nodes"] = 2
    with pytest.raises(jsonschema.ValidationError, match="nodes"):
        check(manifest)


def test_a_patched_runtime_attaches() -> None:
    manifest = patched(RUNTIME, "--container", "node")
    check(manifest)
    job = manifest["spec"]["template"]["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["CRUX_ATTACH"] == "1"
    assert env["CRUX_STORE"] == "tcp://10.0.0.1:29410"
    assert container["env"][-1] == {
        "name": NAMESPACE,
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}},
    }
    assert container["securityContext"]["capabilities"]["add"] == ["NET_RAW"]
    assert container["image"] == "registry.example/crux-job"
    assert pod["hostNetwork"] is True


def test_a_patched_job_attaches_under_any_runtime() -> None:
    manifest = patched(TRAINJOB)
    check(manifest)
    assert {"CRUX_ATTACH", "CRUX_STORE", NAMESPACE} <= set(
        names(manifest["spec"]["trainer"]["env"])
    )
    # Trainer refuses a TrainJob that sets what it sets itself.
    assert not any(name.startswith("PET_") for name in names(manifest["spec"]["trainer"]["env"]))


def test_a_patch_keeps_what_is_there_and_a_second_one_changes_nothing(tmp_path: Path) -> None:
    pod = {
        "kind": "Pod",
        "spec": {
            "initContainers": [{"name": "fetch"}],
            "containers": [
                {
                    "name": "train",
                    "env": [{"name": "A", "value": "1"}, {"name": "CRUX_STORE", "value": "old"}],
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                },
                {"name": "logs"},
            ],
        },
    }
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump(pod))
    manifest = patched(file, "--container", "train")
    train, logs = manifest["spec"]["containers"]
    assert train["env"][0] == {"name": "A", "value": "1"}
    assert names(train["env"]).count("CRUX_STORE") == 1
    assert train["securityContext"]["capabilities"]["add"] == ["IPC_LOCK", "NET_RAW"]
    assert logs == {"name": "logs"}
    assert manifest["spec"]["initContainers"] == [{"name": "fetch"}]
    file.write_text(yaml.safe_dump(manifest))
    assert patched(file, "--container", "train") == manifest


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("kind: Pod", (), "no container with a pod template"),
        ("containers: [{name: a}]", ("--container", "b"), "no container with the name 'b'"),
        ("a: [", (), "no YAML"),
    ],
)
def test_what_cannot_be_patched_is_said(
    tmp_path: Path, text: str, arguments: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "in.yaml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["env", "--patch", str(file), *arguments])
    assert result.exit_code == 1
    assert said in result.output


@pytest.fixture(scope="module")
def built() -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(ROOT / "deploy/kubernetes")],
        capture_output=True,
        text=True,
        check=True,
    )
    return list(yaml.safe_load_all(done.stdout))


def test_the_base_has_no_rights_because_nothing_asks_kubernetes(
    built: list[dict[str, Any]],
) -> None:
    kinds = sorted(one["kind"] for one in built)
    assert kinds == ["ConfigMap", "Deployment", "Deployment", "Namespace", "Service", "Service"]
    for one in built:
        if one["kind"] == "Deployment":
            pod = one["spec"]["template"]["spec"]
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_base_names_real_options_and_one_port_each(built: list[dict[str, Any]]) -> None:
    ports = {
        one["metadata"]["name"]: one["spec"]["ports"] for one in built if one["kind"] == "Service"
    }
    help_of = {"crux-exporter": ["exporter"], "crux-dispatch": ["dispatch", "serve"]}
    for one in built:
        if one["kind"] != "Deployment":
            continue
        name = one["metadata"]["name"]
        (container,) = one["spec"]["template"]["spec"]["containers"]
        line = " ".join(container["command"] + container.get("args", []))
        known = CliRunner().invoke(main, [*help_of[name], "--help"]).output
        options = {word for word in line.replace('"', " ").split() if word.startswith("--")}
        assert options
        assert all(option in known for option in options)
        assert container["ports"][0]["containerPort"] == ports[name][0]["port"]
        assert f"--port {ports[name][0]['port']}" in line


def charted(*arguments: str) -> subprocess.CompletedProcess[str]:
    helm = shutil.which("helm")
    if not helm:
        pytest.skip("helm is not installed")
    chart = str(ROOT / "deploy/helm/crux")
    return subprocess.run(
        [helm, "template", "crux", chart, *arguments], capture_output=True, text=True, check=False
    )


def test_the_chart_makes_what_the_base_does(built: list[dict[str, Any]]) -> None:
    done = charted("--set", "store=tcp://10.0.0.1:29410", "--namespace", "crux")
    assert done.returncode == 0, done.stderr
    made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
    for one in built:
        name = one["metadata"]["name"]
        # Kustomize adds a hash of the contents to a ConfigMap's name.
        if one["kind"] == "ConfigMap":
            assert made.pop(("ConfigMap", "crux"))["data"] == one["data"]
        elif one["kind"] != "Namespace":
            text = json.dumps(one["spec"])
            for each in built:
                if each["kind"] == "ConfigMap":
                    text = text.replace(each["metadata"]["name"], "crux")
            assert made.pop((one["kind"], name))["spec"] == json.loads(text)
    assert not made


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("cluster=a", "expected the address of the jobs' store"),
        ("store=10.0.0.1", "does not match pattern"),
        ("store=tcp://10.0.0.1:29410,dispatch.uplink=0", "exclusiveMinimum"),
        ("store=tcp://10.0.0.1:29410,exporter.port=1", "additional"),
    ],
)
def test_the_chart_refuses_what_is_wrong(values: str, said: str) -> None:
    done = charted("--set", values)
    assert done.returncode != 0
    assert said in done.stderr
