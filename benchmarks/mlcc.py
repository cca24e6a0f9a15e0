"""mlcc's own figures (docs/research/cassini-and-mlcc.md), beside the paper's.

    python benchmarks/mlcc.py [--mixes A,B] [--minutes N] [--keep FILE] [--out DIR]

Training jobs in a network of namespaces under the kernel's congestion controls and under mlcc, in
turns (lab/mlcc.py; needs root); rates and delays on the loopback; and slots and mixes in the
simulator. Times are ratios to those under cubic, or, in the simulator, under fair sharing.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from crux_torch.agreement.load_tables import TablesClient, UpdateSchedule
from crux_torch.cli.results import Result, publish
from crux_torch.errors import StoreError
from crux_torch.schedule.model import Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp
from crux_torch.schedule.papers.mlcc import SLOT_S, SLOTS, LinkLoad, allocate, mlcc
from crux_torch.sim.play import play
from crux_torch.store.endpoint import TcpConnector
from crux_torch.store.host import StoreHost
from lab import netns
from lab.job import JobError
from lab.mlcc import SideBySide, offered
from lab.mlcc_mixes import LIVE, MLCC, MLCC_HOSTS, PLAIN, RULES, SHAPES, Mix, with_servers

#: Seconds that a commanded rate lasts (Figure 7a).
COMMAND_S = 0.05
ROUNDS = 3
MIXES = (
    ("vgg19", "vgg16"),
    ("vgg19", "gpt2"),
    ("vgg19", "resnet50"),
    ("vgg19", "vgg16", "gpt2", "resnet50"),
)
SLOTS_MS = (20, 40, 60, 80, 100, 150)
#: What no turn can be below.
BOUND = "bound"
#: What the paper says of a turn's JCT over TCP's: "at least 15% reduction", and 8.5% (§VI-C, -H).
PAPER = {MLCC: "at most 0.85", MLCC_HOSTS: "0.915"}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and 10th and 90th percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "count": len(ordered),
    }


def rate_consistency(commands: int = 100, most_Bps: float = 250e6) -> dict[str, float]:
    """What a paced socket sends in each 50 ms, over what was commanded; rates vary twentyfold."""
    draw = random.Random(0)
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    moved, ended = [0], threading.Event()

    def send() -> None:
        block = bytes(1 << 16)
        while not ended.is_set():
            try:
                sender.sendall(block)
            except OSError:
                return

    def receive() -> None:
        buffer = bytearray(1 << 18)
        while count := receiver.recv_into(buffer):
            moved[0] += count

    sender.setsockopt(socket.SOL_SOCKET, 47, int(most_Bps))  # SO_MAX_PACING_RATE
    threads = [threading.Thread(target=run, daemon=True) for run in (send, receive)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    ratios = []
    for _ in range(commands):
        rate_Bps = draw.uniform(0.05, 1.0) * most_Bps
        sender.setsockopt(socket.SOL_SOCKET, 47, int(rate_Bps))
        # The change itself: what is on its way still moves at the rate before.
        time.sleep(COMMAND_S / 5)
        began_s, before = time.perf_counter(), moved[0]
        time.sleep(COMMAND_S)
        ratios.append((moved[0] - before) / (time.perf_counter() - began_s) / rate_Bps)
    ended.set()
    sender.close()
    listener.close()
    return spread(ratios)


def delays(hosts: int = 6, rounds: int = 300) -> dict[str, dict[str, float]]:
    """Milliseconds of ``fetch_feedback`` and of Algorithm 2, with other hosts' flows booked."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    host = StoreHost(f"tcp://127.0.0.1:{port}", module="crux_torch.agreement.load_tables")
    host.start()
    clients = [TablesClient(TcpConnector("127.0.0.1", port)) for _ in range(hosts)]
    links = {f"l{n}": 1e9 for n in range(4)}
    negotiation_ms, computation_ms = [], []
    draw = random.Random(0)
    deadline_s = time.monotonic() + 60
    while True:
        try:
            clients[0].fetch_feedback("0", links)
            break
        except StoreError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
    for n in range(rounds):
        client, flow = clients[n % hosts], str(n % hosts)
        began_s = time.perf_counter()
        try:
            seen = client.fetch_feedback(flow, links)
        except StoreError:
            negotiation_ms.append(float("inf"))
            continue
        told_s = time.perf_counter()
        path = [LinkLoad(c, x) for c, x in zip(links.values(), seen.loads_Bps, strict=True)]
        volume = draw.uniform(0.1, 0.6) * 1e9
        rates = allocate(path, volume, seen.slot_s, 1e7, 1e9, gone=seen.gone)
        done_s = time.perf_counter()
        client.update_schedule(
            UpdateSchedule(flow, links, seen.slot, rates[:SLOTS], float(n), flow, {})
        )
        negotiation_ms.append((told_s - began_s) * 1e3)
        computation_ms.append((done_s - told_s) * 1e3)
    for client in clients:
        client.close()
    host.stop()
    return {"negotiation_ms": spread(negotiation_ms), "computation_ms": spread(computation_ms)}


def cluster_of(mix: Sequence[str], seed: int) -> Cluster:
    """The mix on one link, each job's computation off by up to 5%, so that no two are equal."""
    draw = random.Random(seed)
    jobs = (
        Job(
            name,
            1,
            1.0,
            SHAPES[name][0] * draw.uniform(0.95, 1.05),
            (Flow(SHAPES[name][1], (("l",),)),),
        )
        for name in mix
    )
    return Cluster({"l": 1.0}, tuple(jobs))


def mean_s(cluster: Cluster, slot_ms: float | None, **more: Any) -> float:
    """Mean over the jobs of the time of an iteration; under fair sharing without slots."""
    options = SchedulerOptions()
    decision = ecmp(cluster, options) if slot_ms is None else mlcc(cluster, options)
    if slot_ms is not None:
        decision = replace(decision, slot_s=slot_ms / 1e3)
    report = play(cluster, decision, 120.0, **more)
    return statistics.fmean(job.mean_iteration_s or 120.0 for job in report.jobs.values())


def simulated() -> dict[str, Any]:
    """JCT over fair sharing's, by mix and by length of the slot, in the simulator."""
    found: dict[str, Any] = {"mixes": {}, "slots_ms": {}}
    for mix in MIXES:
        clusters = [cluster_of(mix, seed) for seed in range(ROUNDS)]
        found["mixes"]["+".join(mix)] = spread(
            [mean_s(c, 60.0) / mean_s(c, None) for c in clusters]
        )
    pair = [cluster_of(MIXES[1], seed) for seed in range(ROUNDS)]
    for slot_ms in SLOTS_MS:
        ratios = [mean_s(c, float(slot_ms)) / mean_s(c, None) for c in pair]
        found["slots_ms"][str(slot_ms)] = spread(ratios)
    found["foreign_share"] = foreign_share()
    found["servers"] = with_servers()
    return found


def foreign_share() -> float:
    """What a foreign flow that always sends gets beside a job, over what fair sharing gives it."""
    link = (("l",),)
    jobs = (
        Job("ours", 1, 1.0, 0.4, (Flow(0.44, link),)),
        Job("foreign", 1, 1.0, 1e-3, (Flow(1e4, link),)),
    )
    cluster, options = Cluster({"l": 1.0}, jobs), SchedulerOptions()
    fair, ours = (
        play(cluster, s(cluster, options), 120.0, foreign=["foreign"]).jobs["foreign"].comm_s
        for s in (ecmp, mlcc)
    )
    return ours / fair


def take_turns(
    mix: Mix,
    rounds: int,
    window_s: float,
    slot_ms: int,
    deadline: float,
    folder: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The turns of one mix, as many as begin before the deadline; whole rounds before others."""
    turns = [turn for turn in mix.turns if turn not in PLAIN or turn in offered()]
    with mix.fabric() as fabric, SideBySide(mix, fabric, folder, turns, say, slot_ms) as jobs:
        jobs.prepare()
        for round_ in range(rounds):
            for turn in turns:
                if time.monotonic() < deadline:
                    jobs.play(turn, round_, window_s)
        return jobs.rows()


def over_cubic(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of each round, the mean over its jobs of the time of a step over that under cubic.

    Beside the turns stands what none can be below: a job's time alone, and the time in which the
    link carries a step of every job.
    """
    jobs = [row for row in rows if "job" in row and row["step_s"]]
    base = {(j["run"], j["round"], j["job"]): j["step_s"] for j in jobs if j["turn"] == "cubic"}
    found: dict[tuple[int, int, str], list[float]] = {}
    for job in jobs:
        key = job["run"], job["round"], job["job"]
        if key not in base:
            continue
        if job["turn"] == "cubic":
            others = (j for j in jobs if j["turn"] == "cubic" and j["round"] == job["round"])
            moved = sum(j["step_bytes"] for j in others if j["run"] == job["run"])
            least_s = max(job["alone_s"], moved / LIVE[job["mix"]].rate_Bps)
            found.setdefault((*key[:2], BOUND), []).append(least_s / base[key])
        found.setdefault((*key[:2], job["turn"]), []).append(job["step_s"] / base[key])
    return {
        turn: [statistics.fmean(v) for key, v in found.items() if key[2] == turn]
        for turn in dict.fromkeys(key[2] for key in found)
    }


def table(mix: Mix, rows: Sequence[Mapping[str, Any]]) -> str:
    """The turns of a mix beside the paper's figures: medians over rounds, least and most."""
    turns = [row for row in rows if "job" not in row]
    ratios = over_cubic(rows)
    lines = [
        f"{mix.name}: {', '.join(mix.jobs)}; {mix.about}; the paper's {mix.gbit:g} Gbit/s",
        f"  {'turn':<12}{'time of a step x cubic':>26}{'the paper':>14}{'overlap':>9}{'drops':>7}"
        f"{'link':>6}{'paced':>7}{'load':>6}  step x alone: {', '.join(mix.jobs)}",
    ]
    foreign = {
        (t["run"], t["round"]): t["foreign_Bps"]
        for t in turns
        if t["turn"] == "cubic" and "foreign_Bps" in t
    }
    if shown := ratios.get(BOUND):
        lines.append(f"  {BOUND:<12}{f'{_spread(shown)} of {len(shown)}':>26}")
    for turn in dict.fromkeys(t["turn"] for t in turns):
        of = [t for t in turns if t["turn"] == turn]
        jobs = [row for row in rows if "job" in row and row["turn"] == turn and row["step_s"]]
        shown = ratios.get(turn)
        times = f"{_spread(shown)} of {len(shown)}" if shown else ""
        overlap = _median(t["overlap"] for t in of)
        overlap = "" if overlap is None else f"{overlap:.0%}"
        paced = _median(j["paced"] for j in jobs)
        alone = (
            _median(j["step_s"] / j["alone_s"] for j in jobs if j["job"] == n) for n in mix.jobs
        )
        cells = ", ".join("none" if a is None else f"{a:.2f}" for a in alone)
        notes = "" if all(j["losses_equal"] for j in jobs) else "; LOSSES DIFFER"
        beside = [
            t["foreign_Bps"] / foreign[t["run"], t["round"]]
            for t in of
            if "foreign_Bps" in t and (t["run"], t["round"]) in foreign
        ]
        if beside:
            notes += f"; foreign flows x cubic {_spread(beside)}"
        lines.append(
            f"  {turn:<12}{times:>26}{PAPER.get(turn, ''):>14}{overlap:>9}"
            f"{_median(t['drops'] for t in of):>7.0f}{_link(mix, jobs):>6}"
            f"{'' if paced is None else f'{paced:.0%}':>7}"
            f"{_median(t['load'] for t in of):>6.1f}  {cells}{notes}"
        )
    return "\n".join(lines) + "\n"


def _link(mix: Mix, jobs: Sequence[Mapping[str, Any]]) -> str:
    """The share of the link that the jobs' steps use, each way; the median over rounds."""
    used: dict[tuple[int, int], float] = {}
    for job in jobs:
        if job["step_bytes"] is not None:
            key = job["run"], job["round"]
            used[key] = used.get(key, 0.0) + job["step_bytes"] / job["step_s"] / mix.rate_Bps
    return f"{statistics.median(used.values()):.0%}" if used else ""


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def own_table(found: Mapping[str, Any]) -> str:
    """Rates, delays and what the simulator says, beside the paper's figures."""
    rate, told, computed = (
        found[key] for key in ("rate_consistency", "negotiation_ms", "computation_ms")
    )
    sim = found["simulated"]
    slots = sim["slots_ms"].values()
    least, most = min(s["median"] for s in slots), max(s["median"] for s in slots)
    lines = [
        ("measured on the loopback", "", "the paper"),
        (
            "rate over the commanded one, 50 ms each",
            f"{rate['median']:.3f}, 80% from {rate['p10']:.3f} to {rate['p90']:.3f}",
            "as expected (Figure 7a)",
        ),
        ("fetch_feedback, 90% within", f"{told['p90']:.1f} ms", "6.2 ms"),
        ("computation of Algorithm 2, 90% within", f"{computed['p90']:.2f} ms", "1.5 ms"),
        ("simulated: time of an iteration x fair sharing", "", "at most 0.85"),
        *((f"  {mix}", f"{s['median']:.3f}", "") for mix, s in sim["mixes"].items()),
        (
            f"  slots of {SLOTS_MS[0]} to {SLOTS_MS[-1]} ms",
            f"{least:.3f} to {most:.3f}",
            "60 ms is best",
        ),
        ("  a foreign flow that always sends", f"{sim['foreign_share']:.3f}", "Figure 11"),
    ]
    lines.append(("  with servers: start-after, Algorithm 1, 2", "", "MCS 1.51 x mlcc (Figure 15)"))
    for case, times in sim["servers"].items():
        shown = "  ".join(f"{times[rule]:.3f}" for rule in RULES)
        lines.append((f"    {case}", shown, ""))
    return "".join(f"{a:<48}{b:<34}{c}\n" for a, b, c in lines)


def merged(results: Sequence[Mapping[str, Any]]) -> tuple[Result, str]:
    """What some runs showed together, and the tables of it."""
    rows: list[dict[str, Any]] = []
    runs: list[Any] = []
    for result in results:
        rows += [row | {"run": row.get("run", 0) + len(runs)} for row in result["rows"]]
        runs += result["settings"].get("runs", [result["settings"]])
    parts = []
    for mix in LIVE.values():
        for slot_ms in sorted({r["slot_ms"] for r in rows if r.get("mix") == mix.name}):
            mine = [r for r in rows if r.get("mix") == mix.name and r["slot_ms"] == slot_ms]
            parts.append(f"slots of {slot_ms} ms\n" if slot_ms != SLOT_S * 1e3 else "")
            parts[-1] += table(mix, mine)
    if own := [row["own"] for row in rows if "own" in row]:
        parts.append(own_table(own[-1]))
    missing = sorted({name for run in runs for name in run["not_offered"]})
    if missing:
        parts.append(f"this kernel offers no {', '.join(missing)}\n")
    return Result("mlcc", {"runs": runs}, rows), "\n".join(parts)


def _chosen(_context: click.Context, _option: click.Option, value: str) -> list[str]:
    chosen = [name for name in value.split(",") if name]
    if unknown := set(chosen) - set(LIVE):
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))}; expected some of {', '.join(LIVE)}"
        )
    return chosen


@click.command()
@click.option(
    "--mixes",
    default=",".join(LIVE),
    show_default=True,
    callback=_chosen,
    help="Which ones train; none if empty.",
)
@click.option("--own/--no-own", default=True, help="Also rates, delays and the simulator.")
@click.option("--rounds", default=3, show_default=True, help="Turns of each kind.")
@click.option("--window", "window_s", default=12.0, show_default=True, help="Seconds of a turn.")
@click.option("--slot-ms", default=round(SLOT_S * 1e3), show_default=True, help="mlcc's slots.")
@click.option("--minutes", type=float, default=math.inf, help="Begin no turn after so many.")
@click.option(
    "--keep",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Put what these files hold before it.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/mlcc.{json,txt}.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep what the jobs print here.")
def main(
    mixes: list[str], own: bool, rounds: int, window_s: float, slot_ms: int, minutes: float,
    keep: tuple[Path, ...], json_path: Path | None, out: Path | None, logs: Path | None,
) -> None:  # fmt: skip
    """Prints mlcc's figures beside the paper's; writes what there is after each mix."""
    possible, reason = netns.available()
    if mixes and not possible:
        raise click.ClickException(f"no network of namespaces here: {reason}")
    console = Console(stderr=True)
    began_s = time.monotonic()
    deadline = began_s + 60.0 * minutes
    kept = [json.loads(file.read_text()) for file in keep]
    settings = {
        "mixes": mixes, "rounds": rounds, "window_s": window_s, "cpus": os.cpu_count(),
        "not_offered": sorted(set(PLAIN) - set(offered())),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    failed = []

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began_s:5.0f} s  {text}")

    with tempfile.TemporaryDirectory() as scratch:
        for name in mixes:
            folder = (logs.absolute() if logs else Path(scratch)) / name
            if time.monotonic() >= deadline:
                say(f"{name}: no time left")
                continue
            try:
                rows += take_turns(LIVE[name], rounds, window_s, slot_ms, deadline, folder, say)
            except (JobError, netns.NamespaceError, OSError) as error:
                # What the others show must not be lost.
                failed.append(f"{name}: {error}")
                say(failed[-1])
                continue
            result, text = merged([*kept, {"settings": settings, "rows": rows}])
            result.write(text, json_path, out)
    if own:
        rows.append({"own": own_figures()})
    publish(*merged([*kept, {"settings": settings, "rows": rows}]), json_path, out)
    if failed:
        raise click.ClickException("; ".join(failed))


def own_figures() -> dict[str, Any]:
    """What needs no network of namespaces."""
    return {"rate_consistency": rate_consistency(), **delays(), "simulated": simulated()}


if __name__ == "__main__":
    main()
