"""``crux status``: the jobs of a cluster and their plan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.results import json_option, put_json
from crux_torch.errors import CruxError, SettingsError, StoreError
from crux_torch.report.cluster_status import COLUMNS, as_json_text, read_status, render
from crux_torch.settings import Settings
from crux_torch.store.endpoint import looked_into


def of_a_cluster(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command about one cluster: ``store``, ``cluster`` and ``json_path``."""
    for option in (
        json_option,
        click.option("--cluster", help="Name of the cluster [default: CRUX_CLUSTER]."),
        click.option("--store", help="unix:, tcp://HOST:PORT or etcd://... [default: CRUX_STORE]."),
    ):
        command = option(command)
    return command


def settings_of(store: str | None, cluster: str | None) -> Settings:
    """The settings of the environment, with those that the command line gives instead."""
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
    """Says what can't be done where the store fails, and what helps."""
    try:
        yield
    except StoreError as error:
        told = looked_into(error, settings.store).told
        raise click.ClickException(f"can't {what}: {told}") from None
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
def status(
    store: str | None, cluster: str | None, settle_s: float, wide: bool, json_path: Path | None
) -> None:
    """Show the cluster's jobs and the plan in force, as the store has them.

    For each job: how long its steps take now, how long alone, and the priority level of its
    traffic.
    """
    settings = settings_of(store, cluster)
    with store_errors(settings, "read the cluster's state"):
        found = read_status(
            settings.store,
            settings.store_secret,
            settings.cluster,
            settle_s,
            group=settings.store_group,
        )
    if not put_json(json_path, as_json_text(found)):
        render(found, () if wide else COLUMNS)
