"""One rank of a job under cruxrun: trains until FOLDER/stop appears, and tells how its links stand.

Writes ``FOLDER/RANK.status`` now and then: ``crux_torch.status()``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crux_torch

#: Seconds after which it stops though nobody says so.
LIMIT_S = 300.0


def main() -> None:
    folder, width, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    # Links of the host are shared whatever hosts the topology has: these share one core.
    os.environ["CRUX_HOST"] = f"host{os.environ['RANK']}"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file = folder / f"{os.environ['RANK']}.status"
    end_s, told_s = time.monotonic() + LIMIT_S, float("-inf")
    steps = 0
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, width)).square().mean().backward()
        optimizer.step()
        steps += 1
        stop = torch.tensor([float((folder / "stop").exists() or time.monotonic() > end_s)])
        dist.all_reduce(stop)
        if stop.item():
            break
        time.sleep(pause_s)
        if time.monotonic() - told_s > 0.1:
            told_s = time.monotonic()
            partial = file.with_suffix(".partial")
            partial.write_text(
                json.dumps(crux_torch.status() | {"steps": steps, "pid": os.getpid()})
            )
            partial.rename(file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
