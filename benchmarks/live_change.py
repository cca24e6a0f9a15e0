"""A live queue pair is moved to another spine and another class, again and again, under load.

    python benchmarks/live_change.py [--changes 1000] [--out DIR]

Two queue pairs of the Soft-RoCE lab (docs/rdma-lab.md) send messages to each other through two leaf
and two spine switches, as fast as an emulated machine can. The ends take turns at being changed by
RESET, INIT, RTR, RTS, each time to a source port of the other spine and to another class. In a
second run, steps of the changes are made to fail. Counted are the messages, by their order and
their contents, and what captures on both spines saw of each setting.

Times are those of an emulated machine: hardware is faster.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import click

from crux_torch.sim.commands.publish import publish
from crux_torch.sim.results import Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rdma"))
from lab import program, standin
from lab.guest import Guest
from lab.live_change import read_live_change, settings_of_answers, settings_on_the_wire
from lab.play import Outcome, play
from lab.requirement import LabUnavailableError
from scenarios.fabric import FAULTS

STEPS = {"live change": "no faults", "live change with faults": f"faults {FAULTS}"}
_START_S, _CHANGE_S = 250, 1


def row_of(outcome: Outcome, step: str) -> dict[str, Any]:
    """One row: what happened to messages and settings.

    Raises:
        click.ClickException: the program could not do what it was asked to.
    """
    run = read_live_change(outcome.steps[step].processes[0])
    if len(run.directions) != 2:
        raise click.ClickException(f"{step}: {run.process.stderr or run.process.stdout[-500:]}")
    wrong_on_wire = 0
    for end in (0, 1):
        seen = settings_on_the_wire(outcome, step, end)
        made = [change.setting for change in run.changes if change.end == end and change.applied]
        # The first is the one that the connection was made with.
        is_same = [(port, tos) for port, tos, _ in seen[1:]] == made
        wrong_on_wire += not (is_same and settings_of_answers(outcome, step, end) <= set(seen))
    return {
        "run": STEPS[step],
        "changes": len(run.changes),
        "applied": sum(change.applied for change in run.changes),
        "messages": sum(way.sent for way in run.directions),
        "lost": sum(way.sent - way.received for way in run.directions),
        "misplaced": sum(way.misplaced for way in run.directions),
        "altered": sum(way.altered for way in run.directions),
        "failed": sum(way.failed for way in run.directions),
        "ends_with_another_sequence_on_the_wire": wrong_on_wire,
        "applied_ms": [change.took_ms for change in run.changes if change.applied],
    }


def table(rows: list[dict[str, Any]], release: str) -> str:
    """The rows as text."""
    counts = ("changes", "applied", "messages", "lost", "misplaced", "altered", "failed")
    lines = [
        f"Soft-RoCE on Linux {release} in an emulated machine: two ends changed in turn under load",
        " ".join(f"{name:>9}" for name in counts) + f" {'on the wire':>11} {'ms a change':>20}",
    ]
    for row in rows:
        low, middle, high = statistics.quantiles(row["applied_ms"], n=4, method="inclusive")
        wire = "other" if row["ends_with_another_sequence_on_the_wire"] else "as made"
        times = f"{middle:.1f} ({low:.1f} to {high:.1f})"
        lines.append(
            " ".join(f"{row[name]:>9}" for name in counts)
            + f" {wire:>11} {times:>20}  {row['run']}"
        )
    lines.append("ms: median and quartiles, with the hold of the peer")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--changes", default=1000, type=click.IntRange(4), help="Of a queue pair.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/live_change.{json,txt}.")
def main(changes: int, json_path: Path | None, out: Path | None) -> None:
    """Changes live queue pairs under load, and counts what is lost."""
    try:
        guest = Guest.prepare()
        outcome = play(
            guest,
            "fabric",
            sys.executable,
            standin.environment(),
            str(program.build("live_change")),
            str(changes),
            timeout_s=_START_S + changes * _CHANGE_S,
        )
    except LabUnavailableError as error:
        raise click.ClickException(f"no Soft-RoCE lab here: {error}") from None
    rows = [row_of(outcome, step) for step in STEPS]
    settings = {"kernel": guest.kernel.release, "device": "rdma_rxe, emulated", "faults": FAULTS}
    result = Result("live_change", settings, rows)
    publish(result, table(rows, guest.kernel.release), json_path, out)
    outcome.remove()


if __name__ == "__main__":
    main()
