"""One rank: ``rig.worker JOB_FILE RANK`` does its job's parts in turn and keeps each outcome."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cuda_rig import control
from torch.distributed import distributed_c10d as c10d

from rig import kind, outcome, part
from rig.job import CRUX, SPOILT, STOCK, JobFile


def _backend(job: JobFile, which: kind.Kind) -> str:
    """The name to make the default process group with."""
    if job.mode == STOCK:
        return which.backend
    from crux_torch.backend import register

    if job.mode == CRUX:
        return "crux"
    register.attach()
    return which.backend


def _done_on_the_rig() -> list[Any]:
    """What NCCL was asked for."""
    issued = [[operation[field] for field in control.SAME] for operation in control.operations()]
    control.clear()
    return issued


def _every_group_is_recorded(device: torch.device) -> None:
    from crux_torch import _C
    from crux_torch.backend import register
    from crux_torch.backend.register import is_attached

    for group in c10d._world.pg_map:
        if not is_attached() and dist.get_backend(group) != "crux":
            continue  # the script asked for another backend by its name
        backend = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
        wrapped = isinstance(getattr(backend, "wrapped_pg", backend), _C.DelegatingBackend)
        assert wrapped or device.type in register._recording[group], group
        assert wrapped or os.environ["CRUX_SWITCH_GROUPS"] == "none"


def _attempt(made: part.Part, rank: part.Rank) -> outcome.Outcome:
    begin = time.monotonic()
    compared_on_the_rig = rank.kind.name == kind.RIG and not (made.fatal or made.measures)
    try:
        kind_, value = outcome.VALUE, outcome.plain(made.run(rank))
        rank.synchronize()
        if rank.crux:
            _every_group_is_recorded(rank.device)
        if compared_on_the_rig:
            done = _done_on_the_rig()
            value = [value, [] if made.only_crux else done]
    except Exception as error:
        kind_, value = outcome.ERROR, outcome.message(error)
        traceback.print_exc()
    return outcome.Outcome(kind_, value, time.monotonic() - begin)


def main() -> None:
    job = JobFile.read(Path(sys.argv[1]))
    number = int(sys.argv[2])
    torch.set_num_threads(1)
    which = kind.named(job.kind)
    device = which.prepare(number)
    register = _backend(job, which)
    options: dict[str, Any] = {"device_id": device} if job.eager else {}
    dist.init_process_group(
        register,
        init_method=f"file://{job.folder}/store",
        rank=number,
        world_size=job.size,
        timeout=timedelta(seconds=job.timeout_s),
        **options,
    )
    crux = job.mode != STOCK
    delegates = crux and not os.environ.get("CRUX_DISABLE")
    if crux:
        import crux_torch

        status = crux_torch.status()
        assert status["active"] == delegates, status
    rank = part.Rank(number, job.size, which, device, delegates, job.arguments)
    parts = part.load()
    for name in job.parts:
        print(f"== {name}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(max(job.limit_s, parts[name].limit_s), exit=True)
        found = _attempt(parts[name], rank)
        job.keep(name, number, found)
        faulthandler.cancel_dump_traceback_later()
        if parts[name].spoilt_by(found, job.kind):
            sys.stderr.flush()
            os._exit(SPOILT)
    if any(parts[name].fatal for name in job.parts):
        sys.stderr.flush()
        os._exit(0)
    # A rank that ends while another still connects would be taken for a crash.
    faulthandler.dump_traceback_later(job.limit_s, exit=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
