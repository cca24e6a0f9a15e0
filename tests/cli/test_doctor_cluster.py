"""What the doctor says of the topology, of this host's place in it, and of what it brings."""

from __future__ import annotations

from pathlib import Path

import pytest
from dscp_maps import CLASS_SELECTORS
from findings import by_part

from crux_torch.agreement.problems import NO_NETWORK
from crux_torch.cli import doctor
from crux_torch.cli.doctor import network
from crux_torch.cli.doctor.finding import Check
from crux_torch.host import machine
from crux_torch.settings import Settings

TOPOLOGY = """
version: 1
hosts: {h0-0: , h1-0: }
switches: {tor: tor}
links: [{between: [h0-0, tor], capacity_Bps: 1e9}, {between: [h1-0, tor], capacity_Bps: 1e9}]
addresses: {h0-0: [10.0.0.1], h1-0: [10.0.1.1], tor: [10.0.9.9]}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("socket.gethostname", lambda: "vm")
    monkeypatch.setattr(machine, "own_addresses", lambda: ("127.0.0.1", "10.0.1.1"))
    path = tmp_path / "cluster.yaml"
    path.write_text(TOPOLOGY)
    return str(path)


def found(**settings: object) -> dict[str, Check]:
    return by_part(network.topology(Settings(dscp_map=CLASS_SELECTORS, **settings)))  # type: ignore[arg-type]


def test_a_host_that_is_in_the_topology_by_name_or_by_address(file: str) -> None:
    by_address = found(topology=file)
    assert by_address["topology"].state == "ok"
    assert by_address["topology"].finding.endswith("this host is h1-0 by its addresses")
    assert by_address["plans"].state == "ok"
    by_name = found(topology=file, host="h0-0")["topology"]
    assert by_name.finding.endswith("2 hosts, 4 links; this host is h0-0")


def test_a_topology_without_this_host_is_broken(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = found(topology=file, host="h1_0")
    assert wrong.keys() == {"topology"}
    assert wrong["topology"].state == "broken"
    assert "no host 'h1_0'" in wrong["topology"].finding
    assert "its nearest names are 'h1-0'" in wrong["topology"].finding
    monkeypatch.setattr(machine, "own_addresses", lambda: ("10.9.9.9",))
    assert found(topology=file)["topology"].state == "broken"


def test_without_a_topology_the_reasons_are_said() -> None:
    checks = found()
    assert checks["topology"].finding == "none given"
    assert checks["plans"].finding == (
        "nothing is prioritised, because the policy crux gives all jobs one level while "
        f"{NO_NETWORK}; no paths are chosen, because {NO_NETWORK}"
    )


def test_a_misspelt_variable_is_named() -> None:
    first = doctor.examine({"CRUX_STORE": "none", "CRUX_POLCIY": "ecmp"})[0]
    assert (first.part, first.state) == ("settings", "missing")
    assert "CRUX_POLCIY (did you mean CRUX_POLICY?)" in first.finding
