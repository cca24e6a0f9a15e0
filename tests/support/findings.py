"""Findings of ``crux doctor``: each says its cost and remedy where something is missing."""

from __future__ import annotations

from collections.abc import Iterable

from crux_torch.cli.doctor.finding import Check


def sound(check: Check) -> Check:
    assert (check.cost == "") == (check.remedy == "") == (check.state == "ok"), check
    return check


def by_part(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.part: sound(check) for check in checks}
