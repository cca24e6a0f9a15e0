"""An etcd v3 as the contents of a store: answers the requests of one client from it.

Only the store process imports this: gRPC and protobuf don't belong into a training process.
Reads come from a mirror that watches keep up to date. They begin with a full read, so what was
compacted or lost in between is made up for. If the member does not tell for a while how far they
are, the mirror counts as old, and every request is refused until another member answers.

What many write and few read lies apart, and is not mirrored: with a thousand clients, a thousand
writes would be a million events. It is read from the etcd when it is asked for.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

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
    Put,
    Read,
    Refused,
    Request,
    Swap,
)
from crux_torch.store.journal import Journal
from crux_torch.store.shared_store import APART, AUDIT, MAX_KEY_BYTES, MAX_VALUE_BYTES, is_kept

#: Seconds that one request to an etcd may take, and all of one answer.
CALL_S = 1.0
ANSWER_S = 1.5
#: Seconds between two questions how far the watch is, and without an answer until it counts as cut.
PROGRESS_S = 0.5
CONTACT_S = 2.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
#: Keys of one page of a full read: their values fit into MAX_MESSAGE_BYTES.
PAGE_KEYS = 32
MAX_MESSAGE_BYTES = (PAGE_KEYS + 16) * MAX_VALUE_BYTES
#: The keys that are not mirrored: from the first one on, up to the second.
APART_BEGIN, APART_END = AUDIT, APART[:-1] + chr(ord(APART[-1]) + 1)
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
        #: The lease of each key in the mirror.
        self._leased: dict[str, int] = {}
        #: How far the watch of the keys before those that lie apart is, and the one of those after.
        self._revisions = [0, 0]
        #: The next page of a long answer about keys that lie apart, and what it is read from.
        self._page: tuple[Read, Journal] | None = None
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
            if isinstance(request, Read) and not _lies_apart(request.key, request.prefix):
                with self._changed:
                    found = self._mirror.changes(
                        request.key, request.prefix, request.since, PAGE_BYTES
                    )
                return Changes(*found)
            if isinstance(request, Count):
                raise _Refusal("an etcd does not tell its clients")
            if isinstance(request, Clock):
                raise _Refusal("an etcd has no clock to tell: time shifts need a store tcp://...")
            try:
                return self._carry_out(session, request, until_s)
            except grpc.RpcError as error:
                if not self._user or not _token_ended(error):
                    raise
            # A token ends with its time, and some kinds with every change of a role.
            session.authenticate(self._user, self._password)
            return self._carry_out(session, request, until_s)
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

    def _carry_out(
        self, session: _Session, request: Read | Put | Swap | Delete, until_s: float
    ) -> Answer:
        if isinstance(request, Read):
            return self._read_apart(session, request)
        return self._write(session, request, until_s)

    def _read_apart(self, session: _Session, request: Read) -> Changes:
        """All that ``request`` is about, as the etcd has it now; of a long answer, a page."""
        page, self._page = self._page, None
        goes_on = page is not None and page[0] == request
        if page is not None and goes_on:
            journal = page[1]
        else:
            journal = Journal()
            name = self._prefix + request.key.encode()
            end = _end(name) if request.prefix else name + b"\0"
            for key, (value, _) in self._range(session, name, end, 0)[0].items():
                journal.set(key, value)
        since = request.since if goes_on else 0
        revision, values, more, _ = journal.changes(request.key, request.prefix, since, PAGE_BYTES)
        if more:
            self._page = Read(request.key, request.prefix, revision), journal
        return Changes(revision, values, more, not goes_on)

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
            same = same and self._leased.get(key) == lease
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
        """Wait until the mirror has this revision of ``key``, so that a writer reads its write."""
        if _lies_apart(key):
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._revisions[key >= APART_END] >= revision,
                max(0.0, until_s - time.monotonic()),
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

    def _read_all(self, session: _Session) -> None:
        """Make the mirror what the etcd holds at one revision."""
        seen: dict[str, tuple[bytes, int]] = {}
        revision = 0
        for begin, end in self._mirrored():
            found, revision = self._range(session, begin, end, revision)
            seen |= found
        with self._changed:
            for key in [key for key in self._mirror if key not in seen]:
                self._mirror.delete(key)
            for key, (value, _) in seen.items():
                if self._mirror.get(key) != value:
                    self._mirror.set(key, value)
            self._leased = {key: lease for key, (_, lease) in seen.items()}
            self._revisions = [revision, revision]
            self._heard_s, self._session = time.monotonic(), session
            self._changed.notify_all()

    def _mirrored(self) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
        """The ranges of etcd's keys before those that lie apart, and after."""
        begin, end = (self._prefix + key.encode() for key in (APART_BEGIN, APART_END))
        return (self._prefix or b"\0", begin), (end, _end(self._prefix))

    def _range(
        self, session: _Session, begin: bytes, end: bytes, revision: int
    ) -> tuple[dict[str, tuple[bytes, int]], int]:
        """Value and lease of each key in a range at ``revision`` (0: the last), and which it is."""
        seen: dict[str, tuple[bytes, int]] = {}
        while True:
            request = etcdrpc.RangeRequest(
                key=begin, range_end=end, limit=PAGE_KEYS, revision=revision
            )
            page = session.kv.Range(request, timeout=5 * CALL_S, metadata=session.metadata)
            revision = revision or page.header.revision
            for kv in page.kvs:
                key = self._key(kv)
                if key is not None and _counts(key, kv):
                    seen[key] = kv.value, kv.lease
            if not page.more:
                return seen, revision
            begin = page.kvs[-1].key + b"\0"

    def _follow(self, session: _Session) -> None:
        """Take in what changes, until the watch ends or falls silent."""
        # From the revision that was read, though its events are known: newer etcds (3.5.30,
        # but not 3.5.16) do not tell how far a watch is that begins later, until somebody writes.
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for (begin, end), revision in zip(self._mirrored(), self._revisions, strict=True):
            create = etcdrpc.WatchCreateRequest(key=begin, range_end=end, start_revision=revision)
            requests.put(etcdrpc.WatchRequest(create_request=create))
        call = session.watch.Watch(_until_none(requests), metadata=session.metadata)
        ended = threading.Event()

        def nag() -> None:
            ask = etcdrpc.WatchRequest(progress_request=etcdrpc.WatchProgressRequest())
            while not ended.wait(PROGRESS_S):
                if time.monotonic() - self._heard_s >= CONTACT_S:
                    call.cancel()
                    return
                requests.put(ask)

        threading.Thread(target=nag, name="crux-etcd-progress", daemon=True).start()
        try:
            for response in call:
                if response.canceled:
                    # Compacted, or no permission: a full read tells which.
                    raise ConnectionError(response.cancel_reason or "the watch was cancelled")
                self._take(response)
        finally:
            ended.set()
            requests.put(None)
            call.cancel()

    def _take(self, response: Any) -> None:
        with self._changed:
            for event in response.events:
                kv = event.kv
                key = self._key(kv)
                # An event that comes again, or late, must not take the mirror back. All of one
                # revision and one watch come together.
                if key is None or kv.mod_revision <= self._revisions[key >= APART_END]:
                    continue
                if event.type == event.DELETE or not _counts(key, kv):
                    self._mirror.delete(key)
                    self._leased.pop(key, None)
                else:
                    if self._mirror.get(key) != kv.value:
                        self._mirror.set(key, kv.value)
                    self._leased[key] = kv.lease
            if response.events:
                last = response.events[-1].kv
                after = last.key >= self._prefix + APART_END.encode()
                self._revisions[after] = max(self._revisions[after], last.mod_revision)
            self._heard_s = time.monotonic()
            self._changed.notify_all()

    def _key(self, kv: Any) -> str | None:
        """The key of ``kv`` without the prefix; None for what no client of ours wrote."""
        raw = kv.key[len(self._prefix) :]
        if len(raw) > MAX_KEY_BYTES or len(kv.value) > MAX_VALUE_BYTES:
            return None
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            return None


def _lies_apart(key: str, prefix: bool = False) -> bool:
    """Whether ``key`` is not mirrored, or a key that begins with it."""
    return key < APART_END and (key >= APART_BEGIN or (prefix and APART_BEGIN.startswith(key)))


def _counts(key: str, kv: Any) -> bool:
    """Whether ``kv`` ends by itself: otherwise it could hold a name or the slot for good."""
    return bool(kv.lease) or is_kept(key)


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
