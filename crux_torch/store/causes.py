"""Why an exchange with the store failed: from what a call raised, or a server said."""

from __future__ import annotations

import socket

from crux_torch.errors import Cause, StoreError
from crux_torch.own_folders import FolderError
from crux_torch.store.frame_socket import HTTP

#: Of an etcd's refusals, how those begin that say that none answers.
NO_CONTACT = "no contact"
#: What such a refusal has in it where an etcd answers, and does not take this client.
_LOGIN = ("unauthenticated", "invalid user", "authentication", "certificate", "handshake")


def cause_of(error: Exception, *, greeted: bool, connected: bool = True) -> Cause:
    """Why an exchange failed, which had ``connected``, and ``greeted``, before it did."""
    if isinstance(error, StoreError):
        return error.cause
    if isinstance(error, FolderError):
        return Cause.FOLDER
    if isinstance(error, socket.gaierror):
        return Cause.NAME
    if isinstance(error, TimeoutError):
        return Cause.SILENT if connected else Cause.UNREACHABLE
    if not connected:
        absent = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
        return Cause.ABSENT if absent else Cause.UNREACHABLE
    if isinstance(error, ValueError):
        return Cause.HTTP if str(error) == HTTP else Cause.STRANGER
    return Cause.CUT if greeted else Cause.STRANGER


def cause_of_refusal(reason: str) -> Cause:
    """Why a server refused a request, for this ``reason``."""
    if not reason.startswith(NO_CONTACT):
        return Cause.LIMIT
    login = any(word in reason.lower() for word in _LOGIN)
    return Cause.ETCD_LOGIN if login else Cause.ETCD_AWAY
