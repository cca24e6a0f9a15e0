"""What a switch of inner backends costs: a DDP step with switches against without, in one run.

    python benchmarks/switch.py [--rig] [--every K] [--switches N] [--pairs N] [--quick]
                                [--json FILE] [--out DIR]

Two ranks train over gloo on loopback, or over NCCL on the rig (docs/research/without-gpu.md), where
training stops for a switch: "held" is for how long. Blocks of steps with a switch every K steps
take turns with blocks of as many steps without, in random order, so whatever slows the machine for
longer than a block slows both. Of each pair come the ratio of the step times and, from their
difference, what one switch cost: time, and CPU time of one rank, which other programs of the
machine disturb less.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from workloads.ddp_step import ddp_step

from crux_torch.cli.results import Result, publish

WAIT_S = 30.0


def _worker(rank: int, backend: str, store: str, pipe: Connection) -> None:
    """Runs the blocks it is told to: steps, and after how many of them each switch begins."""
    os.environ.update(CRUX_STORE="none", OMP_NUM_THREADS="1", CRUX_LOG_LEVEL="ERROR")
    import torch
    import torch.distributed as dist

    import crux_torch
    from crux_torch.backend.handover import GROUPS

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    crux_torch.attach()
    device = "cpu" if backend == "gloo" else "cuda"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    train = ddp_step(device)

    def step() -> None:
        train()
        if device != "cpu":
            torch.cuda.synchronize()

    for _ in range(5):
        step()
    generation = 0
    while (command := pipe.recv()) is not None:
        steps, every = command
        dist.barrier()
        switched: list[Any] = []
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for number in range(steps):
            if every and number % every == 0:
                switched += _finished(GROUPS, generation)
                generation += 1
                GROUPS.request(generation)
            step()
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        # What is still under way passes with a few more steps, which are not counted.
        while every and not _all_finished(GROUPS, device):
            step()
        dist.barrier()
        switched += _finished(GROUPS, generation) if every else []
        pipe.send((seconds / steps, cpu_s / steps, switched))
    dist.destroy_process_group()


def _finished(groups: Any, generation: int) -> list[dict[str, Any]]:
    return [
        {"created_ms": s.created_ms, "agreed_ms": s.agreed_ms, "held_ms": s.held_ms}
        for s in groups.status()
        if s.state == "idle" and s.generation == generation and generation
    ]


def _all_finished(groups: Any, device: str) -> bool:
    """Whether no rank has a switch under way: asked of all, for the steps need all."""
    import torch
    import torch.distributed as dist

    waiting = torch.tensor([0.0 if groups.wait(0.0001) else 1.0]).to(device)
    dist.all_reduce(waiting)
    return not waiting


class Ranks:
    """Two processes that train together."""

    def __init__(self, backend: str, folder: str) -> None:
        context = mp.get_context("spawn")
        ends = [context.Pipe() for _ in range(2)]
        self._pipes = [mine for mine, _ in ends]
        self._processes = [
            context.Process(
                target=_worker, args=(rank, backend, f"{folder}/store", theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def block(self, steps: int, every: int) -> tuple[float, float, list[dict[str, Any]]]:
        """Seconds of one step, a rank's CPU seconds, and what was noted of the switches."""
        for pipe in self._pipes:
            pipe.send((steps, every))
        answers = [pipe.recv() for pipe in self._pipes]
        seconds, cpu_s, switched = answers[0]
        return seconds, cpu_s, switched

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(WAIT_S)


def _quartiles(values: list[float]) -> list[float]:
    return [round(v, 4) for v in statistics.quantiles(values, n=4)]


def measure(ranks: Ranks, every: int, switches: int, pairs: int) -> dict[str, Any]:
    """One row: pairs of blocks with ``switches`` switches and with none."""
    steps = every * switches
    ratios, costs_ms, cpu_ms, quiet_ms, noted = [], [], [], [], []
    for _ in range(pairs):
        taken: dict[int, float] = {}
        cpu: dict[int, float] = {}
        for with_switches in random.sample((every, 0), 2):
            taken[with_switches], cpu[with_switches], switched = ranks.block(steps, with_switches)
            noted += switched
        ratios.append(taken[every] / taken[0])
        costs_ms.append(1e3 * (taken[every] - taken[0]) * every)
        cpu_ms.append(1e3 * (cpu[every] - cpu[0]) * every)
        quiet_ms.append(1e3 * taken[0])
    return {
        "every": every,
        "pairs": pairs,
        "switches": len(noted),
        "step_ms": round(statistics.median(quiet_ms), 3),
        "ratio": _quartiles(ratios),
        "cost_ms": _quartiles(costs_ms),
        "cpu_ms": _quartiles(cpu_ms),
        **{name: _quartiles([s[name] for s in noted]) for name in ("created_ms", "agreed_ms")},
        "held": sum(s["held_ms"] > 0 for s in noted),
        "held_ms": _quartiles([s["held_ms"] for s in noted]),
        "longest_held_ms": round(max(s["held_ms"] for s in noted), 3),
    }


@click.command()
@click.option("--rig", is_flag=True, help="Over NCCL on the rig instead of gloo.")
@click.option("--every", default="25,100", show_default=True, help="Steps from switch to switch.")
@click.option("--switches", default=1, show_default=True, help="Switches in a block.")
@click.option("--pairs", default=40, show_default=True, help="Pairs of blocks.")
@click.option("--quick", is_flag=True, help="One small measurement, to see that it works.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Rows go here."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Results go here.")
def main(
    rig: bool,
    every: str,
    switches: int,
    pairs: int,
    quick: bool,
    json_path: Path | None,
    out: Path | None,
) -> None:
    """Measure what a switch of inner backends costs a DDP step."""
    if rig:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
        import cuda_rig

        os.environ.update(cuda_rig.environment(os.environ))
    backend = "nccl" if rig else "gloo"
    random.seed(0)
    spacings = [12] if quick else [int(k) for k in every.split(",")]
    if quick:
        switches, pairs = 2, 2
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(backend, folder)
        # The largest blocks get fewer pairs.
        rows = [
            measure(ranks, k, switches, max(2, round(pairs * spacings[0] / k))) for k in spacings
        ]
        ranks.close()
    title = f"A DDP step over {backend}, 2 ranks on loopback, with switches against without"
    table = Table(title=title)
    for column in (
        "every",
        "switches",
        "step",
        "ratio",
        "cost",
        "CPU",
        "made in",
        "agreed in",
        "held",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        low, median, high = row["ratio"]
        cost = row["cost_ms"]
        table.add_row(
            f"{row['every']} steps",
            str(row["switches"]),
            f"{row['step_ms']:.1f} ms",
            f"{median:.3f} ({low:.3f} to {high:.3f})",
            f"{cost[1]:.1f} ms ({cost[0]:.1f} to {cost[2]:.1f})",
            f"{row['cpu_ms'][1]:.1f} ms ({row['cpu_ms'][0]:.1f} to {row['cpu_ms'][2]:.1f})",
            f"{row['created_ms'][1]:.1f} ms",
            f"{row['agreed_ms'][1]:.1f} ms",
            f"{row['held']}, {row['held_ms'][1]:.1f} ms, {row['longest_held_ms']:.1f} ms at most",
        )
    text = io.StringIO()
    console = Console(file=text, width=170)
    console.print(table)
    console.print(
        "ratio, and one switch's cost and CPU time of a rank: median and quartiles of pairs"
    )
    settings = {"switches": switches, "pairs": pairs, "cpus": os.cpu_count()}
    name = "switch_rig" if rig else "switch"
    publish(Result(name, settings, rows), text.getvalue(), json_path, out)


if __name__ == "__main__":
    sys.exit(main())
