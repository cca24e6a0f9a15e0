"""Errors that Crux raises to its user; each says what to do about it."""

from __future__ import annotations


class CruxError(Exception):
    """Base of every error of this package."""


class SettingsError(CruxError, ValueError):
    """A setting that can't be used: which one, its value, and what was expected."""


class StoreError(CruxError, ConnectionError):
    """The shared store can't be reached or refused an operation; Crux goes on without it."""


class StoreForbidden(StoreError):
    """The shared store's roles do not let this user write that key; reading goes on."""
