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
    from crux_torch.agreement.claims import DeviceClaim, DeviceClaims
    from crux_torch.dispatch.this_host import Chosen
    from crux_torch.store.client import StoreClient

logger = logging.getLogger("cruxrun")

#: Choices before a launcher gives up: each time another one was first.
TRIES = 5
#: Seconds that the store gets to answer.
STORE_S = 5.0


@contextmanager
def chosen_devices(args: Namespace, settings: Settings) -> Iterator[dict[str, str]]:
    """Yields the variables that show the job its GPUs, which stay claimed in the context.

    Raises:
        SettingsError: the GPUs can't be chosen.
    """
    if not settings.dispatch:
        yield {}
        return
    from crux_torch.host.activity import VISIBLE

    if not str(args.nproc_per_node).isdecimal() or not int(args.nproc_per_node):
        raise SettingsError("CRUX_DISPATCH: say how many GPUs with --nproc-per-node")
    try:
        claims = _Claims(settings)
        chosen = _choose(settings, int(args.nproc_per_node), claims)
    except CruxError as error:
        raise SettingsError(f"CRUX_DISPATCH={settings.dispatch}: {error}") from None
    numbers = ",".join(str(gpu.index) for gpu in chosen.gpus)
    rate = f", {chosen.bandwidth_Bps / 1e9:.1f} GB/s" if len(chosen.gpus) > 1 else ""
    taken = "; ".join(f"{index}: {why}" for index, why in sorted(chosen.taken.items()))
    rest = f" (not free: {taken})" if taken else ""
    print(f"cruxrun: GPUs {numbers} by local rank{rate}{rest}", file=sys.stderr, flush=True)
    with claims.renewed():
        # The job's own processes choose nothing.
        yield {VISIBLE: ",".join(gpu.uuid for gpu in chosen.gpus), "CRUX_DISPATCH": ""}


def _choose(settings: Settings, k: int, claims: _Claims) -> Chosen:
    """Choose ``k`` free GPUs of this host and claim them."""
    from crux_torch.dispatch.cluster import load
    from crux_torch.dispatch.this_host import choose
    from crux_torch.host.nvml import bounded_report

    table = None if settings.dispatch == "auto" else load(Path(settings.dispatch))
    report = bounded_report()
    for _ in range(TRIES):
        chosen = choose(report, k, os.environ, claims.taken(), table)
        if claims.take(chosen):
            return chosen
    raise SettingsError("other launchers were first each time: try again")


class _Claims:
    """This launcher's claims on GPUs in the shared store; without a store there are none."""

    def __init__(self, settings: Settings) -> None:
        from crux_torch.agreement.claims import DeviceClaims
        from crux_torch.store.endpoint import open_store

        self._host = settings.host or socket.gethostname()
        self._job, self._lease_s = settings.job, settings.lease_s
        self._incarnation = uuid.uuid4().hex
        self._mine: dict[str, DeviceClaim] = {}
        self._store: StoreClient | None = None
        self._claims: DeviceClaims | None = None
        if settings.store != "none":
            self._store = open_store(
                settings.store, settings.store_secret, settings.store_group, timeout_s=STORE_S
            )
            self._claims = DeviceClaims(self._store, settings.cluster)

    def taken(self) -> dict[str, str]:
        """Returns the job that has each claimed GPU of this host, by UUID."""
        if self._claims is not None:
            try:
                claims = self._claims.taken().get(self._host, {})
                return {device: claim.job for device, claim in claims.items()}
            except StoreError as error:
                self._go_without(error)
        return {}

    def take(self, chosen: Chosen) -> bool:
        """Claim all GPUs or none; False if another launcher was first."""
        from crux_torch.agreement.claims import DeviceClaim

        self._mine = {
            gpu.uuid: DeviceClaim(job=self._job, incarnation=self._incarnation, index=gpu.index)
            for gpu in chosen.gpus
        }
        if self._claims is not None:
            try:
                return self._claims.take(self._host, self._mine, self._lease_s)
            except StoreError as error:
                self._go_without(error)
        return True

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the claims until the context ends, then give them up."""
        claims, store = self._claims, self._store
        if claims is None or store is None:
            yield
            return
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._lease_s / 3):
                try:
                    claims.renew(self._host, self._mine, self._lease_s)
                except StoreError as error:
                    logger.debug("claims on GPUs were not renewed: %s", error)

        renewing = threading.Thread(target=renew, name="crux-claims", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join(STORE_S)
            # Without the store, the lease ends by itself.
            with suppress(StoreError):
                claims.release(self._host, self._mine)
            store.close()

    def _go_without(self, error: StoreError) -> None:
        logger.warning("jobs that start now may choose the same GPUs: %s", error.with_remedy)
        self._claims = None
