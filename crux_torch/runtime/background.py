"""The thread that the agent runs in, from a job's first process group to the end of its world."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from crux_torch.host.nvml_device import OwnDevice
from crux_torch.measure.iterations import IterationMarks

if TYPE_CHECKING:
    from crux_torch.runtime.agent import Agent
    from crux_torch.settings import Settings

_log = logging.getLogger(__name__)

#: Seconds that a fork waits while modules are imported: in the child nobody would finish that.
IMPORT_S = 10.0
#: The thread begins once so many iterations have ended, or after the setting ``start_s``: a job
#: that ends before has nothing to be scheduled for, and would wait for the imports.
START_ITERATIONS = 2
START_POLL_S = 0.05
#: Seconds for which the end of a process waits for the last messages. What is not said by then ends
#: with its lease.
LAST_S = 0.05
#: The same if the user wants a file written then (the setting ``trace``).
LAST_TRACE_S = 2.0

_imported = threading.Event()
_imported.set()
os.register_at_fork(before=lambda: _imported.wait(IMPORT_S))


class Background:
    """Makes the agent in its own thread, because its modules take long to import, and runs it.

    Construct it on the training thread: it looks for the CUDA device that this thread uses, and
    installs hooks that this thread runs. ``of`` are the Agent's arguments from ``settings`` on;
    rank 0 leads.
    """

    def __init__(self, *of: Any) -> None:
        self.agent: Agent | None = None
        self.error: str | None = None
        self._device = OwnDevice()
        self._marks = IterationMarks()
        self._marks.install()
        self._settings: Settings = of[0]
        self._leads = of[4] == 0
        self._of = of
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="crux", daemon=True)

    def start(self) -> None:
        """Begin, soon: see ``START_ITERATIONS``."""
        self._thread.start()

    def group_was_made(self) -> None:
        """Have the sockets of a new process group marked soon; on the training thread."""
        self._device.look()
        if self.agent is not None:
            self.agent.refresh()

    @property
    def active(self) -> bool:
        """Whether the thread runs: from :meth:`start` until :meth:`stop` or the world's end."""
        return self._thread.is_alive() and os.getpid() == self._pid

    def end(self) -> None:
        """Have everything taken back: sockets, hooks, the job's record. Returns at once.

        In a forked child it does nothing, because all of that stays its parent's.
        """
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._stop.set()
        self._marks.remove()

    def stop(self, timeout_s: float | None = None) -> None:
        """Have everything taken back, and wait for it, ``timeout_s`` at most.

        By default that is as long as the end of the process may take.
        """
        self.end()
        if timeout_s is None:
            timeout_s = LAST_TRACE_S if self._settings.trace else LAST_S
        if self.active:
            self._thread.join(timeout_s)

    def _begins(self) -> bool:
        """Wait until it is time to begin; False if the end came before."""
        times_all = self._settings.timing == "always" or bool(self._settings.trace)
        begins_at_s = time.monotonic() + (0.0 if times_all else self._settings.start_s)
        while self._marks.total < START_ITERATIONS and time.monotonic() < begins_at_s:
            if self._stop.wait(START_POLL_S):
                return False
        return not self._stop.is_set()

    def _run(self) -> None:
        try:
            if not self._begins():
                # The store's server must be able to end with the group.
                self._of = ()
                return
            _imported.clear()
            try:
                from crux_torch.runtime.agent import Agent

                if self._leads:
                    import crux_torch.runtime.join  # noqa: F401  before a fork can meet it
            finally:
                _imported.set()
            self.agent = Agent(self._device, self._marks, self._stop, *self._of)
            self._of = ()
        except Exception as error:
            self._marks.remove()
            self.error = f"{type(error).__name__}: {error}"
            _log.warning("Crux is off, training goes on without it: %s", self.error)
            _log.debug("details", exc_info=True)
        else:
            self.agent.run()
