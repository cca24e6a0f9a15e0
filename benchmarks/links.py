"""The semaphores of a host's links between real processes: what they keep, and what they cost.

    python benchmarks/links.py [--minutes M] [--soak-only] [--soak-from FILE] [--quick]
                               [--json FILE] [--out DIR]

``links_driver.cc`` and ``links_soak.cc`` are compiled with ``csrc/links`` and run: no Python and no
torch in what is measured. The link of the contention is emulated: it serves the chunks of all
transfers in turn, as one that is shared fairly, 1 ms a chunk. A job above the others sends 20
chunks every 50 ms, the lower ones 10 chunks back to back. Its wait is what it waits before and
between its chunks. Waits are told less the time for which a process was ready and had no core. The
run fails where a bound does not hold.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.results import Result, publish

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    *sorted(Path(__file__).parent.glob("links_*.cc")),
    *sorted((ROOT / "csrc/links").glob("*.cc")),
)
#: Of an operation, in all of this.
WAIT_MS = 500
#: Processes of the soak.
PROCESSES = 24
#: What timers may add to a bound.
SLACK_MS = 20.0


def build(folder: Path) -> Path:
    """The driver, compiled into ``folder``.

    Raises:
        ClickException: there is no compiler, or it refuses.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise click.ClickException("no C++ compiler (set CXX)")
    program = folder / "links_driver"
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-pthread", *map(str, SOURCES)]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    if done.returncode != 0:
        raise click.ClickException(done.stderr[-2000:])
    return program


def run(program: Path, measured: str, *args: float) -> dict[str, Any]:
    """One command of the driver as a row."""
    words = [str(program), measured, *(str(int(arg)) for arg in args)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(words[1:])}: {done.stderr.strip()}")
    return {"measured": measured, **json.loads(done.stdout)}


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which bounds do not hold, in words."""
    found = []
    for row in rows:
        kind = row["measured"]
        if kind == "contend" and row["gate"]:
            bound = row["lower"] * row["lower_transfer_ms"]
            if row["wait_p99_ms"] > bound:
                found.append(f"the higher job's p99 wait is over what was in flight: {bound} ms")
            if row["gate_waits"]:
                found.append("the higher job waited for a lower one")
            if row["lower_longest_ms"] > WAIT_MS + SLACK_MS:
                found.append("a lower job waited for longer than its bound")
        if kind == "death" and (row["ran_out"] or row["max_ms"] > row["bound_ms"]):
            found.append("a dead holder held its link")
        if kind == "hang" and row["hung"]["waits"] > 1:
            found.append("a hung job cost more than one wait")
        if kind == "hang":
            rounds_s = (1 + row["exempt_waits"]) * row["bound_ms"] / 1e3
            if row["always busy"]["waits"] > 1 + row["seconds"] / rounds_s:
                found.append("a job that is always busy cost more than its share")
        if kind == "soak":
            kept = ("deadlocks", "places_lost", "hindered_by_the_dead")
            found += [f"soak: {row[key]} {key}" for key in kept if row[key]]
            if row["longest_wait_ms"] > row["bound_ms"] + SLACK_MS:
                found.append("soak: a wait was longer than its bound")
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines: list[str] = []
    contended = [row for row in rows if row["measured"] == "contend"]
    if contended:
        lines.append(
            f"{'one link, a job above':<24} {'its wait: p50':>14} {'p99':>9} {'most':>9} "
            f"{'in flight':>10} {'lower: waited':>14} {'ran out':>8} {'transfers':>10}"
        )
    for row in contended:
        name = f"{row['lower']} lower, {'semaphore' if row['gate'] else 'no semaphore'}"
        in_flight = f"{row['lower'] * row['lower_transfer_ms']:.0f} ms"
        lines.append(
            f"{name:<24} {row['wait_p50_ms']:>11.2f} ms {row['wait_p99_ms']:>6.2f} ms "
            f"{row['wait_max_ms']:>6.2f} ms {in_flight:>10} {row['lower_longest_ms']:>11.2f} ms "
            f"{row['lower_ran_out']:>8} {row['lower_transfers']:>10}"
        )
    for row in (r for r in rows if r["measured"] == "death"):
        lines.append(
            f"\nholder killed, {row['deaths']} times: free after {row['p50_ms']:.1f} ms in the "
            f"median, {row['p99_ms']:.1f} ms p99, {row['max_ms']:.1f} ms at most "
            f"(a waiter looks every {row['look_again_ms']:.0f} ms; bound {row['bound_ms']:.0f} ms)"
        )
    for row in (r for r in rows if r["measured"] == "hang"):
        for state in ("hung", "always busy"):
            cost = row[state]
            lines.append(
                f"a higher job {state}: {cost['waits']} waits in {row['seconds']} s, longest "
                f"{cost['longest_ms']:.0f} ms, {cost['share']:.1%} of the lower job's time"
            )
    for row in (r for r in rows if r["measured"] == "cost"):
        lines.append("\nenter and leave, nobody in the way, CPU time:")
        lines += [f"  {name:<28} {row[name]:>8.1f} ns" for name in row if name != "measured"]
    for row in (r for r in rows if r["measured"] == "soak"):
        lines.append(
            f"\nsoak: {row['processes']} processes, {row['links']} links, {row['seconds']} s: "
            f"{row['operations']} operations, {row['kills']} kills "
            f"({row['kills_of_halted']} of halted ones), {row['halts']} halts\n"
            f"  {row['calms']} calms, in the slowest all completed an operation within "
            f"{row['slowest_calm_ms'] / 1e3:.1f} s\n"
            f"  deadlocks {row['deadlocks']}, places lost {row['places_lost']}, hindered by the "
            f"dead {row['hindered_by_the_dead']}, longest wait {row['longest_wait_ms']:.1f} ms "
            f"(bound {row['bound_ms']:.0f} ms)"
        )
    broken = failures(rows)
    lines.append("\nevery bound held" if not broken else "\nBROKEN: " + "; ".join(broken))
    return "\n".join(lines).lstrip("\n") + "\n"


@click.command()
@click.option("--minutes", default=10.0, help="How long the soak lasts.")
@click.option("--seconds", default=30, help="How long each of the others lasts.")
@click.option("--soak-only", is_flag=True, help="Only random operations, kills and halts.")
@click.option("--soak-from", type=click.Path(path_type=Path), help="An earlier run's JSON.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/links.{json,txt}.")
@click.option("--quick", is_flag=True, help="Two seconds each: whether it works, no figures.")
def main(
    minutes: float,
    seconds: int,
    soak_only: bool,
    soak_from: Path | None,
    json_path: Path | None,
    out: Path | None,
    quick: bool,
) -> None:
    """Runs the semaphores of a host's links between processes."""
    repeats, deaths = (3, 5) if quick else (25, 200)
    if quick:
        minutes, seconds = 2 / 60, 2
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        if not soak_only:
            for lower in (1, 4):
                rows += [run(program, "contend", seconds, WAIT_MS, on, lower) for on in (0, 1)]
            rows.append(run(program, "death", deaths, WAIT_MS))
            rows.append({**run(program, "hang", seconds, WAIT_MS), "seconds": seconds})
            rows.append(run(program, "cost", repeats))
        if soak_from is None:
            rows.append(run(program, "soak", minutes * 60, WAIT_MS, PROCESSES, 1))
        else:
            before = json.loads(soak_from.read_text(encoding="utf-8"))["rows"]
            rows += [row for row in before if row["measured"] == "soak"]
    settings = {
        "wait_ms": WAIT_MS,
        "seconds": seconds,
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
        "nice": os.nice(0),
    }
    publish(Result("links", settings, rows), table(rows), json_path, out)
    sys.exit(1 if failures(rows) else 0)


if __name__ == "__main__":
    main()
