"""``crux status`` shows a cluster's jobs and plan; ``crux store serve`` keeps its store running."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from crux_torch.cli.results import json_option, put_json
from crux_torch.errors import CruxError, SettingsError, StoreError
from crux_torch.report.cluster_status import COLUMNS, as_json_text, read_status, render
from crux_torch.report.tables import Grid, console, say
from crux_torch.settings import Settings
from crux_torch.store.endpoint import ETCD, looked_into, sharing
from crux_torch.store.host import StoreHost
from crux_torch.words import age

if TYPE_CHECKING:
    from crux_torch.agreement.audit import AuditEntry

#: Lines of an entry of the history in a cell; the audit log has them all.
MAX_REASONS = 3

store_option = click.option(
    "--store", help="unix:, tcp://HOST:PORT or etcd://... [default: CRUX_STORE]."
)
cluster_option = click.option("--cluster", help="Name of the cluster [default: CRUX_CLUSTER].")


def of_a_cluster(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a command about one cluster: ``store``, ``cluster``, ``json_path``."""
    return store_option(cluster_option(json_option(command)))


def settings_of(store: str | None, cluster: str | None) -> Settings:
    """Returns the settings of the environment; those of the command line go first."""
    given = {"CRUX_STORE": store, "CRUX_CLUSTER": cluster}
    try:
        settings = Settings.from_env({**os.environ, **{k: v for k, v in given.items() if v}})
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    if settings.store == "none":
        raise click.UsageError("CRUX_STORE=none: there is no store to read; give --store")
    return settings


@contextlib.contextmanager
def store_errors(settings: Settings, what: str) -> Iterator[None]:
    """Turns errors of the store into one line with the remedy."""
    try:
        yield
    except StoreError as error:
        reason = looked_into(error, settings.store).with_remedy
        raise click.ClickException(f"can't {what}: {reason}") from None
    except CruxError as error:
        raise click.ClickException(f"can't {what}: {error}") from None


@click.command()
@of_a_cluster
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(min=0, max=3600),
    default=0.0,
    metavar="SECONDS",
    help="Read the store a second time after SECONDS and show what is still alive: jobs that "
    "crashed disappear when their lease ends, and the title says whether the plan was renewed.",
)
@click.option("--wide", is_flag=True, help="Show all that is known of each job.")
@click.option(
    "--history", is_flag=True, help="Show the last plans and settings, too: when they held, why."
)
def status(
    store: str | None,
    cluster: str | None,
    settle_s: float,
    wide: bool,
    history: bool,
    json_path: Path | None,
) -> None:
    """Show the cluster's jobs and the plan in force, as the store has them.

    For each job: how long its steps take now, how long alone, and the priority level of its
    traffic.
    """
    settings = settings_of(store, cluster)
    with store_errors(settings, "read the cluster's state"):
        found = read_status(settings, settle_s, history=history)
    if put_json(json_path, as_json_text(found)):
        return
    render(found, () if wide else COLUMNS)
    if history:
        render_history(console(), found.history, time.time())


@click.group("store")
def group() -> None:
    """Keep the store that the jobs of a cluster share."""


@group.command()
@click.option("--store", help="unix:, unix:///PATH or tcp://HOST:PORT [default: CRUX_STORE].")
def serve(store: str | None) -> None:
    """Keep the embedded store running on this host until SIGTERM or SIGINT.

    Otherwise it ends 10 s after its last job, and forgets what the operator has set.
    """
    settings = settings_of(store, None)
    if settings.store.startswith(ETCD):
        raise click.UsageError(f"CRUX_STORE={settings.store}: an etcd is started by its operator")
    given = settings.store, settings.store_secret, settings.store_group
    try:
        host = StoreHost(*given)
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    host.start()
    click.echo(sharing(*given) or f"keeping the store {settings.store}")
    ended.wait()
    host.stop()


def history_of(entries: Sequence[AuditEntry], now_s: float) -> Grid:
    """Returns the table of the entries, the newest last.

    Args:
        entries: in the order in which they were written.
        now_s: seconds since 1970.
    """
    rows = []
    for number, entry in enumerate(entries):
        ends = (e.at_s for e in entries[number + 1 :] if e.kind == entry.kind)
        rows.append(
            {
                "UTC": time.strftime("%m-%d %H:%M:%S", time.gmtime(entry.at_s)),
                "held for": age(max(0.0, next(ends, now_s) - entry.at_s)),
                "what": f"{'plan' if entry.kind == 'plan' else 'settings'} {entry.after}",
                "by": entry.who,
                "why": _some(entry.why),
                "changed": _some(entry.changes),
            }
        )
    return Grid(rows, text=("UTC", "what", "by", "why", "changed"), title="history")


def render_history(to: Console, entries: Sequence[AuditEntry], now_s: float) -> None:
    """Print the table of the entries."""
    if not entries:
        say(to, "no history: no plan has been written yet, and no settings")
        return
    history_of(entries, now_s).print(to)
    say(to, "held for: until the next plan, or the next settings; the newest: so far")
    say(to, "crux cluster audit has every line of it")


def _some(lines: Sequence[str]) -> str:
    more = len(lines) - MAX_REASONS
    return "; ".join(lines[:MAX_REASONS]) + (f"; and {more} more" if more > 0 else "")
