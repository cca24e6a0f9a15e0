"""The facts that ``crux check`` compares between the hosts of a job, and their comparison."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from crux_torch._version import __version__
from crux_torch.agreement.inputs import TopologyReader
from crux_torch.agreement.problems import Place, place_of_this_process, problems
from crux_torch.agreement.registry import Registry
from crux_torch.apply import preload
from crux_torch.cli.doctor.finding import Check, Part
from crux_torch.cli.doctor.process import CAP_NET_RAW, has_capability
from crux_torch.errors import CruxError, SettingsError, StoreError
from crux_torch.host.machine import host_in
from crux_torch.misspelt import misspelt_text
from crux_torch.settings import SETTINGS, TUNING, Settings
from crux_torch.store.endpoint import open_store
from crux_torch.store.frames import read_secret
from crux_torch.words import listed

#: Settings of one host or one process. All others are to be equal in a job.
LOCAL_SETTINGS = (
    "device_flops",
    "dispatch",
    "host",
    "job",
    "links",
    "log_level",
    "ports",
    "store_secret",
    "topology",
    "trace",
)
#: Limit of one call to the store.
STORE_CALL_S = 2.0
#: PBKDF2 rounds of the digest of the secret.
HASH_ROUNDS = 100_000
#: Seconds by which clocks may differ: times of day only stand in logs and in the audit log.
CLOCK_S = 1.0
#: Hosts that a finding names.
MAX_HOSTS = 3


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts about one process and its host; an empty problem is none.

    Attributes:
        place: where it runs.
        releases: of Crux, torch and Python.
        settings: those that are to be equal, as texts, by variable; None if one can't be used.
        settings_problem, secret_problem, store_problem, topology_problem: in words.
        misspelt: variables that nobody reads, in words.
        secret: digest of the store's secret; empty without one.
        topology: digest of the topology's file; empty without one.
        stored_topology, stored_policy: of the plan in the store; empty if it has none.
        privileges: by name, True if this process has it.
    """

    place: Place
    releases: dict[str, str]
    settings: dict[str, str] | None = None
    settings_problem: str = ""
    misspelt: str = ""
    secret: str = ""
    secret_problem: str = ""
    store_problem: str = ""
    topology: str = ""
    topology_problem: str = ""
    stored_topology: str = ""
    stored_policy: str = ""
    privileges: dict[str, bool] = {}


#: Facts of each rank that answered.
ByRank = Mapping[int, Facts]


def facts(env: Mapping[str, str], salt: bytes, store_s: float = 0.0) -> Facts:
    """Returns the facts about this process in ``env``.

    Args:
        salt: new for every check, so that a digest shows that secrets are equal and no more.
        store_s: time for a store that may still be starting.
    """
    problem = ""
    try:
        settings = Settings.from_env(env)
    except SettingsError as error:
        settings, problem = Settings(), str(error)
    name = settings.host or socket.gethostname()
    secret, secret_problem = _secret(settings, salt)
    host, topology, topology_problem = _topology(settings)
    store_problem, stored_topology, stored_policy = _store(settings, store_s)
    place = place_of_this_process(settings, host or name)
    return Facts(
        place=place,
        releases={
            "crux_torch": __version__,
            "torch": _release("torch"),
            "Python": platform.python_version(),
        },
        settings=None if problem else _to_be_equal(settings),
        settings_problem=problem,
        misspelt=misspelt_text(env),
        secret=secret,
        secret_problem=secret_problem,
        store_problem=store_problem,
        topology=topology,
        topology_problem=topology_problem,
        stored_topology=stored_topology,
        stored_policy=stored_policy,
        privileges={
            "CAP_NET_RAW": _may_verify_paths(),
            "the transport library": not settings.transport or preload.obstacle() is None,
        },
    )


def _to_be_equal(settings: Settings) -> dict[str, str]:
    texts = {}
    for setting in (*SETTINGS, *TUNING):
        if setting.field not in LOCAL_SETTINGS:
            texts[setting.env] = setting.text_of(getattr(settings, setting.field))
    return texts


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _secret(settings: Settings, salt: bytes) -> tuple[str, str]:
    try:
        secret = read_secret(settings.store_secret)
    except SettingsError as error:
        return "", str(error)
    if not secret:
        return "", ""
    return hashlib.pbkdf2_hmac("sha256", secret, salt, HASH_ROUNDS, dklen=8).hex(), ""


def _topology(settings: Settings) -> tuple[str, str, str]:
    """Returns (this host's name in the topology, digest of the file, problem of either)."""
    if not settings.topology:
        return "", "", ""
    try:
        topology, raw = TopologyReader().load(Path(settings.topology))
    except (OSError, ValueError) as error:
        return "", "", f"CRUX_TOPOLOGY={settings.topology!r}: {error}"
    digest = _digest(raw)
    try:
        host = host_in(topology, settings.host)
    except CruxError as error:
        return "", digest, f"{settings.topology}: {error}"
    return host, digest, ""


def _store(settings: Settings, patience_s: float) -> tuple[str, str, str]:
    """Returns (fault of the store or empty, digest of its topology, policy of its plan)."""
    if settings.store == "none":
        return "", "", ""
    end_s = time.monotonic() + patience_s
    try:
        client = open_store(
            settings.store, settings.store_secret, settings.store_group, timeout_s=STORE_CALL_S
        )
    except SettingsError as error:
        return str(error), "", ""
    try:
        while True:
            try:
                view = Registry(client, settings.cluster).look()
            except CruxError as error:
                if time.monotonic() >= end_s:
                    return (
                        error.with_remedy if isinstance(error, StoreError) else str(error),
                        "",
                        "",
                    )
                time.sleep(0.2)
            else:
                stored = view.plan.stored
                policy = stored.plan.policy if stored is not None else ""
                return "", _digest(view.topology) if view.topology else "", policy
    finally:
        client.close()


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _may_verify_paths() -> bool:
    try:
        return has_capability(CAP_NET_RAW)
    except (OSError, ValueError, IndexError):
        return False


def compare(
    by_rank: ByRank,
    ahead_s: Mapping[int, float],
    silent: Mapping[int, str],
    patience_s: float = 0.0,
) -> list[Check]:
    """Returns all findings.

    Args:
        by_rank: one entry at least.
        ahead_s: by how many seconds the clock of a rank is at least ahead of rank 0's, or behind
            it (negative); 0 for those that may be equal.
        silent: the host of each rank that did not answer; empty if it said nothing at all.
        patience_s: seconds for which they were waited for.
    """
    return [
        _answers(by_rank, silent, patience_s),
        _names(by_rank),
        _topologies(by_rank),
        _releases(by_rank),
        _settings(by_rank),
        _secrets(by_rank),
        _stores(by_rank),
        _clocks(by_rank, ahead_s),
        _privileges(by_rank),
    ]


def _answers(by_rank: ByRank, silent: Mapping[int, str], patience_s: float) -> Check:
    part = Part("ranks", "nothing is known about them")
    if not silent:
        return part.ok(f"{len(by_rank)} of {len(by_rank)} answered, on {_hosts(by_rank, by_rank)}")
    each = [f"{rank}" + (f" (on {host})" if host else "") for rank, host in sorted(silent.items())]
    return part.broken(
        f"{len(silent)} of {len(by_rank) + len(silent)} did not answer in {patience_s:g} s: "
        f"{listed(each, MAX_HOSTS)}",
        "look at what they print; they must reach MASTER_ADDR at MASTER_PORT",
    )


def _names(by_rank: ByRank) -> Check:
    part = Part("host names", "Crux takes traffic between hosts for traffic inside one")
    found = problems({rank: facts.place for rank, facts in by_rank.items()}, None)
    if found:
        return part.broken("; ".join(found), "set CRUX_HOST on each host")
    return part.ok("each host has its own")


def _topologies(by_rank: ByRank) -> Check:
    part = Part("topology", "cruxrun does not start there, or Crux chooses other links' paths")
    remedy = "give all hosts the same file, with all of them in it (docs/operate/topology.md)"
    if problem := _problem(by_rank, lambda f: f.topology_problem):
        return part.broken(problem, remedy)
    if unequal := _unequal(by_rank, lambda f: f"file {f.topology}" if f.topology else "no file"):
        return part.broken(unequal, remedy)
    first = by_rank[min(by_rank)]
    if not first.topology:
        part = Part("topology", "no paths are chosen before the jobs have seen the network")
        return part.missing(
            "none given",
            "nothing, if routers answer probes; or set CRUX_TOPOLOGY (docs/operate/topology.md)",
        )
    if first.stored_topology not in ("", first.topology):
        return part.broken(f"the store has another one, {first.stored_topology}", remedy)
    return part.ok(f"the same everywhere ({first.topology}), with each host in it")


def _releases(by_rank: ByRank) -> Check:
    part = Part("releases", "ranks may not understand each other")
    for package in by_rank[min(by_rank)].releases:
        if unequal := _unequal(by_rank, lambda f, p=package: f"{p} {f.releases.get(p)}"):  # type: ignore[misc]
            return part.broken(unequal, f"install the same {package} on all hosts")
    shown = ", ".join(
        f"{name} {by_rank[min(by_rank)].releases[name]}" for name in ("crux_torch", "torch")
    )
    return part.ok(shown)


def _settings(by_rank: ByRank) -> Check:
    part = Part("settings", "no plan of the others is followed, or a setting has no effect")
    if problem := _problem(
        by_rank, lambda f: f.settings_problem or ("unknown" if f.settings is None else "")
    ):
        return part.broken(problem, "correct the variable there")
    if unknown := _problem(by_rank, lambda f: f.misspelt):
        return part.broken(unknown, "correct its name, or unset it")
    variables = by_rank[min(by_rank)].settings or {}
    differ = [
        unequal
        for name in variables
        if (unequal := _unequal(by_rank, lambda f, n=name: f"{n}={(f.settings or {}).get(n)}"))  # type: ignore[misc]
    ]
    if differ:
        return part.broken("; ".join(differ), "set the same on all hosts")
    first = by_rank[min(by_rank)]
    if (
        first.stored_policy
        and first.stored_policy.removesuffix("-first") != variables["CRUX_POLICY"]
    ):
        found = f"the plan in force is of CRUX_POLICY={first.stored_policy}"
        return part.broken(found, "give all jobs of a cluster the same")
    return part.ok("equal on all hosts")


def _secrets(by_rank: ByRank) -> Check:
    part = Part("secret", "the store refuses hosts with another one")
    remedy = "copy one file to all hosts, readable by its user alone (docs/operate/store.md)"
    if problem := _problem(by_rank, lambda f: f.secret_problem):
        return part.broken(problem, remedy)
    if unequal := _unequal(by_rank, lambda f: f"secret {f.secret}" if f.secret else "no secret"):
        return part.broken(unequal, remedy)
    return part.ok("the same on all hosts" if by_rank[min(by_rank)].secret else "none on any host")


def _stores(by_rank: ByRank) -> Check:
    part = Part("store", "jobs there have no plan")
    if problem := _problem(by_rank, lambda f: f.store_problem):
        return part.broken(
            problem, "see docs/operate/store.md; the first cruxrun on its host starts it"
        )
    store = (by_rank[min(by_rank)].settings or {}).get("CRUX_STORE")
    if store == "none":
        return part.missing("switched off: CRUX_STORE=none", "unset CRUX_STORE")
    return part.ok(f"{store} lets every host in")


def _clocks(by_rank: ByRank, ahead_s: Mapping[int, float]) -> Check:
    part = Part("clocks", "times in logs and in the audit log do not fit each other")
    off = {rank: s for rank, s in ahead_s.items() if rank in by_rank and abs(s) > CLOCK_S}
    if off:
        worst = max(off, key=lambda rank: abs(off[rank]))
        side = "ahead of" if off[worst] > 0 else "behind"
        found = (
            f"{_hosts(by_rank, off)}: {abs(off[worst]):.1f} s {side} {_host(by_rank, min(by_rank))}"
        )
        return part.broken(found, "run NTP or chrony on all hosts")
    return part.ok(f"within {CLOCK_S:g} s of each other")


def _privileges(by_rank: ByRank) -> Check:
    part = Part("privileges", "Crux can do more on some hosts than on others")
    for what in by_rank[min(by_rank)].privileges:
        lack = {rank for rank, facts in by_rank.items() if not facts.privileges.get(what)}
        if lack and len(lack) < len(by_rank):
            found = f"{_hosts(by_rank, dict.fromkeys(lack))}: without {what}"
            return part.broken(found, "start all hosts alike; crux doctor there says how")
    have = [what for what, has in by_rank[min(by_rank)].privileges.items() if has]
    return part.ok(f"the same on all hosts: {', '.join(have) or 'none'}")


def _problem(by_rank: ByRank, text: Callable[[Facts], str]) -> str:
    """The hosts with a problem, and the first one's; empty if none has one."""
    wrong = {rank: found for rank, facts in by_rank.items() if (found := text(facts))}
    return f"{_hosts(by_rank, wrong)}: {wrong[min(wrong)]}" if wrong else ""


def _unequal(by_rank: ByRank, text: Callable[[Facts], str]) -> str:
    """The values with their hosts; empty if all have the same."""
    values: dict[str, dict[int, None]] = {}
    for rank, facts in sorted(by_rank.items()):
        values.setdefault(text(facts), {})[rank] = None
    if len(values) < 2:
        return ""
    return " and ".join(f"{value} on {_hosts(by_rank, ranks)}" for value, ranks in values.items())


def _host(by_rank: ByRank, rank: int) -> str:
    return by_rank[rank].place.host


def _hosts(by_rank: ByRank, ranks: Mapping[int, object]) -> str:
    """The hosts of ``ranks``, with the ranks."""
    on: dict[str, list[str]] = {}
    for rank in sorted(ranks):
        on.setdefault(_host(by_rank, rank), []).append(str(rank))
    named = [
        f"{host} (rank{'s' if len(at) > 1 else ''} {listed(at, MAX_HOSTS)})"
        for host, at in on.items()
    ]
    return listed(named, MAX_HOSTS)
