"""What Crux costs on one GPU: stock NCCL against Crux, block by block in turn.

    python benchmarks/gpu_overhead.py [--seconds S] [--json FILE] [--text FILE] [--quick]

Worlds of all sides live side by side on one device and only one runs at a time. Blocks alternate in
the order A B B A, and each four of them give one ratio, so that whatever drifts meets both sides.
Crux is seen as it is nearly always, and while a measurement times every operation. For scale the
same is done with torch's flight recorder on and off, and with Kineto.
Figures are written after every cell: what was cut off keeps what it had.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from workloads.gpu_cells import DEVICE, HOST, STEP, Cell
from workloads.gpu_world import Side, World, WorldError

KIB, MIB = 1 << 10, 1 << 20
#: Nanoseconds that a block should take.
BLOCK_NS = 20e6
#: Most calls that are issued before the device has to be done with them.
MAX_ISSUED = 200
MIN_CYCLES = 8

NO_RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_BUFFER_SIZE": "0"}
RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_BUFFER_SIZE": "2000"}
STOCK = Side("stock")
#: The job is never warm enough to be measured.
CRUX = Side(
    "crux",
    crux=True,
    env={"CRUX_TUNING": f"warmup_iterations={10**9}", "CRUX_PROFILE_S": str(10**6)},
)
MEASURING = Side("crux measuring", crux=True, env={"CRUX_TUNING": "timing=always"})
SIDES = {
    side.name: side
    for side in (
        STOCK,
        CRUX,
        MEASURING,
        Side("no flight recorder", env=NO_RECORDER),
        Side("flight recorder", env=RECORDER),
        Side("timing", env={"TORCH_NCCL_ENABLE_TIMING": "1"}),
        Side("Kineto", profiled=True),
    )
}
#: What is compared: for each pair the cost of the first over the second.
PAIRS = (
    ("crux", "stock"),
    ("crux measuring", "stock"),
    ("flight recorder", "no flight recorder"),
    ("timing", "stock"),
    ("Kineto", "stock"),
)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "8 coalesced")
CELLS = (
    Cell("DDP step", 0, STEP),
    Cell("GPT step", 0, STEP),
    *(Cell(op, nbytes, HOST) for op in OPERATIONS for nbytes in (KIB, MIB)),
    # One rank copies at the pace of its memory: a third of a millisecond, and three.
    *(Cell(op, n * MIB, DEVICE) for op in ("all_gather", "reduce_scatter") for n in (512, 4096)),
)
#: Cells that the comparisons for scale are made in.
FOR_SCALE = (
    Cell("DDP step", 0, STEP),
    Cell("all_reduce", KIB, HOST),
    Cell("all_gather", 512 * MIB, DEVICE),
)
#: What Crux may cost, by how it is timed.
GOALS = {HOST: 1.01, STEP: 1.01, DEVICE: 1.002}


@dataclass(frozen=True)
class Row:
    """One cell of one comparison.

    Attributes:
        base_ns: one call on the side that is compared with, the median over its blocks.
        added_ns: what the other side adds to it, the median over the cycles.
        ratio: the median over the cycles.
        quartiles: of the ratio over the cycles.
        interval: in which the median lies with a probability of 95%.
    """

    side: str
    base: str
    cell: Cell
    base_ns: float
    added_ns: float
    ratio: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]
    cycles: int


@dataclass
class Results:
    """Everything that is published."""

    device: str
    torch: str
    nccl: str
    ranks: int
    cpus: int | None = field(default_factory=os.cpu_count)
    python: str = field(default_factory=platform.python_version)
    complete: bool = False
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def table(self) -> Table:
        table = Table(title=f"On {self.device}, {self.ranks} rank(s), torch {self.torch}")
        for column in ("compared", "cell", "timed", "base", "added", "ratio", "95%", "quartiles"):
            table.add_column(column, justify="left" if column in ("compared", "cell") else "right")
        for row in self.rows:
            table.add_row(
                f"{row.side} / {row.base}",
                row.cell.title,
                row.cell.how,
                f"{row.base_ns / 1e3:.1f} µs",
                f"{row.added_ns:+.0f} ns",
                f"{row.ratio:.4f}",
                "{:.4f} to {:.4f}".format(*row.interval),
                "{:.3f} to {:.3f}".format(*row.quartiles),
            )
        return table

    def verdicts(self) -> Iterator[str]:
        """How each goal stands."""
        for how, goal in GOALS.items():
            ratios = [r.ratio for r in self.rows if r.side == CRUX.name and r.cell.how == how]
            if ratios:
                held = "held" if max(ratios) <= goal else "NOT held"
                yield (
                    f"{how}: median over cells {statistics.median(ratios):.4f}, worst "
                    f"{max(ratios):.4f}; goal {goal} {held} in every cell"
                )
        yield from self.failures
        if not self.complete:
            yield "CUT OFF: not every cell had its turn"


def _cycles(side: World, base: World, cell: Cell, seconds: float) -> tuple[list[float], ...]:
    """Ratios, differences and times of the base, one of each for every A B B A."""
    once = min(side.block(cell, 3), base.block(cell, 3))
    repeats = max(2, min(MAX_ISSUED, round(BLOCK_NS / once)))
    ratios, added, times = [], [], []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(ratios) < MIN_CYCLES:
        a, b, c, d = (world.block(cell, repeats) for world in (base, side, side, base))
        ratios.append((b + c) / (a + d))
        added.append((b + c - a - d) / 2)
        times += [a, d]
    return ratios, added, times


def _row(side: World, base: World, cell: Cell, seconds: float) -> Row:
    ratios, added, times = _cycles(side, base, cell, seconds)
    low, _, high = statistics.quantiles(ratios, n=4)
    return Row(
        side.side.name,
        base.side.name,
        cell,
        statistics.median(times),
        statistics.median(added),
        statistics.median(ratios),
        (low, high),
        median_interval(ratios),
        len(ratios),
    )


def median_interval(values: list[float]) -> tuple[float, float]:
    """In which the median lies with a probability of 95%, by the order of the values alone.

    Conover, Practical Nonparametric Statistics, section 3.2, with the normal approximation.
    """
    ordered, n = sorted(values), len(values)
    half = 1.96 * n**0.5 / 2
    low, high = int(n / 2 - half), int(n / 2 + half)
    return ordered[max(0, low)], ordered[min(n - 1, high)]


def _small(cell: Cell) -> Cell:
    return replace(cell, nbytes=min(cell.nbytes, MIB))


def _describe(ranks: int) -> Results:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Results(torch.cuda.get_device_name(), torch.__version__, nccl, ranks)


@click.command()
@click.option("--seconds", default=8.0, show_default=True, help="Time for each cell.")
@click.option("--ranks", default=1, show_default=True, help="Ranks of each world, on one device.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here."
)
@click.option("--text", "text_file", type=click.Path(path_type=Path), help="And the tables here.")
@click.option("--quick", is_flag=True, help="A second for each cell, and small models.")
def main(
    seconds: float, ranks: int, json_file: Path | None, text_file: Path | None, quick: bool
) -> None:
    """Measure what Crux adds to collectives and training steps on one GPU."""
    if not torch.cuda.is_available():
        raise click.ClickException("this benchmark needs a GPU, and torch finds none")
    results = _describe(ranks)
    console = Console(width=140)
    seconds = min(seconds, 0.5) if quick else seconds

    def keep() -> None:
        if json_file:
            json_file.write_text(json.dumps(asdict(results), indent=1) + "\n")
        if text_file:
            with text_file.open("w") as out:
                told = Console(file=out, width=140)
                told.print(results.table())
                for line in results.verdicts():
                    told.print(line)

    with tempfile.TemporaryDirectory() as folder:
        for side, base in PAIRS:
            with contextlib.ExitStack() as stack:
                worlds: list[World] = []
                for name in (side, base):
                    worlds.append(World(SIDES[name], ranks, tempfile.mkdtemp(dir=folder), quick))
                    stack.callback(worlds[-1].close)
                chosen = CELLS if side == CRUX.name else FOR_SCALE
                for cell in dict.fromkeys(_small(each) if quick else each for each in chosen):
                    try:
                        results.rows.append(_row(worlds[0], worlds[1], cell, seconds))
                    except WorldError as error:
                        # One side alone may fail: what comes after it can still be told.
                        results.failures.append(f"{side} / {base}, {cell.title}: {error}")
                        console.print(results.failures[-1], style="red", markup=False)
                        break
                    row = results.rows[-1]
                    console.print(f"{side} / {base}  {cell.title} ({cell.how}): {row.ratio:.4f}")
                    keep()
    results.complete = True
    keep()
    console.print(results.table())
    for line in results.verdicts():
        console.print(line)
    if results.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
