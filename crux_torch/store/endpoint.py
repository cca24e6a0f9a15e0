"""Where a store is: the setting ``CRUX_STORE``, and the client that it asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from crux_torch.errors import SettingsError
from crux_torch.store.client import Connector, StoreClient, TcpConnector
from crux_torch.store.etcd_address import parse_etcd
from crux_torch.store.process_connector import ProcessConnector
from crux_torch.store.secret import read_secret

_log = logging.getLogger(__name__)

ETCD = "etcd://"
#: Seconds that a call may take where an etcd is behind it: more than the store process waits.
ETCD_CALL_S = 2.0


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``; raises SettingsError for another form."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or not port or parts.scheme != "tcp":
        raise SettingsError(f"store {endpoint!r}: expected tcp://HOST:PORT or none")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise SettingsError(f"store {endpoint!r}: expected nothing after tcp://HOST:PORT")
    return host, port


def open_store(
    endpoint: str,
    secret: str = "",
    *,
    timeout_s: float = 0.5,
    load_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> StoreClient:
    """A client of the store at ``endpoint``; it connects with its first call.

    Args:
        endpoint, secret: the settings ``store`` and ``store_secret``.
        timeout_s, clock: see :class:`~crux_torch.store.client.StoreClient`.
        load_s: see :class:`~crux_torch.store.process_connector.ProcessConnector`.

    Raises:
        SettingsError: one of the two can't be used.
    """
    if endpoint.startswith(ETCD):
        address = parse_etcd(endpoint)
        if address.is_bare:
            _log.warning("%s goes over a network without TLS: name its ca", endpoint)
        # Frames to its process say nothing of their own: it has no secret.
        connector: Connector = ProcessConnector(endpoint, load_s)
        return StoreClient(connector, timeout_s=max(timeout_s, ETCD_CALL_S), clock=clock)
    connector = TcpConnector(*parse_endpoint(endpoint))
    return StoreClient(connector, read_secret(secret), timeout_s=timeout_s, clock=clock)


def server_addresses(endpoint: str) -> tuple[tuple[str, int], ...]:
    """Host and port of each server of the store; none for ``none``; raises SettingsError."""
    if endpoint == "none":
        return ()
    if not endpoint.startswith(ETCD):
        return (parse_endpoint(endpoint),)
    members = (each.rpartition(":") for each in parse_etcd(endpoint).endpoints)
    return tuple((host.strip("[]"), int(port)) for host, _, port in members)
