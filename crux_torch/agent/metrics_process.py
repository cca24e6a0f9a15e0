"""The process that serves a job's metrics to a Prometheus (docs/operate/metrics.md)."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from importlib.util import find_spec

from crux_torch.settings import Settings
from crux_torch.store.endpoint import start_child

MODULE = "crux_torch.report.exporter"
_NEEDED = ("jinja2", "prometheus_client")
_MAX_REASON_BYTES = 4096


class MetricsProcess:
    """Serves the job's metrics on this host's loopback, with the lowest priority, until closed.

    Args:
        warn: is given the subject and the text of a warning, once.
    """

    def __init__(self, settings: Settings, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._where = f"no metrics at http://127.0.0.1:{settings.metrics}/metrics"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, its = socket.socketpair()
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if settings.store == "none" or missing:
            its.close()
            needs = f"pip install 'crux-torch[metrics]' ({', '.join(missing)})" if missing else ""
            warn("metrics", f"{self._where}: {needs or 'without a store there is nothing to show'}")
            return
        secret = os.path.abspath(settings.store_secret) if settings.store_secret else ""
        with its:
            self._process = start_child(
                MODULE,
                f"--parent={os.getpid()}",
                f"--port={settings.metrics}",
                f"--secret={secret}",
                settings.job,
                fd=its.fileno(),
            )
        self._socket.setblocking(False)

    def look(self) -> None:
        """Warn if the process has ended, with its reason."""
        if self._process is None or self._process.poll() is None:
            return
        try:
            reason = self._socket.recv(_MAX_REASON_BYTES).decode(errors="replace").strip()
        except OSError:
            reason = ""
        self._warn("metrics", f"{self._where}: {reason or 'the process has ended'}")
        self.close()

    def close(self) -> None:
        """End the process. May be called twice."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
