"""What Crux costs: stock Gloo against Crux in one run, block by block in turn.

Crux is seen as it is nearly always, and while a measurement finds out when every operation ends.

    python benchmarks/overhead.py [--pairs N] [--rounds N] [--only metrics] [--json FILE] [--quick]

Two pairs of processes live side by side, one on stock Gloo and one on Crux with its background
thread at work; only one pair runs at a time. Three blocks side by side give two ratios, so whatever
slows the machine for longer than a block slows all. Printed are median ratios and quartiles.

What `--crux-metrics` costs is seen in one job: its DDP steps while a Prometheus would ask for its
metrics once a second, over those while the process that serves them stands still.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from workloads.ddp_step import ddp_step

sys.path.insert(0, str(Path(__file__).parents[1]))
from lab.sockets import descendants

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
#: How Crux runs, by whether its recorder times.
TIMES = {"between measurements": False, "measuring": True}
#: Where torch's hooks record a group, and not a wrapper of its backend.
HOOKS = ", by hooks"
#: Short blocks, so that all sides meet the same mood of the machine.
BLOCK_S = 0.01
NULL_CALLS = 20_000
#: Blocks with and without metrics: rare work of another process counts, so they are long.
METRICS_BLOCK_S, SCRAPE_S = 2.0, 1.0
METRICS_PAIRS = 50
#: Seconds for the process that serves metrics to answer.
START_S = 60.0
EXPORTER = b"crux_torch.report.exporter"


def _operation(op: str, nbytes: int) -> Any:
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    count = nbytes // 4
    whole, part = torch.ones(count), torch.ones(count // world)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[op]


def _worker(
    mode: str, rank: int, store: str, settings: Mapping[str, str], pipe: Connection
) -> None:
    """Runs the blocks it is told to; rank 0's times are the ones that count."""
    os.environ.update(CRUX_STORE="none", OMP_NUM_THREADS="1", CRUX_LOG_LEVEL="ERROR")
    os.environ.update(settings)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A rank and its helper threads stay on one core: migrations cost more than what is measured.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if mode == "crux":
        import crux_torch
        import crux_torch.backend.register

        crux_torch.attach()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    recorder: Any = None
    if mode == "crux":
        assert crux_torch.status()["active"], crux_torch.status()
        recorder = crux_torch.backend.register.recorder()
    made: dict[Any, Any] = {}
    while (command := pipe.recv()) is not None:
        what, repeats, timed = command
        if recorder is not None and timed is not None:
            recorder.timing = timed
        if what not in made:
            made.clear()
            made[what] = ddp_step() if what == "ddp" else _operation(*what)
            made[what]()
        call = made[what]
        dist.barrier()
        taken = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        # The background thread measures when it likes, too.
        spoilt = None not in (recorder, timed) and recorder.timing is not timed
        pipe.send(None if spoilt else (statistics.median(taken), statistics.fmean(taken)))
    dist.destroy_process_group()


class Pair:
    """Two ranks of one kind.

    Args:
        settings: more variables of their environment.
    """

    def __init__(
        self, mode: str, folder: str, settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        context = mp.get_context("spawn")
        ends = [context.Pipe() for _ in range(2)]
        self._pipes = [mine for mine, _ in ends]
        self._processes = [
            context.Process(
                target=_worker,
                args=(mode, rank, f"{folder}/{mode}", dict(settings), theirs),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def block(self, what: Any, repeats: int, timed: bool = False) -> float:
        """Seconds of one call, the median over a block."""
        while True:
            times = self._answers((what, repeats, timed))
            if None not in times:
                return float(times[0][0])

    def mean(self, what: Any, repeats: int) -> float:
        """Seconds of one call, the mean over a block, timed or not, as Crux likes."""
        return float(self._answers((what, repeats, None))[0][1])

    def _answers(self, command: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        return [pipe.recv() for pipe in self._pipes]

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [process.pid or 0 for process in self._processes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)


Ratios = dict[str, list[float]]


def _ratios(stock: Pair, crux: Pair, what: Any, pairs: int) -> tuple[Ratios, float]:
    """Crux over stock, by how it runs, and the median time of a stock call in seconds."""
    once = min(stock.block(what, 2), crux.block(what, 2))
    repeats = max(2, min(400, round(BLOCK_S / once)))
    # Long calls get fewer pairs.
    pairs = max(min(pairs, 5), min(pairs, round(2.0 / (once * repeats))))
    ratios: Ratios = {how: [] for how in TIMES}
    times = []
    for _ in range(pairs):
        taken = {}
        for how in random.sample(("stock", *TIMES), 1 + len(TIMES)):
            side = stock if how == "stock" else crux
            taken[how] = side.block(what, repeats, TIMES.get(how, False))
        for how in TIMES:
            ratios[how].append(taken[how] / taken["stock"])
        times.append(taken["stock"])
    return ratios, statistics.median(times)


def _metrics_ratios(pairs: int, block_s: float) -> list[float]:
    """Mean DDP steps while metrics are served and asked for, over those while they are not."""
    store, port = _free_port(), _free_port()
    settings = {"CRUX_STORE": f"tcp://127.0.0.1:{store}", "CRUX_JOB": "overhead"}
    settings |= {"CRUX_METRICS": str(port)}
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair("crux", folder, settings)
        repeats = max(2, round(block_s / pair.mean("ddp", 20)))
        exporter = _exporter(pair.pids, port)
        try:
            for _ in range(pairs):
                taken = {}
                for is_on in random.sample((True, False), 2):
                    os.kill(exporter, signal.SIGCONT if is_on else signal.SIGSTOP)
                    done = threading.Event()
                    asking = threading.Thread(target=_ask, args=(port, done, is_on))
                    asking.start()
                    taken[is_on] = pair.mean("ddp", repeats)
                    done.set()
                    asking.join()
                ratios.append(taken[True] / taken[False])
        finally:
            os.kill(exporter, signal.SIGCONT)
            pair.close()
    return ratios


def _exporter(ranks: Sequence[int], port: int) -> int:
    """The process that serves the metrics of a job of these ranks, once it answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for pid in (pid for rank in ranks for pid in descendants(rank)):
            with contextlib.suppress(OSError):
                if EXPORTER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=START_S)
                    return pid
        time.sleep(0.1)
    raise click.ClickException(f"no metrics at port {port}: pip install 'crux-torch[metrics]'")


def _ask(port: int, done: threading.Event, is_on: bool) -> None:
    """Asks for metrics once a second, as a Prometheus would, where they are served."""
    while not done.wait(SCRAPE_S):
        if is_on:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=START_S) as it:
                it.read()


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _say_metrics(console: Console, ratios: list[float]) -> None:
    low, median, high = _quartiles(ratios)
    mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    between = mean - 2 * error, mean + 2 * error
    console.print(
        f"a DDP step while --crux-metrics is asked once a second, over one without: {median:.3f} "
        f"({low:.3f} to {high:.3f}), mean {mean:.4f}, 95% between {between[0]:.4f} and "
        f"{between[1]:.4f}, {len(ratios)} pairs of blocks: "
        + ("the cost can't be resolved" if between[0] <= 1.0 <= between[1] else "resolved")
    )


def _null_ns(pairs: int) -> Ratios:
    """Nanoseconds that Crux adds to an all-reduce of a group whose backend does nothing."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.distributed import distributed_c10d as c10d

    from crux_torch import _C
    from crux_torch.backend import register

    recorder = register.recorder()
    hooked: Any = getattr(_C, "HookedGroup", None)

    def group(wraps: bool = False, hooks: bool = False) -> Any:
        inner: Any = FakeProcessGroup._create_internal(0, 2)
        if wraps:
            inner, fake = _C.DelegatingBackend("crux", 0, 2, recorder), inner
            inner.add_inner("cpu", fake)
        made: Any = c10d.ProcessGroup(dist.HashStore(), 0, 2)
        kind = c10d.ProcessGroup.BackendType.CUSTOM
        made._set_default_backend(kind)
        made._register_backend(torch.device("cpu"), kind, inner)
        if hooks:
            hooked.attach(made, inner, "cpu", True, recorder)
        return made

    stock, sides = group(), {"": group(wraps=True)}
    if hooked is not None:
        sides[HOOKS] = group(hooks=True)
    tensors = [torch.ones(1)]

    def block(target: Any) -> float:
        begin = time.perf_counter()
        for _ in range(NULL_CALLS):
            target.allreduce(tensors)
        seconds = time.perf_counter() - begin
        recorder.drain(1 << 20)
        return seconds / NULL_CALLS * 1e9

    for each in (stock, *sides.values()):
        block(each)
    ways = {f"{how}{by}": (sides[by], TIMES[how]) for by in sides for how in TIMES}
    added: Ratios = {way: [] for way in ways}
    for _ in range(pairs):
        taken = {}
        for way in random.sample(("stock", *ways), 1 + len(ways)):
            target, recorder.timing = ways.get(way, (stock, False))
            taken[way] = block(target)
        for way in ways:
            added[way].append(taken[way] - taken["stock"])
    assert recorder.dropped == 0
    return added


def _counting_ns(pairs: int) -> Ratios:
    """Nanoseconds of CPU that an operator takes longer while FLOPs are counted, by its kind."""
    import torch

    from crux_torch.measure.operators import OperatorCount

    torch.set_num_threads(1)
    tensor = torch.ones(4, 4)
    calls = {"without a formula": tensor.neg, "with one": lambda: tensor.mm(tensor)}

    def block(call: Any) -> float:
        begin = time.thread_time()
        for _ in range(NULL_CALLS):
            call()
        return (time.thread_time() - begin) / NULL_CALLS * 1e9

    added: Ratios = {kind: [] for kind in calls}
    for _ in range(pairs):
        for kind, call in calls.items():
            stock = block(call)
            with OperatorCount(lambda *_: None) as ran:
                counted = block(call)
            assert bool(ran.by_precision) == (kind == "with one")
            added[kind].append(counted - stock)
    return added


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return low, median, high


@click.command()
@click.option("--pairs", default=50, show_default=True, help="Pairs of blocks in a round, at most.")
@click.option("--rounds", default=4, show_default=True, help="Rounds, each with fresh processes.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the figures here."
)
@click.option("--only", type=click.Choice(["metrics"]), help="Measure only this.")
@click.option("--quick", is_flag=True, help="Small sizes and few pairs, to see that it works.")
def main(pairs: int, rounds: int, json_file: str | None, only: str | None, quick: bool) -> None:
    """Measure what Crux adds to collectives, a DDP step, a backend that does nothing, operators."""
    random.seed(0)
    pairs, rounds = (min(pairs, 3), 1) if quick else (pairs, rounds)
    sizes = SIZES[:2] if quick else SIZES
    console = Console(width=100)
    metrics = _metrics_ratios(3 if quick else METRICS_PAIRS, METRICS_BLOCK_S)
    _say_metrics(console, metrics)
    if only:
        if json_file:
            Path(json_file).write_text(json.dumps({"metrics": metrics, "cpus": os.cpu_count()}))
        return
    rows: list[dict[str, Any]] = []
    cells: list[Any] = [*((op, size) for op in OPS for size in sizes), "ddp"]
    ratios: dict[Any, Ratios] = {cell: {how: [] for how in TIMES} for cell in cells}
    seconds: dict[Any, list[float]] = {cell: [] for cell in cells}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(cells) * rounds)
        for _ in range(rounds):
            # Fresh processes: where their memory lies is good for a few per cent either way.
            with tempfile.TemporaryDirectory() as folder:
                stock, crux = Pair("stock", folder), Pair("crux", folder)
                for cell in cells:
                    found, once = _ratios(stock, crux, cell, pairs)
                    for how in TIMES:
                        ratios[cell][how] += found[how]
                    seconds[cell].append(once)
                    bar.advance(task)
                stock.close()
                crux.close()
    for cell in cells:
        name, size = cell if cell != "ddp" else ("DDP step", None)
        rows.append(
            {
                "what": name,
                "bytes": size,
                "stock_s": statistics.median(seconds[cell]),
                "quartiles": {how: _quartiles(ratios[cell][how]) for how in TIMES},
                "blocks": len(ratios[cell]["measuring"]),
            }
        )
    null = {how: _quartiles(added) for how, added in _null_ns(min(pairs, 25)).items()}

    counting = {kind: _quartiles(added) for kind, added in _counting_ns(min(pairs, 25)).items()}

    table = Table(title="Crux over stock Gloo, 2 ranks on loopback: 1.00 is no cost")
    for column in ("operation", "size", "stock", *TIMES):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row in rows:
        size = "" if row["bytes"] is None else f"{row['bytes'] >> 10} KiB"
        told = (row["quartiles"][how] for how in TIMES)
        table.add_row(
            row["what"],
            size,
            f"{row['stock_s'] * 1e6:.0f} µs",
            *(f"{median:.3f} ({low:.2f} to {high:.2f})" for low, median, high in told),
        )
    console.print(table)
    console.print("median ratios (quartiles); medians over sizes:")
    for op in OPS:
        over = {
            how: statistics.median(r["quartiles"][how][1] for r in rows if r["what"] == op)
            for how in TIMES
        }
        console.print(f"{op}: " + ", ".join(f"{how} {ratio:.3f}" for how, ratio in over.items()))
    console.print("in a backend that does nothing Crux adds")
    for how, (low, median, high) in null.items():
        console.print(f"{how}: {median:.0f} ns a call (quartiles {low:.0f} to {high:.0f})")
    console.print("while FLOPs are counted, an operator takes longer by")
    for kind, (low, median, high) in counting.items():
        console.print(f"{kind}: {median:.0f} ns (quartiles {low:.0f} to {high:.0f})")
    if json_file:
        figures = {
            "rows": rows,
            "null_ns": null,
            "counting_ns": counting,
            "metrics": metrics,
            "cpus": os.cpu_count(),
        }
        with open(json_file, "w") as out:
            json.dump(figures, out, indent=1)


if __name__ == "__main__":
    sys.exit(main())
