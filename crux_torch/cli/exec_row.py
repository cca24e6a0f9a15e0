"""The row of a program under ``crux exec`` in ``crux status``, kept by a process beside it."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import select
from urllib.parse import quote

import msgspec

from crux_torch.agreement.programs import ProgramRecord, programs_prefix
from crux_torch.errors import StoreError
from crux_torch.settings import Settings
from crux_torch.store import SharedStore
from crux_torch.store.endpoint import open_store


def user_name() -> str:
    """Returns the name of this process's user; without one, its number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def keep_listed(settings: Settings, row: ProgramRecord) -> None:
    """Keep ``row`` in the cluster's store until this process ends, whatever program it becomes.

    A process of its own does it. It is no child of this one, so the program never waits for it.
    Without a store it waits for one.

    Raises:
        SettingsError: the settings name no store that can be used.
        OSError: the kernel can't tell when a process ends (pidfd), or makes no new one.
    """
    if settings.store == "none":
        return
    store = open_store(settings.store, settings.store_secret, settings.store_group)
    alive = os.pidfd_open(os.getpid())
    between = os.fork()
    if between == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _leave_files(alive)
                _keep(store, settings, row, alive)
        finally:
            os._exit(0)
    os.close(alive)
    os.waitpid(between, 0)


def _leave_files(kept: int) -> None:
    """Close what the program has open, so that its pipes end with it."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != kept:
            with contextlib.suppress(OSError):
                os.close(number)


def _keep(store: SharedStore, settings: Settings, row: ProgramRecord, alive: int) -> None:
    key = f"{programs_prefix(settings.cluster)}{quote(row.host, safe='')}.{secrets.token_hex(8)}"
    value = msgspec.json.encode(row)
    try:
        ended = False
        while not ended:
            with contextlib.suppress(StoreError):
                store.put(key, value, settings.lease_s)
            ended = bool(select.select([alive], [], [], settings.lease_s / 3)[0])
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)
        store.close()
