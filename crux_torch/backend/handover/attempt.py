"""One handover of one process group: makes the next inner backend and moves the group to it.

On the CPU the next one is made beside training. On a device training stops for it.

docs/understand/handover.md explains the protocol and its limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch

from crux_torch.backend import inner_backends, listener, torch_patches
from crux_torch.backend.handover import device, rounds
from crux_torch.backend.job_store import JobStore, Rendezvous
from crux_torch.errors import CruxError, StoreError, first_line
from crux_torch.logs import WarnOnce

_log = logging.getLogger(__name__)

PREFIX = "crux/handover/"
#: Seconds between two looks for a decision, at most, while operations may wait for it.
HOLD_POLL_S = 0.004
#: A rank may issue this many seconds' worth of collectives before it reaches its hold point.
LOOKAHEAD_S = 0.25
#: Seconds between two looks whether the current inner backend is out of use.
DRAIN_POLL_S = 0.01

#: Types of device whose groups may have two inner backends at work. On others that takes twice the
#: memory, and none may be made or freed beside operations.
MAY_KEEP_TWO = frozenset({"cpu"})
#: Inner backends whose connections are queue pairs.
ON_QUEUE_PAIRS = frozenset({"nccl"})

#: Parts of the longest wait of an operation on a device: for the decision, until the device is
#: idle, until all ranks have stopped, for the next backend, until all have one, for the end of the
#: old one. A store that fails is given up after twice such a part, so they sum to less than 1.
DECIDE, IDLE, STOP, MAKE, MADE, FREE = 1 / 12, 1 / 6, 1 / 6, 1 / 4, 1 / 6, 1 / 12

#: Why a group on a device keeps its connections.
MESSAGES_STAY = (
    "its point-to-point operations can't be moved: this backend makes connections of their own "
    "for them, or keeps messages that nobody has received yet"
)

State = Literal["idle", "making", "agreeing", "decided", "closing", "failed"]
#: States in which connections are about to be replaced.
UNDER_WAY = frozenset({"making", "agreeing", "decided", "closing"})


@dataclasses.dataclass(frozen=True)
class GroupStatus:
    """The state of one group's inner backend.

    Attributes:
        group: its index in the recorder's table of groups.
        generation: of the last handover that was finished, or was not needed.
        state: ``decided``: the counts are known, and this rank has not reached them yet;
            ``closing``: it has, and waits for the other ranks; ``failed``: it did not
            happen.
        switched_at: number of the first collective on the newest inner backend; None before.
        transfers_stay: point-to-point operations stayed with an earlier inner backend.
        created_ms, agreed_ms: how long it took to make the newest inner backend, and to agree on
            the counts.
        held, held_ms: operations that waited in the last handover, and the longest such wait.
        error: why the last handover did not happen.
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


class Member:
    """One holder of inner backends of this process, and the thread that works on it, if any.

    Args:
        handover: the C++ part (``_C.Handover``).
        options: that the script gave for the first inner backend.
        made_at_s: when the group was made.
    """

    def __init__(self, handover: Any, options: Any, made_at_s: float) -> None:
        self.handover, self.options, self.made_at_s = handover, options, made_at_s
        self.status = GroupStatus(handover.group, handover.device)
        self.attempted = 0
        self.thread: threading.Thread | None = None
        # What earlier handovers left in the store; deleted once all ranks are past them.
        self.left: list[rounds.Agreement] = []
        # The inner backends' stores, the newest last.
        self.stores: list[Rendezvous] = []

    def note(self, **changes: Any) -> None:
        before, self.status = self.status, dataclasses.replace(self.status, **changes)
        if self.status.state != before.state:
            _log.debug("handover %d: %s", self.attempted, self.status)


class Attempt:
    """One handover of one group, from its beginning to the end of the old connections.

    Thread safety: its member's thread makes all calls.

    Args:
        generation, pairs_moved, patience_s, hold_s: see ``Groups``.
        stopping: set when the process exits.
        turn: held by the one group of this process that makes or frees a backend on a device.
    """

    def __init__(
        self,
        member: Member,
        generation: int,
        *,
        turn: threading.Lock,
        pairs_moved: bool,
        patience_s: float,
        hold_s: float,
        stopping: threading.Event,
        warn: WarnOnce,
    ) -> None:
        self._member, self._generation = member, generation
        self._pairs_moved = pairs_moved
        self._patience_s, self._hold_s = patience_s, hold_s
        self._stopping, self._warn = stopping, warn
        self._handover = member.handover
        self._all_or_none = self._handover.device not in MAY_KEEP_TWO
        self._turn = turn
        self._next: Any = None

    def run(self, skipped: range) -> None:
        """Hands the group over. Never raises; the member's status says how it ended.

        Args:
            skipped: generations that this rank left out. Other ranks may wait for it in them.
        """
        try:
            store, current = self._handover.store, self._handover.backend
            if store is None:
                raise CruxError("the group was made without a store")
            self._store = JobStore(store)
            self._rank, self._size = current.rank(), current.size()
            self._moved = self._pairs_moved and inner_backends.kind_of(current) in ON_QUEUE_PAIRS
            # Ranks that wait for this one in a collective must not time out.
            if (timeout_s := torch_patches.timeout_s(current)) is not None:
                self._hold_s = min(self._hold_s, timeout_s / 3)
                if self._all_or_none:
                    self._patience_s = min(self._patience_s, timeout_s / 3)
            self._obstacle = inner_backends.obstacle(current)
            self._messages_move = not self._all_or_none or inner_backends.connects_when_made(
                type(current)
            )
            # Hold nothing of the group while waiting: it must be able to end.
            del store, current
            for generation in skipped:
                self._agree(generation).refuse("start", f"rank {self._rank} skipped it")
            self._agreement = self._agree(self._generation)
            self._follow()
        except rounds.Ended:
            self._handover.cancel()
        except Exception as error:
            self._handover.cancel()
            reason = first_line(error)
            self._member.note(state="failed", error=reason)
            self._warn(
                "handover", f"a process group keeps its connections, training goes on: {reason}"
            )
            _log.debug("details", exc_info=True)
        finally:
            self._next = None

    def _ended(self) -> bool:
        """Returns True once nobody needs this handover any more."""
        return self._stopping.is_set() or bool(self._handover.closed)

    def _agree(self, generation: int) -> rounds.Agreement:
        agreement = rounds.Agreement(
            self._store,
            f"{PREFIX}{generation}/{self._handover.device}/",
            self._rank,
            self._size,
            ended=self._ended,
        )
        self._member.left.append(agreement)
        return agreement

    def _follow(self) -> None:
        member, patience_s = self._member, self._patience_s
        since_s, seen = time.monotonic(), int(self._handover.collectives)
        born = self._generation if self._moved else self._handover.born
        word = rounds.Consent(born=born, refusal=self._refusal()[: rounds.MAX_REASON])
        start = self._agreement.round("start", word, self._needed, patience_s=patience_s)
        if not start.go and not start.reason:
            member.note(state="idle", generation=self._generation, error=None)
            return
        _expect(start)

        if self._all_or_none:
            self._replace(since_s, seen)
        else:
            self._move(since_s, seen)
        member.note(state="idle", generation=self._generation)
        self._tidy()

    def _move(self, since_s: float, seen: int) -> None:
        """Make the next inner backend beside training, and pass to it."""
        member = self._member
        member.note(state="making", error=None)
        self._all_can("made", lambda: self._make(self._patience_s / 2), self._patience_s)

        member.note(state="agreeing")
        self._decide(self._margin(since_s, seen), self._hold_s, self._hold_s / 3)

        self._until(self._handover.finish)
        held, held_s = self._handover.waits
        member.note(state="closing", held=held, held_ms=1e3 * held_s)
        self._agreement.round("drained", rounds.Consent(), rounds.unanimous, patience_s=None)
        self._handover.release()

    def _replace(self, since_s: float, seen: int) -> None:
        """Stop all ranks at one operation, and put the next inner backend in the old one's place.

        Nothing waits before a rank has come to that operation, so nothing is bounded until then.
        """
        member, limit_s = self._member, self._patience_s
        member.note(state="agreeing", error=None)
        self._decide(self._margin(since_s, seen), limit_s, limit_s * DECIDE)

        self._until(lambda: self._handover.stopped or not self._handover.armed)
        member.note(state="making")
        self._device = torch.device(self._handover.device, max(0, self._handover.waits_on))
        if not self._turn.acquire(timeout=limit_s * IDLE):
            raise CruxError("another group's connections are being made")
        try:
            self._replace_stopped(limit_s)
        finally:
            self._handover.cancel()
            self._turn.release()
            # Whoever waited tells for how long when it wakes.
            self._until(lambda: self._handover.waits[0] > 0)
            held, held_s = self._handover.waits
            member.note(held=held, held_ms=1e3 * held_s)

    def _replace_stopped(self, limit_s: float) -> None:
        self._all_can("stopped", lambda: self._be_quiet(limit_s * IDLE), limit_s * STOP)
        try:
            self._all_can("made", lambda: self._make(limit_s * MAKE), limit_s * MADE)
            if not self._handover.replace(self._next):
                raise CruxError("operations waited too long, and go on as before")
        except Exception:
            if self._next is not None:
                device.abort(self._next, self._device, limit_s * FREE)
            raise
        self._member.note(state="closing")
        try:
            late = "the old connections were not closed"
            device.within(limit_s * FREE, self._handover.release, self._device, late)
        except Exception as error:
            self._warn("free", f"training goes on over new connections: {first_line(error)}")

    def _all_can(self, name: str, call: Callable[[], None], patience_s: float) -> None:
        """Raise CruxError unless ``call`` succeeds on all ranks."""
        _expect(
            self._agreement.round(
                name,
                rounds.Consent(refusal=_failure(call)),
                rounds.unanimous,
                patience_s=patience_s,
                longest_poll_s=HOLD_POLL_S if self._all_or_none else rounds.LONGEST_POLL_S,
            )
        )

    def _refusal(self) -> str:
        """Returns why this rank can't be handed over now; empty if it can."""
        if not self._messages_move and self._handover.has_transfers:
            return self._obstacle or MESSAGES_STAY
        return str(self._handover.refusal) or self._obstacle

    def _be_quiet(self, limit_s: float) -> None:
        if refusal := self._refusal():
            raise CruxError(refusal)
        device.wait_until_idle(self._device, limit_s)
        device.require_room(self._device)

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._ended():
                raise rounds.Ended("the process group has ended")
            time.sleep(DRAIN_POLL_S)

    def _needed(self, words: list[rounds.Consent]) -> rounds.Verdict:
        """Returns the verdict to go on unless the connections have this generation already.

        They are if every rank made the group after it knew of this generation, or has changed the
        live connections.
        """
        if all(word.born >= self._generation for word in words):
            return rounds.Verdict(go=False)
        return rounds.unanimous(words)

    def _make(self, limit_s: float) -> None:
        """Make the next inner backend; raises what made that fail."""
        began_s = time.monotonic()
        current = self._handover.backend
        prefix = f"{PREFIX}{self._generation}/{self._handover.device}/inner/"
        store = Rendezvous(self._store, prefix, self._ended)
        self._member.stores.append(store)
        timeout, options = timedelta(seconds=limit_s), self._member.options

        def make() -> Any:
            return inner_backends.make_next(current, store, timeout, options)

        with inner_backends.OWNED_SOCKETS.watching(store, current.rank(), current.size()):
            if self._all_or_none:
                self._next = device.make_connected(make, self._device, limit_s)
            else:
                self._next = make()
        self._member.note(created_ms=1e3 * (time.monotonic() - began_s))
        listener().connections_made()

    def _margin(self, since_s: float, seen: int) -> int:
        """Returns the collectives that this rank may issue while the ranks agree.

        The rate is the recent one, or that of the group's whole life if it is higher.
        """
        now_s, collectives = time.monotonic(), int(self._handover.collectives)
        # Over a shorter time than the lookahead, one burst would look like a rate.
        recent = (collectives - seen) / max(now_s - since_s, LOOKAHEAD_S)
        ever = collectives / max(now_s - self._member.made_at_s, LOOKAHEAD_S)
        expected = max(recent, ever) * LOOKAHEAD_S
        if recent == 0.0 and expected < 1.0:
            return 0
        return max(2, math.ceil(expected))

    def _decide(self, margin: int, limit_s: float, patience_s: float) -> None:
        """Agree on the operation counts from which the next inner backend serves."""
        began_s = time.monotonic()
        collectives, transfers, stay = self._handover.arm(
            self._next, margin, timedelta(seconds=limit_s)
        )
        self._next = None
        if self._all_or_none:
            transfers, stay = [], False
        verdict = self._agreement.round(
            "hold",
            rounds.Hold(collectives=collectives, transfers=transfers, stay=stay),
            rounds.decide,
            # A store that fails is given up after twice this: still less than the limit.
            patience_s=patience_s,
            longest_poll_s=HOLD_POLL_S,
        )
        _expect(verdict)
        if not self._handover.decide(verdict.for_rank(self._rank)):
            raise CruxError("operations waited too long for the decision, and go on as before")
        self._member.note(
            state="decided",
            switched_at=verdict.collectives,
            transfers_stay=verdict.stay,
            agreed_ms=1e3 * (time.monotonic() - began_s),
        )

    def _tidy(self) -> None:
        """Delete what this rank wrote in earlier handovers: all ranks are past them now."""
        *past, self._agreement = self._member.left
        self._member.left = [self._agreement]
        with contextlib.suppress(StoreError):
            for agreement in past:
                agreement.forget()
            while len(self._member.stores) > 1 and not self._member.status.transfers_stay:
                self._member.stores.pop(0).forget()


def _expect(verdict: rounds.Verdict) -> None:
    if not verdict.go:
        raise CruxError(verdict.reason)


def _failure(call: Callable[[], None]) -> str:
    """Returns why ``call`` failed; empty if it did not."""
    try:
        call()
    except Exception as error:
        _log.debug("details", exc_info=True)
        return first_line(error)
    return ""
