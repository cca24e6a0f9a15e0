"""What waiting on a host's links does to jobs on accelerators that issue ahead of their devices.

    python benchmarks/links_device.py [--blocks N] [--steps N] [--json FILE] [--out DIR]

Two jobs train on the rig (docs/research/without-gpu.md), each on a device of its own, with a
process group of torch under Crux's backend, and both cross one link of Crux. A step has layers of
computation. Behind each one goes an all-reduce, which the step waits for before the optimizer.
Either the all-reduces of the two jobs disturb each other by nothing (``separate``), or they share
an emulated link fairly (``shared``).

Blocks with Crux's gate and without take turns, in the order A B B A. Every four blocks give one
ratio of step times for each job. The low job reads its loss every step or every tenth: the less
often, the further its host issues ahead of the device.

The rig's streams are threads, which a device's are not. Under ``chrt -r 1``, for which root is
needed, other programs of the machine do not hold them up. Results with it have a name of their own.
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

#: A layer's backward pass, its all-reduce, and the optimizer on the device; what ``_sleep`` counts
#: in a second.
LAYERS, LAYER_S, TRANSFER_S, OPTIMIZER_S, SLEEP_HZ = 8, 5e-3, 3e-3, 10e-3, 1.5e9
JOBS = {"high": 6, "low": 1}
READS = (1, 10)
LINKS = ("separate", "shared")
#: The longest wait.
WAIT_S = 0.5


def _job(name: str, level: int, folder: str, pipe: Connection) -> None:
    """One job: for each block that it is told of, its steps take place, and their time is sent."""
    os.environ.update(OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist
    from cuda_rig import control
    from torch._C import _distributed_c10d as c10d

    from crux_torch import _C

    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    options = c10d.ProcessGroupNCCL2.Options()
    options.global_ranks_in_group, options.group_name = [0], name
    backend = _C.DelegatingBackend("nccl", 0, 1, _C.process_recorder(1 << 12))
    backend.add_inner("cuda", c10d.ProcessGroupNCCL2(dist.HashStore(), 0, 1, options))
    gate = _C.link_gate()
    gate.set_wait_s(WAIT_S)
    gate.cross(backend.group_index, [gate.join(folder, "benchmark", "link", name)])
    gate.set_level(level, 0.0)
    gradients = [torch.zeros(1 << 10, device="cuda") for _ in range(LAYERS)]
    loss = torch.zeros(4, device="cuda")

    def step() -> None:
        works = []
        for gradient in gradients:
            torch.cuda._sleep(int(LAYER_S * SLEEP_HZ))
            works.append(backend.allreduce([gradient]))
        for work in works:
            work.wait()
        torch.cuda._sleep(int(OPTIMIZER_S * SLEEP_HZ))

    step()
    loss.cpu()
    control.inject("delay", "all_reduce", TRANSFER_S, control.EVER)
    pipe.send(None)
    while (command := pipe.recv()) is not None:
        gated, shared, steps, read = command
        control.share(f"{folder}/carriers" if shared else "")
        gate.install(gated)
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
    backend.shutdown()


def measure(
    pipes: dict[str, Connection], link: str, blocks: int, steps: int, read: int
) -> dict[str, Any]:
    """Ratios of step times with the gate over without it, of each job, and waits of each job."""
    ratios: dict[str, list[float]] = {name: [] for name in pipes}
    without_ms: dict[str, list[float]] = {name: [] for name in pipes}
    waits = dict.fromkeys(pipes, 0)
    for _ in range(blocks):
        taken: dict[str, dict[bool, list[float]]] = {n: {True: [], False: []} for n in pipes}
        for gated in (False, True, True, False):
            for name, pipe in pipes.items():
                pipe.send((gated, link == "shared", steps, 1 if name == "high" else read))
            for name, pipe in pipes.items():
                seconds, waited = pipe.recv()
                taken[name][gated].append(seconds)
                waits[name] += waited
        for name, by in taken.items():
            ratios[name].append(sum(by[True]) / sum(by[False]))
            without_ms[name] += [1e3 * seconds for seconds in by[False]]
    return {
        "link": link,
        "read_every": read,
        "ratio": ratios,
        "step_ms": {name: statistics.median(values) for name, values in without_ms.items()},
        "waits": waits,
    }


def text_of(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        "Two jobs whose devices issue ahead: step time with Crux's gate over without",
        "link      low reads every  job   ratio (quartiles)         waits  step without",
    ]
    for row in rows:
        for name, values in row["ratio"].items():
            low, middle, high = statistics.quantiles(values, n=4)
            lines.append(
                f"{row['link']:<9} {row['read_every']:<16} {name:<5} "
                f"{middle:.3f} ({low:.3f} to {high:.3f}) {row['waits'][name]:>9} "
                f"{row['step_ms'][name]:>10.1f} ms"
            )
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--blocks", default=6, show_default=True, help="Fours of blocks.")
@click.option("--steps", default=20, show_default=True, help="Steps in a block.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Results go here.")
def main(blocks: int, steps: int, json_path: Path | None, out: Path | None) -> None:
    """Measure what waiting on links does to jobs that issue ahead of their devices."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    import cuda_rig

    usable, why = cuda_rig.available()
    if not usable:
        raise click.ClickException(why)
    os.environ.update(cuda_rig.environment(os.environ))
    context = mp.get_context("spawn")
    pipes, processes = {}, []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "carriers").write_bytes(bytes(8))
        for name, level in JOBS.items():
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=_job, args=(name, level, folder, theirs)))
            processes[-1].start()
            theirs.close()
        try:
            for pipe in pipes.values():
                pipe.recv()
            rows = [measure(pipes, link, blocks, steps, read) for link in LINKS for read in READS]
            for pipe in pipes.values():
                pipe.send(None)
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()
    realtime = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    settings = {"blocks": blocks, "steps": steps, "realtime": realtime}
    name = "links_device_realtime" if realtime else "links_device"
    publish(Result(name, settings, rows), text_of(rows), json_path, out)


if __name__ == "__main__":
    main()
