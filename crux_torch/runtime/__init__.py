"""What runs beside the training thread of every rank: it measures, leads and follows.

The functions that say "called when" answer :mod:`crux_torch.c10d.events`.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from crux_torch.apply import nccl, nccl_sockets, queue_pairs
from crux_torch.log_lines import to_stderr
from crux_torch.settings import Settings
from crux_torch.variables import misspelt_in_words
from cruxrun.launched import is_launched

if TYPE_CHECKING:
    from crux_torch.measure.job_profile import JobProfile
    from crux_torch.runtime.agent import Agent
    from crux_torch.runtime.background import Background

_log = logging.getLogger("crux_torch")
_lock = threading.Lock()
_background: Background | None = None
_world_store: weakref.ref[Any] | None = None
_why_not = "no process group was made"

#: The process whose job ``CRUX_JOB`` names. Its children inherit both variables.
JOB_OF = "CRUX_JOB_OF"
#: Seconds for which a new world waits for the last one's thread, which takes its hooks away.
END_S = 2.0


def group_was_made(store: Any, rank: int, size: int, devices: Collection[str]) -> None:
    """Called on the training thread when a process group was made, with its ``store``.

    The first group of a world starts the agent. Raises nothing: if the agent can't be started,
    training goes on without it.
    """
    global _background, _why_not
    try:
        with _lock:
            if dist.is_initialized() or _belongs_to_last_world(store):
                if _background is not None:
                    _background.group_was_made()
                return
            _end()
            settings = Settings.from_env()
            if settings.disable:
                _why_not = "CRUX_DISABLE is set"
                return
            settings = _with_job(settings)
            to_stderr(_log, f"crux {settings.job}", settings.log_level)
            _say_misspelt(rank)
            _log.info("beside rank %d of %d, devices %s", rank, size, ", ".join(devices))
            _background = _start(settings, store, rank, size)
    except Exception as error:
        _why_not = f"{type(error).__name__}: {error}"
        _log.warning("Crux is off, training goes on without it: %s", _why_not)
        _log.debug("details", exc_info=True)


def world_ended() -> None:
    """Called when the last process group was destroyed: the thread ends soon.

    The rest of the agent stays, for :func:`status` and :func:`profile`.
    """
    if _background is not None:
        _background.end()


def _end() -> None:
    """Stop what runs beside the last world."""
    global _background
    previous, _background = _background, None
    if previous is not None:
        previous.stop(END_S)
        atexit.unregister(previous.stop)


def connections_were_made() -> None:
    """Called when a process group has new connections: they get the class at the next tick."""
    if (agent := _agent()) is not None:
        agent.refresh()


def with_nccl_class(options: Any, new: Callable[[], Any], group: str) -> Any:
    """Called when a NCCL communicator is to be made: its options, with the class of the level."""
    agent = _agent()
    if agent is None or not agent.may_mark_pairs:
        return options
    active = _background is not None and _background.active
    dscp = agent.planned_qp_dscp if active else None
    return nccl.with_class(options, dscp, new=new, owner=group)


def needs_switches() -> bool:
    """Called for whether only new connections may give NCCL another path."""
    settings = Settings.from_env()
    moves = settings.paths and settings.transport
    return moves and not queue_pairs.all_can_move(os.environ)


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


def _start(settings: Settings, store: Any, rank: int, size: int) -> Background:
    from crux_torch.c10d.delegating import recorder
    from crux_torch.c10d.inner_backends import OWNED_SOCKETS
    from crux_torch.c10d.switch import GROUPS
    from crux_torch.runtime.background import Background

    GROUPS.patience_s = settings.switch_timeout_s
    if os.environ.get("LD_PRELOAD"):
        from crux_torch.apply import preload

        preload.leave_to_this_process(os.environ)
    background = Background(settings, recorder(), OWNED_SOCKETS, store, rank, size)
    background.start()
    atexit.register(background.stop)
    return background


def _with_job(settings: Settings) -> Settings:
    here = str(os.getpid())
    if settings.job and _first_of_job(here) == here:
        return settings
    # Not launched by cruxrun, or started by a rank: the leader names its job itself.
    return dataclasses.replace(settings, job=f"{socket.gethostname()}-{os.getpid()}")


def _first_of_job(here: str) -> str:
    """The first process on the way from the launcher to this one, ``here``, that made a group."""
    os.environ[JOB_OF] = os.environ.get(JOB_OF) or here
    return os.environ[JOB_OF]


def _agent() -> Agent | None:
    """The last world's agent, once its thread has made it."""
    return None if _background is None else _background.agent


def _say_misspelt(rank: int) -> None:
    """Name variables that nobody reads, once on each host; cruxrun has done so itself."""
    first = rank == 0 or os.environ.get("LOCAL_RANK") == "0"
    if first and not is_launched() and (unknown := misspelt_in_words(os.environ)):
        _log.warning("%s", unknown)


def profile() -> JobProfile | None:
    """See :func:`crux_torch.profile`."""
    agent = _agent()
    return None if agent is None else agent.profile()


def status() -> dict[str, Any]:
    """See :func:`crux_torch.status`."""
    from crux_torch.c10d import backend, delegating

    agent, background = _agent(), _background
    active = background is not None and background.active
    ended = _why_not
    if background is not None:
        ended = background.error or "the process group was destroyed"
    report: dict[str, Any] = {
        "active": active,
        "why_not": None if active else ended,
        "attached": backend.is_attached(),
        "unreached": nccl.unreached(os.environ, sys.modules),
        "settings": None,
        "recorder": None,
        # Until the background thread begins.
        "profile": None,
        "plan": None,
        "leader": None,
    }
    try:
        report["settings"] = dataclasses.asdict(Settings.from_env())
        recorder = delegating.recorder()
        told = ("recorded", "dropped", "captured", "timing", "capacity")
        report["recorder"] = {name: getattr(recorder, name) for name in told}
        report["recorder"]["groups"] = len(recorder.groups())
    except Exception as error:
        report["why_not"] = f"{type(error).__name__}: {error}"
    return report | ({} if agent is None else agent.status())
