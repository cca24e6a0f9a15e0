"""mlcc's own figures (docs/mlcc.md): rates, delays, and in the simulator slots and jobs' times.

python benchmarks/mlcc.py --json benchmarks/results/mlcc.json

Rates and delays are measured on the loopback. Times are ratios to fair sharing's.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crux_torch.control.tables_client import TablesClient
from crux_torch.control.tables_frames import UpdateSchedule
from crux_torch.errors import StoreError
from crux_torch.schedule.ecmp import ecmp
from crux_torch.schedule.mlcc import mlcc
from crux_torch.schedule.model import Cluster, Flow, Job, SchedulerOptions
from crux_torch.schedule.rates import SLOTS, LinkLoad, allocate
from crux_torch.sim.play import play
from crux_torch.store.host import StoreHost

#: Seconds that a commanded rate lasts (Figure 7a).
COMMAND_S = 0.05
ROUNDS = 3
#: §VI-A's models on links of 10 Gbit/s: seconds of computation (as on its GPUs, estimated), and of
#: transfer alone, from the models' sizes.
SHAPES = {
    "vgg19": (0.40, 0.44),
    "vgg16": (0.40, 0.42),
    "gpt2": (0.90, 0.96),
    "resnet50": (0.25, 0.08),
}
MIXES = (
    ("vgg19", "vgg16"),
    ("vgg19", "gpt2"),
    ("vgg19", "resnet50"),
    ("vgg19", "vgg16", "gpt2", "resnet50"),
)
SLOTS_MS = (20, 40, 60, 80, 100, 150)


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
    host = StoreHost(f"tcp://127.0.0.1:{port}", module="crux_torch.control.tables_server")
    host.start()
    clients = [TablesClient("127.0.0.1", port) for _ in range(hosts)]
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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here, too")
    args = parser.parse_args()
    found = {"rate_consistency": rate_consistency(), **delays(), "simulated": simulated()}
    text = json.dumps(found, indent=1) + "\n"
    if args.json:
        args.json.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
