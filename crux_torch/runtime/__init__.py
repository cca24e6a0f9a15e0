"""Measure, profile, agree, schedule, apply: what runs beside the training thread of every rank."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import socket
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from crux_torch.settings import Settings

if TYPE_CHECKING:
    from crux_torch.profile.job_profile import JobProfile
    from crux_torch.runtime.agent import Agent

_log = logging.getLogger("crux_torch")
_lock = threading.Lock()
_agent: Agent | None = None
_devices: set[str] = set()
_why_not = "no process group was made"


def group_was_made(store: Any, rank: int, size: int, devices: Collection[str]) -> None:
    """Called on the training thread when a process group was made.

    The first group of a world starts the agent. Raises nothing: where the agent can't be started,
    training goes on without it.

    Args:
        store: that the group was given.
        rank, size: this process in the group.
        devices: types of device that the group's backend serves.
    """
    global _agent, _why_not
    try:
        with _lock:
            if dist.is_initialized() or _belongs_to_last_world(devices):
                if _agent is not None:
                    _agent.group_was_made()
                return
            settings = Settings.from_env()
            if settings.disable:
                _why_not = "CRUX_DISABLE is set"
                return
            _say(settings)
            if _agent is not None:
                _agent.stop()
            _agent = _start(settings, store, rank, size)
    except Exception as error:
        _why_not = f"{type(error).__name__}: {error}"
        _log.warning("Crux is off, training goes on without it: %s", _why_not)
        _log.debug("details", exc_info=True)


def _belongs_to_last_world(devices: Collection[str]) -> bool:
    """Whether these devices' backend completes the world whose first backend was made just before.

    A world with a backend for each device makes them one by one, each device once.
    """
    new = _devices.isdisjoint(devices)
    if not new:
        _devices.clear()
    _devices.update(devices)
    return new and len(_devices) > len(devices)


def _start(settings: Settings, store: Any, rank: int, size: int) -> Agent:
    from crux_torch import backend
    from crux_torch.runtime.agent import Agent

    if not settings.job:
        # Launched by something else than cruxrun: the leader names its job itself.
        settings = dataclasses.replace(settings, job=f"{socket.gethostname()}-{os.getpid()}")
    agent = Agent(settings, backend.recorder(), backend.OWNED_SOCKETS, store, rank, size)
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


def profile() -> JobProfile | None:
    """See :func:`crux_torch.profile`."""
    return None if _agent is None else _agent.profile()


def status() -> dict[str, Any]:
    """See :func:`crux_torch.status`."""
    from crux_torch import backend

    recorder = backend.recorder()
    return {
        "active": _agent is not None,
        "why_not": None if _agent is not None else _why_not,
        "attached": backend.is_attached(),
        "settings": dataclasses.asdict(Settings.from_env()),
        "recorder": {
            "recorded": recorder.recorded,
            "dropped": recorder.dropped,
            "capacity": recorder.capacity,
            "groups": len(recorder.groups()),
        },
    } | ({} if _agent is None else _agent.status())
