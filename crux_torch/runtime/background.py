"""The thread that the agent runs in, from a job's first process group to the end of its world."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from crux_torch.host.nvml_device import OwnDevice
from crux_torch.measure.iterations import IterationMarks

if TYPE_CHECKING:
    from crux_torch.runtime.agent import Agent

_log = logging.getLogger(__name__)

#: Seconds that a fork waits while modules are imported: in the child nobody would finish that.
IMPORT_S = 10.0

_imported = threading.Event()
_imported.set()
os.register_at_fork(before=lambda: _imported.wait(IMPORT_S))


class Background:
    """Makes the agent in its own thread, because its modules take long to import, and runs it.

    Construct it on the training thread: it looks for the CUDA device that this thread uses, and
    installs hooks that this thread runs. ``of`` are the Agent's arguments from ``settings`` on.
    """

    def __init__(self, *of: Any) -> None:
        self.agent: Agent | None = None
        self.error: str | None = None
        self._device = OwnDevice()
        self._marks = IterationMarks()
        self._marks.install()
        self._of = of
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="crux", daemon=True)

    def start(self) -> None:
        _imported.clear()
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

    def stop(self, timeout_s: float = 2.0) -> None:
        """Take everything back: sockets, hooks, the job's record. Returns within ``timeout_s``.

        In a forked child it does nothing, because all of that stays its parent's.
        """
        if os.getpid() != self._pid or self._stop.is_set():
            return
        self._stop.set()
        self._marks.remove()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            try:
                from crux_torch.runtime.agent import Agent
            finally:
                _imported.set()
            self.agent = Agent(self._device, self._marks, self._stop, *self._of)
            # The store's server must be able to end with the group.
            self._of = ()
        except Exception as error:
            self._marks.remove()
            self.error = f"{type(error).__name__}: {error}"
            _log.warning("Crux is off, training goes on without it: %s", self.error)
            _log.debug("details", exc_info=True)
        else:
            self.agent.run()
