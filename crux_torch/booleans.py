"""True and false, as environment variables say them. Imports nothing: every process may read it."""

from __future__ import annotations

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")


def is_true(text: str | None) -> bool:
    """Returns True if ``text`` is a word for true, in any case; no other text is an error."""
    return text is not None and text.strip().lower() in TRUE


def parse_boolean(text: str) -> bool:
    """Returns the value that ``text`` stands for.

    Raises:
        ValueError: it is no word for true or false.
    """
    if not is_true(text) and text.strip().lower() not in FALSE:
        pairs = (word for pair in zip(TRUE, FALSE, strict=True) for word in pair)
        raise ValueError(f"expected one of {', '.join(pairs)}")
    return is_true(text)
