"""Errors that Crux raises to its user; each says what to do about it."""

from __future__ import annotations

import enum


class CruxError(Exception):
    """Base of every error of this package."""


def first_line(error: BaseException) -> str:
    """Returns the reason in an error: torch's go on with a stack. Else the name of its type."""
    return str(error).partition("\n")[0][:200] or type(error).__name__


class SettingsError(CruxError, ValueError):
    """A setting that can't be used: which one, its value, and what was expected."""


@enum.unique
class Cause(enum.Enum):
    """Cause of a failure of the shared store; the value is the remedy."""

    ABSENT = (
        "its last job has ended, or none has begun: the first cruxrun on the store's host starts it"
    )
    UNREACHABLE = "correct the address in CRUX_STORE, or open its port in firewalls"
    NAME = "correct the host name in CRUX_STORE"
    SILENT = (
        "its process stands still, or another program has its place: on its host, `ss -xltp` shows "
        "who listens"
    )
    HTTP = "CRUX_STORE names an HTTP server: name the store's port"
    STRANGER = (
        "another program, or another release of Crux, listens there: end it, or name another place "
        "in CRUX_STORE of all jobs"
    )
    VERSION = "use the same release of Crux for all jobs"
    NEEDS_SECRET = "set CRUX_STORE_SECRET to a file with the store's secret, copied from its host"
    HAS_NO_SECRET = "unset CRUX_STORE_SECRET here, or start all jobs of this store with the secret"
    WRONG_SECRET = "copy the file that CRUX_STORE_SECRET names from the store's host"
    UNPROVEN = "what listens there is not the store, or has another secret: see who started it"
    FOREIGN = "name a place of your own in CRUX_STORE, or share with CRUX_STORE_GROUP"
    FOLDER = "see docs/operate/store.md for the places that a store's socket may have"
    LOOPBACK = "set CRUX_STORE_SECRET to a file that only its user can read (docs/operate/store.md)"
    CUT = "it connects again by itself"
    BUSY = "try again"
    LIMIT = "see docs/operate/store.md for the store's limits"
    ETCD_AWAY = "start the etcd, correct its address in CRUX_STORE, or open its ports in firewalls"
    ETCD_LOGIN = "correct what auth, ca, cert and key of CRUX_STORE name (docs/operate/store.md)"
    ETCD_PACKAGE = "install it for the Python that runs the jobs"
    ROLE = "with an etcd, only the operator's role may do this (docs/operate/cluster.md)"
    OTHER = "docs/operate/store.md says what a store needs"


class StoreError(CruxError, ConnectionError):
    """The shared store can't be reached or refused an operation; Crux goes on without it.

    Args:
        message: the store, and what failed.
        cause: the cause, as far as it is known.
    """

    def __init__(self, message: str, cause: Cause = Cause.OTHER) -> None:
        super().__init__(message)
        self.cause = cause

    @property
    def with_remedy(self) -> str:
        """Message and remedy, for a warning."""
        return f"{self}. {self.cause.value[0].upper()}{self.cause.value[1:]}"


class StoreTooLarge(StoreError):
    """The store holds more than the client wants to read."""


class StoreForbidden(StoreError):
    """The shared store's roles do not let this user write that key; reading goes on."""
