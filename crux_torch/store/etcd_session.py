"""Calls to one member of an etcd v3, over gRPC.

Only the store process imports this: gRPC and protobuf don't belong into a training process.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import grpc
from pyetcd import etcdrpc

from crux_torch.errors import SettingsError
from crux_torch.store import MAX_KEY_BYTES, MAX_VALUE_BYTES, is_kept
from crux_torch.store.endpoint import EtcdAddress

T = TypeVar("T")

#: Seconds that one request to an etcd may take.
CALL_S = 1.0
#: Keys of one page of a full read: their values fit into MAX_MESSAGE_BYTES.
PAGE_KEYS = 32
MAX_MESSAGE_BYTES = (PAGE_KEYS + 16) * MAX_VALUE_BYTES
#: Revision of an absent key in etcd's comparisons.
ABSENT = 0


class Held(NamedTuple):
    """A key of an etcd.

    Attributes:
        value: its value; None if it was not read, or no client of ours wrote it.
        lease: number of its lease; 0 if it has none.
        created, version, revision: etcd's numbers of the value.
    """

    value: bytes | None
    lease: int
    created: int
    version: int
    revision: int


class Session:
    """Calls to one member, which raise ``grpc.RpcError``.

    Thread safety: any thread may call any method.

    Raises:
        SettingsError: a file that the address names can't be used.
    """

    def __init__(self, address: EtcdAddress, endpoint: str) -> None:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.enable_http_proxy", 0),
            # A connection of its own, not the one that failed a session before.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if address.ca:
            files = (address.read(name) for name in (address.ca, address.key, address.cert))
            trusted = grpc.ssl_channel_credentials(*files)
            self._channel = grpc.secure_channel(endpoint, trusted, options=options)
        else:
            self._channel = grpc.insecure_channel(endpoint, options=options)
        self._prefix = address.prefix.encode()
        self._login = login_of(address)
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._kv = etcdrpc.KVStub(self._channel)
        self._lease = etcdrpc.LeaseStub(self._channel)

    def authenticate(self) -> None:
        """Get a token, if the address names a user."""
        if self._login is not None:
            name, password = self._login
            request = etcdrpc.AuthenticateRequest(name=name, password=password)
            answer = etcdrpc.AuthStub(self._channel).Authenticate(request, timeout=CALL_S)
            self._metadata = (("token", answer.token),)

    def with_token(self, call: Callable[[], T]) -> T:
        """Returns what ``call`` returns; calls it again with a new token if the old one has ended.

        A token ends with its time, and some kinds with every change of a role.
        """
        try:
            return call()
        except grpc.RpcError as error:
            if self._login is None or not _token_ended(error):
                raise
        self.authenticate()
        return call()

    def read(
        self, key: str, prefix: bool, *, keys_only: bool = False
    ) -> tuple[dict[str, Held], int]:
        """Returns all of a key or prefix, and the revision of that."""
        found: dict[str, Held] = {}
        begin, end = self._range(key, prefix)
        revision = 0
        while True:
            page = self._get(
                key=begin, range_end=end, limit=PAGE_KEYS, revision=revision, keys_only=keys_only
            )
            revision = revision or page.header.revision
            found |= self._held(page.kvs)
            if not page.more:
                return found, revision
            begin = page.kvs[-1].key + b"\0"

    def changed_since(
        self, key: str, prefix: bool, revision: int
    ) -> tuple[dict[str, Held], int, int]:
        """Returns keys that changed from ``revision`` on, the count of all keys, and the revision.

        The answer is as long as what changed, so it costs little if little changes.
        """
        begin, end = self._range(key, prefix)
        found = self._get(key=begin, range_end=end, min_mod_revision=revision, keys_only=True)
        return self._held(found.kvs), found.count, found.header.revision

    def get(self, key: str) -> tuple[bytes | None, int]:
        """Returns the value of ``key`` (None: absent) and its revision."""
        request = etcdrpc.RangeRequest(key=self._name(key))
        found = self._kv.Range(request, timeout=CALL_S, metadata=self._metadata).kvs
        return (found[0].value, found[0].mod_revision) if found else (None, ABSENT)

    def put(
        self, key: str, value: bytes, lease: int, expected_revision: int | None
    ) -> tuple[bool, int]:
        """Write ``key``, if it is at ``expected_revision`` unless that is None.

        Returns:
            True if it was written, and the revision.
        """
        compare = []
        if expected_revision is not None:
            compare.append(
                etcdrpc.Compare(
                    key=self._name(key),
                    target=etcdrpc.Compare.MOD,
                    result=etcdrpc.Compare.EQUAL,
                    mod_revision=expected_revision,
                )
            )
        put = etcdrpc.PutRequest(key=self._name(key), value=value, lease=lease)
        request = etcdrpc.TxnRequest(compare=compare, success=[etcdrpc.RequestOp(request_put=put)])
        done = self._kv.Txn(request, timeout=CALL_S, metadata=self._metadata)
        return done.succeeded, done.header.revision

    def delete(self, key: str) -> tuple[bool, int]:
        """Delete ``key``; returns True if it was there, and the revision."""
        request = etcdrpc.DeleteRangeRequest(key=self._name(key))
        done = self._kv.DeleteRange(request, timeout=CALL_S, metadata=self._metadata)
        return done.deleted > 0, done.header.revision

    def grant_lease(self, lease_s: float) -> int:
        """Returns the number of a new lease."""
        request = etcdrpc.LeaseGrantRequest(TTL=math.ceil(lease_s))
        lease: int = self._lease.LeaseGrant(request, timeout=CALL_S, metadata=self._metadata).ID
        return lease

    def renew_lease(self, lease: int) -> bool:
        """Returns True if the lease had not ended."""
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease)
        replies = self._lease.LeaseKeepAlive(
            iter([request]), timeout=CALL_S, metadata=self._metadata
        )
        return bool(next(iter(replies)).TTL > 0)

    def watches(self, requests: queue.SimpleQueue[Any]) -> Any:
        """Returns the stream of watches that ``requests`` asks for, up to a None."""
        stub = etcdrpc.WatchStub(self._channel)
        return stub.Watch(iter(requests.get, None), metadata=self._metadata)

    def watch_request(self, key: str, prefix: bool, revision: int) -> Any:
        """Returns the request for a watch of a key or prefix from ``revision`` on."""
        begin, end = self._range(key, prefix)
        create = etcdrpc.WatchCreateRequest(key=begin, range_end=end, start_revision=revision)
        return etcdrpc.WatchRequest(create_request=create)

    def key(self, name: bytes) -> str | None:
        """Returns the key of etcd's ``name``; None if no client of ours wrote it."""
        raw = name[len(self._prefix) :]
        if len(raw) > MAX_KEY_BYTES:
            return None
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            return None

    def close(self) -> None:
        """Close the channel; later calls raise ValueError."""
        self._channel.close()

    def _get(self, **fields: Any) -> Any:
        request = etcdrpc.RangeRequest(**fields)
        return self._kv.Range(request, timeout=5 * CALL_S, metadata=self._metadata)

    def _held(self, kvs: Any) -> dict[str, Held]:
        keys = ((self.key(kv.key), kv) for kv in kvs)
        return {key: held(key, kv) for key, kv in keys if key is not None}

    def _name(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _range(self, key: str, prefix: bool) -> tuple[bytes, bytes]:
        """Returns etcd's range: the first key, and the end if it is a prefix."""
        begin = self._name(key)
        stem = begin.rstrip(b"\xff")
        end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"
        return begin or b"\0", end if prefix else b""


def login_of(address: EtcdAddress) -> tuple[str, str] | None:
    """Returns user and password in the address's file, or None; raises SettingsError."""
    credentials = address.read(address.auth)
    if credentials is None:
        return None
    user, colon, password = credentials.decode().strip().partition(":")
    if not colon:
        raise SettingsError(f"{address.auth!r}: expected USER:PASSWORD")
    return user, password


def held(key: str, kv: Any) -> Held:
    """Returns etcd's ``kv``.

    A value that does not end by itself could hold a name or the slot for good: it does not count.
    """
    counts = len(kv.value) <= MAX_VALUE_BYTES and (kv.lease or is_kept(key))
    value = bytes(kv.value) if counts else None
    return Held(value, kv.lease, kv.create_revision, kv.version, kv.mod_revision)


def cancel_request(watch: int) -> Any:
    """Returns the request that ends a watch."""
    cancel = etcdrpc.WatchCancelRequest(watch_id=watch)
    return etcdrpc.WatchRequest(cancel_request=cancel)


def progress_request() -> Any:
    """Returns the request to tell how far the watches are."""
    return etcdrpc.WatchRequest(progress_request=etcdrpc.WatchProgressRequest())


def reason_of(error: grpc.RpcError) -> str:
    """Returns etcd's code and reason."""
    return f"{error.code().name.lower()}: {error.details() or ''}"[:500]


def _token_ended(error: grpc.RpcError) -> bool:
    """Returns True if etcd refused a request for its token alone, so that another one helps."""
    details = (error.details() or "").lower()
    ended = ("invalid auth token", "revision of auth store is old", "revision in header")
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or any(e in details for e in ended)
