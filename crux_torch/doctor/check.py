"""One finding of ``crux doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        part: what was looked at.
        state: ``ok``; ``missing``: Crux works without it, at a cost; ``broken``: it has to be
            repaired before Crux can work.
        finding: what was found.
        cost: what its absence costs; empty where it is there.
        remedy: how to get it; empty where it is there.
    """

    part: str
    state: Literal["ok", "missing", "broken"]
    finding: str
    cost: str = ""
    remedy: str = ""
