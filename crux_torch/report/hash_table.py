"""The hashes of switches, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from crux_torch.network.discover.hashes import Checked, Polarised, SwitchHash
from crux_torch.report.tables import Grid, say

#: Names of equal hashes in a cell.
_NAMED = 2


def hashes_as_dict(
    found: Sequence[SwitchHash], checked: Sequence[Checked], polarised: Sequence[Polarised]
) -> dict[str, Any]:
    """Returns what was found as plain values for JSON."""
    return {
        "switches": [
            {
                "switch": switch,
                "verdict": fit.verdict,
                "reason": fit.reason or None,
                "families": list(fit.families),
                "selection": fit.selection or None,
                "coincidence": fit.coincidence,
                "next_hops": list(fit.next_hops),
                "choices": fit.choices,
                "accuracy": fit.accuracy,
                "chance": fit.chance,
            }
            for switch, fit in found
        ],
        "checked": [each._asdict() for each in checked],
        "polarised": [each._asdict() for each in polarised],
    }


def render_hashes(
    to: Console,
    found: Sequence[SwitchHash],
    checked: Sequence[Checked],
    polarised: Sequence[Polarised],
) -> None:
    """Print a row for each switch that has a choice, and what follows from it."""
    rows = []
    for switch, fit in found:
        tested = fit.verdict == "explained"
        rows.append(
            {
                "switch": switch,
                "next hops": str(len(fit.next_hops)),
                "ports": str(fit.choices),
                "hash": _hash_cell(fit.families, fit.selection) if tested else fit.verdict,
                "right": f"{fit.accuracy:.1%}" if tested else "-",
                "by chance": f"{fit.chance:.0e}" if tested else "-",
            }
        )
    if not rows:
        say(to, "no switch that answered has more than one next hop, so there is no hash to find")
        return
    Grid(rows, text=("switch", "hash")).print(to)
    for switch, fit in found:
        if fit.reason:
            say(to, f"{switch}: {fit.reason}")
        elif fit.families and fit.coincidence > 0.01:
            say(
                to,
                f"{switch}: its ports can be computed, but its hash may be another one: of linear "
                f"hashes of other names, {fit.coincidence:.1%} give these choices",
            )
    for switch, asked, right in checked:
        say(to, f"{switch}: {asked} computed ports were probed, {right} of them took their path")
    for each in polarised:
        say(
            to,
            f"polarised: of {each.known} next hops, {each.switch} uses {each.used} for flows from "
            f"{each.before}, as if both had one hash (by chance: {each.chance:.0e}); give each "
            "tier a hash seed of its own",
        )


def _hash_cell(families: Sequence[str], selection: str) -> str:
    if not families:
        return "linear, of unknown name"
    more = [f"{len(families) - _NAMED} more"] if len(families) > _NAMED else []
    return f"{' or '.join([*families[:_NAMED], *more])}, {selection}"
