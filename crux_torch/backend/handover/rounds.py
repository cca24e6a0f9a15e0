"""Rounds in which the ranks of a process group agree on a handover, through keys of its store.

In each round every rank writes what it has to say. One verdict is written by compare-and-swap: by
group rank 0 once all have spoken, or by a rank that has waited too long. The first verdict stands,
and every rank follows it. :func:`decide` is the verdict on operation counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec

from crux_torch.backend.job_store import JobStore
from crux_torch.errors import CruxError, StoreError

MAX_BYTES = 1 << 20
MAX_REASON = 200
#: Seconds between two looks at the store: the first, and the longest.
FIRST_POLL_S = 0.001
LONGEST_POLL_S = 0.05

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
#: Peer (group rank), tag, whether this rank sends, operations so far.
TransferCount = tuple[Rank, int, bool, Count]

Message = TypeVar("Message", bound=msgspec.Struct)


class Unreachable(CruxError):
    """The group's store can't be reached, so this rank can't know what the others decided."""


class Ended(CruxError):
    """The process group, or the process, has ended."""


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's word in the rounds before operation counts.

    Attributes:
        born: the newest generation that was known when the group was made.
        refusal: why this rank can't go on; empty if it can.
    """

    born: Count = 0
    refusal: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's hold point: how far it goes on the current inner backend until the verdict.

    Attributes:
        collectives: number of the first collective that would wait.
        transfers: how many point-to-point operations of each key were issued.
        stay: point-to-point operations can't be counted, so they stay.
    """

    collectives: Count
    transfers: list[TransferCount] = []
    stay: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of a round, which holds for all ranks.

    Attributes:
        go: whether the handover goes on; ``reason`` says why not.
        collectives: number of the first collective on the next inner backend.
        transfers: sender, receiver, tag, and number of the first on the next inner backend, for
            each key whose two ends' counts differed.
        stay: point-to-point operations stay where they are.
    """

    go: bool
    reason: str = ""
    collectives: Count = 0
    transfers: list[tuple[Rank, Rank, int, Count]] = []
    stay: bool = False

    def for_rank(self, rank: int) -> tuple[int, list[TransferCount], bool]:
        """Returns the counts as the C++ ``decide`` takes them, with the keys of ``rank``."""
        transfers: list[TransferCount] = []
        for sender, receiver, tag, count in self.transfers:
            if sender == rank:
                transfers.append((receiver, tag, True, count))
            elif receiver == rank:
                transfers.append((sender, tag, False, count))
        return self.collectives, transfers, self.stay


def decide(holds: Sequence[Hold]) -> Verdict:
    """Returns operation counts that no rank has passed: the largest of ``holds`` (group order)."""
    counts: dict[tuple[int, int, int], list[int]] = {}
    for rank, hold in enumerate(holds):
        for peer, tag, sends, count in hold.transfers:
            key = (rank, peer, tag) if sends else (peer, rank, tag)
            counts.setdefault(key, [0, 0])[0 if sends else 1] = count
    return Verdict(
        go=True,
        collectives=max(hold.collectives for hold in holds),
        transfers=[(*key, max(two)) for key, two in sorted(counts.items()) if two[0] != two[1]],
        stay=any(hold.stay for hold in holds),
    )


def unanimous(words: Sequence[Consent]) -> Verdict:
    """Returns the verdict to go on if no rank refuses."""
    for rank, one in enumerate(words):
        if one.refusal:
            return Verdict(go=False, reason=f"rank {rank}: {one.refusal}")
    return Verdict(go=True)


class Agreement:
    """One rank's part in the rounds of one handover of one group.

    Thread safety: none; the handover's thread owns it.

    Args:
        store: of the group.
        prefix: of this handover's keys.
        rank, size: of this process in the group.
        ended: tells whether to stop waiting, because nobody needs the handover any more.
    """

    def __init__(
        self,
        store: JobStore,
        prefix: str,
        rank: int,
        size: int,
        *,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._prefix = store, prefix
        self._rank, self._size = rank, size
        self._ended = ended
        self._names: list[str] = []

    def round(
        self,
        name: str,
        word: Message,
        verdict: Callable[[list[Message]], Verdict],
        *,
        patience_s: float | None,
        longest_poll_s: float = LONGEST_POLL_S,
    ) -> Verdict:
        """Writes this rank's word, and returns the verdict for all ranks.

        Args:
            name: of the round; each is held once.
            verdict: of all ranks' words, called on group rank 0.
            patience_s: seconds after which this rank writes the verdict not to go on; None: never.
            longest_poll_s: seconds between two looks at the store, at most.

        Raises:
            Unreachable: the store still fails after twice ``patience_s``; never with None.
            Ended: the group is over.
        """
        began_s, poll_s, said = time.monotonic(), FIRST_POLL_S, False
        while True:
            if self._ended():
                raise Ended("the process group has ended")
            waited_s = time.monotonic() - began_s
            late = patience_s is not None and waited_s >= patience_s
            try:
                if not said:
                    self._store.set(self._key(name, self._rank), _json(word))
                    self._names.append(name)
                    said = True
                if (stands := self._look(name, type(word), verdict, late)) is not None:
                    return stands
            except msgspec.MsgspecError as error:
                reason = f"rank {self._rank} read nonsense: {error}"
                return self._write(name, Verdict(go=False, reason=reason[:MAX_REASON]))
            except StoreError as error:
                if patience_s is not None and waited_s >= 2 * patience_s:
                    raise Unreachable(f"the group's store can't be reached: {error}") from error
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, longest_poll_s)

    def _look(
        self,
        name: str,
        kind: type[Message],
        verdict: Callable[[list[Message]], Verdict],
        late: bool,
    ) -> Verdict | None:
        if self._store.check([self._key(name)]):
            return _parse(Verdict, self._store.get(self._key(name)))
        if self._rank == 0:
            keys = [self._key(name, rank) for rank in range(self._size)]
            if self._store.check(keys):
                words = [_parse(kind, self._store.get(key)) for key in keys]
                return self._write(name, verdict(words))
        if late:
            return self._write(name, Verdict(go=False, reason=self._missing(name)))
        return None

    def _write(self, name: str, verdict: Verdict) -> Verdict:
        return _parse(Verdict, self._store.compare_set(self._key(name), "", _json(verdict)))

    def _missing(self, name: str) -> str:
        for rank in range(self._size):
            if not self._store.check([self._key(name, rank)]):
                return f"rank {rank} said nothing in time"
        return f"rank 0 decided nothing in time, says rank {self._rank}"

    def refuse(self, name: str, reason: str) -> None:
        """Ends a round in which this rank takes no part, unless it has ended; raises StoreError."""
        self._write(name, Verdict(go=False, reason=reason))
        self._names.append(name)

    def forget(self) -> None:
        """Deletes what this rank wrote; all must have left the rounds. Raises StoreError."""
        for name in self._names:
            self._store.delete_key(self._key(name, self._rank))
            if self._rank == 0:
                self._store.delete_key(self._key(name))
        self._names.clear()

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"{self._prefix}{name}" if rank is None else f"{self._prefix}{name}/{rank}"


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _parse(kind: type[Message], raw: bytes) -> Message:
    if len(raw) > MAX_BYTES:
        raise msgspec.ValidationError(f"{len(raw)} bytes, limit {MAX_BYTES}")
    return msgspec.json.decode(bytes(raw), type=kind)
