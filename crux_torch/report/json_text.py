"""Results as JSON, which has no infinity."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def json_text(value: Any) -> str:
    """``value`` as JSON with a line for each field, and null for what has no bound.

    Args:
        value: plain values.
    """
    return json.dumps(bounded(value), indent=1, allow_nan=False) + "\n"


def bounded(value: Any) -> Any:
    """``value`` with None for each number that has no bound, or is none.

    The intensity of a job without traffic has none; plans hold the largest float for it.
    """
    if isinstance(value, float):
        # False for what is no number, too.
        return value if abs(value) < sys.float_info.max else None
    if isinstance(value, Mapping):
        return {key: bounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bounded(each) for each in value]
    return value
