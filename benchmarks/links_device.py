"""What waiting on a host's links does to jobs on accelerators that issue ahead of their devices.

    python benchmarks/links_device.py [--blocks N] [--steps N] [--json FILE] [--out DIR]

Two jobs train on the rig (docs/gpu.md), each on a device of its own, and both cross one link of
Crux. A step has layers of computation; behind each one goes a transfer, on a stream of its own.
Either the transfers disturb each other by nothing (``separate``), or they share an emulated link
fairly (``shared``). Waiting has two forms:

* ``issue``: as the backend does it. A transfer is in flight from its issue to its end, and the low
  job's host waits before it issues one.
* ``stream``: a transfer is in flight from when the device comes to it to its end, and the low job's
  stream waits, in a host function, for a bounded time.

Blocks with waiting and without take turns, in the order A B B A. Every four blocks give one ratio
of step times for each job. The low job reads its loss every step or every tenth: the less often,
the further its host issues ahead of the device.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing as mp
import os
import statistics
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.results import Result, publish

#: A layer's backward pass, its transfer, and the optimizer on the device; what ``_sleep`` counts
#: in a second.
LAYERS, LAYER_S, TRANSFER_S, OPTIMIZER_S, SLEEP_HZ = 8, 5e-3, 3e-3, 10e-3, 1.5e9
#: The part of a transfer after which its share of the link is looked at again.
CHUNK_S = 1e-3
JOBS = {"high": 6, "low": 1}
READS = (1, 10)
FORMS = ("issue", "stream")
LINKS = ("separate", "shared")
#: Of a transfer, for Crux.
GROUP, BYTES = 0, 1 << 20
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Link:
    """An emulated link that all transfers under way share fairly."""

    def __init__(self, folder: str, own: int) -> None:
        with Path(folder, "busy").open("r+b") as file:
            self._busy = mmap.mmap(file.fileno(), 8 * len(JOBS))
        self._own = own

    def carry(self, seconds: float, shared: bool) -> None:
        """Return when a transfer is over that takes ``seconds`` alone."""
        struct.pack_into("q", self._busy, 8 * self._own, 1)
        try:
            while seconds > 0.0:
                begin_s = time.monotonic()
                time.sleep(min(seconds, CHUNK_S))
                others = sum(struct.unpack_from(f"{len(JOBS)}q", self._busy)) if shared else 1
                seconds -= (time.monotonic() - begin_s) / max(1, others)
        finally:
            struct.pack_into("q", self._busy, 8 * self._own, 0)


def _job(name: str, level: int, folder: str, pipe: Connection) -> None:
    """One job: for each block that it is told of, its steps take place, and their time is sent."""
    os.environ.update(OMP_NUM_THREADS="1")
    import torch

    from crux_torch import _C

    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    gate = _C.link_gate()
    crossed = gate.join(folder, "benchmark", "link", name)
    gate.set_wait_s(0.5)
    gate.set_level(level, 0.0)
    gate.cross(GROUP, [crossed])
    link = Link(folder, list(JOBS).index(name))
    launch = ctypes.CDLL(None).cudaLaunchHostFunc
    launch.argtypes = [ctypes.c_void_p, HOST_FUNCTION, ctypes.c_void_p]
    side = torch.cuda.Stream()
    loss = torch.zeros(4, device="cuda")
    form, shared = "", False

    def on_device(ticket: int) -> None:
        """On the stream's thread."""
        if form == "stream":
            ticket = gate.enter(GROUP, BYTES)
        link.carry(TRANSFER_S, shared)
        gate.leave(ticket)

    # A ticket and a null pointer are both 0.
    function = HOST_FUNCTION(lambda ticket: on_device(ticket or 0))

    def transfer() -> None:
        ticket = gate.enter(GROUP, BYTES) if form == "issue" else 0
        side.wait_stream(torch.cuda.current_stream())
        assert launch(side.cuda_stream, function, ticket) == 0

    def step() -> None:
        for _ in range(LAYERS):
            torch.cuda._sleep(int(LAYER_S * SLEEP_HZ))
            transfer()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda._sleep(int(OPTIMIZER_S * SLEEP_HZ))

    step()
    loss.cpu()
    pipe.send(None)
    while (command := pipe.recv()) is not None:
        form, shared, steps, read = command
        waited = gate.waits[0]
        begin_s = time.perf_counter()
        for number in range(1, steps + 1):
            step()
            if number % read == 0:
                loss.cpu()
        loss.cpu()
        pipe.send(((time.perf_counter() - begin_s) / steps, gate.waits[0] - waited))
    gate.retire()


def measure(
    pipes: dict[str, Connection], form: str, link: str, blocks: int, steps: int, read: int
) -> dict[str, Any]:
    """Ratios of step times with waiting over without it, of each job, and waits of each job."""
    ratios: dict[str, list[float]] = {name: [] for name in pipes}
    without_ms: dict[str, list[float]] = {name: [] for name in pipes}
    waits = dict.fromkeys(pipes, 0)
    for _ in range(blocks):
        taken: dict[str, dict[str, list[float]]] = {n: {form: [], "": []} for n in pipes}
        for now in ("", form, form, ""):
            for name, pipe in pipes.items():
                pipe.send((now, link == "shared", steps, 1 if name == "high" else read))
            for name, pipe in pipes.items():
                seconds, waited = pipe.recv()
                taken[name][now].append(seconds)
                waits[name] += waited
        for name, by in taken.items():
            ratios[name].append(sum(by[form]) / sum(by[""]))
            without_ms[name] += [1e3 * seconds for seconds in by[""]]
    return {
        "form": form,
        "link": link,
        "read_every": read,
        "ratio": ratios,
        "step_ms": {name: statistics.median(values) for name, values in without_ms.items()},
        "waits": waits,
    }


def text_of(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        "Two jobs whose devices issue ahead: step time with waiting on a link over without",
        "link      waits in  low reads every  job   ratio (quartiles)         waits  step without",
    ]
    for row in rows:
        for name, values in row["ratio"].items():
            low, middle, high = statistics.quantiles(values, n=4)
            lines.append(
                f"{row['link']:<9} {row['form']:<9} {row['read_every']:<16} {name:<5} "
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
    import cuda_rig

    usable, why = cuda_rig.available()
    if not usable:
        raise click.ClickException(why)
    os.environ.update(cuda_rig.environment(os.environ))
    context = mp.get_context("spawn")
    pipes, processes = {}, []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "busy").write_bytes(bytes(8 * len(JOBS)))
        for name, level in JOBS.items():
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=_job, args=(name, level, folder, theirs)))
            processes[-1].start()
            theirs.close()
        try:
            for pipe in pipes.values():
                pipe.recv()
            rows = [
                measure(pipes, form, link, blocks, steps, read)
                for link in LINKS
                for form in FORMS
                for read in READS
            ]
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
