"""Warnings that are said once: a fault that lasts must not fill the training's log."""

from __future__ import annotations

import logging

#: Different warnings that one object remembers; beyond it new ones are dropped.
MAX_WARNINGS = 256


class WarnOnce:
    """Logs each message once."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def __call__(self, about: str, message: str) -> None:
        """Warn with ``message`` unless something was said ``about`` the same before."""
        if about in self._said or len(self._said) >= MAX_WARNINGS:
            return
        self._said.add(about)
        self._logger.warning("%s", message)

    def forget(self, about: str) -> None:
        """Let the next warning ``about`` this be heard again: what it said no longer holds."""
        self._said.discard(about)
