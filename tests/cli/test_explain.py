"""``crux explain`` on a store: which job it is asked about, whose names it shows, its JSON."""

from __future__ import annotations

import json
import re

from click.testing import CliRunner, Result

from crux_torch.cli.main import main


def crux(endpoint: str, *argv: str, **env: str) -> Result:
    env = {"CRUX_JOB": "", "CRUX_STORE": endpoint, "CRUX_CLUSTER": "lab", **env}
    return CliRunner(env={k: v or None for k, v in env.items()}).invoke(main, ["explain", *argv])


def test_it_says_with_whom_where_and_since_when(endpoint: str) -> None:
    result = crux(endpoint, "A", COLUMNS="400")
    assert result.exit_code == 0, result.output
    assert "A: a step takes 700 ms now" in result.output
    for job in "BCD":
        assert re.search(rf"  {job}, on (leaf0->spine1|the same links)", result.output)
    assert "here since 2027-01-15" in result.output
    assert "because C started" in result.output
    assert "Changed at 2027-01-15 08:00:00Z: level default -> 6." in result.output
    assert max(map(len, crux(endpoint, "A", COLUMNS="80").output.splitlines())) <= 80


def test_json_has_what_the_sentences_have(endpoint: str) -> None:
    found = json.loads(crux(endpoint, "A", "--json", "--schedulers", "crux").output)
    assert found["job"] == "A"
    assert {rival["job"] for rival in found["rivals"]} == {"B", "C", "D"}
    assert all(rival["costs_s"] > 0 for rival in found["rivals"])
    assert [remedy["scheduler"] for remedy in found["remedies"]] == ["crux"]
    assert found["links"][0][1]["jobs"]


def test_the_job_is_that_of_the_environment_else_the_error_lists_them(endpoint: str) -> None:
    assert json.loads(crux(endpoint, "--json", CRUX_JOB="D").output)["job"] == "D"
    for argv, reason in (((), "which job?"), (("E",), "no job 'E' runs")):
        result = crux(endpoint, *argv)
        assert result.exit_code == 2
        assert f"{reason}; there are: A, B, C, D" in result.output
        hidden = crux(endpoint, *argv, "--names", "own")
        assert f"{reason}; 4 run" in hidden.output


def test_own_names_only(endpoint: str) -> None:
    result = crux(endpoint, "A", "--names", "own", "--json")
    assert '"job": "C"' not in result.output
    assert "C started" not in result.output
    assert "Another tenant's job, on" in crux(endpoint, "A", "--names", "own").output


def test_an_empty_cluster_and_a_store_that_is_away_are_errors_in_a_line(endpoint: str) -> None:
    assert "no job runs in this cluster" in crux(endpoint, "--cluster", "other").output
    away = crux("tcp://127.0.0.1:1", "A")
    assert away.exit_code == 1
    assert "can't read the cluster's state" in away.output
