"""Time that Crux adds to the start and end of a job: torchrun against cruxrun, in turn.

    python benchmarks/start_end.py [--pairs N] [--steps N] [--json FILE]

Each pair runs one job of two ranks under each launcher, in random order. So whatever slows the
machine for longer than a pair slows both. Printed are medians and quartiles of the jobs, and of the
differences within the pairs. Processor seconds hardly depend on what else the machine does.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

LAUNCHERS = {"stock": "torch.distributed.run", "crux": "cruxrun"}
RANKS = 2
#: Of each job.
FIGURES = {
    "job": "the whole job",
    "cpu": "processor seconds of all its processes",
    "init": "init_process_group",
    "destroy": "destroy_process_group",
}
RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
begin = time.perf_counter()
dist.init_process_group("gloo")
init = time.perf_counter() - begin
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[2])):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
begin = time.perf_counter()
dist.destroy_process_group()
told = {"init": init, "destroy": time.perf_counter() - begin}
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    json.dump(told, file)
"""


def _job(launcher: str, steps: int) -> dict[str, float]:
    """Seconds of one job; of its ranks, the longest."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "rank.py")
        script.write_text(RANK)
        command = [sys.executable, "-m", launcher, "--standalone", f"--nproc-per-node={RANKS}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CRUX_LOG_LEVEL": "ERROR"}
        begin, before = time.perf_counter(), os.times()
        subprocess.run([*command, str(script), folder, str(steps)], env=env, check=True)
        job_s, after = time.perf_counter() - begin, os.times()
        told = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    return {
        "job": job_s,
        "cpu": after.children_user + after.children_system
        - before.children_user - before.children_system,
        **{name: max(each[name] for each in told) for name in ("init", "destroy")},
    }  # fmt: skip


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


@click.command()
@click.option("--pairs", default=10, show_default=True, help="Pairs of jobs.")
@click.option("--steps", default=1, show_default=True, help="Steps of each job.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the figures here."
)
def main(pairs: int, steps: int, json_file: str | None) -> None:
    """Measure how much longer a short job takes under cruxrun than under torchrun."""
    random.seed(0)
    failed = dict.fromkeys(LAUNCHERS, 0)
    jobs: dict[str, list[dict[str, float]]] = {side: [] for side in LAUNCHERS}
    for _ in range(pairs):
        for side in random.sample(list(LAUNCHERS), 2):
            try:
                jobs[side].append(_job(LAUNCHERS[side], steps))
            except subprocess.CalledProcessError as error:
                # Gloo's teardown now and then aborts a rank, under either launcher.
                failed[side] += error.returncode != 0
                jobs[side].append(_job(LAUNCHERS[side], steps))
    for side, times in failed.items():
        if times:
            print(f"{side}: {times} jobs failed and were started again")
    table = Table(title=f"Jobs of {steps} steps and {RANKS} ranks, {pairs} pairs: seconds")
    for column in ("", *LAUNCHERS, "crux - stock", "crux / stock"):
        table.add_column(column, justify="right" if column else "left")
    rows: dict[str, Any] = {}
    for name, what in FIGURES.items():
        stock, crux = ([job[name] for job in jobs[side]] for side in LAUNCHERS)
        row = rows[name] = {
            "stock": _quartiles(stock),
            "crux": _quartiles(crux),
            "difference": _quartiles([b - a for a, b in zip(stock, crux, strict=True)]),
            "ratio": _quartiles([b / a for a, b in zip(stock, crux, strict=True)]),
        }
        cells = [f"{m:.3f} ({low:.3f} to {high:.3f})" for low, m, high in row.values()]
        table.add_row(what, *cells)
    Console(width=120).print(table)
    if json_file:
        Path(json_file).write_text(json.dumps({"steps": steps, "pairs": pairs, **rows}, indent=1))


if __name__ == "__main__":
    main()
