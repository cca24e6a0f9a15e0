"""Rings of live jobs: their records name the parts, and the default plans with them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from control_fakes import profile, record

from crux_torch.agreement.inputs import plan_inputs
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import JobRecord
from crux_torch.measure.profile import MAX_PARTS, HostFlow, ProfileBurst
from crux_torch.network.topology import Link, Topology, TopologyBuilder
from crux_torch.schedule.model import Decision
from crux_torch.sim.play import play

GB = 1e9


def two_cores() -> Topology:
    """Hosts h0 and h1 meet on the link x, h2 and h3 on y: 1 GB/s each."""
    builder = TopologyBuilder()
    for core, hosts in {"x": ("h0", "h1"), "y": ("h2", "h3")}.items():
        ingress, egress = builder.node(f"{core}/in", "core"), builder.node(f"{core}/out", "core")
        for host in hosts:
            builder.node(host, "host")
            builder.arrow(host, ingress, Link(100 * GB), name=f"up:{host}")
            builder.arrow(egress, host, Link(100 * GB), name=f"down:{host}")
        builder.arrow(ingress, egress, Link(GB), name=core)
    builder.arrow("x/in", "y/out", Link(GB))
    builder.arrow("y/in", "x/out", Link(GB))
    return builder.build()


def job(
    name: str, gpus: int, compute_s: float, x: float, y: float, parts: Sequence[int]
) -> JobRecord:
    """Two groups, one on the hosts at x and one on those at y, with their bytes."""
    told = profile(
        flops=4e12,
        gpus=gpus,
        compute_s=compute_s,
        period_s=compute_s + max(x, y),
        t_s=max(x, y),
        t_source="topology",
        flows=(HostFlow("h0", "h1", x * GB, parts[0]), HostFlow("h2", "h3", y * GB, parts[1])),
        bursts=(ProfileBurst(1.0, 1.0),),
    )
    return record(name, gpus=gpus, hosts=("h0", "h1", "h2", "h3"), profile=told)


def test_the_default_plans_with_the_rings_that_the_records_name() -> None:
    """Where one of its rings waits, a job's other ring goes on: going after `b` costs `a` less."""
    topology = two_cores()

    def jobs(parts: Sequence[int]) -> list[JobRecord]:
        return [job("a", 1, 2.0, 4.0, 2.0, parts), job("b", 2, 1.0, 1.0, 3.0, parts)]

    def levels(parts: Sequence[int]) -> dict[str, int]:
        entries = compute_entries(jobs(parts), topology, policy="crux", levels=(0, 1, 2))
        return {entry.job: entry.level for entry in entries}

    together, apart = levels((0, 0)), levels((0, 1))
    assert together["a"] == together["b"]
    assert apart["a"] < apart["b"]

    cluster = plan_inputs(jobs((0, 1)), topology)
    path = {one.name: (0, 0) for one in cluster.jobs}
    busy = [
        play(cluster, Decision(path, level), 1e4, start_s={"a": 0.3, "b": 1.1}).gpu_utilization
        for level in (together, apart)
    ]
    assert busy[1] > 1.05 * busy[0]


def test_a_job_has_parts_where_all_its_paths_are_known() -> None:
    topology = two_cores()
    told = [job("a", 4, 1.0, 1.0, 1.0, (0, 1)), job("b", 4, 1.0, 1.0, 1.0, (3, 3))]
    assert [one.parts for one in plan_inputs(told, topology).jobs] == [(0, 1), ()]
    assert [one.parts for one in plan_inputs(told, None).jobs] == [(), ()]
    assert told[0].profile is not None
    elsewhere = msgspec.structs.replace(
        told[0].profile, flows=(*told[0].profile.flows, HostFlow("h0", "nobody's", GB, 2))
    )
    (one,) = plan_inputs([msgspec.structs.replace(told[0], profile=elsewhere)], topology).jobs
    assert one.parts == ()


@pytest.mark.parametrize("part", [-1, MAX_PARTS, 1 << 70, 0.5, "0", None])
def test_a_record_with_another_number_of_a_part_is_refused(part: object) -> None:
    data = msgspec.to_builtins(job("a", 4, 1.0, 1.0, 1.0, (0, 1)))
    data["profile"]["flows"][1]["part"] = part
    with pytest.raises(msgspec.ValidationError, match="part"):
        msgspec.json.decode(msgspec.json.encode(data), type=JobRecord)
