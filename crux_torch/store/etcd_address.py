"""The setting ``CRUX_STORE=etcd://…`` taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from crux_torch.errors import SettingsError
from crux_torch.files import read_file

#: Certificates, a key, or a name and a password.
MAX_FILE_BYTES = 1 << 20
_FILES = ("ca", "cert", "key", "auth")
_FORM = "etcd://HOST:PORT[,HOST:PORT…][/PREFIX][?ca=FILE&cert=FILE&key=FILE&auth=FILE]"
_ENDPOINT = re.compile(r"(?P<host>[\w.-]+|\[[\da-fA-F:.]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Where an etcd is, and how to speak with it.

    Attributes:
        endpoints: ``HOST:PORT`` of its members; each is tried.
        prefix: before every key.
        ca: file with the certificates that may have signed the members'; empty: no TLS.
        cert, key: files with this client's own certificate and its key; empty: none.
        auth: file with ``USER:PASSWORD``; empty: none.
    """

    endpoints: tuple[str, ...]
    prefix: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    auth: str = ""

    @property
    def is_bare(self) -> bool:
        """Whether it goes over a network without TLS."""
        hosts = (endpoint.rpartition(":")[0] for endpoint in self.endpoints)
        return not self.ca and not all(
            host in ("localhost", "[::1]") or host.startswith("127.") for host in hosts
        )

    def read(self, file: str) -> bytes | None:
        """The content of one of the files; None for an empty name; raises SettingsError."""
        if not file:
            return None
        try:
            return read_file(file, MAX_FILE_BYTES)
        except OSError as error:
            raise SettingsError(f"CRUX_STORE names {file!r}: {error.strerror}") from None


def parse_etcd(url: str) -> EtcdAddress:
    """``url`` as an address; raises SettingsError for another form."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    members, _, prefix = place.partition("/")
    found = [_ENDPOINT.fullmatch(member) for member in members.split(",")]
    good = all(match is not None and 0 < int(match["port"]) < 65536 for match in found)
    if scheme != "etcd" or not good or "#" in url:
        raise SettingsError(f"store {url!r}: expected {_FORM}")
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError:
        raise SettingsError(f"store {url!r}: expected {_FORM}") from None
    files = dict(pairs)
    if not files.keys() <= set(_FILES) or len(files) < len(pairs):
        raise SettingsError(f"store {url!r}: expected each of {', '.join(_FILES)} once at most")
    if ("cert" in files) != ("key" in files) or ("cert" in files and "ca" not in files):
        raise SettingsError(f"store {url!r}: cert and key belong together, and need ca")
    prefix = unquote(prefix).strip("/")
    return EtcdAddress(
        tuple(members.split(",")), prefix and prefix + "/", **{k: v for k, v in files.items() if v}
    )
