"""Text and JSON as tools write them: with byte order marks, broken characters, NaN."""

from __future__ import annotations

import codecs
import re
from typing import TypeVar

import msgspec

_T = TypeVar("_T")

# The marks of UTF-32 come first: the little one begins like that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL_TO_SPACE = bytes([0x20] * 0x20) + bytes(range(0x20, 256))
_NO_NUMBER = re.compile(
    rb"([:\[,]\s*)[-+]?(?:nan(?:\([^)]{0,40}\))?|inf(?:inity)?)(?=\s*[,\]}])", re.I
)
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(
    rb"(?P<good>" + _PAIR + rb'|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\"
)


def without_mark(held: bytes) -> bytes:
    """The same text in UTF-8, without a byte order mark; unchanged where there is no mark."""
    for mark, encoding in _MARKS:
        if held.startswith(mark):
            return held.decode(encoding, errors="replace").encode()
    return held


def text_of(held: bytes) -> str:
    """The text in UTF-8, or in what its byte order mark names; bytes that are no text become �."""
    return without_mark(held).decode(errors="replace")


def repaired_json(held: bytes) -> bytes:
    """The same JSON as the standard wants it, where that is possible.

    Control characters become spaces, and bytes that are no UTF-8 become �. A backslash that escapes
    nothing becomes a backslash. NaN and Infinity become null.
    """
    held = text_of(held).encode().translate(_CONTROL_TO_SPACE)
    return _NO_NUMBER.sub(rb"\1null", _ESCAPE.sub(_escape, held))


def decode_json(held: bytes, type: type[_T]) -> _T:
    """The JSON as an object of ``type``, repaired where it does not parse as it stands.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        try:
            return msgspec.json.decode(held, type=type, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(repaired_json(held), type=type, strict=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _escape(found: re.Match[bytes]) -> bytes:
    if found["good"]:
        return found["good"]
    return "\N{REPLACEMENT CHARACTER}".encode() if found["half"] else rb"\\"
