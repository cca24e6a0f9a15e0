"""Bandwidths measured with torch's collectives (§5.1), by a process for each device.

:func:`measure` measures the sets of one host's devices, :func:`measure_across` choices that span
hosts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.multiprocessing as mp

from crux_torch.dispatch.cluster import (
    DispatchCluster,
    DispatchError,
    HostTable,
    Ints,
    TableError,
    load,
    save,
    table_of,
)
from crux_torch.dispatch.samples import across_hosts, read_samples, sample_line

#: torch's stubs lack what these two modules re-export.
dist: Any = torch.distributed
spawn: Any = mp.spawn  # type: ignore[attr-defined]
#: Ends what hangs.
LIMIT = timedelta(minutes=5)


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """Method by which sets are measured.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        devices: how many of this host, from device 0 on.
        message_bytes: what all ranks together gather, or what each reduces.
        warm_up, rounds: operations before those that count, and those that do.
        host: this host's name.
        out: the file of results. Entries that it holds already are not measured again.
    """

    backend: str
    devices: int
    collective: str
    message_bytes: int
    warm_up: int
    rounds: int
    out: Path
    host: str


class AcrossPlan(Method, frozen=True, kw_only=True):
    """One host's part in measuring choices across hosts. All hosts need the same, but for names.

    Attributes:
        address, port: where the hosts meet: of the host of rank 0, which writes the file.
        hosts, host_rank: how many there are, and which of them this is.
        number: choices to measure.
        seed: of the choices that are drawn.
    """

    address: str
    port: int
    hosts: int
    host_rank: int
    number: int
    seed: int = 0


def sets_to_measure(plan: Method) -> tuple[HostTable, list[int]]:
    """The table so far, and the sets of two devices or more that it lacks.

    Raises:
        TableError: if the file has a table of something else.
    """
    fresh = msgspec.structs.replace(
        table_of(plan.host, map(str, range(plan.devices)), {}),
        collective=plan.collective,
        message_bytes=plan.message_bytes,
    )
    table = load(plan.out) if plan.out.exists() else fresh
    asked = (fresh.host, fresh.devices, fresh.collective, fresh.message_bytes)
    if asked != (table.host, table.devices, table.collective, table.message_bytes):
        raise TableError(
            f"{plan.out} is of another host, number of devices, collective or message: remove it, "
            "or name another file"
        )
    lacking = [m for m, value in enumerate(table.bandwidth_Bps) if value is None]
    return table, [members for members in lacking if members & (members - 1)]


def measure(plan: Method, progress: Callable[[int], None]) -> None:
    """Measure every set that the table of ``plan`` lacks, and write the table after every set.

    ``progress`` is called with the number of sets that are done.

    Raises:
        TableError: see :func:`sets_to_measure`.
        torch.multiprocessing.ProcessRaisedException: if a process fails.
    """
    table, lacking = sets_to_measure(plan)
    if not lacking:
        save(table, plan.out)
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    _run_ranks(_measure_sets, (plan, store.port), plan.devices, progress)


def _run_ranks(
    rank: Callable[..., None], args: tuple[Any, ...], devices: int, progress: Callable[[int], None]
) -> None:
    """Run ``rank`` to its end, in a process for each device; its last argument takes progress."""
    queue = mp.get_context("spawn").SimpleQueue()
    ranks = spawn(rank, (*args, queue), devices, join=False)
    try:
        ended = False
        while not ended:
            ended = ranks.join(timeout=0.2)
            while not queue.empty():
                progress(queue.get())
    finally:
        for process in ranks.processes:
            process.kill()


def _measure_sets(rank: int, plan: Method, port: int, queue: Any) -> None:
    store, device = _join(plan, "127.0.0.1", port, rank, rank, plan.devices)
    table, lacking = sets_to_measure(plan)
    dist.barrier()
    values = list(table.bandwidth_Bps)
    for done, members in enumerate(lacking, 1):
        ranks = [device for device in range(plan.devices) if members >> device & 1]
        values[members] = _bandwidth_Bps(plan, ranks, rank, device, store, f"set/{members}")
        if rank == 0:
            save(msgspec.structs.replace(table, bandwidth_Bps=tuple(values)), plan.out)
            queue.put(done)
    dist.destroy_process_group()


def _join(
    plan: Method, address: str, port: int, device: int, rank: int, world_size: int
) -> tuple[Any, torch.device]:
    """Join the process group as one rank; the store, and the device, which is the current one."""
    torch.set_num_threads(1)
    store = dist.TCPStore(address, port, is_master=False, timeout=LIMIT)
    mine = torch.device("cpu")
    if plan.backend == "nccl":
        mine = torch.device("cuda", device)
        torch.cuda.set_device(mine)
    dist.init_process_group(
        plan.backend, store=store, rank=rank, world_size=world_size, timeout=LIMIT
    )
    return store, mine


def _bandwidth_Bps(
    plan: Method, ranks: Sequence[int], rank: int, device: torch.device, store: Any, key: str
) -> float:
    """The bus bandwidth of ``ranks``; every rank asks, and learns it by ``key`` of the store."""
    group = dist.new_group(ranks, timeout=LIMIT)
    if rank in ranks:
        measured_Bps = _bus_Bps(plan, group, device)
        if rank == ranks[0]:
            store.set(key, str(measured_Bps))
        dist.destroy_process_group(group)
    return float(store.get(key))


def _bus_Bps(plan: Method, group: Any, device: torch.device) -> float:
    """Bus bandwidth as nccl-tests defines it, by the median round of the slowest rank."""
    count = dist.get_world_size(group)
    gathers = plan.collective == "all_gather"
    part = max(1, plan.message_bytes // 4 // (count if gathers else 1))
    mine = torch.zeros(part, device=device)
    everyone = torch.zeros(part * count, device=device)
    took_s = []
    for _ in range(plan.warm_up + plan.rounds):
        dist.barrier(group)
        begin_s = time.perf_counter()
        if gathers:
            dist.all_gather_into_tensor(everyone, mine, group=group)
        else:
            dist.all_reduce(mine, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_s.append(time.perf_counter() - begin_s)
    slowest_s = torch.tensor(statistics.median(took_s[plan.warm_up :]), dtype=torch.float64)
    slowest_s = slowest_s.to(device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX, group=group)
    crossed = (count - 1) / count * (1 if gathers else 2)
    moved = 4 * (everyone if gathers else mine).numel()
    rate: float = moved * crossed / slowest_s.item()
    return rate


def measure_across(plan: AcrossPlan, progress: Callable[[int, int], None]) -> int:
    """Take part until all choices are measured; returns how many this was.

    ``progress`` is called with the number of choices that are done, and of all.

    Raises:
        DispatchError: hosts of one name, or a file of samples that can't be used.
        torch.distributed.DistError: the hosts don't meet.
        torch.multiprocessing.ProcessRaisedException: if a process fails.
    """
    first = plan.host_rank == 0
    store = dist.TCPStore(
        plan.address, plan.port, is_master=first, wait_for_workers=False, timeout=LIMIT
    )
    store.set(f"host/{plan.host_rank}", json.dumps([plan.host, plan.devices]))
    everyone = [json.loads(store.get(f"host/{rank}")) for rank in range(plan.hosts)]
    cluster = _cluster(everyone)
    choices = across_hosts(cluster.sizes, plan.number, np.random.default_rng(plan.seed))
    if first:
        try:
            known = read_samples(plan.out, cluster).choices if plan.out.exists() else choices[:0]
            done = {row.tobytes() for row in known}
            lacking = [i for i, row in enumerate(choices) if row.tobytes() not in done]
        except Exception as error:
            store.set("lacking", json.dumps(str(error)))
            raise
        store.set("lacking", json.dumps(lacking))
    lacking = json.loads(store.get("lacking"))
    if isinstance(lacking, str):
        raise DispatchError(f"the host of rank 0: {lacking}")
    if lacking:
        _run_ranks(
            _measure_choices,
            (plan, everyone, choices[lacking], sum(cluster.sizes[: plan.host_rank])),
            plan.devices,
            lambda done: progress(done, len(lacking)),
        )
    # The host of rank 0 has the store: it goes last.
    store.add("gone", 1)
    end_s = time.monotonic() + LIMIT.total_seconds()
    while first and store.add("gone", 0) < plan.hosts and time.monotonic() < end_s:
        time.sleep(0.05)
    return len(lacking)


def _cluster(everyone: list[tuple[str, int]]) -> DispatchCluster:
    names = [name for name, _ in everyone]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DispatchError(f"two hosts are called {twice!r}: name each with --host")
    tables = [table_of(name, map(str, range(size)), {}) for name, size in everyone]
    return DispatchCluster(tables, np.zeros(len(tables)))


def _measure_choices(
    local: int,
    plan: AcrossPlan,
    everyone: list[tuple[str, int]],
    choices: Ints,
    first: int,
    queue: Any,
) -> None:
    cluster, rank = _cluster(everyone), first + local
    store, device = _join(plan, plan.address, plan.port, local, rank, sum(cluster.sizes))
    starts = np.concatenate([[0], np.cumsum(cluster.sizes)])
    for done, choice in enumerate(choices, 1):
        ranks = [
            int(starts[host]) + i
            for host, members in enumerate(choice.tolist())
            for i in range(cluster.sizes[host])
            if members >> i & 1
        ]
        measured_Bps = _bandwidth_Bps(plan, ranks, rank, device, store, f"choice/{done}")
        if rank == 0:
            with plan.out.open("a") as file:
                file.write(sample_line(cluster.names(choice), measured_Bps))
            queue.put(done)
    dist.barrier()
    dist.destroy_process_group()
