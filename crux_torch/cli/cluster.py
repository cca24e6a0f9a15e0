"""``crux cluster``: the operator's view of a cluster, and settings for its jobs."""

from __future__ import annotations

import getpass
import inspect
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from crux_torch.cli.results import put_json
from crux_torch.cli.status import of_a_cluster, settings_of, status, store_errors
from crux_torch.errors import CruxError
from crux_torch.report.cluster_status import TIMEOUT_S, read_status, render
from crux_torch.report.tables import json_text

if TYPE_CHECKING:
    from crux_torch.agreement.operator import OperatorSettings
    from crux_torch.agreement.registry import Registry

#: Attempts to change the settings while others change them, too.
ATTEMPTS = 10
#: Hours until all settings end on the embedded store, unless the command says otherwise.
HOURS = 24
JOBS = ("job", "hosts", "GPUs", "state", "W FLOP", "MFU", "t s", "period s", "overlap", "operator")
PLAN = ("job", "I FLOP/s", "k", "P", "level", "paths", "trial", "operator")

Change = Callable[["OperatorSettings"], dict[str, Any]]


@click.group("cluster")
def group() -> None:
    """See a cluster as its operator, and set what holds for its jobs.

    The settings have effect with the next plan, within about a second. On the embedded store all
    of them end 24 hours after the last command, or as it says with --for or --stay. An etcd keeps
    them. Every command takes --json.
    """


group.add_command(status)


@group.command()
@of_a_cluster
def jobs(store: str | None, cluster: str | None, json_path: Path | None) -> None:
    """Show the records of the jobs."""
    _show(store, cluster, json_path, "jobs", JOBS)


@group.command()
@of_a_cluster
def plan(store: str | None, cluster: str | None, json_path: Path | None) -> None:
    """Show the plan in force."""
    _show(store, cluster, json_path, "plan", PLAN)


def _show(
    store: str | None,
    cluster: str | None,
    json_path: Path | None,
    part: str,
    columns: Sequence[str],
) -> None:
    settings = settings_of(store, cluster)
    with store_errors(settings, f"read the {part}"):
        found = read_status(settings)
    if not put_json(json_path, json_text(msgspec.to_builtins(getattr(found, part)))):
        render(found, columns)


@group.command()
@of_a_cluster
def audit(store: str | None, cluster: str | None, json_path: Path | None) -> None:
    """Show the last plans and commands: who, when, from what, to what, and why."""
    with _registry(store, cluster, "read the audit log") as registry:
        entries = registry.audit()
    if put_json(json_path, json_text(msgspec.to_builtins(entries))):
        return
    for entry in entries:
        at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(entry.at_s))
        seen = f" (from {entry.origin})" if entry.origin else ""
        click.echo(f"{at} {entry.kind} {entry.before} -> {entry.after} by {entry.who}{seen}")
        for word, lines in (("why", entry.why), ("then", entry.changes)):
            for line in lines:
                click.echo(f"    {word}: {line}")


def _setting(*parameters: Callable[..., Any]) -> Callable[[Callable[..., Change]], Any]:
    """A command that changes the settings, as its function says from the other arguments."""

    def wrap(change_of: Callable[..., Change]) -> Any:
        name = change_of.__name__

        def command(
            store: str | None,
            cluster: str | None,
            json_path: Path | None,
            hours: float | None,
            stays: bool,
            **given: Any,
        ) -> None:
            if stays and hours is not None:
                raise click.UsageError("give --for or --stay, not both")
            words = [name, *_words(change_of, given)]
            _change(store, cluster, json_path, change_of(**given), words, hours, stays)

        made: Any = _STAY(_FOR(of_a_cluster(command)))
        for parameter in reversed(parameters):
            made = parameter(made)
        return group.command(name, help=change_of.__doc__)(made)

    return wrap


_FOR = click.option(
    "--for",
    "hours",
    type=click.FloatRange(0.01, 8760),
    help=f"Hours until all settings end on the embedded store (default: {HOURS}).",
)
_STAY = click.option("--stay", "stays", is_flag=True, help="Let all settings stay.")


def _words(change_of: Callable[..., Change], given: dict[str, Any]) -> Iterator[str]:
    """The command line of what was given, in the order of the function's parameters."""
    for name, parameter in inspect.signature(change_of).parameters.items():
        value = given[name]
        if parameter.default is parameter.empty:
            yield "none" if value is None else f"{value}"
        elif value is not None:
            yield from (f"--{name}", f"{value}")


def _level(_context: click.Context, _parameter: click.Parameter, given: str) -> int | None:
    if given == "none":
        return None
    if not given.isdecimal() or int(given) > 63:
        raise click.BadParameter("expected a level from 0 to 63, or none")
    return int(given)


_JOB = click.argument("job")


@_setting(_JOB)
def drain(job: str) -> Change:
    """Put JOB on the lowest level, without paths and without a say in the plan."""
    return lambda was: {"drained": tuple(sorted({*was.drained, job}))}


@_setting(_JOB)
def undrain(job: str) -> Change:
    """Plan JOB again as all others."""
    return lambda was: {"drained": tuple(name for name in was.drained if name != job)}


@_setting(_JOB, click.argument("x", type=click.FloatRange(1e-3, 1e3)))
def weight(job: str, x: float) -> Change:
    """Multiply the intensity of JOB by X (0.001 to 1000; 1: as all others)."""
    return lambda was: {"weights": _with(was.weights, job, None if x == 1 else x)}


@_setting(_JOB, click.argument("level", callback=_level))
def pin(job: str, level: int | None) -> Change:
    """Give JOB this LEVEL whatever the planner says; none: no longer."""
    return lambda was: {"pins": _with(was.pins, job, level)}


@_setting(
    click.argument("prefix"),
    click.option("--highest", type=click.IntRange(0, 63), help="Level that no job exceeds."),
    click.option("--share", type=click.FloatRange(0, 1), help="Share of the jobs, 0 to 1, ..."),
    click.option("--above", type=click.IntRange(0, 63), help="... that may be above this level."),
)
def tenant(
    prefix: str, highest: int | None = None, share: float | None = None, above: int | None = None
) -> Change:
    """Cap the levels of the jobs whose names begin with PREFIX; without an option: no longer."""
    if (share is None) != (above is None):
        raise click.UsageError("give both --share and --above, or none of them")
    told = {"highest": highest, "share": share, "above": above}
    given = {name: value for name, value in told.items() if value is not None}

    def change(was: OperatorSettings) -> dict[str, Any]:
        from crux_torch.agreement.operator import TenantCap

        cap = TenantCap(**given) if given else None  # type: ignore[arg-type]
        return {"tenants": _with(was.tenants, prefix, cap)}

    return change


@_setting()
def disable() -> Change:
    """Let all jobs keep the network's defaults: no levels, no paths."""
    return lambda was: {"disabled": True}


@_setting()
def enable() -> Change:
    """Plan again."""
    return lambda was: {"disabled": False}


@_setting()
def observe() -> Change:
    """Measure and plan all jobs, and change nothing: no marks, no paths, no holds."""
    return lambda was: {"observe": True}


@_setting()
def act() -> Change:
    """Carry plans out again, after observe."""
    return lambda was: {"observe": False}


def _with(values: dict[str, Any], job: str, value: Any) -> dict[str, Any]:
    others = {k: v for k, v in values.items() if k != job}
    return others if value is None else {**others, job: value}


def _change(
    store: str | None,
    cluster: str | None,
    json_path: Path | None,
    change: Change,
    words: list[str],
    hours: float | None,
    stays: bool,
) -> None:
    from crux_torch.agreement.audit import line, of_act
    from crux_torch.agreement.operator import OperatorSettings
    from crux_torch.agreement.registry import decode
    from crux_torch.store.endpoint import ETCD

    if settings_of(store, cluster).store.startswith(ETCD):
        if hours is not None:
            raise click.UsageError(
                "an etcd keeps the settings until they are changed: leave out --for"
            )
        stays = True
    said = " ".join(words)
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    with _registry(store, cluster, f"carry out {said!r}") as registry:
        for _ in range(ATTEMPTS):
            view = registry.look()
            now_s = time.time()
            after = view.operator.changed(
                **change(view.operator),
                by=line(who),
                command=line(said),
                stays=stays,
                ends_at_s=0.0 if stays else now_s + 3600 * (HOURS if hours is None else hours),
            )
            try:
                # What no reader would accept, such as a name of a thousand letters.
                decode(OperatorSettings, msgspec.json.encode(after), "the settings")
            except CruxError as error:
                raise click.UsageError(str(error)) from None
            if registry.swap_operator(view.operator_raw, after, after.lease_s(now_s)):
                break
        else:
            raise click.ClickException("others change the settings all the time: try again")
        origin = registry.operator_origin()
        registry.append_audit(of_act(who, said, after, view.operator, origin))
        known = {record.job for record in view.jobs}
    if put_json(json_path, json_text(msgspec.to_builtins(after))):
        return
    about = f"{said}: done, settings {after.revision}"
    if after.effect and not after.stays:
        ends = time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(after.ends_at_s))
        about += f"; all settings end {ends} (--for, --stay)"
    of_tenant = words[0] == "tenant"
    named = (job.startswith(words[1]) if of_tenant else job == words[1] for job in known)
    if len(words) > 1 and not any(named):
        about += "; no job of that name runs now, it holds when one does"
    click.echo(about)


@contextmanager
def _registry(store: str | None, cluster: str | None, what: str) -> Iterator[Registry]:
    from crux_torch.agreement.registry import Registry
    from crux_torch.store.endpoint import LOAD_S, open_store

    settings = settings_of(store, cluster)
    with store_errors(settings, what):
        given = settings.store, settings.store_secret, settings.store_group
        client = open_store(*given, timeout_s=TIMEOUT_S, load_s=LOAD_S)
        try:
            yield Registry(client, settings.cluster)
        finally:
            client.close()
