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

from rig import kind, outcome, part
from rig.job import CRUX, SPOILT, STOCK, JobFile


def _backend(job: JobFile, which: kind.Kind) -> str:
    """The name to make the default process group with."""
    if job.mode == STOCK:
        return which.backend
    from crux_torch import backend

    if job.mode == CRUX:
        return "crux"
    backend.attach(() if which.is_cuda else (which.backend,))
    return which.backend


def _attempt(run: part.Run, rank: part.Rank) -> outcome.Outcome:
    begin = time.monotonic()
    try:
        kind_, value = outcome.VALUE, outcome.plain(run(rank))
        rank.synchronize()
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
    backend = _backend(job, which)
    options: dict[str, Any] = {"device_id": device} if job.eager else {}
    dist.init_process_group(
        backend,
        init_method=f"file://{job.folder}/store",
        rank=number,
        world_size=job.size,
        timeout=timedelta(seconds=job.timeout_s),
        **options,
    )
    crux = job.mode != STOCK
    if crux:
        import crux_torch

        status = crux_torch.status()
        assert status["active"], status
    rank = part.Rank(number, job.size, which, device, crux, job.arguments)
    parts = part.load()
    for name in job.parts:
        print(f"== {name}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(max(job.limit_s, parts[name].limit_s), exit=True)
        found = _attempt(parts[name].run, rank)
        job.keep(name, number, found)
        faulthandler.cancel_dump_traceback_later()
        if parts[name].spoilt_by(found):
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
