"""A server of pages over HTTP, for people of one organisation."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from crux_torch.report.page.operator_page import Answer, Query
from crux_torch.report.web_config import WebConfig

_log = logging.getLogger(__name__)

#: What answers a request; a status instead of an answer says why there is none.
Routes = Mapping[str, Callable[[Query], "Answer | HTTPStatus"]]

#: Requests that are answered at once; open streams count.
MAX_REQUESTS = 64
#: Seconds for a request to arrive, and for a piece of an answer to leave.
REQUEST_S = 15.0
#: Arguments of a query.
MAX_ARGUMENTS = 16
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """Serves ``routes``.

    Args:
        address: to listen at; port 0: a free one.
        config: whom it lets in, and how it encrypts; None: everyone, and not at all.

    Raises:
        OSError: the address can't be used.
    """

    daemon_threads = True
    #: Streams end with the process.
    block_on_close = False

    def __init__(
        self, routes: Routes, address: tuple[str, int], config: WebConfig | None = None
    ) -> None:
        self.config = config
        self.routes = dict(routes)
        self.free = threading.BoundedSemaphore(MAX_REQUESTS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.is_loopback = ip_address(self.socket.getsockname()[0]).is_loopback

    def get_request(self) -> tuple[socket.socket, Any]:
        """Takes a connection; the thread that answers it shakes hands."""
        taken, address = super().get_request()
        tls = self.config.tls if self.config is not None else None
        if tls is not None:
            taken.settimeout(REQUEST_S)
            taken = tls.wrap_socket(taken, server_side=True, do_handshake_on_connect=False)
        return taken, address

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of clients that speak no TLS, or have gone."""
        _log.debug("a request failed", exc_info=True)

    def server_bind(self) -> None:
        """Binds without a look-up of the host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.socket.getsockname()[:2]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = REQUEST_S
    protocol_version = "HTTP/1.0"
    server_version, sys_version = "crux", ""

    def do_GET(self) -> None:
        if not self.server.free.acquire(blocking=False):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        try:
            self._answer()
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            # Its reader has gone.
            self.close_connection = True
        finally:
            self.server.free.release()

    def _answer(self) -> None:
        config = self.server.config
        if config is not None and not config.lets_in(self.headers.get("Authorization")):
            self.send_response(HTTPStatus.UNAUTHORIZED)
            self.send_header("WWW-Authenticate", 'Basic realm="crux"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        found = self._found()
        if isinstance(found, HTTPStatus):
            self.send_error(found)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", found.media_type)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if isinstance(found.body, bytes):
            self.send_header("Content-Length", str(len(found.body)))
        self.end_headers()
        for piece in [found.body] if isinstance(found.body, bytes) else found.body:
            self.wfile.write(piece)

    def _found(self) -> Answer | HTTPStatus:
        if self.server.is_loopback and not _is_local(self.headers.get("Host", "")):
            # A page of another site whose name was made to mean this machine.
            return HTTPStatus.MISDIRECTED_REQUEST
        try:
            asked = urlsplit(self.path)
            query = dict(parse_qsl(asked.query, max_num_fields=MAX_ARGUMENTS))
        except ValueError:
            return HTTPStatus.BAD_REQUEST
        route = self.server.routes.get(asked.path)
        if route is None:
            return HTTPStatus.NOT_FOUND
        try:
            return route(query)
        except Exception:
            _log.exception("can't answer %s", asked.path)
            return HTTPStatus.INTERNAL_SERVER_ERROR

    def log_message(self, *_: object) -> None:
        """Logs nothing: requests name jobs of tenants."""


def _is_local(host: str) -> bool:
    """True if a Host header names this machine by itself."""
    name = (urlsplit(f"//{host}").hostname or "") if host else ""
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
