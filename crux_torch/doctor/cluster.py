"""What the jobs of a cluster share: the store, and the network's description."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from crux_torch.doctor.check import Check
from crux_torch.settings import Settings

CONNECT_TIMEOUT_S = 1.0


def store(settings: Settings) -> Iterator[Check]:
    """Whether somebody listens where the cluster's store should be."""
    if settings.store == "none":
        cost = "every job runs alone, without a plan"
        yield Check("store", "missing", "switched off: CRUX_STORE=none", cost, "set CRUX_STORE")
        return
    url = urlsplit(settings.store)
    try:
        socket.create_connection((url.hostname or "", url.port or 0), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        yield Check(
            "store",
            "missing",
            f"{settings.store}: {error}",
            "jobs here agree with nobody until it can be reached",
            "the first cruxrun on its host starts it; from other hosts, open the port",
        )
    else:
        yield Check("store", "ok", f"{settings.store} answers")


def topology(settings: Settings) -> Iterator[Check]:
    """Whether the network is described."""
    if not settings.topology:
        cost = "every host is taken to share one core link, and no path is chosen"
        yield Check("topology", "missing", "none given", cost, "write one, set CRUX_TOPOLOGY")
    elif not os.access(settings.topology, os.R_OK):
        found = f"{settings.topology} can't be read"
        yield Check("topology", "broken", found, "cruxrun refuses it", "correct CRUX_TOPOLOGY")
    else:
        yield Check("topology", "ok", settings.topology)
