"""The cluster's past as its audit log has it: which plan and which settings held when, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from crux_torch.report.tables import Grid, say
from crux_torch.words import age

if TYPE_CHECKING:
    from crux_torch.agreement.audit import AuditEntry

#: Lines of an entry in a cell; the audit log has them all.
LINES = 3


def history_of(entries: Sequence[AuditEntry], now_s: float) -> Grid:
    """Returns the table of the entries, the newest last.

    Args:
        entries: in the order in which they were written.
        now_s: seconds since 1970.
    """
    rows = []
    for number, entry in enumerate(entries):
        ends = (e.at_s for e in entries[number + 1 :] if e.kind == entry.kind)
        rows.append(
            {
                "UTC": time.strftime("%m-%d %H:%M:%S", time.gmtime(entry.at_s)),
                "held for": age(max(0.0, next(ends, now_s) - entry.at_s)),
                "what": f"{'plan' if entry.kind == 'plan' else 'settings'} {entry.after}",
                "by": entry.who,
                "why": _some(entry.why),
                "changed": _some(entry.changes),
            }
        )
    return Grid(rows, text=("UTC", "what", "by", "why", "changed"), title="history")


def render_history(to: Console, entries: Sequence[AuditEntry], now_s: float) -> None:
    """Print the table of the entries."""
    if not entries:
        say(to, "no history: no plan has been written yet, and no settings")
        return
    history_of(entries, now_s).print(to)
    say(to, "held for: until the next plan, or the next settings; the newest: so far")
    say(to, "crux cluster audit has every line of it")


def _some(lines: Sequence[str]) -> str:
    more = len(lines) - LINES
    return "; ".join(lines[:LINES]) + (f"; and {more} more" if more > 0 else "")
