"""The scheduler extender, asked over HTTP with what kube-scheduler sends."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from control_fakes import profile, record

from crux_torch.cli.main import main
from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, count, save
from crux_torch.dispatch.dispatcher import Dispatcher, Running, labels_of
from crux_torch.dispatch.search import strongest
from crux_torch.dispatch.serve import Extender, gpus_of, server_of
from crux_torch.measure.profile import HostFlow
from evaluation.litegd import host_table

RATES = {"a": 10e9, "b": 20e9, "c": 30e9, "d": 40e9}


def cluster_of(kind: str = "A800") -> DispatchCluster:
    tables = [msgspec.structs.replace(host_table(kind), host=name) for name in RATES]
    return DispatchCluster(tables, np.array(list(RATES.values())))


def pod(gpus: int, **metadata: Any) -> dict[str, Any]:
    """A pod as Go writes a v1.Pod, shortened."""
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"nvidia.com/gpu": str(gpus)}}
    return {
        "metadata": {"name": "w-0", "namespace": "ml", "creationTimestamp": None, **metadata},
        "spec": {
            "containers": [
                {"name": "train", "image": "train:1", "resources": resources if gpus else {}},
                {"name": "sidecar", "image": "side:1", "resources": {}},
            ],
            "schedulerName": "default-scheduler",
        },
        "status": {},
    }


def by_names(of: dict[str, Any], names: Sequence[str] = "abcd") -> dict[str, Any]:
    """ExtenderArgs of a scheduler with ``nodeCacheCapable: true``."""
    return {"Pod": of, "Nodes": None, "NodeNames": list(names)}


def by_nodes(of: dict[str, Any], names: Sequence[str] = "abcd") -> dict[str, Any]:
    items = [{"metadata": {"name": n, "labels": {"zone": "1"}}, "spec": {}} for n in names]
    return {"Pod": of, "Nodes": {"metadata": {}, "items": items}, "NodeNames": None}


class Asked:
    """A server on a free port, whose cluster the test may change."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(cluster_of(), cluster_of().everything)
        self.now_s = 0.0
        self.error: Exception | None = None
        extender = Extender(self._look, clock=lambda: self.now_s)
        self.server = server_of(extender)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self._thread = threading.Thread(target=self.server.run, args=([self.listener],))
        self._thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join()
        self.listener.close()

    def _look(self) -> Dispatcher:
        if self.error:
            raise self.error
        return self.dispatcher

    def post(self, verb: str, body: object) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return request(self.port, "POST", f"/{verb}", raw)

    def scores(self, args: dict[str, Any]) -> dict[str, int]:
        status, answer = self.post("prioritize", args)
        assert status == 200, answer
        assert all(set(one) == {"Host", "Score"} for one in answer)
        return {one["Host"]: one["Score"] for one in answer}


def request(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content)


@pytest.fixture
def asked() -> Iterator[Asked]:
    found = Asked()
    yield found
    found.close()


def test_nodes_without_enough_free_gpus_are_left_out(asked: Asked) -> None:
    taken = Running((), None, {"a": dict.fromkeys("01234", "gpt")})
    asked.dispatcher = Dispatcher(cluster_of(), cluster_of().everything, running=taken)
    status, answer = asked.post("filter", by_names(pod(4), "abx"))
    assert (status, answer["NodeNames"], answer["Error"]) == (200, ["b"], "")
    assert answer["FailedNodes"]["a"] == "4 GPUs asked for, and 3 are free"
    assert "crux dispatch measure" in answer["FailedNodes"]["x"]
    _, answer = asked.post("filter", by_nodes(pod(4), "ab"))
    (kept,) = answer["Nodes"]["items"]
    assert kept == {"metadata": {"name": "b", "labels": {"zone": "1"}}, "spec": {}}
    _, answer = asked.post("filter", by_names(pod(0), "abx"))
    assert answer["NodeNames"] == ["a", "b", "x"], "a pod without GPUs runs anywhere"
    asked.error = DispatchError("no tables")
    assert asked.post("filter", by_names(pod(4)))[1]["Error"] == "no tables"
    assert asked.post("prioritize", by_names(pod(4))) == (500, "no tables")


def test_one_pod_prefers_the_node_with_the_most_bandwidth(asked: Asked) -> None:
    tables = [*cluster_of("4090").tables[:2], *cluster_of("V100").tables[2:]]
    mixed = DispatchCluster(tables, cluster_of().uplink_Bps)
    asked.dispatcher = Dispatcher(mixed, mixed.everything)
    # Four GPUs: 15.75 GB/s on the 4090 hosts, 100 GB/s on the DGX-1.
    assert asked.scores(by_nodes(pod(4))) == {"a": 0, "b": 0, "c": 10, "d": 10}
    assert asked.scores(by_names(pod(0))) == dict.fromkeys("abcd", 0)
    assert asked.scores(by_names(pod(4), "xa")) == {"x": 0, "a": 10}


def test_the_pods_of_one_job_go_to_the_nodes_of_its_best_choice(asked: Asked) -> None:
    job = {"annotations": {"crux-torch/job-gpus": "16"}, "ownerReferences": [{"uid": "u1"}]}
    first = asked.scores(by_names(pod(8, **job)))
    assert first == {"a": 0, "b": 0, "c": 10, "d": 10}
    # Meanwhile its GPUs on d are claimed. Its next pod still goes to c.
    taken = Running((), None, {"d": dict.fromkeys("01234567", "me")})
    asked.dispatcher = Dispatcher(cluster_of(), cluster_of().everything, running=taken)
    assert asked.scores(by_names(pod(8, **job), "abc")) == {"a": 0, "b": 0, "c": 10}
    other = {"labels": {"crux-torch/job-gpus": "16", "crux-torch/job": "other"}}
    assert asked.scores(by_names(pod(8, **other))) == {"a": 0, "b": 10, "c": 10, "d": 0}
    asked.now_s = 601.0
    assert asked.scores(by_names(pod(8, **job))) == {"a": 0, "b": 10, "c": 10, "d": 0}
    status, why = asked.post("prioritize", by_names(pod(8, labels={"crux-torch/job-gpus": "99"})))
    assert status == 500
    assert "99 devices asked for, and 24 are free" in why


def test_running_jobs_count(asked: Asked) -> None:
    flows = (HostFlow("c", "d", 30e9), HostFlow("d", "c", 30e9))
    told = record("gpt", hosts=("c", "d"), profile=profile(compute_s=0.1, flows=flows))
    running = Running((told,), None, {})
    asked.dispatcher = Dispatcher(cluster_of(), np.full(4, 0b1111), running=running)
    job = {"labels": {"crux-torch/job-gpus": "8", "crux-torch/job": "j"}}
    found = asked.scores(by_names(pod(4, **job)))
    assert sorted(found.values()) == [0, 0, 10, 10]
    assert (found["c"], found["d"]) != (10, 10), "the link between them is busy"


def test_what_is_not_kube_schedulers_is_refused(asked: Asked) -> None:
    port = asked.port
    for body in (b"no json", b"[]", b'{"Pod": 3, "NodeNames": ["a"]}', b'{"NodeNames": ["a"]}'):
        status, why = asked.post("filter", body)
        assert (status, "ExtenderArgs" in why) == (400, True), body
    assert asked.post("bind", b"{}")[0] == 404
    assert request(port, "GET", "/healthz") == (200, "ok")
    assert request(port, "GET", "/else")[0] == 404


def huge_pod(count: object) -> dict[str, Any]:
    container = {"name": "train", "resources": {"limits": {"nvidia.com/gpu": count}}}
    return {"metadata": {}, "spec": {"containers": [container]}}


HOSTILE: dict[str, bytes] = {
    "deep": b'{"Pod":' * 200_000,
    "deep lists": b"[" * 5_000_000,
    "infinity": b'{"Pod": {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": '
    b'Infinity}}}]}}, "NodeNames": ["a"]}',
    "no number": b'{"Pod": NaN, "NodeNames": ["a"]}',
    "out of range": json.dumps({"Pod": huge_pod(1), "NodeNames": ["a"]})
    .replace('": 1}', '": 1e999}')
    .encode(),
    "many digits": json.dumps({"Pod": huge_pod("9" * 100_000), "NodeNames": ["a"]}).encode(),
    "more than a cluster": json.dumps({"Pod": huge_pod(1 << 62), "NodeNames": ["a"]}).encode(),
    "negative": json.dumps({"Pod": huge_pod(-3), "NodeNames": ["a"]}).encode(),
    "no text": b"\xff\xfe{}",
    "nodes without names": json.dumps({"Pod": huge_pod(1), "Nodes": {"items": [{}]}}).encode(),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("verb", ["filter", "prioritize"])
def test_whatever_a_body_holds_gets_an_answer(asked: Asked, what: str, verb: str) -> None:
    status, why = asked.post(verb, HOSTILE[what])
    assert (status, "ExtenderArgs" in why) == (400, True), why
    assert request(asked.port, "GET", "/healthz") == (200, "ok")


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "0x10", str(1 << 40)])
def test_absurd_lengths_get_an_answer(asked: Asked, length: str) -> None:
    with socket.create_connection(("127.0.0.1", asked.port), timeout=60) as peer:
        head = f"POST /filter HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n"
        peer.sendall(head.encode() + b"x" * 100)
        if length == str(1 << 40):
            # The limit counts what comes, so it is met before the end.
            with contextlib.suppress(ConnectionError):
                while True:
                    peer.sendall(bytes(1 << 20))
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = peer.recv(4096)
    # What is sent after the end of the server's patience resets the connection, with its answer.
    expected = (b"HTTP/1.1 413", b"") if length == str(1 << 40) else (b"HTTP/1.1 400",)
    assert answer[:12] in expected, answer
    assert request(asked.port, "GET", "/healthz") == (200, "ok")


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /fil", b"POST /filter HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_slow_clients_are_dropped(
    asked: Asked, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte every 20 ms, or none: the time counts from the request's start."""
    monkeypatch.setattr("crux_torch.dispatch.serve.REQUEST_S", 0.3)
    with socket.create_connection(("127.0.0.1", asked.port), timeout=60) as peer:
        peer.settimeout(0.02)
        peer.sendall(sent)
        dropped = False
        for _ in range(3000):
            try:
                dropped = peer.recv(100) == b""
            except TimeoutError:
                with contextlib.suppress(ConnectionError):
                    peer.sendall(b"x" if sent else b"")
            except ConnectionError:
                dropped = True
            if dropped:
                break
    assert dropped
    assert request(asked.port, "GET", "/healthz") == (200, "ok")


def test_names_that_have_no_table_cost_no_search(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Any] = []
    choices = Dispatcher.choices

    def counted(self: Dispatcher, *args: Any) -> Any:
        searched.append(args)
        return choices(self, *args)

    monkeypatch.setattr(Dispatcher, "choices", counted)
    names = [f"node-{i}" for i in range(100_000)]
    scores = asked.scores(by_names(pod(4), [*names, "a"]))
    assert len(scores) == 100_001
    assert scores["a"] == 10
    assert len(searched) == 1
    assert len(asked.post("filter", by_names(pod(4), names))[1]["FailedNodes"]) == 100_000


def test_gpus_of_a_pod() -> None:
    assert gpus_of(pod(3)) == 3
    assert gpus_of({"spec": {"containers": [{"resources": {"limits": None}}]}}) == 0


def test_hosts_give_multiples_of_a_unit() -> None:
    cluster = cluster_of()
    free = np.array([0xFF, 0xFF, 0b111, 0b11111])
    choice = strongest(cluster, free, 8, unit=4)
    assert all(bin(m).count("1") % 4 == 0 for m in choice.tolist())
    assert count(strongest(cluster, free, 12, unit=4)) == 12
    with pytest.raises(DispatchError, match="4 or a multiple of each host"):
        strongest(cluster, np.array([7, 7, 7, 7]), 8, unit=4)


def test_labels_are_valid_whole_numbers() -> None:
    found = labels_of(cluster_of("V100"))
    assert found["b"]["crux-torch/uplink-gbps"] == "20"
    assert (found["b"]["crux-torch/gbps-2"], found["b"]["crux-torch/gbps-8"]) == ("50", "150")
    assert len(found["b"]) == 8


@pytest.mark.slow
def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    arguments = ["--uplink", "25"]
    for table in cluster_of().tables:
        save(table, tmp_path / f"{table.host}.json")
        arguments += ["--table", str(tmp_path / f"{table.host}.json")]
    shown = CliRunner().invoke(main, ["dispatch", "labels", *arguments]).output
    assert "kubectl label --overwrite node a crux-torch/gbps-2=200" in shown
    told = json.loads(CliRunner().invoke(main, ["dispatch", "labels", *arguments, "--json"]).output)
    assert told["a"]["crux-torch/gbps-2"] == "200"
    command = [sys.executable, "-m", "crux_torch.cli", "dispatch", "serve", "--port", "0"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)$", process.stdout.readline().strip())
        assert found is not None
        body = json.dumps(by_names(pod(8))).encode()
        status, answer = request(int(found[1]), "POST", "/filter", body)
        assert (status, answer["NodeNames"]) == (200, list("abcd"))
    finally:
        process.terminate()
        process.wait(120)
        assert process.stdout is not None
        process.stdout.close()
