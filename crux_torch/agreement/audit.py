"""The audit log: who changed the plan or the operator's settings, when, to what, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from crux_torch.agreement import SCHEMA_VERSION
from crux_torch.agreement.bounds import holdings
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import JobRecord, Plan, PlanEntry, TriedPlan
from crux_torch.agreement.seen_network import contradicted
from crux_torch.logs import one_line
from crux_torch.network.discover.seen_topology import SeenTopology
from crux_torch.network.topology import Topology
from crux_torch.words import listed

#: Entries that are kept: each overwrites one that is older by so many.
MAX_PLANS, MAX_ACTS = 64, 32
#: Lines of one entry that say why, and lines that say what has changed; letters of each.
MAX_LINES = 16
MAX_LINE = 256
#: Jobs of a component that a line names, and links of a network that has changed.
JOBS_NAMED, LINKS_NAMED = 6, 3

Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE)]
Lines = Annotated[tuple[Line, ...], msgspec.Meta(max_length=MAX_LINES + 1)]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change.

    Attributes:
        at_s: seconds since 1970 by the author's clock.
        who: the job whose leader wrote the plan, or USER@HOST.
        before, after: the plan's epoch or the settings' revision; 0: there was none.
        origin: address that wrote the operator's settings, as the store saw it; empty if unknown.
        why: changes of contested hosts and of records; or the command.
        changes: of levels, paths and grids, or of the settings, by job.
    """

    version: int = SCHEMA_VERSION
    kind: Literal["plan", "operator"]
    at_s: float
    who: Line
    before: int
    after: int
    origin: Line = ""
    why: Lines = ()
    changes: Lines = ()

    @property
    def slot(self) -> str:
        """Last part of the entry's key."""
        return f"{self.kind}-{self.after % (MAX_PLANS if self.kind == 'plan' else MAX_ACTS):02d}"


class Basis(NamedTuple):
    """Inputs of a plan. ``fabric`` is the parsed ``topology``, if that can be read."""

    jobs: tuple[JobRecord, ...]
    topology: bytes | None
    operator: OperatorSettings
    fabric: Topology | None = None


def of_plan(
    epoch: int,
    before: Plan | None,
    after: Plan,
    known: Basis | None,
    now: Basis,
    origin: str = "",
) -> AuditEntry:
    """Return the entry about the plan ``after``.

    Args:
        epoch: of the plan in whose place it was written; 0: there was none.
        before, known: the plan that its author followed, and its inputs; None if it had none.
        now: inputs of ``after``.
        origin: see :class:`AuditEntry`.
    """
    if known is None:
        why = [*contests(None, now), "its author has not followed a plan before"]
        if now.operator.effect:
            why += about_settings(OperatorSettings(), now.operator, origin)
    else:
        why = [*contests(known, now), *reasons(known, now, origin)] or [
            "the plan in the store did not follow from the records"
        ]
    return AuditEntry(
        kind="plan",
        at_s=time.time(),
        who=line(after.author),
        before=epoch,
        after=after.epoch,
        why=_bounded(why),
        changes=_bounded(differences(before.entries if before is not None else (), after.entries)),
    )


def of_act(
    who: str,
    command: str,
    after: OperatorSettings,
    before: OperatorSettings | None = None,
    origin: str = "",
) -> AuditEntry:
    """Return the entry about an operator's ``command``, which wrote ``after`` over ``before``."""
    revision = after.revision
    return AuditEntry(
        kind="operator",
        at_s=time.time(),
        who=line(who),
        before=revision - 1,
        after=revision,
        origin=line(origin),
        why=(line(command),),
        changes=_bounded(after.differences(before)) if before is not None else (),
    )


def contests(before: Basis | None, after: Basis) -> list[str]:
    """Return in words the hosts that became contested, and those that no longer are."""
    old, new = (
        {host.host: host for host in holdings(basis.jobs, basis.fabric).contested} if basis else {}
        for basis in (before, after)
    )
    found = [str(new[name]) for name in sorted(new) if old.get(name) != new[name]]
    return found + [f"host {name} is contested no more" for name in sorted(old.keys() - new.keys())]


def about_settings(before: OperatorSettings, after: OperatorSettings, origin: str) -> list[str]:
    """Return the author and the changes of the settings, in words."""
    by = f" by {after.by}" if after.by else ", nobody says by whom"
    where = f", written from {origin}" if origin else ""
    command = f": {after.command}" if after.command else ""
    return [
        f"the operator's settings {after.revision}{by}{where}{command}",
        *(f"set: {change}" for change in after.differences(before)),
    ]


def reasons(before: Basis, after: Basis, origin: str = "") -> list[str]:
    """Return the inputs that differ, in words."""
    old, new = ({r.job: r for r in basis.jobs if r.profile} for basis in (before, after))
    found = []
    for job in sorted(old.keys() | new.keys()):
        was, now = old.get(job), new.get(job)
        if was is None or now is None:
            found.append(f"{job} {'started' if was is None else 'ended'}")
        elif was.incarnation != now.incarnation:
            found.append(f"{job} restarted")
        elif was.profile != now.profile or (was.hosts, was.gpus) != (now.hosts, now.gpus):
            found.append(f"{job} has a new profile")
        elif was.marks != now.marks:
            found.append(f"{job} has another DSCP map")
        if now is not None:
            known = {t.name: t.state for t in was.trials} if was is not None else {}
            found += [about_trial(t) for t in now.trials if known.get(t.name) != t.state]
    if before.topology != after.topology:
        found.append(about_network(before.fabric, after.fabric))
    doubted = contradicted(before.jobs, before.fabric)
    doubts = contradicted(after.jobs, after.fabric)
    found += [f"{s} ({doubts[s]} saw it)" for s in sorted(doubts.keys() - doubted.keys())]
    if before.operator.effect != after.operator.effect:
        if after.operator == OperatorSettings():
            found.append("the operator's settings have ended")
        else:
            found += about_settings(before.operator, after.operator, origin)
    return found


def about_network(before: Topology | None, after: Topology | None) -> str:
    """Return the change of the network that plans are made for, in words."""
    if not isinstance(after, SeenTopology):
        return "another topology" if after is not None else "no topology"
    if not isinstance(before, SeenTopology):
        return f"nobody gives a topology: the network is as jobs saw it, {len(after.links)} links"
    changes = []
    for word, links in (
        ("gone", before.links.keys() - after.links.keys()),
        ("new", after.links.keys() - before.links.keys()),
    ):
        changes += [f"{word}: {listed(sorted(links), LINKS_NAMED)}"] if links else []
    return f"jobs saw another network: {'; '.join(changes) or 'the same links'}"


def about_trial(tried: TriedPlan) -> str:
    """Return a judge's verdict, in words."""
    who = listed(tried.jobs, JOBS_NAMED)
    if tried.state == "trying":
        return f"a plan is tried by {who}"
    what = "is kept by" if tried.state == "kept" else "was taken back from"
    why = f"{tried.change:+.1%} busy GPUs (from {tried.low:+.1%} to {tried.high:+.1%})"
    if tried.slowed:
        why = f"{tried.slowed} was slowed down beyond the cap, {why}"
    return f"a plan {what} {who}: {why} after {tried.iterations} iterations"


def differences(before: Sequence[PlanEntry], after: Sequence[PlanEntry]) -> list[str]:
    """Return the jobs whose level, paths or grid differ, in words."""
    old, new = ({entry.job: entry for entry in entries} for entries in (before, after))
    found = []
    for job in sorted(old.keys() | new.keys()):
        was, now = old.get(job), new.get(job)
        levels = [str(e.level) if e is not None else "default" for e in (was, now)]
        parts = [f"level {levels[0]} -> {levels[1]}"] if levels[0] != levels[1] else []
        if (was.paths if was else ()) != (now.paths if now else ()):
            parts.append("other paths")
        if (was.grid if was else UNSET) != (now.grid if now else UNSET):
            parts.append("another grid")
        if parts:
            found.append(f"{job}: {', '.join(parts)}")
    return found


def line(text: str) -> str:
    """Return ``text`` as it may stand in an entry."""
    return one_line(text)[:MAX_LINE]


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    more = len(lines) - MAX_LINES
    return (*map(line, lines[:MAX_LINES]), *([f"and {more} more"] if more > 0 else []))
