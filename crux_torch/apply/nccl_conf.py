"""NCCL's variables as NCCL will read them: the environment, and the two files behind it.

NCCL reads ``NCCL_CONF_FILE`` (if it is not set, ``.nccl.conf`` in the user's home) and then
``/etc/nccl.conf``. It puts each line ``NAME=VALUE`` into the environment unless the name is already
there. So the environment goes before the user's file, and that one before the system's. A variable
that is set but empty hides the value of the files, and counts as unset.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crux_torch.files import read_file

SYSTEM_FILE = Path("/etc/nccl.conf")
USER_FILE = ".nccl.conf"
VARIABLE = "NCCL_CONF_FILE"
ENVIRONMENT = "environment"
#: The room in NCCL's line buffers, without the terminating zero.
_MAX_BYTES = 1023
#: Larger files are not NCCL's.
_MAX_FILE_BYTES = 1 << 20
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([-+]?)(?:0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9][0-9]*))")


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a variable, never empty, and its source: ``ENVIRONMENT``, or a file's path."""

    text: str
    source: str


class NcclVariables:
    """NCCL's variables in one environment.

    Args:
        env: of the process that loads NCCL.
        home: of its user; by default the one in the user database, like NCCL (not ``HOME``).
    """

    def __init__(
        self,
        env: Mapping[str, str],
        home: Path | None = None,
        system_file: Path | None = None,
    ) -> None:
        self._env = env
        if env.get(VARIABLE):
            files = [Path(env[VARIABLE])]
        else:
            home = home or _home()
            files = [home / USER_FILE] if home is not None else []
        self._read: dict[str, Value] = {}
        for file in (*files, system_file or SYSTEM_FILE):
            for name, text in _lines(file):
                self._read.setdefault(name, Value(text, str(file)))

    def get(self, name: str) -> Value | None:
        """The variable ``name``, or None if NCCL uses its default."""
        if name in self._env:
            text = self._env[name]
            return Value(text, ENVIRONMENT) if text else None
        found = self._read.get(name)
        return found if found is not None and found.text else None

    def integer(self, name: str) -> int | None:
        """A number as NCCL's ``strtoll(…, 0)`` reads it; None if it is not set, or -1.

        A text that does not begin with a number is 0, as in NCCL.
        """
        value = self.get(name)
        if value is None:
            return None
        number = _strtoll(value.text)
        return None if number == -1 else number


def _strtoll(text: str) -> int:
    """The decimal, 0x… or 0… (octal) number at the beginning of the text; 0 if there is none."""
    found = _NUMBER.match(text)
    if found is None:
        return 0
    sign, hexadecimal, octal, decimal = found.groups()
    digits, base = (hexadecimal, 16) if hexadecimal else (octal, 8) if octal else (decimal, 10)
    return int(sign + digits, base)


def _home() -> Path | None:
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _lines(file: Path) -> list[tuple[str, str]]:
    """Names and values in the order of the file; none if it can't be read."""
    try:
        raw = read_file(file, _MAX_FILE_BYTES)
    except OSError:
        return []
    # NCCL strips no blanks, so " NCCL_IB_TC" and "NCCL_IB_TC " are other names.
    lines = (line.partition("=") for line in raw.decode(errors="replace").split("\n"))
    found = ((name, value) for name, equals, value in lines if equals and name[:1] != "#")
    return [(name[:_MAX_BYTES], value[:_MAX_BYTES]) for name, value in found]
