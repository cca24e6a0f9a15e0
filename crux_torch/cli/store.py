"""``crux store serve``: keeps the embedded store running between jobs, as a service."""

from __future__ import annotations

import signal
import threading

import click

from crux_torch.cli.status import settings_of
from crux_torch.errors import SettingsError
from crux_torch.store.endpoint import ETCD, sharing
from crux_torch.store.host import StoreHost


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
