"""``crux dispatch``: choices, what is taken, what is wrong with the input, and measuring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from control_fakes import profile, record
from store_server import ServerThread

from crux_torch.agreement.claims import DeviceClaim, DeviceClaims
from crux_torch.agreement.registry import Registry
from crux_torch.cli import progress
from crux_torch.cli.main import main
from crux_torch.dispatch.cluster import DispatchCluster, load, save, table_of
from crux_torch.dispatch.samples import across_hosts, sample_line
from crux_torch.measure.profile import HostFlow
from crux_torch.network.builders import GpuServer, two_layer_clos
from crux_torch.network.loaders import dump_yaml
from evaluation.litegd import host_table


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    arguments = []
    for name, kind in (("a", "V100"), ("b", "A6000"), ("c", "A800")):
        path = tmp_path / f"{name}.json"
        save(msgspec.structs.replace(host_table(kind), host=name), path)
        arguments += ["--table", str(path)]
    return arguments


def crux(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["dispatch", *arguments])


def best(result: Result) -> dict[str, Sequence[str]]:
    assert result.exit_code == 0, result.output
    found: dict[str, Sequence[str]] = json.loads(result.output)[0]["devices"]
    return found


def test_the_fastest_free_devices_are_chosen(tables: list[str]) -> None:
    asked = [*tables, "--uplink", "25", "--json", "--gpus"]
    assert list(best(crux(*asked, "4"))) == ["c"]
    assert list(best(crux(*asked, "4", "--exclude", "c"))) == ["a"]
    assert best(crux(*asked, "2", "--exclude", "c", "--exclude", "a")) in (
        {"b": ["0", "1"]},
        {"b": ["2", "3"]},
        {"b": ["4", "5"]},
        {"b": ["6", "7"]},
    )
    taken = ["--exclude", "c:0,1,2,3,4", "--exclude", "a:0", "--exclude", "b:1,2,3,4,5,6,7"]
    assert set(best(crux(*asked, "10", *taken))) == {"a", "c"}


def test_a_fast_link_draws_a_request_that_spans_hosts(tables: list[str]) -> None:
    asked = [*tables, "--json", "--gpus", "12", "--uplink", "10", "--uplink"]
    assert set(best(crux(*asked, "a=30", "--uplink", "c=30"))) == {"a", "c"}
    assert set(best(crux(*asked, "b=30", "--uplink", "c=30"))) == {"b", "c"}


def test_choices_come_best_first_over_different_hosts_with_what_limits_them(
    tables: list[str],
) -> None:
    result = crux(*tables, "--uplink", "25", "--gpus", "8", "--json", "--top", "9")
    found = json.loads(result.output)
    rates = [one["bandwidth_Bps"] for one in found]
    assert rates == sorted(rates, reverse=True)
    assert [list(one["devices"]) for one in found] == [["c"], ["a"], ["b"]]
    assert [one["limit"] for one in found] == ["within c", "within a", "within b"]
    text = crux(*tables, "--uplink", "25", "--gpus", "20").output
    assert "the link of a" in text
    assert "25.0" in text
    nodes = crux(*tables, "--uplink", "25", "--gpus", "20", "--nodelist").output
    assert sorted(nodes.strip().split(",")) == ["a", "b", "c"]


def test_links_are_fitted_from_samples(tables: list[str], tmp_path: Path) -> None:
    samples = tmp_path / "samples.csv"
    samples.write_text("# measured\na:0,2 c:0;12\nb:0 c:1;30\n\n")
    result = crux(*tables, "--samples", str(samples), "--gpus", "16", "--json")
    assert set(best(result)) == {"b", "c"}
    assert json.loads(result.output)[0]["bandwidth_Bps"] == 30e9


def test_beside_running_jobs_the_gpus_of_all_jobs_are_kept_busy(tables: list[str]) -> None:
    flows = (HostFlow("a", "c", 20e9), HostFlow("c", "a", 20e9))
    busy = record("gpt", hosts=("a", "c"), profile=profile(compute_s=0.1, flows=flows))
    with ServerThread() as server:
        client = server.client()
        asked = [*tables, "--uplink", "25", "--exclude", "a:4,5,6,7", "--exclude", "c:4,5,6,7"]
        asked += ["--exclude", "b:4,5,6,7", "--store", f"tcp://127.0.0.1:{server.port}"]
        nothing = crux(*asked, "--gpus", "8")
        assert "No measured job runs on the network" in nothing.output
        Registry(client, "default").publish_job(busy, 60.0)
        claim = DeviceClaim(job="gpt", incarnation="1", index=1)
        assert DeviceClaims(client, "default").take("b", {"GPU-1": claim}, 60.0)
        result = crux(*asked, "--gpus", "6", "--json", "--top", "9")
        shown = crux(*asked, "--gpus", "6").output
        unknown = crux(*asked, "--gpus", "6", "--like", "bert")
        alike = crux(*asked, "--gpus", "6", "--like", "gpt", "--nodelist")
        client.close()
    found = json.loads(result.output)
    used = [one["utilisation"] for one in found]
    assert used == sorted(used, reverse=True)
    assert "b" in found[0]["devices"], "the link of either a or c alone is half taken"
    assert all("1" not in one["devices"].get("b", ()) for one in found), "it is claimed"
    assert len(found[0]["ranks"]) == 6
    assert found[0]["now_Bps"] <= found[0]["bandwidth_Bps"]
    assert "GPUs busy" in shown
    assert "no job 'bert' runs; there are gpt" in unknown.output
    assert set(alike.output.strip().split(",")) == set(found[0]["devices"])


@pytest.mark.slow
def test_a_network_learns_measured_choices_and_then_what_running_jobs_measured(
    tables: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    truth = DispatchCluster([load(Path(p)) for p in tables[1::2]], np.array([12e9, 30e9, 30e9]))
    choices = across_hosts(truth.sizes, 120, np.random.default_rng(0))
    rates = truth.weakest_link_Bps(choices)
    samples, file = tmp_path / "samples.csv", tmp_path / "network.pt"
    lines = (sample_line(truth.names(c), r) for c, r in zip(choices, rates, strict=True))
    samples.write_text("".join(lines))
    learn = ["learn", *tables, "--network", str(file)]
    too_few = crux(*learn)
    assert "0 samples of 3 hosts: expected 10" in too_few.output
    learned = crux(*learn, "--samples", str(samples))
    assert learned.exit_code == 0, learned.output
    assert "120 samples learned, 0 replayed" in learned.stdout
    assert "epochs (it may stop early): 1 of 100" in learned.stderr
    assert "nothing new" in crux(*learn, "--samples", str(samples)).output
    # The order in which hosts are named makes no difference.
    turned = [part for i in (4, 2, 0) for part in tables[i : i + 2]]
    chosen = [crux(*t, "--network", str(file), "--gpus", "16", "--json") for t in (tables, turned)]
    assert set(best(chosen[0])) == set(best(chosen[1]))
    # A job runs between a and b, whose link was slow until now.
    flows = (HostFlow("a", "b", 3e9), HostFlow("b", "a", 3e9))
    told = profile(compute_s=0.1, flows=flows, t_measured_s=0.1, measured_alone=True)
    with ServerThread() as server:
        client = server.client()
        job = record("gpt", hosts=("a", "b"), gpus=2, profile=told)
        Registry(client, "default").publish_job(job, 60.0)
        for host in "ab":
            claim = DeviceClaim(job="gpt", incarnation="1", index=5)
            assert DeviceClaims(client, "default").take(host, {f"GPU-{host}": claim}, 60.0)
        live = crux(*learn, "--store", f"tcp://127.0.0.1:{server.port}")
        again = crux(*learn, "--store", f"tcp://127.0.0.1:{server.port}")
        client.close()
    assert "1 samples learned, 120 replayed" in live.output, "one odd sample drops no other"
    assert "nothing new" in again.output
    refused = crux(*tables, "--network", str(file), "--samples", str(samples), "--gpus", "2")
    assert "--samples or --network" in refused.output
    fewer = crux(*tables[2:], "--network", str(file), "--gpus", "2")
    assert "has learned of 'a', which has no --table" in fewer.output
    file.write_bytes(b"junk")
    assert "no network of `crux dispatch learn`" in crux(*learn).output


def test_links_are_those_of_the_topology(tables: list[str], tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    server = GpuServer(nics=2, pcie_switches=2, nic_Bps=6e9)
    text = dump_yaml(two_layer_clos(3, 3, 2, server))
    file.write_text(text.replace("h0", "a").replace("h1", "b").replace("h2", "c"))
    found = crux(*tables, "--topology", str(file), "--gpus", "24", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)[0]["bandwidth_Bps"] == 12e9
    file.write_text(text)
    missing = crux(*tables, "--topology", str(file), "--gpus", "24")
    assert "host 'a' is not in the topology" in missing.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "2", "T", "--uplink", "1", "--like", "x"], "name the store with --store"),
        (["--gpus", "2"], "name a table of each host with --table"),
        (["--gpus", "25", "T", "--uplink", "1"], "25 devices asked for, and 24 are free"),
        (["--gpus", "2", "T"], "the link of a is not known: give --uplink"),
        (["--gpus", "2", "T", "--uplink", "fast"], "--uplink fast: expected GB/s"),
        (["--gpus", "2", "T", "--uplink", "d=1"], "no host 'd'; there are a, b, c"),
        (["--gpus", "2", "T", "--uplink", "1", "--exclude", "d"], "no host 'd'"),
        (["--gpus", "2", "T", "--uplink", "1", "--exclude", "a:9"], "host 'a' has no device '9'"),
        (["T"], "say how many GPUs with --gpus"),
    ],
)
def test_what_is_wrong_is_said(tables: list[str], arguments: list[str], says: str) -> None:
    given = [part for one in arguments for part in (tables if one == "T" else [one])]
    result = crux(*given)
    assert result.exit_code != 0
    assert says in result.output


@pytest.mark.parametrize(
    "line", ["a:0 b:0", "a:0;5", "a b;5", "a:0 b:0;-1", "a:0 z:0;5", "a:0 b:0;x"]
)
def test_a_wrong_sample_is_named(tables: list[str], tmp_path: Path, line: str) -> None:
    samples = tmp_path / "samples.csv"
    samples.write_text(f"a:0 b:0;5\n{line}\n")
    result = crux(*tables, "--samples", str(samples), "--gpus", "2")
    assert result.exit_code == 1
    assert "samples.csv:2: expected" in result.output


@pytest.mark.slow
def test_measuring_goes_on_where_it_stopped(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "host.json"
    arguments = ["measure", "--out", str(out), "--bytes", "100000", "--host", "h", "--devices"]
    begun = table_of("h", "012", {0b011: 12345.0})
    save(msgspec.structs.replace(begun, message_bytes=100000), out)
    result = crux(*arguments, "3")
    assert result.exit_code == 0, result.output
    assert "complete" in result.output
    table = load(out)
    assert table.missing == 0
    assert table.array[0b011] == 12345.0, "it was not measured again"
    for other in ("4",), ("3", "--collective", "all_reduce"):
        refused = crux(*arguments, *other)
        assert refused.exit_code == 1
        assert "is of another host, number of devices, collective or message" in refused.output


@pytest.mark.slow
def test_an_all_reduce_is_measured_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "host.json"
    arguments = ["measure", "--out", str(out), "--bytes", "100000", "--host", "h"]
    result = crux(*arguments, "--devices", "2", "--collective", "all_reduce")
    assert result.exit_code == 0, result.output
    assert (load(out).collective, load(out).missing) == ("all_reduce", 0)
