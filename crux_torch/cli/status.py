"""``crux status``: the jobs of a cluster and their plan."""

from __future__ import annotations

import os

import click

from crux_torch.errors import CruxError, SettingsError
from crux_torch.report.cluster_status import as_json_text, read_status, render
from crux_torch.settings import Settings


@click.command()
@click.option("--store", help="tcp://HOST:PORT of the store [default: CRUX_STORE].")
@click.option("--cluster", help="Name of the cluster [default: CRUX_CLUSTER].")
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(min=0, max=3600),
    default=0.0,
    metavar="SECONDS",
    help="Read the store a second time after SECONDS and show what is still alive: jobs that "
    "crashed disappear when their lease ends, and the title says whether the plan was renewed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(store: str | None, cluster: str | None, settle_s: float, as_json: bool) -> None:
    """Show the cluster's jobs and the plan in force, as the store has them."""
    given = {"CRUX_STORE": store, "CRUX_CLUSTER": cluster}
    try:
        settings = Settings.from_env({**os.environ, **{k: v for k, v in given.items() if v}})
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    if settings.store == "none":
        raise click.UsageError("CRUX_STORE=none: there is no store to read; give --store")
    try:
        found = read_status(settings.store, settings.store_secret, settings.cluster, settle_s)
    except CruxError as error:
        raise click.ClickException(
            f"can't read the cluster's state: {error}. The first cruxrun on the store's host "
            "starts the store; from another host its port must be open"
        ) from None
    if as_json:
        click.echo(as_json_text(found))
    else:
        render(found)
