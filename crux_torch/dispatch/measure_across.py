"""The bandwidth of choices that span hosts, measured by a process for each device of each host."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from crux_torch.dispatch.cluster import DispatchCluster, DispatchError, Ints
from crux_torch.dispatch.measure import LIMIT, How, bandwidth_Bps, device_of, dist, spawn
from crux_torch.dispatch.predictor import Samples
from crux_torch.dispatch.samples_file import read_samples, sample_line
from crux_torch.dispatch.sampling import across_hosts
from crux_torch.dispatch.table import table_of


class AcrossPlan(How, frozen=True, kw_only=True):
    """One host's part in measuring choices across hosts. All hosts need the same, but for names.

    Attributes:
        host: this host's name; every host has another one.
        address, port: where the hosts meet: of the host of rank 0.
        hosts, host_rank: how many there are, and which of them this is.
        number: choices to measure.
        seed: of the choices that are drawn.
        out: the samples' file, which the host of rank 0 writes; what it holds already is not
            measured again.
    """

    out: Path
    host: str
    address: str
    port: int
    hosts: int
    host_rank: int
    number: int
    seed: int = 0


def measure_across(plan: AcrossPlan, progress: Callable[[int, int], None]) -> int:
    """Take part until all choices are measured; how many this was.

    ``progress`` is told how many are done, of how many.

    Raises:
        DispatchError: hosts of one name, or a file of samples that can't be used.
        torch.distributed.DistError: the hosts don't meet.
        torch.multiprocessing.ProcessRaisedException: if a process fails.
    """
    store = dist.TCPStore(
        *(plan.address, plan.port),
        is_master=plan.host_rank == 0,
        wait_for_workers=False,
        timeout=LIMIT,
    )
    store.set(f"host/{plan.host_rank}", json.dumps([plan.host, plan.devices]))
    everyone = [json.loads(store.get(f"host/{rank}")) for rank in range(plan.hosts)]
    cluster = _cluster(everyone)
    choices = across_hosts(cluster.sizes, plan.number, np.random.default_rng(plan.seed))
    if plan.host_rank == 0:
        try:
            lacking = _lacking(plan, cluster, choices)
        except Exception as error:
            store.set("lacking", json.dumps(str(error)))
            raise
        store.set("lacking", json.dumps(lacking))
    lacking = json.loads(store.get("lacking"))
    if isinstance(lacking, str):
        raise DispatchError(f"the host of rank 0: {lacking}")
    if lacking:
        first = sum(cluster.sizes[: plan.host_rank])
        _spawn((plan, everyone, choices[lacking], first), progress)
    # The host of rank 0 has the store: it goes last.
    store.add("gone", 1)
    if plan.host_rank == 0:
        _wait_for_others(store, plan.hosts)
    return len(lacking)


def _spawn(args: tuple[AcrossPlan, Any, Ints, int], progress: Callable[[int, int], None]) -> None:
    """Run this host's ranks to their end."""
    told = mp.get_context("spawn").SimpleQueue()
    ranks = spawn(_rank, (*args, told), args[0].devices, join=False)
    try:
        ended = False
        while not ended:
            ended = ranks.join(timeout=0.2)
            while not told.empty():
                progress(told.get(), len(args[2]))
    finally:
        for process in ranks.processes:
            process.kill()


def _cluster(everyone: list[tuple[str, int]]) -> DispatchCluster:
    names = [name for name, _ in everyone]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DispatchError(f"two hosts are called {twice!r}: name each with --host")
    tables = [table_of(name, map(str, range(size)), {}) for name, size in everyone]
    return DispatchCluster(tables, np.zeros(len(tables)))


def _lacking(plan: AcrossPlan, cluster: DispatchCluster, choices: Ints) -> list[int]:
    known = Samples(choices[:0], np.zeros(0))
    if plan.out.exists():
        known = read_samples(plan.out, cluster)
    done = {row.tobytes() for row in known.choices}
    return [i for i, row in enumerate(choices) if row.tobytes() not in done]


def _wait_for_others(store: Any, hosts: int) -> None:
    end_s = time.monotonic() + LIMIT.total_seconds()
    while store.add("gone", 0) < hosts and time.monotonic() < end_s:
        time.sleep(0.05)


def _rank(
    local: int,
    plan: AcrossPlan,
    everyone: list[tuple[str, int]],
    choices: Ints,
    first: int,
    told: Any,
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(plan.address, plan.port, is_master=False, timeout=LIMIT)
    device = device_of(plan.backend, local)
    cluster = _cluster(everyone)
    rank, world = first + local, sum(cluster.sizes)
    dist.init_process_group(plan.backend, store=store, rank=rank, world_size=world, timeout=LIMIT)
    starts = np.concatenate([[0], np.cumsum(cluster.sizes)])
    for done, choice in enumerate(choices, 1):
        ranks = [
            int(starts[host]) + i
            for host, members in enumerate(choice.tolist())
            for i in range(cluster.sizes[host])
            if members >> i & 1
        ]
        measured_Bps = bandwidth_Bps(plan, ranks, rank, device, store, f"choice/{done}")
        if rank == 0:
            with plan.out.open("a") as file:
                file.write(sample_line(cluster.names(choice), measured_Bps))
            told.put(done)
    dist.barrier()
    dist.destroy_process_group()
