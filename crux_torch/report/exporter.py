"""Metrics of a cluster, or of one job, over HTTP or in a file of node_exporter's; and the page.

A rank starts the exporter of its own job:

    python -m crux_torch.report.exporter --fd N --parent PID --port PORT JOB
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest, write_to_textfile

from crux_torch.agreement.audit import AuditEntry
from crux_torch.agreement.leader_process import stand_back
from crux_torch.errors import CruxError, StoreError
from crux_torch.logs import WarnOnce
from crux_torch.network.topology import Topology
from crux_torch.report.cluster_status import ClusterReader, ClusterStatus
from crux_torch.report.metrics import Reading, registry_of
from crux_torch.report.page.operator_page import PERIOD_S, Answer, OperatorPage, Query
from crux_torch.report.page.server import PageServer, Routes
from crux_torch.settings import process_settings

_log = logging.getLogger(__name__)

#: Name of the file for node_exporter.
TEXTFILE = "crux.prom"
#: Seconds without a reading, failed ones included, after which the exporter is not healthy.
STUCK_S = 60.0
#: Things that may fail: reading the store, and making the page of what was read.
STORE, STATE = "store", "state"


class Watched:
    """Reads a cluster again and again, through store outages, and sees when its plan is renewed.

    Args:
        open_reader: may raise CruxError, as every reading may.
    """

    def __init__(
        self, open_reader: Callable[[], ClusterReader], clock: Callable[[], float]
    ) -> None:
        self._open, self._clock = open_reader, clock
        self._reader: ClusterReader | None = None
        self.errors = Counter({STORE: 0, STATE: 0})
        self.is_up = False
        self.renewed_at_s: float | None = None

    @property
    def topology(self) -> Topology | None:
        """The cluster's topology at the last reading; None without one."""
        return self._reader.topology if self._reader is not None else None

    def read(self) -> ClusterStatus:
        """Returns the state now.

        Raises:
            CruxError: the store can't be read; the next call begins anew.
        """
        try:
            if self._reader is None:
                self._reader = self._open()
            found = self._reader.read()
        except CruxError:
            self.errors[STORE] += 1
            self.is_up = False
            self.close()
            raise
        self.is_up = True
        if found.plan is None:
            self.renewed_at_s = None
        elif found.plan_renewed or self.renewed_at_s is None:
            self.renewed_at_s = self._clock()
        return found

    def audit(self) -> tuple[AuditEntry, ...]:
        """Returns the audit log, the oldest entry first."""
        return self._reader.audit() if self._reader is not None else ()

    def close(self) -> None:
        """Closes the connection to the store."""
        if self._reader is not None:
            with contextlib.suppress(StoreError):
                self._reader.__exit__()
            self._reader = None


class Exporter:
    """Serves what it reads in a thread of its own: no request waits for the store.

    Args:
        open_reader: returns a reader of the cluster.
        job: the only job whose metrics are wanted, and no page; empty: all.
    """

    def __init__(
        self,
        open_reader: Callable[[], ClusterReader],
        job: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._job = clock, job
        self._watched = Watched(open_reader, clock)
        self._page = OperatorPage(self._watched)
        self._registry = registry_of(self.reading)
        self._warn = WarnOnce(_log)
        self._stop = threading.Event()
        self._tried_at_s = clock()

    def reading(self) -> Reading:
        """Returns what was read last."""
        snapshot, watched = self._page.snapshot, self._watched
        renewed_at_s = watched.renewed_at_s
        return Reading(
            status=snapshot.status if snapshot is not None else None,
            loads=snapshot.loads if snapshot is not None else None,
            store_up=watched.is_up,
            renewed_s=None if renewed_at_s is None else self._clock() - renewed_at_s,
            errors=dict(watched.errors),
            job=self._job,
        )

    def refresh(self) -> None:
        """Reads the cluster once; raises nothing."""
        try:
            self._page.refresh()
        except Exception as error:
            self._watched.errors[STATE] += 1
            self._warn("state", f"the state can't be shown: {type(error).__name__}: {error}")
        self._tried_at_s = self._clock()

    def run(self, textfile: Path | None = None) -> None:
        """Refreshes until :meth:`end` is called.

        Args:
            textfile: folder that gets a file of the metrics after each reading.

        Raises:
            OSError: the first file can't be written.
        """
        written = False
        while not self._stop.is_set():
            self.refresh()
            if textfile is not None:
                try:
                    write_to_textfile(str(textfile / TEXTFILE), self._registry)
                    written = True
                except OSError as error:
                    if not written:
                        raise
                    self._warn("textfile", f"{textfile / TEXTFILE}: {error.strerror}")
            self._stop.wait(PERIOD_S)

    def end(self) -> None:
        """Ends :meth:`run` and all streams of the page."""
        self._stop.set()
        self._page.end()

    def routes(self) -> Routes:
        """Returns what answers requests: the metrics, signs of life, and the page."""
        own: Routes = {"/metrics": self._metrics, "/healthz": self._health}
        return own if self._job else {**self._page.routes(), **own}

    def _metrics(self, _: Query) -> Answer:
        return Answer(CONTENT_TYPE_LATEST, generate_latest(self._registry))

    def _health(self, _: Query) -> Answer | HTTPStatus:
        if self._clock() - self._tried_at_s > STUCK_S:
            return HTTPStatus.SERVICE_UNAVAILABLE
        return Answer("text/plain; charset=utf-8", b"ok\n")


def main() -> None:
    """The exporter of one job: it ends with the rank that has started it."""
    parser = argparse.ArgumentParser(prog="crux-metrics")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret", default="")
    parser.add_argument("job")
    args = parser.parse_args()
    told = socket.socket(fileno=args.fd)
    try:
        stand_back(args.parent)
        settings = replace(process_settings(), store_secret=args.secret)
        exporter = Exporter(lambda: ClusterReader(settings), args.job)
        server = PageServer(exporter.routes(), ("127.0.0.1", args.port))
        threading.Thread(target=exporter.run, daemon=True).start()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told.sendall(b"\n")
        told.recv(1)  # until the rank ends
    except Exception as error:
        with contextlib.suppress(OSError):
            told.sendall(f"{error}\n".encode(errors="replace"))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
