"""What waiting on a host's links costs jobs on separate accelerators, which share no link's time.

    python benchmarks/links_device.py [--blocks N] [--steps N] [--json FILE] [--out DIR]

Two jobs of one rank train on the rig (docs/gpu.md), each on a device of its own, and both cross one
link of Crux. The devices disturb each other by nothing, so any cost is that of the waiting alone.
Blocks with waiting and without take turns, in the order A B B A. Every four blocks give one ratio
of step times for each job. The low job reads its loss every step or every tenth: the less often,
the further its host issues ahead of the device.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.results import Result, publish

#: A layer's backward pass and the optimizer on the device; what ``_sleep`` counts in a second.
LAYERS, LAYER_S, OPTIMIZER_S, SLEEP_HZ = 8, 5e-3, 10e-3, 1.5e9
JOBS = {"high": 6, "low": 1}
READS = (1, 10)


def _job(name: str, level: int, folder: str, pipe: Connection) -> None:
    """One job: for each block that it is told of, its steps take place, and their time is sent."""
    os.environ.update(CRUX_STORE="none", OMP_NUM_THREADS="1", CRUX_LOG_LEVEL="ERROR")
    import torch
    import torch.distributed as dist

    import crux_torch
    from crux_torch import _C

    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    crux_torch.attach()
    dist.init_process_group("nccl", init_method=f"file://{folder}/{name}", rank=0, world_size=1)
    gate = _C.link_gate()
    link = gate.join(folder, "benchmark", "link", name)
    gate.set_wait_s(0.5)
    gate.set_level(level, 0.0)
    gate.cross(0, [link])
    gradient = torch.empty(1 << 18, device="cuda")
    loss = torch.zeros(4, device="cuda")

    def step() -> None:
        works = []
        for _ in range(LAYERS):
            torch.cuda._sleep(int(LAYER_S * SLEEP_HZ))
            works.append(dist.all_reduce(gradient, async_op=True))
        for work in works:
            work.wait()
        torch.cuda._sleep(int(OPTIMIZER_S * SLEEP_HZ))

    step()
    loss.cpu()
    pipe.send(None)
    while (command := pipe.recv()) is not None:
        waiting, steps, read = command
        gate.install(waiting)
        waited = gate.waits[0]
        begin_s = time.perf_counter()
        for number in range(1, steps + 1):
            step()
            if number % read == 0:
                loss.cpu()
        loss.cpu()
        pipe.send(((time.perf_counter() - begin_s) / steps, gate.waits[0] - waited))
    gate.install(False)
    gate.retire()
    dist.destroy_process_group()


def measure(pipes: dict[str, Connection], blocks: int, steps: int, read: int) -> dict[str, Any]:
    """Ratios of step times with waiting over without it, of each job, and waits of each job."""
    ratios: dict[str, list[float]] = {name: [] for name in pipes}
    alone_ms: dict[str, list[float]] = {name: [] for name in pipes}
    waits = dict.fromkeys(pipes, 0)
    for _ in range(blocks):
        taken: dict[str, dict[bool, list[float]]] = {n: {True: [], False: []} for n in pipes}
        for waiting in (False, True, True, False):
            for name, pipe in pipes.items():
                pipe.send((waiting, steps, 1 if name == "high" else read))
            for name, pipe in pipes.items():
                seconds, waited = pipe.recv()
                taken[name][waiting].append(seconds)
                waits[name] += waited
        for name, by in taken.items():
            ratios[name].append(sum(by[True]) / sum(by[False]))
            alone_ms[name] += [1e3 * seconds for seconds in by[False]]
    return {
        "read_every": read,
        "ratio": ratios,
        "step_ms": {name: statistics.median(values) for name, values in alone_ms.items()},
        "waits": waits,
    }


def text_of(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = ["Two jobs on separate devices: step time with waiting on a link over without"]
    for row in rows:
        for name, values in row["ratio"].items():
            low, middle, high = statistics.quantiles(values, n=4)
            lines.append(
                f"  {name:<4} job, the low one reads its loss every {row['read_every']:>2} steps: "
                f"{middle:.3f} ({low:.3f} to {high:.3f}), {row['waits'][name]} waits, "
                f"step {row['step_ms'][name]:.1f} ms"
            )
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--blocks", default=6, show_default=True, help="Fours of blocks.")
@click.option("--steps", default=20, show_default=True, help="Steps in a block.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Results go here.")
def main(blocks: int, steps: int, json_path: Path | None, out: Path | None) -> None:
    """Measure what waiting on links costs jobs on separate devices."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import cuda_rig

    usable, why = cuda_rig.available()
    if not usable:
        raise click.ClickException(why)
    os.environ.update(cuda_rig.environment(os.environ))
    context = mp.get_context("spawn")
    pipes, processes = {}, []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name, level in JOBS.items():
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=_job, args=(name, level, folder, theirs)))
            processes[-1].start()
            theirs.close()
        try:
            for pipe in pipes.values():
                pipe.recv()
            rows = [measure(pipes, blocks, steps, read) for read in READS]
            for pipe in pipes.values():
                pipe.send(None)
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()
    settings = {"blocks": blocks, "steps": steps}
    publish(Result("links_device", settings, rows), text_of(rows), json_path, out)


if __name__ == "__main__":
    main()
