"""Verbs through the shim for libibverbs against without, in the Soft-RoCE lab.

    python benchmarks/transport_rdma.py [--rounds N] [--out DIR]

perftest's ``ib_write_bw`` and ``ib_send_lat`` run between two Soft-RoCE devices in one boot of an
emulated machine (docs/research/without-gpu.md), with and without the shim in turn. Each round gives
one ratio, so whatever slows the machine for longer than a round slows both. The shim is in the way
of making and changing queue pairs; posting and polling pass it by, so the ratio should be 1.

What this can't tell: how fast RDMA is. The processor is emulated and so is the device, and the
figures of either side are a thousandth of what hardware does.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.results import Result, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rdma"))
from scenarios.speed import CASES, PROGRAMS

from lab.rdma.guest import Guest
from lab.rdma.play import play
from lab.rdma.requirement import LabUnavailableError
from lab.rdma.step import Process
from lab.rdma.verbs_shim import environment

#: The machine's start, and one program with its counterpart at their slowest.
_START_S, _PROGRAM_S = 60, 5


def figure(process: Process) -> float:
    """What perftest found: average MB/s of a bandwidth test, typical µs of a latency test.

    Raises:
        click.ClickException: it failed.
    """
    lines = [line for line in process.stdout.splitlines() if not line.lstrip().startswith("-")]
    values = lines[-1].split() if lines else []
    if process.status != 0 or not values or not values[0].isdigit():
        raise click.ClickException(f"{process}")
    # #bytes #iterations peak average rate, or #bytes #iterations min max typical ...
    return float(values[4 if process.argv[0] == "ib_send_lat" else 3])


def row_of(program: str, figures: dict[str, list[float]]) -> dict[str, Any]:
    """One row: figures of both cases, and the ratio of each round, above 1 where crux is better.

    Left out are rounds in which perftest failed to gauge the processor's clock, as it does on a
    busy machine: its figure is then 0.
    """
    pairs = [both for both in zip(*(figures[case] for case in CASES), strict=True) if all(both)]
    if len(pairs) < 2:
        raise click.ClickException(f"{program}: the machine is too busy for figures")
    plain, shim = map(list, zip(*pairs, strict=True))
    latency = PROGRAMS[program][0] == "ib_send_lat"
    ratios = [a / b if latency else b / a for a, b in zip(plain, shim, strict=True)]
    return {
        "program": program,
        "unit": "us" if latency else "MB/s",
        "plain": plain,
        "shim": shim,
        "ratio": ratios,
    }


def table(rows: list[dict[str, Any]], release: str) -> str:
    """The rows as text: medians, and quartiles of the rounds' ratios."""
    lines = [
        f"Soft-RoCE on Linux {release} in an emulated machine: the ratio counts, not the speeds",
        f"{'program':<20} {'rounds':>6} {'unit':>5} {'without':>9} {'with':>9} {'ratio':>7} "
        f"{'quartiles':>16}",
    ]
    for row in rows:
        low, _, high = statistics.quantiles(row["ratio"], n=4, method="inclusive")
        without, within = (statistics.median(row[case]) for case in CASES)
        lines.append(
            f"{row['program']:<20} {len(row['ratio']):>6} {row['unit']:>5} {without:>9.1f} "
            f"{within:>9.1f} {statistics.median(row['ratio']):>7.3f} "
            f"{f'{low:.3f} to {high:.3f}':>16}"
        )
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--rounds", default=20, type=click.IntRange(2), help="Runs of each program.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/transport_rdma.{json,txt}.")
def main(rounds: int, json_path: Path | None, out: Path | None) -> None:
    """Times verbs through the shim against without."""
    try:
        guest = Guest.prepare()
        timeout_s = _START_S + rounds * len(PROGRAMS) * len(CASES) * _PROGRAM_S
        outcome = play(guest, "speed", environment(), str(rounds), timeout_s=timeout_s)
    except LabUnavailableError as error:
        raise click.ClickException(f"no Soft-RoCE lab here: {error}") from None
    rows = []
    for program in PROGRAMS:
        figures = {
            case: [
                figure(outcome.steps[f"{program} {case} {i}"].processes[1]) for i in range(rounds)
            ]
            for case in CASES
        }
        rows.append(row_of(program, figures))
    settings = {"rounds": rounds, "kernel": guest.kernel.release, "device": "rdma_rxe, emulated"}
    publish(
        Result("transport_rdma", settings, rows), table(rows, guest.kernel.release), json_path, out
    )
    outcome.remove()


if __name__ == "__main__":
    main()
