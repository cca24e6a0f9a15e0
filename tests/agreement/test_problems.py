"""The reasons why nothing is prioritised and no paths are chosen are those of the planner."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from dscp_maps import CLASS_SELECTORS

from crux_torch.agreement.problems import (
    NO_NETWORK,
    ONE_LEVEL_POLICIES,
    left_out,
    left_out_of_plan,
    network_of,
)
from crux_torch.network.loaders import parse_yaml
from crux_torch.schedule.model import Burst, Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.schedulers import LIVE
from crux_torch.settings import PATH_POLICIES, Settings

BARE = """
version: 1
hosts: {a: , b: }
switches: {tor: tor}
links: [{between: [a, tor], capacity_Bps: 1e9}, {between: [b, tor], capacity_Bps: 1e9}]
"""
TOPOLOGY = parse_yaml(BARE + "addresses: {a: [10.0.0.1], b: [10.0.0.2], tor: [10.0.0.9]}\n")
MARKED = Settings(dscp_map=CLASS_SELECTORS)


def test_with_a_topology_and_marks_nothing_is_left_out() -> None:
    assert left_out(MARKED, network_of(TOPOLOGY)) == ()


@pytest.mark.parametrize(
    ("changed", "topology", "priorities", "paths"),
    [
        ({}, None, f"gives all jobs one level while {NO_NETWORK}", NO_NETWORK),
        ({"policy": "crux-paper"}, None, "", NO_NETWORK),
        ({"store": "none"}, TOPOLOGY, "CRUX_STORE=none", "CRUX_STORE=none"),
        ({"policy": "ecmp"}, TOPOLOGY, "the policy ecmp gives", "the policy ecmp leaves"),
        ({"policy": "varys"}, TOPOLOGY, "", "the policy varys leaves"),
        ({"levels": 2}, TOPOLOGY, "one level for plans", ""),
        ({"dry_run": True}, TOPOLOGY, "it is a dry run", ""),
        ({"paths": False}, TOPOLOGY, "", "switched off (CRUX_PATHS)"),
        ({"paths": False, "transport": False}, TOPOLOGY, "", "(CRUX_PATHS, CRUX_TRANSPORT)"),
        ({}, parse_yaml(BARE), "", "the topology has no addresses"),
    ],
)
def test_each_reason_is_said(
    changed: dict[str, Any], topology: Any, priorities: str, paths: str
) -> None:
    said = left_out(dataclasses.replace(MARKED, **changed), network_of(topology))
    expected = [("nothing is prioritised, because ", priorities), ("no paths are chosen, ", paths)]
    wanted = [(start, why) for start, why in expected if why]
    assert len(said) == len(wanted)
    for sentence, (start, why) in zip(said, wanted, strict=True):
        assert sentence.startswith(start)
        assert why in sentence


def test_without_marks_levels_reach_nobody() -> None:
    (said,) = left_out(Settings(), network_of(TOPOLOGY))
    assert said == (
        "nothing is prioritised, because nobody said which DSCP values are Crux's "
        "(CRUX_DSCP_MAP, or qos in the topology)"
    )


@pytest.mark.parametrize("policy", LIVE)
def test_the_policies_are_told_apart_as_they_decide(policy: str) -> None:
    """Three unlike jobs on two links: who gives them levels, and who leaves the network's paths."""
    links = dict.fromkeys(("l0", "l1", "far"), 1e9)

    def job(name: str, flops: float, *beyond: str) -> Job:
        flows = (Flow(1e9, (("l0", *beyond), ("l1", *beyond))),) * 2
        return Job(name, 8, flops, 0.2, flows, (Burst(1.0, 1.0),), 2.0)

    cluster = Cluster(links, (job("a", 1e13, "far"), job("b", 1e10), job("c", 1e11)))
    options = SchedulerOptions(tuple(range(7)))
    decided = LIVE[policy](cluster, options)
    if policy in ONE_LEVEL_POLICIES:
        assert len(set(decided.level.values())) == 1
    elif policy != "crux":
        assert len(set(decided.level.values())) > 1
    default = LIVE["ecmp"](cluster, options).path
    if policy not in PATH_POLICIES:
        assert decided.path == default


def test_a_plan_of_all_jobs_says_the_same_as_one_job() -> None:
    """What `crux status` says of a cluster is what `cruxrun` says of a job with its settings."""
    levels = MARKED.marks.plan_levels
    for policy in sorted(LIVE):
        settings = dataclasses.replace(MARKED, policy=policy)
        for topology in (None, TOPOLOGY):
            network = network_of(topology)
            of_plan = left_out_of_plan(policy, levels, "", network)
            assert of_plan == left_out(settings, network), (policy, topology)
    (first, _) = left_out_of_plan("crux", (0,), "no DSCP map is given", network_of(None))
    assert first == "nothing is prioritised, because no DSCP map is given"
