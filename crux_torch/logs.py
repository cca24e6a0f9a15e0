"""Log lines on stderr, with a time, the program and its job; and warnings that come only once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_TIME = "%Y-%m-%d %H:%M:%S"


def to_stderr(logger: logging.Logger, who: str, level: str, *, alone: bool = False) -> None:
    """Write the logger's messages to stderr, unless the program has set up logging for it.

    Args:
        logger: the logger, with all below it.
        who: start of each line: the program, and its job.
        level: least severe level to show. :func:`news` is shown unless it is ERROR.
        alone: True to write to stderr only, whatever the program has set up.
    """
    logger.setLevel(level)
    news(logger).setLevel(logging.ERROR if level == "ERROR" else logging.INFO)
    if alone:
        logger.propagate = False
    elif logging.getLogger().handlers:
        return
    own = [handler for handler in logger.handlers if isinstance(handler, _Lines)]
    if not logger.handlers:
        own = [_Lines()]
        logger.addHandler(own[0])
    for handler in own:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s [{who}] %(levelname)s %(message)s", _TIME)
        )


def news(logger: logging.Logger) -> logging.Logger:
    """Returns the logger for the few messages of a job that everyone should see."""
    return logger.getChild("news")


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """Our own handler: the next job of this process gives its lines another name."""


#: Warnings that one object remembers; more are dropped.
MAX_WARNINGS = 256
#: Warnings in a row, and seconds until one more.
BURST = 16
PAUSE_S = 60.0
#: Longest message.
MAX_CHARACTERS = 1000


def one_line(text: str) -> str:
    """Returns a stranger's ``text`` so that it can't pass for a message or control a terminal."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: MAX_CHARACTERS + 1])
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]}..."


class WarnOnce:
    """Logs each message once, in one line of printable characters.

    A stranger can cause many messages. After ``BURST`` of them there is one in ``PAUSE_S``.

    Thread safety: any thread may call it; two that warn at once may both be heard.
    """

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._said: set[str] = set()
        self._left, self._counted_s = float(BURST), clock()

    def __call__(self, key: str, message: str) -> None:
        """Warn with ``message`` unless there was a warning of the same ``key``."""
        if key in self._said or len(self._said) >= MAX_WARNINGS:
            return
        now = self._clock()
        self._left = min(float(BURST), self._left + (now - self._counted_s) / PAUSE_S)
        self._counted_s = now
        if self._left < 1:
            return
        self._left -= 1
        self._said.add(key)
        last = "; more such warnings follow one a minute" if self._left < 1 else ""
        self._logger.warning("%s", one_line(message) + last)

    def forget(self, key: str) -> None:
        """Let the next warning of ``key`` be heard: the last one no longer holds."""
        self._said.discard(key)
