"""What runs beside the training thread of every rank: it measures, leads and follows.

The functions that say "called when" answer :mod:`crux_torch.c10d.events`.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from crux_torch.apply import nccl, nccl_sockets
from crux_torch.settings import Settings

if TYPE_CHECKING:
    from crux_torch.measure.job_profile import JobProfile
    from crux_torch.runtime.agent import Agent

_log = logging.getLogger("crux_torch")
_lock = threading.Lock()
_agent: Agent | None = None
_world_store: weakref.ref[Any] | None = None
_why_not = "no process group was made"


def group_was_made(store: Any, rank: int, size: int, devices: Collection[str]) -> None:
    """Called on the training thread when a process group was made, with its ``store``.

    The first group of a world starts the agent. Raises nothing: if the agent can't be started,
    training goes on without it.
    """
    global _agent, _why_not
    try:
        with _lock:
            if dist.is_initialized() or _belongs_to_last_world(store):
                if _agent is not None:
                    _agent.group_was_made()
                return
            previous, _agent = _agent, None
            if previous is not None:
                previous.stop()
                atexit.unregister(previous.stop)
            settings = Settings.from_env()
            if settings.disable:
                _why_not = "CRUX_DISABLE is set"
                return
            _say(settings)
            _log.info("beside rank %d of %d, devices %s", rank, size, ", ".join(devices))
            _agent = _start(settings, store, rank, size)
    except Exception as error:
        _why_not = f"{type(error).__name__}: {error}"
        _log.warning("Crux is off, training goes on without it: %s", _why_not)
        _log.debug("details", exc_info=True)


def connections_were_made() -> None:
    """Called when a process group has new connections: they get the class at the next tick."""
    if (agent := _agent) is not None:
        agent.group_was_made()


def with_nccl_class(options: Any, new: Callable[[], Any], group: str) -> Any:
    """Called when a NCCL communicator is to be made: its options, with the class of the level."""
    return nccl.with_class(options, planned_dscp(), new=new, owner=group)


def made_by_nccl() -> frozenset[int]:
    """Called for the inodes of NCCL's connections."""
    return nccl_sockets.made_by_nccl()


def _belongs_to_last_world(store: Any) -> bool:
    """Whether ``store`` belongs to another backend of the world whose first backend was made last.

    torch makes the backends of a world one by one. Each gets a prefix of one store, an object that
    lives no longer than that.
    """
    global _world_store
    parent = getattr(store, "underlying_store", store)
    last = _world_store() if _world_store is not None else None
    _world_store = weakref.ref(parent)
    return last is parent


def _start(settings: Settings, store: Any, rank: int, size: int) -> Agent:
    from crux_torch.c10d import backend
    from crux_torch.c10d.inner_backends import OWNED_SOCKETS
    from crux_torch.c10d.switch import GROUPS
    from crux_torch.runtime.agent import Agent

    GROUPS.patience_s = settings.switch_timeout_s
    if not settings.job:
        # Not launched by cruxrun: the leader names its job itself.
        settings = dataclasses.replace(settings, job=f"{socket.gethostname()}-{os.getpid()}")
    agent = Agent(settings, backend.recorder(), OWNED_SOCKETS, store, rank, size)
    agent.start()
    atexit.register(agent.stop)
    return agent


def _say(settings: Settings) -> None:
    """Send this package's messages to stderr, unless the script has set up logging for them."""
    _log.setLevel(settings.log_level)
    if not _log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[crux] %(levelname)s %(message)s"))
        _log.addHandler(handler)


def planned_dscp() -> int | None:
    """DSCP of the level that the plan gives this process's job; None if it gives none."""
    agent = _agent
    return agent.planned_dscp if agent is not None and agent.active else None


def profile() -> JobProfile | None:
    """See :func:`crux_torch.profile`."""
    return None if _agent is None else _agent.profile()


def status() -> dict[str, Any]:
    """See :func:`crux_torch.status`."""
    from crux_torch.c10d import backend

    agent = _agent
    active = agent is not None and agent.active
    ended = _why_not if agent is None else "the process group was destroyed"
    report: dict[str, Any] = {
        "active": active,
        "why_not": None if active else ended,
        "attached": backend.is_attached(),
        "settings": None,
        "recorder": None,
    }
    try:
        report["settings"] = dataclasses.asdict(Settings.from_env())
        recorder = backend.recorder()
        told = ("recorded", "dropped", "captured", "timing", "capacity")
        report["recorder"] = {name: getattr(recorder, name) for name in told}
        report["recorder"]["groups"] = len(recorder.groups())
    except Exception as error:
        report["why_not"] = f"{type(error).__name__}: {error}"
    return report | ({} if agent is None else agent.status())
