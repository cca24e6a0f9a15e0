"""Compares what the hosts of a job say of themselves: one finding for each thing that must fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from crux_torch.control.places import problems
from crux_torch.doctor.check import Check, Part
from crux_torch.doctor.facts import Facts

#: Seconds by which clocks may differ: times of day only stand in logs and in the audit log.
CLOCK_S = 1.0
#: Hosts that a finding names.
MOST_HOSTS = 3

Told = Mapping[int, Facts]


def compare(
    told: Told, ahead_s: Mapping[int, float], silent: Mapping[int, str], patience_s: float = 0.0
) -> list[Check]:
    """All findings.

    Args:
        told: facts by rank, of those that answered; at least one.
        ahead_s: by how many seconds the clock of a rank is at least ahead of rank 0's, or behind
            it (negative); 0 for those that may be equal.
        silent: the host of each rank that did not answer; empty if it said nothing at all.
        patience_s: seconds for which they were waited for.
    """
    return [
        _answers(told, silent, patience_s),
        _names(told),
        _topology(told),
        _releases(told),
        _settings(told),
        _secret(told),
        _store(told),
        _clocks(told, ahead_s),
        _privileges(told),
    ]


def _answers(told: Told, silent: Mapping[int, str], patience_s: float) -> Check:
    part = Part("ranks", "nothing is known about them")
    if not silent:
        return part.ok(f"{len(told)} of {len(told)} answered, on {_hosts(told, told)}")
    each = [f"{rank}" + (f" (on {host})" if host else "") for rank, host in sorted(silent.items())]
    return part.broken(
        f"{len(silent)} of {len(told) + len(silent)} did not answer in {patience_s:g} s: "
        f"{_listed(each)}",
        "look at what they print; they must reach MASTER_ADDR at MASTER_PORT",
    )


def _names(told: Told) -> Check:
    part = Part("host names", "Crux takes traffic between hosts for traffic inside one")
    found = problems({rank: facts.place for rank, facts in told.items()}, None)
    if found:
        return part.broken("; ".join(found), "set CRUX_HOST on each host")
    return part.ok("each host has its own")


def _topology(told: Told) -> Check:
    part = Part("topology", "cruxrun does not start there, or Crux chooses other links' paths")
    remedy = "give all hosts the same file, with all of them in it (docs/topology.md)"
    wrong = {rank: f.topology_problem for rank, f in told.items() if f.topology_problem}
    if wrong:
        rank = min(wrong)
        return part.broken(f"{_hosts(told, wrong)}: {wrong[rank]}", remedy)
    if unequal := _unequal(told, lambda f: f"file {f.topology}" if f.topology else "no file"):
        return part.broken(unequal, remedy)
    first = told[min(told)]
    if not first.topology:
        part = Part("topology", "no paths are chosen, and the policy crux prioritises nothing")
        return part.missing("none given", "write one and set CRUX_TOPOLOGY (docs/topology.md)")
    if first.stored_topology not in ("", first.topology):
        return part.broken(f"the store has another one, {first.stored_topology}", remedy)
    return part.ok(f"the same everywhere ({first.topology}), with each host in it")


def _releases(told: Told) -> Check:
    part = Part("releases", "ranks may not understand each other")
    for package in told[min(told)].releases:
        if unequal := _unequal(told, lambda f, p=package: f"{p} {f.releases.get(p)}"):  # type: ignore[misc]
            return part.broken(unequal, f"install the same {package} on all hosts")
    shown = ", ".join(
        f"{name} {told[min(told)].releases[name]}" for name in ("crux_torch", "torch")
    )
    return part.ok(shown)


def _settings(told: Told) -> Check:
    part = Part("settings", "no plan of the others is followed, or a setting has no effect")
    bad = {rank: facts.settings_problem for rank, facts in told.items() if facts.settings is None}
    if bad:
        return part.broken(f"{_hosts(told, bad)}: {bad[min(bad)]}", "correct the variable there")
    unknown = {rank: facts.misspelt for rank, facts in told.items() if facts.misspelt}
    if unknown:
        found = f"{_hosts(told, unknown)}: {unknown[min(unknown)]}"
        return part.broken(found, "correct its name, or unset it")
    variables = told[min(told)].settings or {}
    differ = [
        unequal
        for name in variables
        if (unequal := _unequal(told, lambda f, n=name: f"{n}={(f.settings or {}).get(n)}"))  # type: ignore[misc]
    ]
    if differ:
        return part.broken("; ".join(differ), "set the same on all hosts")
    first = told[min(told)]
    if (
        first.stored_policy
        and first.stored_policy.removesuffix("-first") != variables["CRUX_POLICY"]
    ):
        found = f"the plan in force is of CRUX_POLICY={first.stored_policy}"
        return part.broken(found, "give all jobs of a cluster the same")
    return part.ok("equal on all hosts")


def _secret(told: Told) -> Check:
    part = Part("secret", "the store refuses hosts with another one")
    remedy = "copy one file to all hosts, readable by its user alone (docs/store.md)"
    wrong = {rank: facts.secret_problem for rank, facts in told.items() if facts.secret_problem}
    if wrong:
        return part.broken(f"{_hosts(told, wrong)}: {wrong[min(wrong)]}", remedy)
    if unequal := _unequal(told, lambda f: f"secret {f.secret}" if f.secret else "no secret"):
        return part.broken(unequal, remedy)
    return part.ok("the same on all hosts" if told[min(told)].secret else "none on any host")


def _store(told: Told) -> Check:
    part = Part("store", "jobs there have no plan")
    wrong = {rank: facts.store_problem for rank, facts in told.items() if facts.store_problem}
    if wrong:
        found = f"{_hosts(told, wrong)}: {wrong[min(wrong)]}"
        return part.broken(found, "see docs/store.md; the first cruxrun on its host starts it")
    store = (told[min(told)].settings or {}).get("CRUX_STORE")
    if store == "none":
        return part.missing("switched off: CRUX_STORE=none", "unset CRUX_STORE")
    return part.ok(f"{store} lets every host in")


def _clocks(told: Told, ahead_s: Mapping[int, float]) -> Check:
    part = Part("clocks", "times in logs and in the audit log do not fit each other")
    off = {rank: s for rank, s in ahead_s.items() if rank in told and abs(s) > CLOCK_S}
    if off:
        worst = max(off, key=lambda rank: abs(off[rank]))
        side = "ahead of" if off[worst] > 0 else "behind"
        found = f"{_hosts(told, off)}: {abs(off[worst]):.1f} s {side} {_host(told, min(told))}"
        return part.broken(found, "run NTP or chrony on all hosts")
    return part.ok(f"within {CLOCK_S:g} s of each other")


def _privileges(told: Told) -> Check:
    part = Part("privileges", "Crux can do more on some hosts than on others")
    for what in told[min(told)].privileges:
        lack = {rank for rank, facts in told.items() if not facts.privileges.get(what)}
        if lack and len(lack) < len(told):
            found = f"{_hosts(told, dict.fromkeys(lack))}: without {what}"
            return part.broken(found, "start all hosts alike; crux doctor there says how")
    have = [what for what, has in told[min(told)].privileges.items() if has]
    return part.ok(f"the same on all hosts: {', '.join(have) or 'none'}")


def _unequal(told: Told, text: Callable[[Facts], str]) -> str:
    """Who has which of several values; empty if all have the same."""
    values: dict[str, dict[int, None]] = {}
    for rank, facts in sorted(told.items()):
        values.setdefault(text(facts), {})[rank] = None
    if len(values) < 2:
        return ""
    return " and ".join(f"{value} on {_hosts(told, ranks)}" for value, ranks in values.items())


def _host(told: Told, rank: int) -> str:
    return told[rank].place.host


def _hosts(told: Told, ranks: Mapping[int, object]) -> str:
    """The hosts of ``ranks``, with the ranks."""
    on: dict[str, list[str]] = {}
    for rank in sorted(ranks):
        on.setdefault(_host(told, rank), []).append(str(rank))
    named = [f"{host} (rank{'s' if len(at) > 1 else ''} {_listed(at)})" for host, at in on.items()]
    return _listed(named)


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - MOST_HOSTS} more" if len(texts) > MOST_HOSTS else ""
    return ", ".join(texts[:MOST_HOSTS]) + more
