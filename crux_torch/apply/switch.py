"""Moves live process groups to new connections: a switch of inner backends, in the background.

A request names a generation. Each group that this process is a member of then gets a thread that
makes the next inner backend, agrees with the group's other ranks on the operation counts from which
it serves, waits until the current one is out of use, and closes it. Training goes on meanwhile. The
protocol and its limits: docs/switching.md.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

from crux_torch.apply.switch_agreement import (
    MAX_REASON,
    Agreement,
    Ended,
    Hold,
    Says,
    Verdict,
    decide,
    unanimous,
)
from crux_torch.apply.switch_makers import make_next
from crux_torch.apply.switch_store import GroupStore, Rendezvous, close_clients
from crux_torch.control.warn_once import WarnOnce
from crux_torch.errors import CruxError, StoreError

_log = logging.getLogger(__name__)

PREFIX = "crux/switch/"
#: Seconds that a rank waits for the others before it writes that nobody switches.
PATIENCE_S = 30.0
#: Seconds for which operations may wait for a decision.
HOLD_S = 10.0
#: Seconds between two looks for a decision, at most, while operations may wait for it.
HOLD_POLL_S = 0.004
#: Collectives that this many seconds may bring don't reach the hold point.
LOOKAHEAD_S = 0.25
#: Seconds between two looks whether the current inner backend is out of use.
DRAIN_POLL_S = 0.01
#: Generations left out, at most, that a rank tells the others of.
MAX_SKIPPED = 8
#: Seconds that the process's exit waits for the threads.
EXIT_S = 2.0

State = Literal["idle", "making", "agreeing", "decided", "closing", "failed"]
#: States in which connections are about to be replaced.
UNDER_WAY = frozenset({"making", "agreeing", "decided", "closing"})
#: ``Ownership.watching``: wraps what opens an inner backend's sockets.
Watching = Callable[[Any, int, int], AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class GroupStatus:
    """How the switches of one group's inner backend stand.

    Attributes:
        group: its index in the recorder's table of groups.
        device: type of device that the inner backend serves.
        generation: of the last switch that was finished, by switching or because it was not needed.
        state: ``decided``: the counts are known and not yet reached everywhere; ``closing``: they
            are, and the other ranks' are awaited; ``failed``: the last switch did not happen.
        switched_at: number of the first collective on the newest inner backend; None before.
        transfers_stay: point-to-point operations stayed with an earlier inner backend.
        created_ms: how long making the newest inner backend took.
        agreed_ms: how long the ranks took to agree on the counts.
        held: operations that waited in the last switch.
        held_ms: the longest such wait.
        error: why the last switch did not happen.
    """

    group: int
    device: str
    generation: int = 0
    state: State = "idle"
    switched_at: int | None = None
    transfers_stay: bool = False
    created_ms: float | None = None
    agreed_ms: float | None = None
    held: int = 0
    held_ms: float = 0.0
    error: str | None = None


class _Member:
    """One inner switch of this process, and the thread that is at work on it, if any."""

    def __init__(self, switch: Any, options: Any, made_at_s: float) -> None:
        self.switch, self.options, self.made_at_s = switch, options, made_at_s
        self.status = GroupStatus(switch.group, switch.device)
        self.attempted = 0
        self.thread: threading.Thread | None = None
        # Of earlier switches: left in the store until all ranks are known to be past them.
        self.left: list[Agreement] = []
        # Of the next or current inner backend, after those of earlier ones.
        self.stores: list[Rendezvous] = []

    def note(self, **changes: Any) -> None:
        before, self.status = self.status, dataclasses.replace(self.status, **changes)
        if self.status.state != before.state:
            _log.debug("switch %d: %s", self.attempted, self.status)


class Groups:
    """The process groups of this process that can switch; safe to use from several threads.

    Args:
        patience_s, hold_s: see the module's constants.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S, hold_s: float = HOLD_S) -> None:
        self.patience_s, self.hold_s = patience_s, hold_s
        #: Set by the backend: knows the inner backends' sockets, and is told of new ones.
        self.watching: Watching | None = None
        self.on_connected: Callable[[], None] = lambda: None
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.stop)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[tuple[int, str], _Member] = {}
        # By group: the options that the script gave, and when it was made.
        self._made: dict[int, tuple[Any, float]] = {}
        self._newest, self._pairs_moved = 0, False
        self._stopping = threading.Event()
        self._warn = WarnOnce(_log)

    @property
    def generation(self) -> int:
        """The newest generation that was requested."""
        with self._lock:
            return self._newest

    def group_was_made(self, backend: Any, store: Any, born: int, options: Any = None) -> None:
        """Let a new group take part, also in a switch that is under way.

        Args:
            backend: the group's ``DelegatingBackend``.
            store: that the group was given.
            born: :attr:`generation` before its inner backends were made.
            options: that the script gave for them.
        """
        with self._lock:
            self._made[backend.group_index] = options, time.monotonic()
            backend.publish(store, born)
            self._start()

    def request(self, generation: int, *, pairs_moved: bool = False) -> None:
        """Move every group to new connections, unless it has those of ``generation`` already.

        Returns at once; a generation that is not newer than the last one changes nothing. All
        ranks of a group must be asked for the same generations, in any timing; over the life of a
        job's store a number must not come twice.

        Args:
            generation: number of the switch.
            pairs_moved: this process's queue pairs have what is wanted already. NCCL groups of
                which all ranks say so keep their connections.
        """
        with self._lock:
            if generation <= self._newest:
                return
            self._newest, self._pairs_moved = generation, pairs_moved
            self._start()

    def status(self) -> list[GroupStatus]:
        """How each group stands."""
        with self._lock:
            self._look()
            return [member.status for member in self._members.values()]

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; whether that came in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if not any(m.thread for m in self._members.values()):
                    return True
            time.sleep(0.002)
        return False

    def stop(self) -> None:
        """End the threads, each at its next look; returns within ``EXIT_S``."""
        self._stopping.set()
        with self._lock:
            threads = [m.thread for m in self._members.values() if m.thread]
        deadline = time.monotonic() + EXIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self) -> None:
        """Take in the groups that were made, leave out those that have ended."""
        from crux_torch import _C

        found = {(s.group, s.device): s for s in _C.inner_switches()}
        if not found:
            # Another world may come, whose leader counts from the beginning.
            self._newest = 0
            close_clients()
        for key in self._members.keys() - found.keys():
            del self._members[key]
        for key, made in found.items():
            if key not in self._members:
                self._members[key] = _Member(
                    made, *self._made.get(key[0], (None, time.monotonic()))
                )
        alive = {group for group, _ in found}
        self._made = {group: known for group, known in self._made.items() if group in alive}

    def _start(self) -> None:
        if self._newest == 0 or self._stopping.is_set():
            return
        newest = self._newest
        self._look()
        for member in self._members.values():
            if member.thread is None and member.attempted < newest:
                member.thread = threading.Thread(
                    target=self._run, args=(member,), name="crux-switch", daemon=True
                )
                member.thread.start()

    def _run(self, member: _Member) -> None:
        while True:
            with self._lock:
                if member.attempted >= self._newest or self._stopping.is_set():
                    member.thread = None
                    return
                skipped = range(max(member.attempted + 1, self._newest - MAX_SKIPPED), self._newest)
                member.attempted = self._newest
            _Attempt(self, member, member.attempted).run(skipped)

    def has_moved(self, generation: int, backend: str) -> bool:
        """Whether the connections of a ``backend`` have what ``generation`` wants already."""
        with self._lock:
            return self._pairs_moved and generation == self._newest and backend == "nccl"

    def ended(self, member: _Member) -> bool:
        """Whether a thread has nothing left to do."""
        return self._stopping.is_set() or member.switch.closed

    def warn(self, about: str, message: str) -> None:
        """Say ``message`` once."""
        self._warn(about, message)


class _Attempt:
    """One switch of one group, from its beginning to the end of the old connections."""

    def __init__(self, groups: Groups, member: _Member, generation: int) -> None:
        self._groups, self._member, self._generation = groups, member, generation
        self._switch = member.switch
        self._next: Any = None

    def run(self, skipped: range) -> None:
        """Never raises; how it ended is in the member's status.

        Args:
            skipped: generations that this rank left out, in which others may wait for it.
        """
        try:
            store, current = self._switch.store, self._switch.backend
            if store is None:
                raise CruxError("the group was made without a store")
            self._store = GroupStore(store)
            self._rank, self._size = current.rank(), current.size()
            self._moved = self._groups.has_moved(self._generation, current.name())
            # Whoever waits for this rank in a collective must not lose patience.
            third_s = current.options._timeout.total_seconds() / 3 if _has_timeout(current) else 1e9
            self._hold_s = min(self._groups.hold_s, third_s)
            # Nothing of the group is held while waiting: it must be able to end.
            del store, current
            for generation in skipped:
                self._agree(generation).refuse("start", f"rank {self._rank} skipped it")
            self._agreement = self._agree(self._generation)
            self._follow()
        except Ended:
            self._switch.cancel()
        except Exception as error:
            self._switch.cancel()
            reason = str(error).partition("\n")[0][:MAX_REASON] or type(error).__name__
            self._member.note(state="failed", error=reason)
            self._groups.warn(
                "switch", f"a process group keeps its connections, training goes on: {reason}"
            )
            _log.debug("details", exc_info=True)
        finally:
            self._next = None

    def _ended(self) -> bool:
        return self._groups.ended(self._member)

    def _agree(self, generation: int) -> Agreement:
        agreement = Agreement(
            self._store,
            f"{PREFIX}{generation}/{self._switch.device}/",
            self._rank,
            self._size,
            ended=self._ended,
        )
        self._member.left.append(agreement)
        return agreement

    def _follow(self) -> None:
        member, patience_s = self._member, self._groups.patience_s
        since_s, seen = time.monotonic(), int(self._switch.collectives)
        born = self._generation if self._moved else self._switch.born
        says = Says(born=born, refusal=self._switch.refusal[:MAX_REASON])
        start = self._round("start", says, self._needed, patience_s)
        if not start.go and not start.reason:
            member.note(state="idle", generation=self._generation, error=None)
            return
        self._expect(start)

        member.note(state="making", error=None)
        made = self._make()
        self._expect(self._round("made", Says(refusal=made), unanimous, patience_s))

        member.note(state="agreeing")
        began_s = time.monotonic()
        margin = self._margin(since_s, seen)
        collectives, transfers, stay = self._switch.arm(
            self._next, margin, timedelta(seconds=self._hold_s)
        )
        self._next = None
        hold = Hold(collectives=collectives, transfers=transfers, stay=stay)
        # Twice that may pass before a store that fails is given up: still less than the hold.
        verdict = self._agreement.round(
            "hold",
            hold,
            decide,
            patience_s=self._hold_s / 3,
            longest_poll_s=HOLD_POLL_S,
        )
        self._expect(verdict)
        if not self._switch.decide(verdict.for_rank(self._rank)):
            raise CruxError("operations waited too long for the decision, and go on as before")
        member.note(
            state="decided",
            switched_at=verdict.collectives,
            transfers_stay=verdict.stay,
            agreed_ms=1e3 * (time.monotonic() - began_s),
        )

        while not self._switch.finish():
            if self._ended():
                raise Ended("the process group has ended")
            time.sleep(DRAIN_POLL_S)
        held, held_s = self._switch.waits
        member.note(state="closing", held=held, held_ms=1e3 * held_s)
        self._round("drained", Says(), unanimous, None)
        self._switch.release()
        member.note(state="idle", generation=self._generation)
        self._tidy()

    def _tidy(self) -> None:
        """Delete what this rank wrote in earlier switches: all ranks are past them now."""
        *past, self._agreement = self._member.left
        self._member.left = [self._agreement]
        with contextlib.suppress(StoreError):
            for agreement in past:
                agreement.forget()
            while len(self._member.stores) > 1 and not self._member.status.transfers_stay:
                self._member.stores.pop(0).forget()

    def _round(
        self,
        name: str,
        says: Any,
        verdict: Callable[[list[Any]], Verdict],
        patience_s: float | None,
    ) -> Verdict:
        return self._agreement.round(name, says, verdict, patience_s=patience_s)

    def _needed(self, says: list[Says]) -> Verdict:
        """Where every rank made the group after it knew of this generation, or has moved its
        connections as they are, the group has it already."""
        if all(one.born >= self._generation for one in says):
            return Verdict(go=False)
        return unanimous(says)

    @staticmethod
    def _expect(verdict: Verdict) -> None:
        if not verdict.go:
            raise CruxError(verdict.reason)

    def _make(self) -> str:
        """Make the next inner backend; returns why that failed, or nothing."""
        began_s = time.monotonic()
        try:
            current = self._switch.backend
            prefix = f"{PREFIX}{self._generation}/{self._switch.device}/inner/"
            store = Rendezvous(self._store, prefix, self._ended)
            self._member.stores.append(store)
            with contextlib.ExitStack() as stack:
                if self._groups.watching is not None:
                    stack.enter_context(
                        self._groups.watching(store, current.rank(), current.size())
                    )
                timeout = timedelta(seconds=self._groups.patience_s / 2)
                self._next = make_next(current, store, timeout, self._member.options)
        except Exception as error:
            _log.debug("details", exc_info=True)
            return str(error).partition("\n")[0][:MAX_REASON] or type(error).__name__
        self._member.note(created_ms=1e3 * (time.monotonic() - began_s))
        self._groups.on_connected()
        return ""

    def _margin(self, since_s: float, seen: int) -> int:
        """Collectives that this rank may issue while the ranks agree.

        The rate is that of late, or of the group's whole life where that is higher. A group at rest
        gets none, so that it can switch at once.
        """
        now_s, collectives = time.monotonic(), int(self._switch.collectives)
        # Over less than the time looked ahead, one burst would pass for a rate.
        recent = (collectives - seen) / max(now_s - since_s, LOOKAHEAD_S)
        ever = collectives / max(now_s - self._member.made_at_s, LOOKAHEAD_S)
        expected = max(recent, ever) * LOOKAHEAD_S
        if recent == 0.0 and expected < 1.0:
            return 0
        return max(2, math.ceil(expected))


def _has_timeout(backend: Any) -> bool:
    return hasattr(getattr(backend, "options", None), "_timeout")


#: The groups of this process.
GROUPS = Groups()
