"""Moves live process groups to new connections while training goes on.

A request names a generation. Each group of this process then gets a thread that makes one
:class:`~crux_torch.backend.handover.attempt.Attempt`. docs/understand/handover.md explains the
protocol and its limits.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from typing import Any

from crux_torch.backend.handover.attempt import Attempt, GroupStatus, Member
from crux_torch.backend.job_store import close_shared
from crux_torch.logs import WarnOnce

_log = logging.getLogger(__name__)

PATIENCE_S = 30.0
HOLD_S = 10.0
#: Older generations, at most, that a rank tells the others it has left out.
MAX_SKIPPED = 8
#: Seconds that the process's exit waits for the threads.
EXIT_S = 2.0


class Groups:
    """The process groups of this process that can be handed over.

    Thread safety: any thread may call any method. The threads of the groups share the lock that
    guards which groups there are, and the ``turn`` to make or free a backend on a device.

    Args:
        patience_s: seconds that a rank waits for the others before it ends the handover for all.
        hold_s: seconds for which operations may wait for a decision. On a device they may wait
            for ``patience_s`` in all.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S, hold_s: float = HOLD_S) -> None:
        self.patience_s, self.hold_s = patience_s, hold_s
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.stop)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[tuple[int, str], Member] = {}
        # For each group the options that the script gave, and when it was made.
        self._made: dict[int, tuple[Any, float]] = {}
        self._newest, self._pairs_moved = 0, False
        self._stopping = threading.Event()
        self._turn = threading.Lock()
        self._warn = WarnOnce(_log)

    @property
    def generation(self) -> int:
        """The newest generation that was requested."""
        with self._lock:
            return self._newest

    def add(self, backend: Any, store: Any, born: int, options: Any = None) -> None:
        """Adds a new group; it takes part in a handover that is under way.

        Args:
            born: :attr:`generation` before its inner backends were made with ``options``.
        """
        with self._lock:
            self._made[backend.group_index] = options, time.monotonic()
            backend.publish(store, born)
            self._start()

    def request(self, generation: int, *, pairs_moved: bool = False) -> None:
        """Moves every group to new connections, unless it has those of ``generation`` already.

        Returns at once. All ranks of a group must get the same requests, at whatever time.

        Args:
            generation: number of the handover. One that is not newer than the last changes nothing,
                and none may be used twice in the life of a job's store.
            pairs_moved: True if this process's queue pairs take their paths already. If all ranks
                of a NCCL group say so, it keeps its connections.
        """
        with self._lock:
            if generation <= self._newest:
                return
            self._newest, self._pairs_moved = generation, pairs_moved
            self._start()

    def status(self) -> list[GroupStatus]:
        """Returns the state of each group's inner backends."""
        with self._lock:
            self._update_members()
            return [member.status for member in self._members.values()]

    def drop_ended(self) -> None:
        """Forgets groups that have ended; after the last, closes the connections to its store."""
        with self._lock:
            self._update_members()

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is under way; returns True if that came in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if not any(m.thread for m in self._members.values()):
                    return True
            time.sleep(0.002)
        return False

    def stop(self) -> None:
        """Tells the threads to end; returns within ``EXIT_S``."""
        self._stopping.set()
        with self._lock:
            threads = [m.thread for m in self._members.values() if m.thread]
        deadline = time.monotonic() + EXIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _update_members(self) -> None:
        """Add the groups that were made and drop those that have ended."""
        from crux_torch import _C

        found = {(each.group, each.device): each for each in _C.handovers()}
        if not found:
            # The leader of another world would count from the beginning.
            self._newest = 0
            close_shared()
        for key in self._members.keys() - found.keys():
            del self._members[key]
        for key, handover in found.items():
            if key not in self._members:
                options, made_at_s = self._made.get(key[0], (None, time.monotonic()))
                self._members[key] = Member(handover, options, made_at_s)
        alive = {group for group, _ in found}
        self._made = {group: known for group, known in self._made.items() if group in alive}

    def _start(self) -> None:
        if self._newest == 0 or self._stopping.is_set():
            return
        newest = self._newest
        self._update_members()
        for member in self._members.values():
            if member.thread is None and member.attempted < newest:
                member.thread = threading.Thread(
                    target=self._run, args=(member,), name="crux-handover", daemon=True
                )
                member.thread.start()

    def _run(self, member: Member) -> None:
        while True:
            with self._lock:
                if member.attempted >= self._newest or self._stopping.is_set():
                    member.thread = None
                    return
                skipped = range(max(member.attempted + 1, self._newest - MAX_SKIPPED), self._newest)
                member.attempted = self._newest
                attempt = Attempt(
                    member,
                    member.attempted,
                    turn=self._turn,
                    pairs_moved=self._pairs_moved,
                    patience_s=self.patience_s,
                    hold_s=self.hold_s,
                    stopping=self._stopping,
                    warn=self._warn,
                )
            attempt.run(skipped)


#: The groups of this process.
GROUPS = Groups()
