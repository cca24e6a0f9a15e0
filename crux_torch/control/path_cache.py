"""What probing found, kept in the shared store, so that the next process need not probe again.

Soft state: who finds no entry, or none that can be trusted, probes. An entry is not taken any more
when it is too old, when the cluster's topology changed since, when it was probed from another
address, or when somebody saw a connection take another path (:meth:`PathCache.confirm`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import Annotated
from urllib.parse import quote

import msgspec

from crux_torch.control.records import SCHEMA_VERSION, RecordError
from crux_torch.control.registry import Registry, decode
from crux_torch.control.warn_once import WarnOnce
from crux_torch.errors import StoreError
from crux_torch.fabric.path_map import Hops, PathMap, PathMapError, Transport
from crux_torch.profile.job_profile import Name

_log = logging.getLogger(__name__)

DEFAULT_TTL_S = 3600.0
#: Ports that an entry keeps of each path: more than any job opens towards one peer.
PORTS_PER_PATH = 64
#: The clocks of two hosts may differ by so much.
_CLOCK_SKEW_S = 60.0


class PathRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry.

    Attributes:
        host: that probed.
        probed_at_s: Unix time at which it ended.
        topology: fingerprint of the cluster's topology at that time; empty where it had none.
        paths: what was found.
    """

    version: int = SCHEMA_VERSION
    host: Name
    probed_at_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
    topology: Annotated[str, msgspec.Meta(max_length=64)] = ""
    paths: PathMap


class PathCache:
    """The path maps of one host in the store of its cluster.

    No method raises for what the store does or holds: a store that is lost, and an entry that
    can't be used, cost one warning and a new search.

    Args:
        registry: of the cluster.
        host: the name of this host.
        ttl_s: age at which an entry is not taken any more.
        clock: Unix time.
    """

    def __init__(
        self,
        registry: Registry,
        host: str,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.registry, self.host, self.ttl_s = registry, host, ttl_s
        self._clock = clock
        self._warn = WarnOnce(_log)

    def key(self, destination: str, protocol: Transport, port: int) -> str:
        """Where the entry of one destination port lies."""
        parts = (self.host, destination, protocol, str(port))
        return f"{self.registry.prefix}paths/{'/'.join(quote(part, safe='') for part in parts)}"

    def get(
        self, destination: str, protocol: Transport, port: int, source: str | None = None
    ) -> PathRecord | None:
        """The entry of a destination port, None where there is none that can be trusted.

        Args:
            destination: address.
            protocol: ``tcp`` or ``udp``.
            port: destination port.
            source: address of this host that connections will leave from; None: any.
        """
        key = self.key(destination, protocol, port)
        try:
            raw = self.registry.store.get(key)
            topology = "" if raw is None else self._topology()
        except StoreError as error:
            self._warn("store", f"no cache of paths: {error}")
            return None
        self._warn.forget("store")
        if raw is None:
            return None
        try:
            record = decode(PathRecord, raw, key)
            if record.version != SCHEMA_VERSION:
                raise RecordError(f"{key}: schema version {record.version}")
            found = record.paths
            if (record.host, found.destination, found.protocol, found.port) != (
                self.host,
                destination,
                protocol,
                port,
            ):
                raise RecordError(f"{key}: it speaks of {found.destination} port {found.port}")
        except RecordError as error:
            self._warn(key, f"ignoring cached paths: {error}")
            return None
        age_s = self._clock() - record.probed_at_s
        fresh = -_CLOCK_SKEW_S <= age_s <= self.ttl_s
        same = record.topology == topology and source in (None, found.source)
        return record if fresh and same else None

    def put(self, found: PathMap) -> bool:
        """Keep ``found`` for others; say if that worked.

        At most ``PORTS_PER_PATH`` ports of each path are kept; a map that knows no path of any
        port, or where something else than the port decides, is of no use to others.
        """
        trimmed = found.trimmed(PORTS_PER_PATH)
        if not trimmed.hops or not found.decides:
            return False
        try:
            trimmed.to_json()
            record = PathRecord(
                host=self.host,
                probed_at_s=self._clock(),
                topology=self._topology(),
                paths=trimmed,
            )
            key = self.key(found.destination, found.protocol, found.port)
            self.registry.store.put(key, msgspec.json.encode(record), self.ttl_s)
        except (StoreError, PathMapError) as error:
            self._warn("put", f"paths are not cached: {error}")
            return False
        self._warn.forget("put")
        return True

    def find(
        self,
        destination: str,
        protocol: Transport,
        port: int,
        search: Callable[[], PathMap],
        source: str | None = None,
    ) -> PathMap:
        """The cached map, or else what ``search`` finds, which is then cached.

        Raises:
            whatever ``search`` raises.
        """
        record = self.get(destination, protocol, port, source)
        if record is not None:
            return record.paths
        found = search()
        self.put(found)
        return found

    def confirm(
        self, destination: str, protocol: Transport, port: int, source_port: int, hops: Hops
    ) -> bool | None:
        """Compare the way that a live connection was seen to take with the entry.

        Where they disagree the network has changed, and the entry is deleted.

        Args:
            destination: as in :meth:`get`.
            protocol: as in :meth:`get`.
            port: as in :meth:`get`.
            source_port: of the connection.
            hops: who answered for it.

        Returns:
            Whether they agree; None where the entry says nothing of this port.
        """
        record = self.get(destination, protocol, port)
        cached = dict(record.paths.hops.get(source_port, ())) if record is not None else {}
        pairs = [(cached.get(ttl), seen) for ttl, seen in hops]
        both = [(was, seen) for was, seen in pairs if was is not None and seen is not None]
        if not both:
            return None
        if all(was == seen for was, seen in both):
            return True
        self.forget(destination, protocol, port)
        return False

    def forget(self, destination: str, protocol: Transport, port: int) -> None:
        """Delete an entry; the next search is a real one."""
        try:
            self.registry.store.delete(self.key(destination, protocol, port))
        except StoreError as error:
            self._warn("forget", f"cached paths are not deleted: {error}")

    def _topology(self) -> str:
        raw = self.registry.topology()
        return "" if raw is None else hashlib.sha256(raw).hexdigest()[:32]
