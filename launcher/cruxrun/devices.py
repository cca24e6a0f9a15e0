"""``--crux-dispatch``: this host's GPUs for the job, chosen and claimed while the job runs."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from crux_torch.errors import CruxError, SettingsError, StoreError
from crux_torch.settings import Settings

if TYPE_CHECKING:
    from crux_torch.control.claims import DeviceClaim, DeviceClaims
    from crux_torch.dispatch.this_host import Chosen
    from crux_torch.store.client import StoreClient

logger = logging.getLogger("cruxrun")

#: Launchers that start at once try again.
TRIES = 5
#: Seconds that the store gets to answer.
STORE_S = 5.0


@contextmanager
def chosen_devices(args: Namespace, settings: Settings) -> Iterator[dict[str, str]]:
    """What the job's processes get in their environment; the GPUs stay claimed in the context.

    Raises:
        SettingsError: the GPUs can't be chosen.
    """
    if not settings.dispatch:
        yield {}
        return
    from crux_torch.host.nvml_device import VISIBLE

    if not str(args.nproc_per_node).isdecimal() or not int(args.nproc_per_node):
        raise SettingsError("CRUX_DISPATCH: say how many GPUs with --nproc-per-node")
    try:
        chooser = Chooser(settings, int(args.nproc_per_node))
        chosen = chooser.choose()
    except CruxError as error:
        raise SettingsError(f"CRUX_DISPATCH={settings.dispatch}: {error}") from None
    print(f"cruxrun: {in_words(chosen)}", file=sys.stderr, flush=True)
    with chooser.claimed():
        # The job's own processes choose nothing.
        yield {VISIBLE: ",".join(gpu.uuid for gpu in chosen.gpus), "CRUX_DISPATCH": ""}


def in_words(chosen: Chosen) -> str:
    """What was chosen, and what was taken."""
    numbers = ",".join(str(gpu.index) for gpu in chosen.gpus)
    rate = f", {chosen.bandwidth_Bps / 1e9:.1f} GB/s" if len(chosen.gpus) > 1 else ""
    taken = "; ".join(f"{index}: {why}" for index, why in sorted(chosen.taken.items()))
    return f"GPUs {numbers} by local rank{rate}" + (f" (not free: {taken})" if taken else "")


class Chooser:
    """One launcher's choice, and its claims in the shared store."""

    def __init__(self, settings: Settings, k: int) -> None:
        from crux_torch.control.claims import DeviceClaims
        from crux_torch.dispatch.table import load
        from crux_torch.store.endpoint import open_store

        self._settings, self._k = settings, k
        self._table = None if settings.dispatch == "auto" else load(Path(settings.dispatch))
        self._host = settings.host or socket.gethostname()
        self._incarnation = uuid.uuid4().hex
        self._mine: dict[str, DeviceClaim] = {}
        self._store: StoreClient | None = None
        self._claims: DeviceClaims | None = None
        if settings.store != "none":
            self._store = open_store(
                settings.store, settings.store_secret, settings.store_group, timeout_s=STORE_S
            )
            self._claims = DeviceClaims(self._store, settings.cluster)

    def choose(self) -> Chosen:
        """Choose, and claim what was chosen."""
        from crux_torch.control.claims import DeviceClaim
        from crux_torch.dispatch.this_host import choose
        from crux_torch.host.nvml import bounded_report

        report = bounded_report()
        for _ in range(TRIES):
            taken: dict[str, str] = {}
            try:
                if self._claims is not None:
                    mine = self._claims.taken().get(self._host, {})
                    taken = {device: claim.job for device, claim in mine.items()}
            except StoreError as error:
                logger.warning("jobs that start now may choose the same GPUs: %s", error.told)
                self._claims = None
            chosen = choose(report, self._k, os.environ, taken, self._table)
            job = self._settings.job
            self._mine = {
                gpu.uuid: DeviceClaim(job=job, incarnation=self._incarnation, index=gpu.index)
                for gpu in chosen.gpus
            }
            if self._claims is None or self._take(self._claims):
                return chosen
        raise SettingsError("other launchers were first each time: try again")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Renew the claims until the context ends, then give them up."""
        if self._claims is None or self._store is None:
            yield
            return
        ended = threading.Event()
        renewing = threading.Thread(
            target=self._renew, args=(self._claims, ended), name="crux-claims", daemon=True
        )
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join(STORE_S)
            # Without the store, the lease ends by itself.
            with suppress(StoreError):
                self._claims.release(self._host, self._mine)
            self._store.close()

    def _take(self, claims: DeviceClaims) -> bool:
        try:
            return claims.take(self._host, self._mine, self._settings.lease_s)
        except StoreError as error:
            logger.warning("jobs that start now may choose the same GPUs: %s", error.told)
            self._claims = None
            return True

    def _renew(self, claims: DeviceClaims, ended: threading.Event) -> None:
        while not ended.wait(self._settings.lease_s / 3):
            try:
                claims.renew(self._host, self._mine, self._settings.lease_s)
            except StoreError as error:
                logger.debug("claims on GPUs were not renewed: %s", error)
