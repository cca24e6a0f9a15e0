"""The c10d backend: registers, creates, wraps and hands over process groups.

The backends report to one :class:`Listener`, and ask it what depends on the plan. They work alike
without one, and NCCL's communicators then keep the options that the script gave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from crux_torch.logs import WarnOnce

_log = logging.getLogger("crux_torch")
_warn = WarnOnce(_log)


class Listener:
    """Takes part in the life of this process's groups; this one ignores everything.

    Thread safety: any thread may call any method.
    """

    def group_made(self, store: Any, rank: int, size: int, devices: Collection[str]) -> None:
        """Called on the training thread when a group was made that serves types of device."""

    def world_ended(self) -> None:
        """Called on the training thread when the script destroyed its last process group."""

    def connections_made(self) -> None:
        """Called when a handover gave a process group new connections."""

    def nccl_options(self, options: Any, empty: Callable[[], Any], group: str) -> Any:
        """Returns the options to make a NCCL communicator with.

        Args:
            options: the script's, or None; never changed. Returned as they are if the communicator
                is to have the script's traffic class.
            empty: makes empty options.
            group: name of the group if it is not in the options yet.
        """
        return options

    def needs_handover(self) -> bool:
        """True if NCCL can change path only by reconnecting."""
        return False

    def nccl_sockets(self) -> Collection[int]:
        """Returns the inodes of the TCP connections that NCCL made in this process."""
        return ()


_load: Callable[[], Listener] = Listener


def set_listener(load: Callable[[], Listener]) -> None:
    """Sets the function that gives the listener, for when a backend first needs one."""
    global _load
    _load = load


def listener() -> Listener:
    """Returns the listener; one that ignores everything if it can't be loaded."""
    try:
        return _load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        _warn("listener", f"Crux can't start beside a process group, training goes on: {reason}")
        _log.debug("details", exc_info=True)
        return Listener()
