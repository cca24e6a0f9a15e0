"""The levels that a plan may give: those that mean the same DSCP for all jobs that mark traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from crux_torch.control.records import JobRecord
from crux_torch.fabric.topology import Topology
from crux_torch.settings import Marks


@dataclass(frozen=True, slots=True)
class Agreed:
    """The levels that the planner may give.

    Attributes:
        levels: that it may assign, ascending; level 0 alone where a level has no effect.
        unmarked: jobs whose traffic is not marked, and the level that their packets are on.
        why: why no level has an effect; empty if levels have.
    """

    levels: Sequence[int]
    unmarked: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


Agree = Callable[[Sequence[JobRecord], Topology | None], Agreed]


def agreed(records: Sequence[JobRecord], topology: Topology | None) -> Agreed:
    """Returns the levels that the jobs' DSCP maps allow; a ``qos`` of the topology decides.

    A job without a map, or with another than the topology's, is planned as what it is: traffic of
    the network's default class. If maps differ and no ``qos`` says whose is right, no job gets a
    level: one job's high level may be another's low one.
    """
    planned = [record for record in records if record.profile is not None]
    stated = {record.marks for record in planned if record.marks and record.marks.are_sound}
    operators = topology.qos.marks if topology is not None and topology.qos is not None else None
    if operators is not None:
        stated &= {operators}
    if len(stated) != 1:
        return Agreed((0,), why=_why_not(planned, operators))
    (marks,) = stated
    low = _default_level(marks)
    unmarked = {record.job: low for record in planned if record.marks != marks}
    return Agreed(marks.plan_levels, unmarked)


def every_level(_records: Sequence[JobRecord], _topology: Topology | None) -> Agreed:
    """All levels, whatever the jobs say."""
    return Agreed(range(64))


def _default_level(marks: Marks) -> int:
    """The level of packets with DSCP 0, as far as a plan has it; else the lowest."""
    levels = marks.plan_levels
    values = marks.tcp or marks.rdma
    return next((n for n in levels if n < len(values) and values[n] == 0), levels[0])


def _why_not(planned: Sequence[JobRecord], operators: Marks | None) -> str:
    if operators is not None:
        return "no job has the topology's qos as its DSCP map"
    by_map: dict[Marks, str] = {}
    for record in planned:
        if record.marks and record.marks.are_sound:
            by_map.setdefault(record.marks, record.job)
    if not by_map:
        return "no DSCP map is given (CRUX_DSCP_MAP, or qos in the topology)"
    first, second = list(by_map.values())[:2]
    return f"jobs have different DSCP maps: {first} and {second}"
