"""A world of ranks that lives beside others and runs the blocks that it is told to."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seconds that a block may take before its world counts as hung.
LIMIT_S = 120.0


@dataclass(frozen=True)
class Side:
    """One way to run a job.

    Attributes:
        crux: whether Crux stands in for the stock backend.
        profiled: whether torch's profiler (Kineto) watches each block.
        env: variables of its processes.
    """

    name: str
    crux: bool = False
    profiled: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


class WorldError(RuntimeError):
    """A rank ended, or did not answer in time."""


class World:
    """``ranks`` processes of one side, all on one GPU."""

    def __init__(self, side: Side, ranks: int, folder: str, quick: bool) -> None:
        self.side = side
        context = mp.get_context("spawn")
        ends = [context.Pipe() for _ in range(ranks)]
        self._pipes = [mine for mine, _ in ends]
        self._processes = [
            context.Process(
                target=_rank, args=(side, rank, ranks, folder, quick, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in ends:
            theirs.close()

    def block(self, cell: Any, repeats: int) -> float:
        """Nanoseconds of one call on rank 0.

        Raises:
            WorldError: a rank failed.
        """
        for pipe in self._pipes:
            pipe.send((cell, repeats))
        times = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(LIMIT_S):
                    raise WorldError(f"{self.side.name}, rank {rank}: no answer in {LIMIT_S:.0f} s")
                answer = pipe.recv()
            except (EOFError, OSError):
                raise WorldError(f"{self.side.name}, rank {rank} ended") from None
            if isinstance(answer, str):
                raise WorldError(f"{self.side.name}, rank {rank}: {answer}")
            times.append(answer)
        return float(times[0])

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(20)
            process.kill()
            process.join()


def _rank(side: Side, rank: int, ranks: int, folder: str, quick: bool, pipe: Connection) -> None:
    os.environ.update(CRUX_STORE="none", OMP_NUM_THREADS="1", CRUX_LOG_LEVEL="ERROR", **side.env)
    sys.path.append(str(ROOT))
    if ranks > 1:
        from lab import nccl_ranks

        os.environ.update(nccl_ranks.environment(f"bench-{side.name}", rank, "lo"))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from workloads.gpu_cells import block, call_of

    chosen = torch.device("cuda", 0)
    torch.cuda.set_device(chosen)
    if side.crux:
        import crux_torch
        from crux_torch.backend import register

        register.attach()
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/{side.name}", rank=rank, world_size=ranks
    )
    if side.crux:
        assert crux_torch.status()["active"], crux_torch.status()
    cell, call = None, None
    while (command := pipe.recv()) is not None:
        try:
            wanted, repeats = command
            if wanted != cell:
                cell, call = wanted, call_of(wanted, chosen, quick)
                for _ in range(5):
                    call()
                gc.collect()
                # What a step leaves is freed by counting; a collection amid a block is chance.
                gc.disable()
            if ranks > 1:
                dist.barrier()
            with _profiler(side):
                pipe.send(block(cell, call, repeats, chosen))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


def _profiler(side: Side) -> Any:
    import torch

    if not side.profiled:
        return contextlib.nullcontext()
    return torch.profiler.profile()
