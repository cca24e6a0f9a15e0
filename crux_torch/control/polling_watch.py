"""A watch for stores that have none: a thread that lists and compares."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from crux_torch.control.store import OnChange
from crux_torch.errors import StoreError

_log = logging.getLogger(__name__)


class PollingWatch:
    """Calls back for every key under a prefix whose value is another one than at the last look.

    While the store can't be reached nothing is called.

    Args:
        list_keys: the store's ``list``.
        prefix: of the keys.
        on_change: called on the watch's thread; an exception is logged and the watch goes on.
        interval_s: seconds between two looks.
    """

    def __init__(
        self,
        list_keys: Callable[[str], dict[str, bytes]],
        prefix: str,
        on_change: OnChange,
        interval_s: float,
    ) -> None:
        self._list_keys = list_keys
        self._prefix = prefix
        self._on_change = on_change
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crux-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch; from its own callback too."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        known: dict[str, bytes] = {}
        while not self._stop.is_set():
            with contextlib.suppress(StoreError):
                now = self._list_keys(self._prefix)
                for key in sorted(known.keys() | now.keys()):
                    if known.get(key) != now.get(key):
                        self._tell(key, now.get(key))
                known = now
            self._stop.wait(self._interval_s)

    def _tell(self, key: str, value: bytes | None) -> None:
        if self._stop.is_set():
            return
        try:
            self._on_change(key, value)
        except Exception:
            _log.exception("a watch of %r failed", self._prefix)
