"""What the backends announce, and what they ask for, without knowing who answers.

Whoever wants to hear of process groups registers a :class:`Listener` with :func:`listen`. It is
loaded when a backend first needs it, on the training thread. Without a listener the backends work
as they do with one, and NCCL's communicators keep the options that the script gave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

from crux_torch.warn_once import WarnOnce

_log = logging.getLogger("crux_torch")
_warn = WarnOnce(_log)


class Listener(Protocol):
    """What answers; every method may be called from any thread."""

    def group_was_made(self, store: Any, rank: int, size: int, devices: Collection[str], /) -> None:
        """A process group that serves types of device was made, on the training thread."""

    def world_ended(self) -> None:
        """The script destroyed its last process group, on the training thread."""

    def connections_were_made(self) -> None:
        """A switch gave a process group new connections."""

    def with_nccl_class(self, options: Any, new: Callable[[], Any], group: str, /) -> Any:
        """The options to make a NCCL communicator with.

        Args:
            options: the script's, or None. The script's own object must not be changed.
            new: makes empty options.
            group: name of the group, where it is not in the options yet.

        Returns:
            ``options`` themselves where the communicator is to have the script's class.
        """

    def needs_switches(self) -> bool:
        """Whether only new connections may give NCCL another path."""

    def made_by_nccl(self) -> Collection[int]:
        """Inodes of the TCP connections that NCCL made in this process."""


_load: Callable[[], Listener] | None = None


def listen(load: Callable[[], Listener]) -> None:
    """Tell the listener that ``load`` gives for each event, in place of an earlier one."""
    global _load
    _load = load


def _listener() -> Listener | None:
    """The listener; None where there is none, or where it can't be loaded."""
    if _load is None:
        return None
    try:
        return _load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        _warn("listener", f"Crux can't start beside a process group, training goes on: {reason}")
        _log.debug("details", exc_info=True)
        return None


def group_was_made(store: Any, rank: int, size: int, devices: Collection[str]) -> None:
    """See :meth:`Listener.group_was_made`."""
    if (listener := _listener()) is not None:
        listener.group_was_made(store, rank, size, devices)


def world_ended() -> None:
    """See :meth:`Listener.world_ended`."""
    if (listener := _listener()) is not None:
        listener.world_ended()


def connections_were_made() -> None:
    """See :meth:`Listener.connections_were_made`."""
    if (listener := _listener()) is not None:
        listener.connections_were_made()


def with_nccl_class(options: Any, new: Callable[[], Any], group: str) -> Any:
    """See :meth:`Listener.with_nccl_class`."""
    listener = _listener()
    return options if listener is None else listener.with_nccl_class(options, new, group)


def needs_switches() -> bool:
    """See :meth:`Listener.needs_switches`; nobody asks for a switch where there is no listener."""
    listener = _listener()
    return listener is not None and listener.needs_switches()


def made_by_nccl() -> Collection[int]:
    """See :meth:`Listener.made_by_nccl`."""
    listener = _listener()
    return () if listener is None else listener.made_by_nccl()
