"""One finding of ``crux doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        part: its subject.
        state: ``ok``; ``missing``: Crux runs, but a feature is off; ``broken``: repair it before
            you start a job.
        finding: in words.
        cost, remedy: the feature that is off, or the damage, and what to do; empty if ``ok``.
    """

    part: str
    state: Literal["ok", "missing", "broken"]
    finding: str
    cost: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that Crux can use, and the ``cost`` if it can't."""

    name: str
    cost: str

    def ok(self, finding: str) -> Check:
        return Check(self.name, "ok", finding)

    def missing(self, finding: str, remedy: str) -> Check:
        return Check(self.name, "missing", finding, self.cost, remedy)

    def broken(self, finding: str, remedy: str) -> Check:
        return Check(self.name, "broken", finding, self.cost, remedy)
