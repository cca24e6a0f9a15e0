"""A tiny data-parallel job for tests: logs its losses and, if asked, what Crux says of it.

    cruxrun --standalone --nproc-per-node 2 kill_job.py FOLDER [--steps N] [--width N] ...

It ends after the last step, or soon after ``FOLDER/stop`` appears. Each rank writes
``FOLDER/RANK.pid``, rank 0 ``FOLDER/losses`` (a line for each step: its number and ``float.hex`` of
the loss) and ``FOLDER/steps`` (when each step ended, by the machine's monotonic clock), and with
``--status`` each rank ``FOLDER/RANK.status``, about every quarter of a second. With
``--channel-by PORT`` rank 1 and its leader talk over that port of this host, which is to carry to
the port in ``FOLDER/store``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAUNCHERS = {
    "RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


def _log(folder: Path | None, name: str) -> TextIO:
    return open(os.devnull if folder is None else folder / name, "w")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sleep-s", type=float, default=0.05)
    parser.add_argument("--status", action="store_true")
    parser.add_argument("--channel-by", type=int)
    args = parser.parse_args()
    # srun and mpirun leave it to the script to tell torch.
    for name, others in LAUNCHERS.items():
        if found := next((os.environ[other] for other in others if other in os.environ), ""):
            os.environ.setdefault(name, found)
    rank = int(os.environ["RANK"])
    # Two ranks on two hosts as far as Crux knows: else nothing would leave the host.
    if "SLURM_PROCID" not in os.environ:
        os.environ["CRUX_HOST"] = f"host{rank}"
    write_atomically(args.folder / f"{rank}.pid", str(os.getpid()))

    if args.channel_by and rank == 1:
        reach_leader_by(args.channel_by, args.folder / "store")

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(args.seed + 1 + rank)
    told_at_s = float("-inf")
    folder = args.folder if rank == 0 else None
    with _log(folder, "losses") as log, _log(folder, "steps") as ends:
        for step in range(args.steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, args.width, generator=data)).square().mean()
            loss.backward()
            optimizer.step()
            stop = torch.tensor([float((args.folder / "stop").exists())])
            dist.all_reduce(stop)
            print(step, loss.item().hex(), file=log, flush=True)
            time.sleep(args.sleep_s)
            print(time.monotonic(), file=ends, flush=True)
            if args.status and time.monotonic() - told_at_s > 0.25:
                told_at_s = time.monotonic()
                write_atomically(args.folder / f"{rank}.status", json.dumps(status()))
            if stop.item():
                break
    dist.destroy_process_group()


def reach_leader_by(port: int, told: Path) -> None:
    from crux_torch.backend import job_store

    client = job_store.TcpClient

    def client_by(_: str, store: int, *options: Any) -> Any:
        write_atomically(told, str(store))
        return client("127.0.0.1", port, *options)

    job_store.TcpClient = client_by  # type: ignore[assignment, misc]


def status() -> dict[str, Any]:
    import crux_torch

    return crux_torch.status()


if __name__ == "__main__":
    main()
