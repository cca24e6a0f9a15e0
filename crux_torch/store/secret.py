"""The shared secret of an embedded store: the content of a file that only its user can read."""

from __future__ import annotations

import os

from crux_torch.errors import SettingsError
from crux_torch.files import open_regular

MIN_BYTES = 16
MAX_BYTES = 4096


def read_secret(path: str) -> bytes:
    """The secret in the file at ``path``, without white space around it; none for an empty path.

    Raises:
        SettingsError: the file can't be read, others may read it, or it is too short or too long.
    """
    if not path:
        return b""
    how = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            secret = file.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise SettingsError(f"CRUX_STORE_SECRET={path!r}: {error.strerror}; {how}") from None
    if about.st_mode & 0o077 or about.st_uid not in (os.geteuid(), 0):
        raise SettingsError(
            f"CRUX_STORE_SECRET={path!r} must be its user's alone: chown and chmod 600 it"
        )
    if not MIN_BYTES <= len(secret) <= MAX_BYTES:
        raise SettingsError(
            f"CRUX_STORE_SECRET={path!r} has {len(secret)} bytes, expected {MIN_BYTES} to "
            f"{MAX_BYTES}; {how}"
        )
    return secret
