"""Which DSCP values a cluster's jobs may send with: the topology's qos, and what jobs agree on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from control_fakes import profile, record
from dscp_maps import CLASS_SELECTORS, MARKED_ENV, MARKS
from hypothesis import given
from hypothesis import strategies as st
from networks import NETWORK, OF_QOS, QOS

from crux_torch.agreement.inputs import agreed
from crux_torch.agreement.operator import OperatorSettings, operated
from crux_torch.agreement.planner import entries_of_agreed_levels
from crux_torch.agreement.records import JobRecord
from crux_torch.errors import SettingsError
from crux_torch.measure.profile import HostFlow
from crux_torch.network.loaders import dump_yaml, parse_yaml
from crux_torch.network.qos import Qos, with_qos
from crux_torch.network.topology import TopologyError
from crux_torch.settings import Marks, Settings
from cruxrun.flags import dscp_maps

BUILDER = "version: 1\nbuilder: fat_tree\nparameters: {k: 2}\n"


def of(name: str, told: Marks | None, **changes: Any) -> JobRecord:
    flows = (HostFlow("h0", "h1", 1e9), HostFlow("h1", "h0", 1e9))
    measured = profile(flows=flows, **changes)
    return record(
        name, hosts=("h0", "h1"), profile=measured, marks=msgspec.UNSET if told is None else told
    )


@pytest.mark.parametrize("network", [NETWORK, BUILDER])
def test_a_topology_says_which_values_are_crux_s(network: str) -> None:
    topology = parse_yaml(network + QOS)
    assert topology.qos is not None
    assert topology.qos.marks == OF_QOS
    assert parse_yaml(dump_yaml(topology)).qos == topology.qos
    assert parse_yaml(network).qos is None


@pytest.mark.parametrize(
    ("qos", "reason"),
    [
        ("{tcp: []}", "no level is left"),
        ("{tcp: [{dscp: 64}]}", r"`\$\.qos\.tcp\[0\]\.dscp`"),
        ("{tcp: [{dscp: 1, priority: 8}]}", "priority"),
        ("{tcp: [{dscp: 1, color: red}]}", "color"),
        ("{udp: [{dscp: 1}]}", "udp"),
        ("{tcp: [{dscp: 1}, {dscp: 1}]}", r"tcp\[1\]: DSCP 1 is that of level 0"),
        ("{tcp: [{dscp: 1, priority: 2}, {dscp: 2, priority: 2}]}", "priority 2 .* share a queue"),
        ("{rdma: [{dscp: 1, lossless: true}, {dscp: 2}]}", r"rdma\[1\]: lossy .* is lossless"),
        ("{rdma: [{dscp: 1, ecn: true}, {dscp: 2}]}", r"rdma\[1\]: lossy and not ECN, but DSCP 1"),
        ("{tcp: [{dscp: 1}], rdma: [{dscp: 2}, {dscp: 3}]}", "tcp has 1 levels and rdma 2"),
        ("{tcp: [{dscp: 1}], rdma: [{dscp: 1, lossless: true}]}", "DSCP 1 is described in two"),
        (
            "{tcp: [{dscp: 1, priority: 3}], rdma: [{dscp: 2, priority: 3, lossless: true}]}",
            "priority 3 is lossless for DSCP 2 and lossy for DSCP 1",
        ),
        ("{tcp: [{dscp: 1, reserved_by: voice}]}", "no level is left"),
        ("[1]", r"\$\.qos"),
    ],
)
def test_a_qos_that_contradicts_itself_is_refused_with_the_reason(qos: str, reason: str) -> None:
    for network in (NETWORK, BUILDER):
        with pytest.raises(TopologyError, match=reason):
            parse_yaml(f"{network}qos: {qos}\n", "t.yaml")


def test_the_settings_take_the_maps_of_the_topology() -> None:
    topology = parse_yaml(NETWORK + QOS)
    settings = Settings(levels=8)
    told = dscp_maps(topology, settings)
    found = Settings.from_env(told)
    assert found.marks == OF_QOS
    assert (found.levels, found.reserved_levels) == (4, (3,))
    assert dscp_maps(topology, found) == {}, "what a launcher set is the topology's"
    with pytest.raises(SettingsError, match=r"tcp 0,8,16.* but the topology's qos says tcp 0,10"):
        dscp_maps(topology, replace(settings, dscp_map=CLASS_SELECTORS))
    assert dscp_maps(parse_yaml(NETWORK), settings) == {}
    assert with_qos(settings, None) is settings
    assert with_qos(settings, Qos(tcp=parse_yaml(NETWORK + QOS).qos.tcp)).marks.rdma == ()  # type: ignore[union-attr]


def test_without_a_map_a_plan_has_one_level_and_its_paths_are_the_same() -> None:
    topology = parse_yaml(NETWORK)
    plans = []
    for told in (None, MARKS):
        jobs = [of("a", told, flops=1e12), of("b", told, flops=1e9)]
        plans.append(entries_of_agreed_levels(jobs, topology, policy="crux-paper"))
    unmarked, marked = plans
    assert [entry.level for entry in unmarked] == [0, 0]
    assert len({entry.level for entry in marked}) == 2
    assert [entry.paths for entry in unmarked] == [entry.paths for entry in marked]


def test_jobs_without_the_cluster_s_map_are_planned_as_unmarked_traffic() -> None:
    other = Marks((1, 2), (), (0, 1))
    jobs = [of("a", MARKS, flops=1e12), of("b", MARKS, flops=1e9), of("c", None, flops=1e15)]
    found = agreed(jobs, None)
    assert (tuple(found.levels), found.unmarked) == (MARKS.plan_levels, {"c": 0})
    entries = operated(
        entries_of_agreed_levels,
        jobs,
        None,
        policy="crux-paper",
        agreed=found,
        settings=OperatorSettings(pins={"c": 6}),
    )
    level = {entry.job: entry.level for entry in entries}
    assert level["a"] > level["b"]
    assert level["c"] == 0, "a pin, too, would have no effect"

    differing = agreed([*jobs, of("d", other)], None)
    assert (tuple(differing.levels), dict(differing.unmarked)) == ((0,), {})
    assert differing.why == "jobs have different DSCP maps: a and d"
    assert "no DSCP map is given" in agreed([of("c", None)], None).why
    starting = msgspec.structs.replace(of("d", other), profile=None)
    assert agreed([*jobs, starting], None).levels == MARKS.plan_levels, "it is not planned yet"


def test_the_topology_s_qos_decides_whose_map_is_right() -> None:
    topology = parse_yaml(NETWORK + QOS)
    jobs = [of("a", MARKS), of("b", OF_QOS)]
    assert tuple(agreed(jobs, None).levels) == (0,)
    found = agreed(jobs, topology)
    assert (tuple(found.levels), found.unmarked) == ((0, 1), {"a": 0})
    assert agreed([of("a", MARKS)], topology).why == "no job has the topology's qos as its DSCP map"


def test_unmarked_traffic_is_on_the_level_whose_value_is_0() -> None:
    scavenging = Marks((8, 0, 16, 24), (), (0, 1, 2, 3))
    assert agreed([of("a", scavenging), of("b", None)], None).unmarked == {"b": 1}


_marks = st.builds(Marks, *[st.lists(st.integers(0, 63), max_size=3).map(tuple)] * 3)


@given(st.lists(st.none() | _marks, min_size=1, max_size=4))
def test_whatever_jobs_say_of_their_marks_they_get_a_plan_of_levels_that_exist(
    told: list[Marks | None],
) -> None:
    jobs = [of(str(n), one) for n, one in enumerate(told)]
    found = agreed(jobs, None)
    entries = operated(
        entries_of_agreed_levels,
        jobs,
        None,
        policy="crux-paper",
        agreed=found,
        settings=OperatorSettings(),
    )
    assert [entry.job for entry in entries] == [job.job for job in jobs]
    assert {entry.level for entry in entries} <= {*found.levels}
    for job, entry in zip(jobs, entries, strict=True):
        if not job.marks or not job.marks.are_sound:
            assert entry.level in {0, found.unmarked.get(job.job)}


def test_the_environment_of_tests_is_the_map_that_they_compare_with() -> None:
    assert Settings.from_env(MARKED_ENV).dscp_map == CLASS_SELECTORS
