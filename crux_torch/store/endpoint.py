"""Where a store is: the setting ``CRUX_STORE``, and the client that it asks for."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from crux_torch.errors import Cause, SettingsError, StoreError
from crux_torch.store.client import Connector, StoreClient, TcpConnector
from crux_torch.store.etcd_address import parse_etcd
from crux_torch.store.frame_socket import HTTP
from crux_torch.store.process_connector import ProcessConnector
from crux_torch.store.secret import read_secret
from crux_torch.store.shared_store import MAX_STORE_BYTES
from crux_torch.store.unix_place import UNIX, UnixConnector, parse_unix

_log = logging.getLogger(__name__)

ETCD = "etcd://"
#: The load tables of a host's own links: beside its user's store.
OWN_TABLES = f"{UNIX}tables"
#: Seconds that a call may take where an etcd is behind it: more than the store process waits.
ETCD_CALL_S = 2.0
#: Seconds for which an HTTP server is asked, twice.
HTTP_S = 1.0
#: Seconds for which a command waits for its store process to load, on a busy machine.
LOAD_S = 60.0


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``; raises SettingsError for another form."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or not port or parts.scheme != "tcp":
        raise SettingsError(f"store {endpoint!r}: expected tcp://HOST:PORT, unix: or none")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise SettingsError(f"store {endpoint!r}: expected nothing after tcp://HOST:PORT")
    return host, port


def open_store(
    endpoint: str,
    secret: str = "",
    group: str = "",
    *,
    timeout_s: float = 0.5,
    load_s: float = 0.0,
    limit_bytes: int = MAX_STORE_BYTES,
    clock: Callable[[], float] = time.monotonic,
) -> StoreClient:
    """A client of the store at ``endpoint``; it connects with its first call.

    Args:
        endpoint, secret, group: the settings ``store``, ``store_secret`` and ``store_group``.
        timeout_s, limit_bytes, clock: see :class:`~crux_torch.store.client.StoreClient`.
        load_s: see :class:`~crux_torch.store.process_connector.ProcessConnector`.

    Raises:
        SettingsError: one of them can't be used.
    """
    if endpoint.startswith(ETCD):
        address = parse_etcd(endpoint)
        if address.is_bare:
            _log.warning("%s goes over a network without TLS: name its ca", endpoint)
        # Frames to its process say nothing of their own: it has no secret.
        connector: Connector = ProcessConnector(endpoint, load_s)
        timeout_s = max(timeout_s, ETCD_CALL_S)
        return StoreClient(connector, timeout_s=timeout_s, limit_bytes=limit_bytes, clock=clock)
    connector = embedded(endpoint, group)
    known = read_secret(secret)
    return StoreClient(connector, known, timeout_s=timeout_s, limit_bytes=limit_bytes, clock=clock)


def embedded(endpoint: str, group: str = "") -> Connector:
    """Returns the connector to our own server at ``endpoint``; raises SettingsError."""
    if endpoint.startswith(UNIX):
        return UnixConnector(parse_unix(endpoint, group))
    return TcpConnector(*parse_endpoint(endpoint))


def server_addresses(endpoint: str) -> tuple[tuple[str, int], ...]:
    """Host and port of each server of the store, if it has one; raises SettingsError."""
    if endpoint == "none" or endpoint.startswith(UNIX):
        return ()
    if not endpoint.startswith(ETCD):
        return (parse_endpoint(endpoint),)
    members = (each.rpartition(":") for each in parse_etcd(endpoint).endpoints)
    return tuple((host.strip("[]"), int(port)) for host, _, port in members)


def sharing(endpoint: str, secret: str, group: str) -> str:
    """Who else may read and write the store, in a sentence; empty if only this user may."""
    if endpoint.startswith(UNIX):
        return f"the store {endpoint} is shared with all users of group {group}" if group else ""
    # Beyond loopback there is no store without a secret.
    if not secret and endpoint.startswith("tcp:") and _is_loopback(parse_endpoint(endpoint)[0]):
        return (
            f"any user of the host of {endpoint} can read and write this store: use "
            f"CRUX_STORE={UNIX}, or set CRUX_STORE_SECRET (docs/store.md)"
        )
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def looked_into(error: StoreError, endpoint: str) -> StoreError:
    """``error``, or a better one where an HTTP server has the store's port. Takes a second."""
    if error.cause not in (Cause.SILENT, Cause.STRANGER) or not endpoint.startswith("tcp:"):
        return error
    host, port = parse_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), HTTP_S) as asking:
            asking.settimeout(HTTP_S)
            asking.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            if asking.recv(len(b"HTTP/"), socket.MSG_WAITALL) != b"HTTP/":
                return error
    except OSError:
        return error
    return StoreError(f"store {endpoint}: {HTTP}", Cause.HTTP)
