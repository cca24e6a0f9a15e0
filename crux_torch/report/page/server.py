"""A server of pages over HTTP, for people of one organisation.

TLS and passwords are in the format of Prometheus' exporters: a subset of the exporter-toolkit's web
configuration, ``tls_server_config`` with ``cert_file`` and ``key_file``, and ``basic_auth_users``
with bcrypt hashes. Anything else is refused.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import ctypes.util
import hashlib
import hmac
import logging
import re
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import yaml

from crux_torch.errors import CruxError
from crux_torch.report.page.operator_page import Answer, Query

MAX_BYTES = 1 << 20
#: Passwords that were checked and are remembered by their digest: bcrypt takes a while.
REMEMBERED = 256
#: Letters of a user's name and password in a request.
MAX_LETTERS = 1024
_HASH = r"\A\$2[aby]\$(0[4-9]|1[0-9])\$[./A-Za-z0-9]{53}\Z"
#: A hash that nobody's password has, for users that do not exist: they take as long as others.
_NOBODY = "$2y$10$abcdefghijklmnopqrstuu5LGdcJmHbKzOHAv4RZpY6GGTLMbQJhS"


class WebConfigError(CruxError, ValueError):
    """A web configuration that can't be used: the file, and what is wrong with it."""


class _Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cert_file: str
    key_file: str


_Hash = Annotated[str, msgspec.Meta(pattern=_HASH)]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tls_server_config: _Tls | None = None
    basic_auth_users: Annotated[dict[str, _Hash], msgspec.Meta(max_length=1000)] = {}


class WebConfig:
    """Requirements of a web server on its clients.

    Thread safety: any thread may call :meth:`lets_in`.

    Args:
        users: bcrypt hashes of passwords by user; empty: everyone may read.
        tls: None: plain HTTP.

    Raises:
        WebConfigError: this system's libcrypt can't check bcrypt hashes.
    """

    def __init__(self, users: dict[str, str], tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self._users = users
        self._seen: OrderedDict[bytes, bool] = OrderedDict()
        self._lock = threading.Lock()
        if users and not _checks_bcrypt():
            raise WebConfigError(
                "basic_auth_users needs a libcrypt with bcrypt (libxcrypt, as Debian, Ubuntu and "
                "Fedora have): put a proxy that asks for passwords before the exporter"
            )

    @classmethod
    def load(cls, file: Path) -> WebConfig:
        """Returns the configuration in ``file``; its paths are relative to the file's folder.

        Raises:
            WebConfigError: it can't be read or used.
        """
        try:
            with file.open("rb") as opened:
                text = opened.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise WebConfigError(f"{file}: more than 1 MiB")
            found = msgspec.convert(yaml.safe_load(text) or {}, _File)
            return cls(found.basic_auth_users, _context(found.tls_server_config, file.parent))
        except WebConfigError:
            raise
        except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
            reason = re.sub(r"\s+", " ", str(error))
            raise WebConfigError(
                f"{file}: {reason}; supported are tls_server_config with cert_file and key_file, "
                "and basic_auth_users with bcrypt hashes (htpasswd -nBC 10 USER)"
            ) from None

    def lets_in(self, authorization: str | None) -> bool:
        """True if a request with this Authorization header may read."""
        if not self._users:
            return True
        kind, _, given = (authorization or "").partition(" ")
        if kind.lower() != "basic" or len(given) > 2 * MAX_LETTERS:
            return False
        try:
            user, colon, password = base64.b64decode(given, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        if not colon or b"\0" in password:
            return False
        known = self._users.get(user.decode("utf-8", "replace"))
        hashed = known or _NOBODY
        key = hashlib.sha256(b"%s\0%s" % (hashed.encode(), password)).digest()
        with self._lock:
            right = self._seen.get(key)
            if right is None:
                right = _crypt(password, hashed.encode()) == hashed.encode()
                self._seen[key] = right
                while len(self._seen) > REMEMBERED:
                    self._seen.popitem(last=False)
        return right and known is not None


def _context(given: _Tls | None, folder: Path) -> ssl.SSLContext | None:
    if given is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / given.cert_file, folder / given.key_file)
    return context


def _crypt(password: bytes, setting: bytes) -> bytes:
    """The hash of a password by libcrypt, which is not thread-safe; empty if it knows no such."""
    library = _libcrypt()
    found = library.crypt(password, setting) if library is not None else None
    return found if found and hmac.compare_digest(found[:7], setting[:7]) else b""


@lru_cache(maxsize=1)
def _libcrypt() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("crypt")
    try:
        library = ctypes.CDLL(name) if name else None
    except OSError:
        return None
    if library is None or not hasattr(library, "crypt"):
        return None
    library.crypt.restype, library.crypt.argtypes = ctypes.c_char_p, [ctypes.c_char_p] * 2
    return library


@lru_cache(maxsize=1)
def _checks_bcrypt() -> bool:
    # From the test vectors of crypt_blowfish.
    known = b"$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW"
    return _crypt(b"U*U", known) == known


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
