"""Step times of a job under each fault of its store, beside the stock launcher's in one run.

    python benchmarks/faults.py [--steps N] [--turns N] [--only WORDS] [--text FILE] [--json FILE]

Under each fault two jobs of two ranks train side by side on this machine: one under ``torchrun``,
and one under ``cruxrun``, whose store the fault hits. Both take the same steps, and the losses must
be equal. Printed are the median step and the longest one, in ms, of all turns, the median over the
turns of the difference between the longest ones, and the exit codes. Both jobs have the machine's
moods in common, but not each hiccup: the row ``none`` tells how much two jobs differ without one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from hostile import CLIENTS, SQUATTERS
from loopback import free_port
from training_job import Job

from crux_torch.store.host import StoreHost

SUPPORT = Path(__file__).parents[1] / "tests/support"
#: Steps that do not count: the first ones make connections and allocate.
WARM_STEPS = 20
STEP_S = 0.03
OWN = (
    "none",
    "store stopped (SIGSTOP)",
    "store killed every 2 s",
    "store of another secret",
    "address that nobody has",
)
FAULTS = (*OWN, *SQUATTERS, *CLIENTS)
#: Measured and planned early, so that a fault meets all parts.
QUICK = {"CRUX_PROFILE_S": "2", "CRUX_LEASE_S": "4", "CRUX_TUNING": "profile_iterations=5"}


@contextmanager
def program(name: str, port: int) -> Iterator[None]:
    """A hostile program, for as long as the context lasts."""
    command = [sys.executable, str(SUPPORT / "hostile.py"), name, str(port)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        if name in SQUATTERS:
            assert running.stdout is not None
            assert running.stdout.readline().strip() == b"ready", name
        yield
    finally:
        running.kill()
        running.wait()


@contextmanager
def fault(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """The store's address for the job, and what to do now and then while it trains."""
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    with ExitStack() as stack:
        if name in SQUATTERS:
            stack.enter_context(program(name, port))
        elif name == "address that nobody has":
            where = f"tcp://192.0.2.1:{port}"
        elif name == "store of another secret":
            secret = folder / "other-secret"
            secret.touch(mode=0o600)
            secret.write_text("0123456789abcdef\n")
            host = StoreHost(where, str(secret))
            host.start()
            stack.callback(host.stop)
        else:
            host = StoreHost(where, linger_s=60.0)
            host.start()
            stack.callback(host.stop)
            if name in CLIENTS:
                stack.enter_context(program(name, port))
            yield where, lambda: _disturb(name, host)
            return
        yield where, lambda: None


def _disturb(name: str, host: StoreHost) -> None:
    pid = host.pid
    if pid is None or not name.startswith("store "):
        return
    os.kill(pid, signal.SIGSTOP if "SIGSTOP" in name else signal.SIGKILL)


def run(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Both jobs under one fault."""
    folder.mkdir()
    options = (f"--steps={steps + WARM_STEPS}", f"--sleep-s={STEP_S}", "--width=256")
    with fault(name, folder) as (where, disturb):
        crux = {"CRUX_STORE": where, "CRUX_JOB": "job", **QUICK}
        jobs = {
            "stock": Job("torch.distributed.run", folder / "stock", *options),
            "crux": Job("cruxrun", folder / "crux", *options, **crux),
        }
        began_s = time.monotonic()
        while any(job.launcher.poll() is None for job in jobs.values()):
            time.sleep(0.1)
            if time.monotonic() - began_s > 2.0 and jobs["crux"].steps() > WARM_STEPS:
                disturb()
                began_s = time.monotonic()
        found = {side: _seen(job) for side, job in jobs.items()}
    equal = jobs["stock"].losses() == jobs["crux"].losses()
    return {"fault": name, "equal": equal, **found}


def _seen(job: Job) -> dict[str, Any]:
    ends = [float(line) for line in (job.folder / "steps").read_text().splitlines()]
    took = [1e3 * (b - a) for a, b in pairwise(ends[WARM_STEPS:])]
    return {
        "median_ms": statistics.median(took),
        "longest_ms": max(took),
        "exit": job.launcher.wait(),
    }


def table(rows: list[list[dict[str, Any]]]) -> Table:
    """One row a fault, over its turns."""
    made = Table(title="Steps under faults of the store, ms: stock / Crux", title_justify="left")
    for column in ("fault", "median step", "longest step", "longest: difference", "losses", "exit"):
        made.add_column(column, justify="left" if column in ("fault", "losses") else "right")
    for turns in rows:

        def middle(value: str, side: str, turns: list[dict[str, Any]] = turns) -> float:
            return statistics.median(turn[side][value] for turn in turns)

        apart = [turn["crux"]["longest_ms"] - turn["stock"]["longest_ms"] for turn in turns]
        exits = sorted({(turn["stock"]["exit"], turn["crux"]["exit"]) for turn in turns})
        spread = f" ({min(apart):+.0f} to {max(apart):+.0f})" if len(apart) > 1 else ""
        made.add_row(
            turns[0]["fault"],
            f"{middle('median_ms', 'stock'):.1f} / {middle('median_ms', 'crux'):.1f}",
            f"{middle('longest_ms', 'stock'):.0f} / {middle('longest_ms', 'crux'):.0f}",
            f"{statistics.median(apart):+.0f}{spread}",
            "equal" if all(turn["equal"] for turn in turns) else "DIFFER",
            ", ".join(f"{a} / {b}" for a, b in exits),
        )
    return made


@click.command()
@click.option("--steps", type=click.IntRange(10), default=250, help="Steps of each job.")
@click.option("--turns", type=click.IntRange(1), default=3, help="Runs of each fault.")
@click.option("--only", default="", help="Faults whose name has this in it.")
@click.option("--text", type=click.Path(path_type=Path), help="Write the table here, too.")
@click.option("--json", "as_json", type=click.Path(path_type=Path), help="Write all turns here.")
def main(steps: int, turns: int, only: str, text: Path | None, as_json: Path | None) -> None:
    """Run the faults, each so often, in turn."""
    chosen = [name for name in FAULTS if only in name]
    if not chosen:
        raise click.UsageError(f"no fault has {only!r} in its name: {', '.join(FAULTS)}")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            for number, name in enumerate(chosen):
                found[name].append(run(name, steps, Path(folder) / f"{turn}-{number}"))
                print(json.dumps(found[name][-1]), file=sys.stderr, flush=True)
    made = table(list(found.values()))
    about = f"{os.cpu_count()} cores, {steps} steps of about {STEP_S * 1e3:.0f} ms, {turns} turns"
    for console in (Console(), Console(file=text.open("w"), width=132) if text else None):
        if console is not None:
            console.print(made)
            console.print(about)
    if as_json is not None:
        as_json.write_text(
            json.dumps({"host": socket.gethostname(), "rows": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
