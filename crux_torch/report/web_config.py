"""TLS and passwords of a web server, in the format of Prometheus' exporters.

A subset of the exporter-toolkit's web configuration: ``tls_server_config`` with ``cert_file`` and
``key_file``, and ``basic_auth_users`` with bcrypt hashes. Anything else is refused.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import ctypes.util
import hashlib
import hmac
import re
import ssl
import threading
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from crux_torch.errors import CruxError

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
