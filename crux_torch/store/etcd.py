"""An etcd v3 as the contents of a store: answers the requests of one client from it.

Only the store process imports this: gRPC and protobuf don't belong into a training process.
Reads come from a mirror of the keys and prefixes that the client asks for, which watches keep up to
date. A watch begins with a full read, so what was compacted or lost in between is made up for. What
a watch leaves out is noticed by the versions of the keys: with the next change of one, or when all
are compared, and then everything is read anew. If the member does not tell for a while how far it
is, the mirror counts as old, and every request is refused until another member answers.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import grpc
from pyetcd import etcdrpc

from crux_torch.errors import SettingsError
from crux_torch.store.etcd_address import EtcdAddress
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
from crux_torch.store.journal import Journal
from crux_torch.store.shared_store import MAX_KEY_BYTES, MAX_VALUE_BYTES, is_kept

#: Seconds that one request to an etcd may take, and all of one answer.
CALL_S = 1.0
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
#: Keys of one page of a full read: their values fit into MAX_MESSAGE_BYTES.
PAGE_KEYS = 32
MAX_MESSAGE_BYTES = (PAGE_KEYS + 16) * MAX_VALUE_BYTES
#: Revision of etcd's compare: the number of a key that is absent.
ABSENT = 0


class _Session:
    """Calls to one member."""

    def __init__(self, address: EtcdAddress, endpoint: str) -> None:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.enable_http_proxy", 0),
            # A connection of its own, not the one that failed a session before.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if address.ca:
            read = address.read
            trusted = grpc.ssl_channel_credentials(
                read(address.ca), read(address.key), read(address.cert)
            )
            self.channel = grpc.secure_channel(endpoint, trusted, options=options)
        else:
            self.channel = grpc.insecure_channel(endpoint, options=options)
        self.metadata: tuple[tuple[str, str], ...] = ()
        self.endpoint = endpoint
        self.kv = etcdrpc.KVStub(self.channel)
        self.lease = etcdrpc.LeaseStub(self.channel)
        self.watch = etcdrpc.WatchStub(self.channel)

    def authenticate(self, user: str, password: str) -> None:
        stub = etcdrpc.AuthStub(self.channel)
        request = etcdrpc.AuthenticateRequest(name=user, password=password)
        self.metadata = (("token", stub.Authenticate(request, timeout=CALL_S).token),)


class _Refusal(Exception):
    """Why a request was not carried out."""


class _Cancelled(Exception):
    """Why the member ended a watch."""


class _Held(NamedTuple):
    """What etcd says of a key: its lease, and which of its values it has."""

    lease: int
    created: int
    version: int
    revision: int


class _Part:
    """What is mirrored by one watch: a key, or all keys that begin with it."""

    def __init__(self, key: str, *, prefix: bool) -> None:
        self.key, self.prefix = key, prefix
        #: Of the full read, up to which the mirror has it, and of the last comparison.
        self.read_revision = self.revision = self.compared = 0
        self.used_s = time.monotonic()

    def covers(self, key: str, prefix: bool) -> bool:
        """Whether it has all that a look at ``key`` shows."""
        if self.prefix:
            return key.startswith(self.key)
        return key == self.key and not prefix


class EtcdContents:
    """The keys of an etcd under the address's prefix.

    Call :meth:`answer` from one thread. :meth:`start` begins to keep the mirror.

    Raises:
        SettingsError: a file that the address names can't be used.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._prefix = address.prefix.encode()
        self._user = self._password = ""
        for file in (address.ca, address.cert, address.key):
            address.read(file)
        credentials = address.read(address.auth)
        if credentials is not None:
            self._user, colon, self._password = credentials.decode().strip().partition(":")
            if not colon:
                raise SettingsError(f"{address.auth!r}: expected USER:PASSWORD")
        self._changed = threading.Condition()
        self._mirror = Journal()
        #: Of each key of the etcd in what is mirrored; some have a value that does not count.
        self._held: dict[str, _Held] = {}
        #: What is mirrored, no key twice. The first is a key that nobody writes: without a watch,
        #: an etcd tells no progress.
        self._parts = [_Part("", prefix=False)]
        #: What is being read, and why reading it failed.
        self._reading: _Part | None = None
        self._failed: tuple[str, bool, str] | None = None
        #: Of the stream of watches: what is to be sent, what waits for its watch, and the watches.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._created: deque[_Part] = deque()
        self._watches: dict[int, _Part] = {}
        self._heard_s = float("-inf")
        self._reason = "not connected yet"
        self._session: _Session | None = None
        self._leases: dict[str, tuple[int, float]] = {}

    def start(self) -> None:
        """Begin to mirror, in a thread that runs until the process ends."""
        threading.Thread(target=self._keep_mirror, name="crux-etcd", daemon=True).start()

    def answer(self, request: Request) -> Answer:
        """Carry out ``request``; raises nothing for what etcd says or does not say."""
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
            try:
                return self._write(session, request, until_s)
            except grpc.RpcError as error:
                if not self._renewed(session, error):
                    raise
            return self._write(session, request, until_s)
        except grpc.RpcError as error:
            return Refused(_told(error))
        except _Refusal as refusal:
            return Refused(str(refusal)[:1000])

    def _in_contact(self, until_s: float) -> _Session:
        """The session; waits for the first one for a moment."""
        with self._changed:
            while True:
                session = self._session
                if session is not None and time.monotonic() - self._heard_s < CONTACT_S:
                    return session
                ever = self._heard_s > float("-inf")
                if ever or not self._changed.wait(max(0.0, until_s - time.monotonic())):
                    raise _Refusal(f"no contact: {self._reason}")

    def _renewed(self, session: _Session, error: grpc.RpcError) -> bool:
        """Whether ``error`` only told that the token has ended, and there is another one now."""
        if not self._user or not _token_ended(error):
            return False
        # It ends with its time, and some kinds with every change of a role.
        session.authenticate(self._user, self._password)
        return True

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
                    # What it has again must not be older than what was seen: that ends first.
                    for one in [
                        one for one in self._parts[1:] if self._reading.covers(one.key, one.prefix)
                    ]:
                        self._end(one)
                    args = self._session, self._reading
                    threading.Thread(
                        target=self._add, args=args, name="crux-etcd-read", daemon=True
                    ).start()
                if not self._changed.wait(max(0.0, until_s - now_s)):
                    raise _Refusal("no contact: what was asked for is still being read")

    def _add(self, session: _Session, part: _Part) -> None:
        """Begin to mirror ``part``."""
        failed = ""
        try:
            try:
                found = self._read(session, part)
            except grpc.RpcError as error:
                if not self._renewed(session, error):
                    raise
                found = self._read(session, part)
        except grpc.RpcError as error:
            failed = _told(error)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        with self._changed:
            self._reading = None
            if failed:
                self._failed = part.key, part.prefix, failed
            elif self._session is session:
                self._take_all(part, *found)
                self._parts.append(part)
                self._watch(part)
            self._changed.notify_all()

    def _end(self, part: _Part) -> None:
        """Mirror ``part`` no longer."""
        self._parts.remove(part)
        for number in [number for number, one in self._watches.items() if one is part]:
            del self._watches[number]
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        cancel = etcdrpc.WatchCancelRequest(watch_id=number)
        self._requests.put(etcdrpc.WatchRequest(cancel_request=cancel))

    def _drop_idle(self, now_s: float) -> None:
        for part in [part for part in self._parts[1:] if now_s - part.used_s > IDLE_S]:
            self._end(part)
            for key in [key for key in self._held if part.covers(key, False)]:
                self._forget(key)

    def _watch(self, part: _Part) -> None:
        """Ask for what changes in ``part`` from now on."""
        # From the revision that was read, though its events are known: newer etcds (3.5.30,
        # but not 3.5.16) do not tell how far a watch is that begins later, until somebody writes.
        begin, end = self._range(part)
        create = etcdrpc.WatchCreateRequest(key=begin, range_end=end, start_revision=part.revision)
        self._created.append(part)
        self._requests.put(etcdrpc.WatchRequest(create_request=create))

    def _range(self, part: _Part) -> tuple[bytes, bytes]:
        """etcd's name of ``part``: its first key, and the end of its range if it has one."""
        begin = self._prefix + part.key.encode()
        return begin or b"\0", _end(begin) if part.prefix else b""

    def _write(self, session: _Session, request: Put | Swap | Delete, until_s: float) -> Answer:
        key, metadata = request.key, session.metadata
        name = self._prefix + key.encode()
        if isinstance(request, Delete):
            gone = session.kv.DeleteRange(
                etcdrpc.DeleteRangeRequest(key=name), timeout=CALL_S, metadata=metadata
            )
            self._leases.pop(key, None)
            if gone.deleted:
                self._await(key, gone.header.revision, until_s)
            return Done(int(gone.deleted > 0))
        compare = []
        if isinstance(request, Swap):
            held = session.kv.Range(
                etcdrpc.RangeRequest(key=name), timeout=CALL_S, metadata=metadata
            ).kvs
            if (held[0].value if held else None) != request.expected:
                if held:
                    self._await(key, held[0].mod_revision, until_s)
                return Done(0)
            compare.append(
                etcdrpc.Compare(
                    key=name,
                    target=etcdrpc.Compare.MOD,
                    result=etcdrpc.Compare.EQUAL,
                    mod_revision=held[0].mod_revision if held else ABSENT,
                )
            )
        lease, kept = self._lease(session, key, request.lease_s)
        with self._changed:
            same = kept and self._mirror.get(key) == request.value
            same = same and self._held[key].lease == lease
        if same and (isinstance(request, Put) or is_kept(key)):
            return Done(1)
        put = etcdrpc.PutRequest(key=name, value=request.value, lease=lease)
        done = session.kv.Txn(
            etcdrpc.TxnRequest(compare=compare, success=[etcdrpc.RequestOp(request_put=put)]),
            timeout=CALL_S,
            metadata=metadata,
        )
        if done.succeeded:
            self._await(key, done.header.revision, until_s)
        return Done(int(done.succeeded))

    def _lease(self, session: _Session, key: str, lease_s: float) -> tuple[int, bool]:
        """A lease for ``key`` from now on (0: none), and whether it is the one that it had."""
        if is_kept(key):
            return 0, True
        metadata = session.metadata
        known = self._leases.get(key)
        if known is not None and known[1] == lease_s:
            ask = etcdrpc.LeaseKeepAliveRequest(ID=known[0])
            replies = session.lease.LeaseKeepAlive(iter([ask]), timeout=CALL_S, metadata=metadata)
            if next(iter(replies)).TTL > 0:
                return known[0], True
        grant = etcdrpc.LeaseGrantRequest(TTL=math.ceil(lease_s))
        lease: int = session.lease.LeaseGrant(grant, timeout=CALL_S, metadata=metadata).ID
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
                session = _Session(self._address, endpoint)
                if self._user:
                    session.authenticate(self._user, self._password)
                self._read_all(session)
                self._follow(session)
            except grpc.RpcError as error:
                self._reason = f"{endpoint}: {_told(error)}"
            except Exception as error:
                self._reason = f"{endpoint}: {type(error).__name__}: {error}"
            finally:
                self._session = None
                if session is not None:
                    session.channel.close()
            failures = 0 if time.monotonic() - began_s > 2 * CONTACT_S else failures + 1
            # Every member has a first try at once.
            if failures >= len(endpoints):
                pause_s = FIRST_BACKOFF_S * 2.0 ** min(failures - len(endpoints), 30)
                time.sleep(min(MAX_BACKOFF_S, pause_s) * random.uniform(0.5, 1.0))

    def _read(
        self, session: _Session, part: _Part, *, keys_only: bool = False
    ) -> tuple[dict[str, tuple[bytes | None, _Held]], int]:
        """What the etcd holds of ``part``, and the revision of that."""
        seen: dict[str, tuple[bytes | None, _Held]] = {}
        begin, end = self._range(part)
        revision = 0
        while True:
            request = etcdrpc.RangeRequest(
                key=begin, range_end=end, limit=PAGE_KEYS, revision=revision, keys_only=keys_only
            )
            page = session.kv.Range(request, timeout=5 * CALL_S, metadata=session.metadata)
            revision = revision or page.header.revision
            for kv in page.kvs:
                key = self._key(kv)
                if key is not None:
                    seen[key] = _counted(key, kv), _held(kv)
            if not page.more:
                return seen, revision
            begin = page.kvs[-1].key + b"\0"

    def _take_all(
        self, part: _Part, seen: dict[str, tuple[bytes | None, _Held]], revision: int
    ) -> None:
        """Make the mirror of ``part`` what was read."""
        for key in [key for key in self._held if part.covers(key, False) and key not in seen]:
            self._forget(key)
        for key, (value, held) in seen.items():
            self._keep(key, value, held)
        part.read_revision = part.revision = part.compared = revision

    def _keep(self, key: str, value: bytes | None, held: _Held) -> None:
        if value is None:
            self._mirror.delete(key)
        elif self._mirror.get(key) != value:
            self._mirror.set(key, value)
        self._held[key] = held

    def _forget(self, key: str) -> None:
        self._mirror.delete(key)
        self._held.pop(key, None)

    def _read_all(self, session: _Session) -> None:
        """Read everything that is mirrored anew, and ask for what changes from there."""
        with self._changed:
            parts = list(self._parts)
        found = []
        for part in parts:
            try:
                found.append((part, self._read(session, part)))
            except grpc.RpcError as error:
                if part is parts[0] or error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                    raise
        with self._changed:
            self._requests, self._created, self._watches = queue.SimpleQueue(), deque(), {}
            self._parts = [part for part, _ in found if part in self._parts]
            for part, (seen, revision) in found:
                self._take_all(part, seen, revision)
            for part in self._parts:
                self._watch(part)
            self._heard_s, self._session = time.monotonic(), session
            self._changed.notify_all()

    def _follow(self, session: _Session) -> None:
        """Take in what changes, until the member falls silent, or ends watches time and again."""
        while True:
            began_s = time.monotonic()
            ended = self._follow_stream(session)
            if time.monotonic() - began_s < PROGRESS_S:
                raise ended
            # Compacted, or the token has ended: the requests of this session go on meanwhile.
            if self._user:
                session.authenticate(self._user, self._password)
            self._read_all(session)

    def _follow_stream(self, session: _Session) -> _Cancelled:
        """Why the stream of watches has ended."""
        requests = self._requests
        call = session.watch.Watch(_until_none(requests), metadata=session.metadata)
        ended = threading.Event()

        def nag() -> None:
            ask = etcdrpc.WatchRequest(progress_request=etcdrpc.WatchProgressRequest())
            check_at_s = time.monotonic() + CHECK_S * random.uniform(0.5, 1.0)
            while not ended.wait(PROGRESS_S):
                now_s = time.monotonic()
                if now_s - self._heard_s >= CONTACT_S:
                    call.cancel()
                    return
                requests.put(ask)
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
                self._take(response)
            return _Cancelled("the stream of watches has ended")
        except _Cancelled as cancelled:
            return cancelled
        finally:
            ended.set()
            requests.put(None)
            call.cancel()

    def _take(self, response: Any) -> None:
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
                    self._cancel(response.watch_id)
            elif part is not None:
                self._take_events(part, response.events)
            self._heard_s = time.monotonic()
            self._changed.notify_all()

    def _take_events(self, part: _Part, events: Sequence[Any]) -> None:
        """Take in one answer of a watch.

        Raises:
            _Cancelled: the watch told a change late, or not all of them.
        """
        last = part.revision  # the events of one revision come together
        for event in events:
            kv = event.kv
            key = self._key(kv)
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
            self._keep(key, _counted(key, kv), _held(kv))
        if events:
            part.revision = max(part.revision, events[-1].kv.mod_revision)

    def _behind(self, session: _Session) -> dict[str, int | None]:
        """Keys that the etcd holds otherwise than the mirror, and the revision of the mirror's."""
        behind: dict[str, int | None] = {}
        with self._changed:
            parts = list(self._parts)
        for part in parts:
            if self._has_changes(session, part):
                continue
            seen, revision = self._read(session, part, keys_only=True)
            with self._changed:
                if part not in self._parts:
                    continue
                held = {key: one for key, one in self._held.items() if part.covers(key, False)}
            for key, (_, now) in seen.items():
                if key not in held or held[key].revision < now.revision:
                    behind[key] = held[key].revision if key in held else None
            for key, one in held.items():
                if key not in seen and one.revision <= revision:
                    behind[key] = one.revision
        return behind

    def _still_has(self, behind: Mapping[str, int | None]) -> bool:
        """Whether the mirror has one of these at that revision still: its watch has lost something.

        A watch that is merely late has meanwhile told of them.
        """
        with self._changed:
            held = {key: self._held.get(key) for key in behind}
        return any(
            (one.revision if one is not None else None) == behind[key] for key, one in held.items()
        )

    def _has_changes(self, session: _Session, part: _Part) -> bool:
        """Whether the mirror has what changed since the last comparison, and as many keys.

        Its answer is as long as what changed, so it costs little where little changes.
        """
        begin, end = self._range(part)
        request = etcdrpc.RangeRequest(
            key=begin, range_end=end, min_mod_revision=part.compared + 1, keys_only=True
        )
        answer = session.kv.Range(request, timeout=5 * CALL_S, metadata=session.metadata)
        with self._changed:
            # The count is of all keys in the range, changed or not.
            held = sum(part.covers(key, False) for key in self._held)
            for kv in answer.kvs:
                known = self._held.get(self._key(kv) or "")
                if known is None or known.revision < kv.mod_revision:
                    return False
            if answer.count != held:
                return False
            part.compared = max(part.compared, answer.header.revision)
            return True

    def _key(self, kv: Any) -> str | None:
        """The key of ``kv`` without the prefix; None for what no client of ours wrote."""
        raw = kv.key[len(self._prefix) :]
        if len(raw) > MAX_KEY_BYTES:
            return None
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            return None


def _held(kv: Any) -> _Held:
    return _Held(kv.lease, kv.create_revision, kv.version, kv.mod_revision)


def _counted(key: str, kv: Any) -> bytes | None:
    """The value of ``kv``; None if no client of ours wrote it.

    One that does not end by itself could hold a name or the slot for good.
    """
    counts = len(kv.value) <= MAX_VALUE_BYTES and (kv.lease or is_kept(key))
    return bytes(kv.value) if counts else None


def _end(prefix: bytes) -> bytes:
    """The end of etcd's range of all keys that begin with ``prefix``."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def _until_none(requests: queue.SimpleQueue[Any]) -> Iterator[Any]:
    return iter(requests.get, None)


def _token_ended(error: grpc.RpcError) -> bool:
    """Whether etcd refused a request for its token alone, so that another one helps."""
    told = (error.details() or "").lower()
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or any(
        words in told
        for words in ("invalid auth token", "revision of auth store is old", "revision in header")
    )


def _told(error: grpc.RpcError) -> str:
    code, details = error.code(), error.details() or ""
    return f"{code.name.lower()}: {details}"[:500]
