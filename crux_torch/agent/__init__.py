"""The agent beside the training thread of every rank: it measures, leads and follows.

:data:`AGENT` hears of this process's groups. The first group of a world starts its
:class:`BackgroundThread`, which runs the :class:`~crux_torch.agent.pipeline.Pipeline`.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from crux_torch.apply import nccl, wire
from crux_torch.backend import Listener
from crux_torch.host.activity import OwnDevice
from crux_torch.job_name import local_rank, name_of_launch
from crux_torch.logs import to_stderr
from crux_torch.measure.iterations import IterationMarks
from crux_torch.misspelt import misspelt_text
from crux_torch.settings import JOB_OF_VARIABLE, Settings, is_launched, process_settings

if TYPE_CHECKING:
    from crux_torch.agent.pipeline import Pipeline
    from crux_torch.measure.profile import JobProfile

_log = logging.getLogger("crux_torch")

#: Seconds for which a new world waits for the last one's thread, which takes its hooks away.
END_S = 2.0
#: Seconds that a fork waits for imports under way: in the child nobody would finish them.
IMPORT_S = 10.0
#: The thread begins once so many iterations have ended, or after the setting ``start_s``: a job
#: that ends before has nothing to be scheduled for, and would wait for the imports.
START_ITERATIONS = 2
START_POLL_S = 0.05
#: Seconds that the end of a process waits for its last messages; without them its leases end.
LAST_S = 0.05
#: The same if the user wants a file written then (the setting ``trace``).
LAST_TRACE_S = 2.0

_imported = threading.Event()
_imported.set()
os.register_at_fork(before=lambda: _imported.wait(IMPORT_S))


class BackgroundThread:
    """The thread that makes a world's pipeline, whose modules take long to import, and runs it.

    Construct it on the training thread: it looks for the CUDA device that this thread uses, and
    installs hooks that this thread runs.

    Thread safety: the training thread calls the methods; the background thread sets ``pipeline``
    and ``error`` once.

    Args:
        make: makes the pipeline, in the background thread.
        settings, rank: of this process; rank 0 leads.
    """

    def __init__(
        self,
        make: Callable[[OwnDevice, IterationMarks, threading.Event], Pipeline],
        settings: Settings,
        rank: int,
    ) -> None:
        self.pipeline: Pipeline | None = None
        self.error: str | None = None
        self.marks = IterationMarks()
        self.marks.install()
        self._device = OwnDevice()
        self._make: Callable[..., Pipeline] | None = make
        self._settings, self._leads = settings, rank == 0
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="crux", daemon=True)

    def start(self) -> None:
        """Starts the thread, which waits for ``START_ITERATIONS`` iterations before it works."""
        self._thread.start()

    def group_made(self) -> None:
        """Has the sockets of a new process group marked soon; on the training thread."""
        self._device.look()
        if self.pipeline is not None:
            self.pipeline.refresh()

    @property
    def active(self) -> bool:
        """True from :meth:`start` until :meth:`stop` or the world's end."""
        return self._thread.is_alive() and os.getpid() == self._pid

    def end(self) -> None:
        """Has the thread revert sockets and hooks and remove the job's record; returns at once.

        Does nothing in a forked child: sockets, hooks and record belong to its parent.
        """
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._stop.set()
        self.marks.remove()

    def stop(self, timeout_s: float | None = None) -> None:
        """Does what :meth:`end` does, and waits for the thread to finish.

        Args:
            timeout_s: seconds to wait at most; default: as long as a process's end may take.
        """
        self.end()
        if timeout_s is None:
            timeout_s = LAST_TRACE_S if self._settings.trace else LAST_S
        if self.active:
            self._thread.join(timeout_s)

    def _wait_to_begin(self) -> bool:
        """Wait until it is time to begin; False if the end came before."""
        times_all = self._settings.timing == "always" or bool(self._settings.trace)
        begins_at_s = time.monotonic() + (0.0 if times_all else self._settings.start_s)
        while self.marks.total < START_ITERATIONS and time.monotonic() < begins_at_s:
            if self._stop.wait(START_POLL_S):
                return False
        return not self._stop.is_set()

    def _run(self) -> None:
        # ``make`` holds the store, whose server must be able to end with the group.
        make, self._make = self._make, None
        assert make is not None
        try:
            if not self._wait_to_begin():
                return
            _imported.clear()
            try:
                import crux_torch.agent.pipeline

                if self._leads:
                    import crux_torch.agent.join  # noqa: F401  before a fork can meet it
            finally:
                _imported.set()
            self.pipeline = make(self._device, self.marks, self._stop)
            del make
        except Exception as error:
            self.marks.remove()
            self.error = f"{type(error).__name__}: {error}"
            _log.warning("Crux is off, training goes on without it: %s", self.error)
            _log.debug("details", exc_info=True)
        else:
            self.pipeline.run()


class ProcessAgent(Listener):
    """Starts and ends the background thread of each world of this process.

    Thread safety: any thread may call any method. The lock guards the start of a world's thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.background: BackgroundThread | None = None
        self._world_store: weakref.ref[Any] | None = None
        self._why_not = "no process group was made"

    @property
    def pipeline(self) -> Pipeline | None:
        """The last world's pipeline, once its thread has made it."""
        return None if self.background is None else self.background.pipeline

    def group_made(self, store: Any, rank: int, size: int, devices: Collection[str]) -> None:
        """Starts the thread for the first group of a world.

        Raises nothing: if the thread can't be started, training goes on without it.
        """
        try:
            with self._lock:
                if dist.is_initialized() or self._belongs_to_last_world(store):
                    if self.background is not None:
                        self.background.group_made()
                    return
                previous, self.background = self.background, None
                if previous is not None:
                    previous.stop(END_S)
                    atexit.unregister(previous.stop)
                settings = process_settings()
                if settings.disable:
                    self._why_not = "CRUX_DISABLE is set"
                    return
                settings = _with_job(settings)
                to_stderr(_log, f"crux {settings.job}", settings.log_level)
                _warn_of_misspelt_variables(rank)
                _log.info("beside rank %d of %d, devices %s", rank, size, ", ".join(devices))
                self.background = _start(settings, store, rank, size)
        except Exception as error:
            self._why_not = f"{type(error).__name__}: {error}"
            _log.warning("Crux is off, training goes on without it: %s", self._why_not)
            _log.debug("details", exc_info=True)

    def world_ended(self) -> None:
        """Ends the thread soon. The pipeline stays, for :meth:`status` and :meth:`profile`."""
        if self.background is not None:
            self.background.end()

    def connections_made(self) -> None:
        """Has new connections get the class at the next tick."""
        if self.pipeline is not None:
            self.pipeline.refresh()

    def nccl_options(self, options: Any, empty: Callable[[], Any], group: str) -> Any:
        """Returns the options with the traffic class of the job's level."""
        pipeline = self.pipeline
        if pipeline is None or not pipeline.may_mark_pairs:
            return options
        active = self.background is not None and self.background.active
        dscp = pipeline.planned_qp_dscp if active else None
        return nccl.with_class(options, dscp, new=empty, owner=group)

    def needs_handover(self) -> bool:
        """True if NCCL can change path only by reconnecting."""
        settings = process_settings()
        moves = settings.paths and settings.transport
        return moves and not wire.all_can_move(os.environ)

    def nccl_sockets(self) -> frozenset[int]:
        """Returns the inodes of NCCL's connections."""
        return nccl.made_by_nccl()

    def profile(self) -> JobProfile | None:
        """See :func:`crux_torch.profile`."""
        return None if self.pipeline is None else self.pipeline.profile()

    def status(self) -> dict[str, Any]:
        """See :func:`crux_torch.status`."""
        from crux_torch.backend import register

        pipeline, background = self.pipeline, self.background
        active = background is not None and background.active
        ended = self._why_not
        if background is not None:
            ended = background.error or "the process group was destroyed"
        report: dict[str, Any] = {
            "active": active,
            "why_not": None if active else ended,
            "attached": register.is_attached(),
            "unreached": nccl.unreached(os.environ, sys.modules),
            "settings": None,
            "recorder": None,
            # Until the background thread begins.
            "profile": None,
            "plan": None,
            "leader": None,
        }
        try:
            report["settings"] = dataclasses.asdict(process_settings())
            recorder = register.recorder()
            counters = ("recorded", "dropped", "captured", "timing", "capacity")
            report["recorder"] = {name: getattr(recorder, name) for name in counters}
            report["recorder"]["groups"] = len(recorder.groups())
        except Exception as error:
            report["why_not"] = f"{type(error).__name__}: {error}"
        return report | ({} if pipeline is None else pipeline.status())

    def _belongs_to_last_world(self, store: Any) -> bool:
        """Returns True if ``store`` is of another backend of the world that was made last.

        torch makes the backends of a world one by one. Each gets a prefix of one store, an object
        that lives no longer than that.
        """
        parent = getattr(store, "underlying_store", store)
        last = self._world_store() if self._world_store is not None else None
        self._world_store = weakref.ref(parent)
        return last is parent


def _start(settings: Settings, store: Any, rank: int, size: int) -> BackgroundThread:
    from crux_torch.backend.handover import GROUPS
    from crux_torch.backend.inner_backends import OWNED_SOCKETS
    from crux_torch.backend.register import recorder

    GROUPS.patience_s = settings.switch_timeout_s
    if os.environ.get("LD_PRELOAD"):
        from crux_torch.apply import preload

        preload.leave_to_this_process(os.environ)

    records = recorder()

    def make(device: OwnDevice, marks: IterationMarks, stop: threading.Event) -> Pipeline:
        from crux_torch.agent.pipeline import Pipeline

        return Pipeline(
            settings,
            rank=rank,
            world_size=size,
            store=store,
            recorder=records,
            ownership=OWNED_SOCKETS,
            device=device,
            marks=marks,
            stop=stop,
        )

    background = BackgroundThread(make, settings, rank)
    background.start()
    atexit.register(background.stop)
    return background


def _with_job(settings: Settings) -> Settings:
    name = settings.job or name_of_launch(os.environ, sys.argv[0])
    if name:
        own_pid = str(os.getpid())
        # Children inherit it: the first process below the launcher that made a group.
        os.environ[JOB_OF_VARIABLE] = os.environ.get(JOB_OF_VARIABLE) or own_pid
        if os.environ[JOB_OF_VARIABLE] == own_pid:
            return dataclasses.replace(settings, job=name)
    # No launcher's, or started by a rank: the leader names its job itself.
    return dataclasses.replace(settings, job=f"{socket.gethostname()}-{os.getpid()}")


def _warn_of_misspelt_variables(rank: int) -> None:
    """Name variables that nobody reads, once on each host; cruxrun has done so itself."""
    first = rank == 0 or local_rank(os.environ) == 0
    if first and not is_launched() and (unknown := misspelt_text(os.environ)):
        _log.warning("%s", unknown)


#: The agent of this process.
AGENT = ProcessAgent()
