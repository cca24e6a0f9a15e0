"""An etcd v3 as the contents of a store: answers the requests of one client from it.

Only the store process imports this: gRPC and protobuf don't belong into a training process. Reads
come from a mirror of the keys and prefixes that the client asks for. Watches keep it up to date:

- A watch begins with a full read, which makes up for what was compacted or lost in between.
- The versions of the keys show what a watch left out: with a key's next change, or when all keys
  are compared. Then everything is read anew.
- If the member does not tell for a while how far it is, every request is refused until another
  member answers.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc

from crux_torch.store import is_kept
from crux_torch.store.contents import Journal
from crux_torch.store.endpoint import EtcdAddress
from crux_torch.store.etcd_session import (
    Held,
    Session,
    cancel_request,
    held,
    login_of,
    progress_request,
    reason_of,
)
from crux_torch.store.frames import (
    PAGE_BYTES,
    Answer,
    Changes,
    Clock,
    Count,
    Delete,
    Done,
    Origin,
    Put,
    Read,
    Refused,
    Request,
    Swap,
)

#: Seconds that one answer may take.
ANSWER_S = 1.5
#: Seconds between two questions how far the watch is, and without an answer until it counts as cut.
PROGRESS_S = 0.5
CONTACT_S = 2.0
#: Seconds between two comparisons of the mirror's keys with the etcd's.
CHECK_S = 10.0
#: Seconds after which what the client does not ask for any more is mirrored no longer.
IDLE_S = 60.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class _Refusal(Exception):
    """A request was not carried out."""


class _Cancelled(Exception):
    """The member ended a watch, or it can't be trusted."""


class _Part:
    """A key or prefix that one watch mirrors."""

    def __init__(self, key: str, *, prefix: bool) -> None:
        self.key, self.prefix = key, prefix
        #: Revisions of the full read, up to which the mirror has it, and of the last comparison.
        self.read_revision = self.revision = self.compared = 0
        self.used_s = time.monotonic()

    def covers(self, key: str, prefix: bool) -> bool:
        """Returns True if it has all that a look at ``key`` shows."""
        if self.prefix:
            return key.startswith(self.key)
        return key == self.key and not prefix


class EtcdContents:
    """The keys of an etcd under the address's prefix. :meth:`start` begins to keep the mirror.

    Thread safety: one thread calls :meth:`answer`. Threads that read, follow and compare share the
    mirror and what is known of its parts with it, under ``_changed``.

    Raises:
        SettingsError: a file that the address names can't be used.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        for file in (address.ca, address.cert, address.key):
            address.read(file)
        login_of(address)
        self._changed = threading.Condition()
        self._mirror = Journal()
        #: Keys of the etcd in the mirrored parts, also those whose value does not count.
        self._held: dict[str, Held] = {}
        #: Mirrored parts; no key is in two. Nobody writes the first one's key: without a watch, an
        #: etcd tells no progress.
        self._parts = [_Part("", prefix=False)]
        #: The part that is being read, and the last one whose reading failed, with the reason.
        self._reading: _Part | None = None
        self._failed: tuple[str, bool, str] | None = None
        #: Stream of watches: requests to send, parts whose watch is not created yet, and watches.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._created: deque[_Part] = deque()
        self._watches: dict[int, _Part] = {}
        self._heard_s = float("-inf")
        self._reason = "not connected yet"
        self._session: Session | None = None
        #: Number and length of the lease that each key was last written with.
        self._leases: dict[str, tuple[int, float]] = {}

    def start(self) -> None:
        """Begin to mirror, in a thread that runs until the process ends."""
        threading.Thread(target=self._keep_mirror, name="crux-etcd", daemon=True).start()

    def answer(self, request: Request) -> Answer:
        """Carry out ``request``; raises nothing for what etcd answers or does not answer."""
        until_s = time.monotonic() + ANSWER_S
        try:
            session = self._in_contact(until_s)
            if isinstance(request, Read):
                self._mirror_part(request.key, request.prefix, until_s)
                with self._changed:
                    found = self._mirror.changes(
                        request.key, request.prefix, request.since, PAGE_BYTES
                    )
                return Changes(*found)
            if isinstance(request, Origin):
                raise _Refusal("an etcd does not tell who wrote a key")
            if isinstance(request, Count):
                raise _Refusal("an etcd does not tell its clients")
            if isinstance(request, Clock):
                raise _Refusal("an etcd has no clock to tell: time shifts need a store tcp://...")
            if not isinstance(request, Delete):
                # So that a value which is there already is not written again.
                self._mirror_part(request.key, False, until_s)
            return session.with_token(lambda: self._write(session, request, until_s))
        except grpc.RpcError as error:
            return Refused(reason_of(error))
        except _Refusal as refusal:
            return Refused(str(refusal)[:1000])

    def _in_contact(self, until_s: float) -> Session:
        """Returns the session; waits for the first one for a moment."""
        with self._changed:
            while True:
                session = self._session
                if session is not None and time.monotonic() - self._heard_s < CONTACT_S:
                    return session
                ever = self._heard_s > float("-inf")
                if ever or not self._changed.wait(max(0.0, until_s - time.monotonic())):
                    raise _Refusal(f"no contact: {self._reason}")

    def _mirror_part(self, key: str, prefix: bool, until_s: float) -> None:
        """Wait until what a look at ``key`` shows is mirrored."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                self._drop_idle(now_s)
                part = next((part for part in self._parts if part.covers(key, prefix)), None)
                if part is not None:
                    if (part.key, part.prefix) == (key, prefix):
                        part.used_s = now_s
                    return
                if self._failed is not None and self._failed[:2] == (key, prefix):
                    reason, self._failed = self._failed[2], None
                    raise _Refusal(reason)
                if self._session is None:
                    raise _Refusal(f"no contact: {self._reason}")
                if self._reading is None:
                    self._reading = _Part(key, prefix=prefix)
                    # Stop the narrower watches first, so the new read never goes back in time.
                    covers = self._reading.covers
                    for one in [one for one in self._parts[1:] if covers(one.key, one.prefix)]:
                        self._end(one)
                    args = self._session, self._reading
                    threading.Thread(
                        target=self._add, args=args, name="crux-etcd-read", daemon=True
                    ).start()
                if not self._changed.wait(max(0.0, until_s - now_s)):
                    raise _Refusal("no contact: what was asked for is still being read")

    def _write(self, session: Session, request: Put | Swap | Delete, until_s: float) -> Answer:
        key = request.key
        if isinstance(request, Delete):
            deleted, revision = session.delete(key)
            self._leases.pop(key, None)
            if deleted:
                self._await(key, revision, until_s)
            return Done(int(deleted))
        expected_revision = None
        if isinstance(request, Swap):
            value, expected_revision = session.get(key)
            if value != request.expected:
                if value is not None:
                    self._await(key, expected_revision, until_s)
                return Done(0)
        lease, is_same = self._lease(session, key, request.lease_s)
        with self._changed:
            is_same = is_same and self._mirror.get(key) == request.value
            is_same = is_same and self._held[key].lease == lease
        if is_same and (isinstance(request, Put) or is_kept(key)):
            return Done(1)
        written, revision = session.put(key, request.value, lease, expected_revision)
        if written:
            self._await(key, revision, until_s)
        return Done(int(written))

    def _lease(self, session: Session, key: str, lease_s: float) -> tuple[int, bool]:
        """Returns a lease for ``key`` from now on (0: none), and True if it had that already."""
        if is_kept(key):
            return 0, True
        lease, known_s = self._leases.get(key, (0, 0.0))
        if known_s == lease_s and session.renew_lease(lease):
            return lease, True
        lease = session.grant_lease(lease_s)
        self._leases[key] = lease, lease_s
        return lease, False

    def _await(self, key: str, revision: int, until_s: float) -> None:
        """Wait until the mirror has this revision, so that a writer reads what it wrote."""
        with self._changed:
            part = next((part for part in self._parts if part.covers(key, False)), None)
            if part is not None:
                self._changed.wait_for(
                    lambda: part.revision >= revision, max(0.0, until_s - time.monotonic())
                )

    def _add(self, session: Session, part: _Part) -> None:
        """Begin to mirror ``part``."""
        failed = ""
        try:
            found = session.with_token(lambda: session.read(part.key, part.prefix))
        except grpc.RpcError as error:
            failed = reason_of(error)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        with self._changed:
            self._reading = None
            if failed:
                self._failed = part.key, part.prefix, failed
            elif self._session is session:
                self._take_all(part, *found)
                self._parts.append(part)
                self._watch(session, part)
            self._changed.notify_all()

    def _end(self, part: _Part) -> None:
        """Mirror ``part`` no longer."""
        self._parts.remove(part)
        for number in [number for number, one in self._watches.items() if one is part]:
            del self._watches[number]
            self._requests.put(cancel_request(number))

    def _drop_idle(self, now_s: float) -> None:
        for part in [part for part in self._parts[1:] if now_s - part.used_s > IDLE_S]:
            self._end(part)
            for key in [key for key in self._held if part.covers(key, False)]:
                self._forget(key)

    def _watch(self, session: Session, part: _Part) -> None:
        """Ask for what changes in ``part`` from now on."""
        # From the revision that was read, though its events are known: newer etcds (3.5.30,
        # but not 3.5.16) do not tell how far a watch is that begins later, until somebody writes.
        self._created.append(part)
        self._requests.put(session.watch_request(part.key, part.prefix, part.revision))

    def _take_all(self, part: _Part, found: Mapping[str, Held], revision: int) -> None:
        """Make the mirror of ``part`` what was read."""
        for key in [key for key in self._held if part.covers(key, False) and key not in found]:
            self._forget(key)
        for key, one in found.items():
            self._keep(key, one)
        part.read_revision = part.revision = part.compared = revision

    def _keep(self, key: str, one: Held) -> None:
        if one.value is None:
            self._mirror.delete(key)
        elif self._mirror.get(key) != one.value:
            self._mirror.set(key, one.value)
        self._held[key] = one

    def _forget(self, key: str) -> None:
        self._mirror.delete(key)
        self._held.pop(key, None)

    def _keep_mirror(self) -> None:
        """Watch one member after the other, each for as long as it answers."""
        endpoints = list(self._address.endpoints)
        random.shuffle(endpoints)
        failures = 0
        while True:
            endpoint = endpoints[0]
            endpoints.append(endpoints.pop(0))
            session, began_s = None, time.monotonic()
            try:
                session = Session(self._address, endpoint)
                session.authenticate()
                self._read_all(session)
                self._follow(session)
            except grpc.RpcError as error:
                self._reason = f"{endpoint}: {reason_of(error)}"
            except Exception as error:
                self._reason = f"{endpoint}: {type(error).__name__}: {error}"
            finally:
                self._session = None
                if session is not None:
                    session.close()
            failures = 0 if time.monotonic() - began_s > 2 * CONTACT_S else failures + 1
            # Every member has a first try at once.
            if failures >= len(endpoints):
                pause_s = FIRST_BACKOFF_S * 2.0 ** min(failures - len(endpoints), 30)
                time.sleep(min(MAX_BACKOFF_S, pause_s) * random.uniform(0.5, 1.0))

    def _read_all(self, session: Session) -> None:
        """Read everything that is mirrored anew, and ask for what changes from there."""
        with self._changed:
            parts = list(self._parts)
        found = []
        for part in parts:
            try:
                found.append((part, session.read(part.key, part.prefix)))
            except grpc.RpcError as error:
                if part is parts[0] or error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                    raise
        with self._changed:
            self._requests, self._created, self._watches = queue.SimpleQueue(), deque(), {}
            self._parts = [part for part, _ in found if part in self._parts]
            for part, (keys, revision) in found:
                self._take_all(part, keys, revision)
            for part in self._parts:
                self._watch(session, part)
            self._heard_s, self._session = time.monotonic(), session
            self._changed.notify_all()

    def _follow(self, session: Session) -> None:
        """Take in what changes, until the member falls silent, or ends watches time and again."""
        while True:
            began_s = time.monotonic()
            ended = self._follow_stream(session)
            if time.monotonic() - began_s < PROGRESS_S:
                raise ended
            # Compacted, or the token has ended: the requests of this session go on meanwhile.
            session.authenticate()
            self._read_all(session)

    def _follow_stream(self, session: Session) -> _Cancelled:
        """Take in one stream of watches; returns why it has ended."""
        requests = self._requests
        call = session.watches(requests)
        ended = threading.Event()

        def nag() -> None:
            check_at_s = time.monotonic() + CHECK_S * random.uniform(0.5, 1.0)
            while not ended.wait(PROGRESS_S):
                now_s = time.monotonic()
                if now_s - self._heard_s >= CONTACT_S:
                    call.cancel()
                    return
                requests.put(progress_request())
                if now_s >= check_at_s:
                    check_at_s = now_s + CHECK_S
                    threading.Thread(target=check, name="crux-etcd-check", daemon=True).start()

        def check() -> None:
            # gRPC raises ValueError for a channel that was closed meanwhile.
            with suppress(grpc.RpcError, ValueError):
                behind = self._behind(session)
                if behind and not ended.wait(CONTACT_S) and self._still_has(behind):
                    call.cancel()

        threading.Thread(target=nag, name="crux-etcd-progress", daemon=True).start()
        try:
            for response in call:
                self._take(session, response)
            return _Cancelled("the stream of watches has ended")
        except _Cancelled as cancelled:
            return cancelled
        finally:
            ended.set()
            requests.put(None)
            call.cancel()

    def _take(self, session: Session, response: Any) -> None:
        """Take in one answer of the stream of watches.

        Raises:
            _Cancelled: a watch has ended, told a change late, or not all of them.
        """
        with self._changed:
            part = self._watches.get(response.watch_id)
            if response.canceled and (response.created or part is not None):
                raise _Cancelled(response.cancel_reason or "the watch was cancelled")
            if response.created:
                # They come in the order in which they were asked for.
                asked = self._created.popleft()
                if asked in self._parts:
                    self._watches[response.watch_id] = asked
                else:
                    self._requests.put(cancel_request(response.watch_id))
            elif part is not None:
                self._take_events(session, part, response.events)
            self._heard_s = time.monotonic()
            self._changed.notify_all()

    def _take_events(self, session: Session, part: _Part, events: Sequence[Any]) -> None:
        last = part.revision  # the events of one revision come together
        for event in events:
            kv = event.kv
            key = session.key(kv.key)
            if key is None or kv.mod_revision <= part.read_revision:
                continue
            known = self._held.get(key)
            if known is not None and kv.mod_revision <= known.revision:
                continue
            if kv.mod_revision <= last:
                raise _Cancelled("the watch told a change late")
            if event.type == event.DELETE:
                self._forget(key)
                continue
            before = (known.created, known.version) if known is not None else (kv.mod_revision, 0)
            if (kv.create_revision, kv.version - 1) != before:
                raise _Cancelled("the watch did not tell every change")
            self._keep(key, held(key, kv))
        if events:
            part.revision = max(part.revision, events[-1].kv.mod_revision)

    def _behind(self, session: Session) -> dict[str, int | None]:
        """Returns keys that the etcd holds otherwise, with the revision that the mirror has."""
        behind: dict[str, int | None] = {}
        with self._changed:
            parts = list(self._parts)
        for part in parts:
            if self._has_changes(session, part):
                continue
            found, revision = session.read(part.key, part.prefix, keys_only=True)
            with self._changed:
                if part not in self._parts:
                    continue
                ours = {k: one.revision for k, one in self._held.items() if part.covers(k, False)}
            for key, now in found.items():
                if ours.get(key, -1) < now.revision:
                    behind[key] = ours.get(key)
            behind |= {key: at for key, at in ours.items() if key not in found and at <= revision}
        return behind

    def _still_has(self, behind: Mapping[str, int | None]) -> bool:
        """Returns True if the mirror has one of these revisions still: its watch lost something.

        A watch that is merely late has meanwhile told of them.
        """
        with self._changed:
            now = {key: self._held.get(key) for key in behind}
        return any((one.revision if one else None) == behind[key] for key, one in now.items())

    def _has_changes(self, session: Session, part: _Part) -> bool:
        """Returns True if the mirror has all changes since the last comparison, and all keys."""
        changed, count, revision = session.changed_since(part.key, part.prefix, part.compared + 1)
        with self._changed:
            # The count is of all keys in the range, changed or not.
            ours = {key: one for key, one in self._held.items() if part.covers(key, False)}
            late = (k not in ours or ours[k].revision < one.revision for k, one in changed.items())
            if count != len(ours) or any(late):
                return False
            part.compared = max(part.compared, revision)
            return True
