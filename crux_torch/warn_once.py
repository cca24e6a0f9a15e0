"""Warnings that are said once: a fault that lasts must not fill the training's log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

#: Different warnings that one object remembers; beyond it new ones are dropped.
MAX_WARNINGS = 256
#: Warnings that one object says in a row, and seconds until it may say one more.
BURST = 16
PAUSE_S = 60.0
#: Of one message, the rest is cut off.
MAX_CHARACTERS = 1000


def one_line(text: str) -> str:
    """``text`` of a stranger, so that it can't pass for another message or control a terminal."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: MAX_CHARACTERS + 1])
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]}..."


class WarnOnce:
    """Logs each message once, in one line of printable characters.

    A stranger can cause many messages. Beyond ``BURST`` of them there is one in ``PAUSE_S``.
    """

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._said: set[str] = set()
        self._left, self._counted_s = float(BURST), clock()

    def __call__(self, about: str, message: str) -> None:
        """Warn with ``message`` unless something was said ``about`` the same before."""
        if about in self._said or len(self._said) >= MAX_WARNINGS:
            return
        now = self._clock()
        self._left = min(float(BURST), self._left + (now - self._counted_s) / PAUSE_S)
        self._counted_s = now
        if self._left < 1:
            return
        self._left -= 1
        self._said.add(about)
        last = "; more such warnings follow one a minute" if self._left < 1 else ""
        self._logger.warning("%s", one_line(message) + last)

    def forget(self, about: str) -> None:
        """Let the next warning ``about`` this be heard again: what it said no longer holds."""
        self._said.discard(about)
