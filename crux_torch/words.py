"""Numbers, times and strangers' names in words, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Larger values stand for infinity.
BOUNDLESS = 1e30
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str = "") -> str:
    """Returns a number with three digits and a prefix, as in ``2.5 P``; inf without a bound."""
    # A job that needs no time on the network has no finite intensity; plans hold the largest float.
    if abs(value) >= BOUNDLESS:
        return f"inf {unit}".rstrip()
    size, prefix = next((p for p in _PREFIXES if p[0] <= abs(value)), (1.0, ""))
    return f"{value / size:.3g} {prefix}{unit}".rstrip()


def seconds(value_s: float | None) -> str:
    """Returns a time with three digits, as in ``857 ms``; empty for None."""
    if value_s is None:
        return ""
    return f"{value_s:.3g} s" if value_s >= 1 else f"{1e3 * value_s:.3g} ms"


def age(value_s: float | None) -> str:
    """Returns an age in whole seconds, minutes, hours or days; empty for None."""
    if value_s is None:
        return ""
    for size_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value_s >= 2 * size_s:
            return f"{value_s / size_s:.0f} {unit}"
    return f"{value_s:.0f} s"


def listed(names: Sequence[str], most: int) -> str:
    """Returns the first ``most`` names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def safe(name: Any) -> str:
    """Returns ``name``, which comes from another tenant, without what could control a terminal."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
