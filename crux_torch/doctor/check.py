"""One finding of ``crux doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        part: what was checked.
        state: ``ok``; ``missing``: Crux runs, but a feature is off; ``broken``: repair it before
            you start a job.
        finding: what was found.
        cost: which feature is off, or what goes wrong; empty if the state is ``ok``.
        remedy: what to do; empty if the state is ``ok``.
    """

    part: str
    state: Literal["ok", "missing", "broken"]
    finding: str
    cost: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that Crux can use, and the ``cost`` if it can't: makes the findings about it."""

    name: str
    cost: str

    def ok(self, finding: str) -> Check:
        return Check(self.name, "ok", finding)

    def missing(self, finding: str, remedy: str) -> Check:
        return Check(self.name, "missing", finding, self.cost, remedy)

    def broken(self, finding: str, remedy: str) -> Check:
        return Check(self.name, "broken", finding, self.cost, remedy)
