"""RoCEv2 through leaf and spine switches: probes foretell its way, and a plan decides it."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from scenarios.fabric import (
    PLANNED_DSCP,
    PROBED_PORTS,
    QUEUE_PAIRS,
    STEERED_QUEUE_PAIRS,
    STEERED_SPINE,
)

from lab.rdma.network import FABRIC_ADDRESSES, SPINES
from lab.rdma.play import Outcome
from lab.rdma.step import Step

# The first test waits for the scenario.
pytestmark = pytest.mark.timeout(250)

#: Names of the probing steps, by the address that packets go to.
PROBES = dict(zip(reversed(FABRIC_ADDRESSES), ("there", "back"), strict=True))


def foretold(fabric: Outcome, destination: str) -> dict[int, str]:
    """The spine of each probed source port towards ``destination``."""
    spines = fabric.steps[f"foretold {PROBES[destination]}"].facts["spines"]
    return {int(port): spine for port, spine in spines.items()}


def ways(fabric: Outcome, step: Step) -> dict[tuple[str, int, bool], set[tuple[int, str]]]:
    """By destination, queue pair and request or answer: all source ports and spines it had."""
    found: dict[tuple[str, int, bool], set[tuple[int, str]]] = {}
    for spine in SPINES:
        for packet in fabric.capture(spine, step):
            flow = (packet.destination, packet.qpn, packet.is_request)
            found.setdefault(flow, set()).add((packet.source_port, spine))
    return found


def assert_successful(steps: Iterable[Step]) -> None:
    for step in steps:
        for process in step.processes:
            assert process.status == 0, (step.name, process)


@pytest.mark.parametrize("step", ["stock ports", "planned ports"])
def test_probes_foretell_the_spine_of_every_queue_pair(fabric: Outcome, step: str) -> None:
    assert_successful([fabric.steps[step]])
    taken = ways(fabric, fabric.steps[step])
    requests = [flow for flow in taken if flow[2]]
    assert len(requests) == QUEUE_PAIRS
    assert len(taken) == 2 * QUEUE_PAIRS, "each is answered"
    for (destination, _, _), way in taken.items():
        ((port, spine),) = way
        assert foretold(fabric, destination)[port] == spine
    spines = {spine for flow in requests for _, spine in taken[flow]}
    assert spines == set(SPINES), "over one spine alone, nothing would have been foretold"


def test_queue_pairs_leave_by_the_planned_ports(fabric: Outcome) -> None:
    taken = ways(fabric, fabric.steps["planned ports"])
    ports = [port for flow in taken if flow[2] for port, _ in taken[flow]]
    assert sorted(ports) == PROBED_PORTS, "each once"


def test_a_planned_spine_is_taken_in_the_planned_class(fabric: Outcome) -> None:
    step = fabric.steps["planned spine"]
    assert_successful([step])
    taken = ways(fabric, step)
    assert len(taken) == 2 * STEERED_QUEUE_PAIRS
    assert {spine for way in taken.values() for _, spine in way} == {SPINES[STEERED_SPINE]}
    for packet in fabric.capture(SPINES[STEERED_SPINE], step):
        assert packet.tos == PLANNED_DSCP[packet.destination] << 2


@pytest.mark.parametrize("name", PROBES.values())
def test_probing_takes_no_torch_and_repeats_itself(fabric: Outcome, name: str) -> None:
    step = fabric.steps[f"probe {name}"]
    assert_successful([step])
    found = json.loads(step.processes[0].stdout)
    assert not found["torch"]
    assert found["changed"] == 0
    assert {int(port) for port in found["spines"]} >= set(PROBED_PORTS)
