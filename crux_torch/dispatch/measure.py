"""The bandwidth of sets of this host's devices, measured with torch's collectives (§5.1)."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.multiprocessing as mp

from crux_torch.dispatch.table import HostTable, TableError, load, save, table_of

#: torch's stubs lack what these two modules re-export.
dist: Any = torch.distributed
spawn: Any = mp.spawn  # type: ignore[attr-defined]
#: Ends what hangs.
LIMIT = timedelta(minutes=5)


class How(msgspec.Struct, frozen=True, kw_only=True):
    """How sets are measured.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        devices: how many of this host, from device 0 on.
        message_bytes: what all ranks together gather, or what each reduces.
        warm_up, rounds: operations before those that count, and those that do.
    """

    backend: str
    devices: int
    collective: str
    message_bytes: int
    warm_up: int
    rounds: int


class Plan(How, frozen=True, kw_only=True):
    """What to measure on this host: every set, into the table's file ``out``.

    What the file holds already is not measured again.
    """

    out: Path
    host: str


def sets_to_measure(plan: Plan) -> tuple[HostTable, list[int]]:
    """The table so far, and the sets of two devices or more that it lacks.

    Raises:
        TableError: if the file has a table of something else.
    """
    names = tuple(map(str, range(plan.devices)))
    fresh = msgspec.structs.replace(
        table_of(plan.host, names, {}),
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


def measure(plan: Plan, progress: Callable[[int], None]) -> None:
    """Measure what the table of ``plan`` lacks. It is written after every set.

    Starts a process for each device. ``progress`` is told how many sets are done.

    Raises:
        TableError: see :func:`sets_to_measure`.
        torch.multiprocessing.ProcessRaisedException: if a process fails.
    """
    table, lacking = sets_to_measure(plan)
    if not lacking:
        save(table, plan.out)
        return
    context = mp.get_context("spawn")
    told = context.SimpleQueue()
    with _listener() as address:
        ranks = spawn(_rank, (plan, address, told), plan.devices, join=False)
        try:
            while not ranks.join(timeout=0.2):
                while not told.empty():
                    progress(told.get())
        finally:
            for process in ranks.processes:
                process.kill()
    while not told.empty():
        progress(told.get())


@contextmanager
def _listener() -> Iterator[int]:
    """A store on a free port of the loopback, for the ranks to meet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    yield store.port
    del store


def _rank(rank: int, plan: Plan, port: int, told: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    device = device_of(plan.backend, rank)
    dist.init_process_group(
        plan.backend, store=store, rank=rank, world_size=plan.devices, timeout=LIMIT
    )
    table, lacking = sets_to_measure(plan)
    dist.barrier()
    values = list(table.bandwidth_Bps)
    for done, members in enumerate(lacking, 1):
        ranks = [device for device in range(plan.devices) if members >> device & 1]
        values[members] = bandwidth_Bps(plan, ranks, rank, device, store, f"set/{members}")
        if rank == 0:
            save(msgspec.structs.replace(table, bandwidth_Bps=tuple(values)), plan.out)
            told.put(done)
    dist.destroy_process_group()


def device_of(backend: str, number: int) -> torch.device:
    """The device of a process, which becomes its current one."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def bandwidth_Bps(
    plan: How, ranks: Sequence[int], rank: int, device: torch.device, store: Any, key: str
) -> float:
    """The bus bandwidth of ``ranks``; every rank asks, and learns it by ``key`` of the store."""
    group = dist.new_group(ranks, timeout=LIMIT)
    if rank in ranks:
        measured_Bps = _bus_Bps(plan, group, device)
        if rank == ranks[0]:
            store.set(key, str(measured_Bps))
        dist.destroy_process_group(group)
    return float(store.get(key))


def _bus_Bps(plan: How, group: Any, device: torch.device) -> float:
    """Bus bandwidth as nccl-tests defines it, by the median round of the slowest rank."""
    count = dist.get_world_size(group)
    part = max(1, plan.message_bytes // 4 // (count if plan.collective == "all_gather" else 1))
    mine = torch.zeros(part, device=device)
    everyone = torch.zeros(part * count, device=device)

    def once() -> None:
        if plan.collective == "all_gather":
            dist.all_gather_into_tensor(everyone, mine, group=group)
        else:
            dist.all_reduce(mine, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    took_s = []
    for _ in range(plan.warm_up + plan.rounds):
        dist.barrier(group)
        begin_s = time.perf_counter()
        once()
        took_s.append(time.perf_counter() - begin_s)
    slowest_s = torch.tensor(statistics.median(took_s[plan.warm_up :]), dtype=torch.float64)
    slowest_s = slowest_s.to(device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX, group=group)
    crossed = (count - 1) / count * (1 if plan.collective == "all_gather" else 2)
    moved = 4 * (everyone if plan.collective == "all_gather" else mine).numel()
    rate: float = moved * crossed / slowest_s.item()
    return rate


def this_host() -> str:
    """This host's name."""
    return socket.gethostname()
