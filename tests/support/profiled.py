"""Traces as torch's profiler writes them of a job whose iterations are known."""

from __future__ import annotations

import json
from typing import Any

from crux_torch.sim.importers.workload import ImportedJob

#: An iteration on the device, in microseconds: how long it is, and how long it only communicates.
STEP_US, EXPOSED_US = 100_000, 3_900
#: Computation and payload of an iteration of 16 ranks, as :func:`profiled` has them.
COMPUTE_S = (STEP_US - EXPOSED_US) * 1e-6
GATHERED, REDUCED = 32e6, 1e9
_ALL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BATCH = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict:
    """One event of a trace."""
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def collective(name: str, dtype: str, nelems: int, out: int, world: int = 16, **more: Any) -> dict:
    """What the profiler records of a collective of all ranks."""
    return {
        "Collective name": name,
        "dtype": dtype,
        "In msg nelems": nelems,
        "Out msg nelems": out,
        "Group size": world,
        "Process Group Name": "0",
        "Process Group Ranks": str(list(range(world))),
        **more,
    }


def kineto(events: list[dict], world: int = 16, rank: int = 0, **more: object) -> bytes:
    """The file of a rank's events."""
    about = {"backend": "nccl", "rank": rank, "world_size": world}
    return json.dumps(
        {"schemaVersion": 1, "distributedInfo": about, "traceEvents": events, **more}
    ).encode()


class Recording:
    """The events of a rank while they are recorded.

    Args:
        launches: the calls that launch kernels are recorded.
        records: the host's records of collectives are.
        own: a kernel that communicates has a record of its own.
    """

    def __init__(self, *, launches: bool = True, records: bool = True, own: bool = True) -> None:
        self.events: list[dict] = []
        self._launches, self._records, self._own = launches, records, own
        self._count = 0

    def kernel(
        self, name: str, host: float, ts: float, dur: float, stream: int = 7, about: Any = None
    ) -> None:
        """A kernel that the host launches at ``host``, and the device runs at ``ts``."""
        self._count += 1
        number: dict[str, object] = {"External id": self._count}
        if about and self._records:
            self.events.append(
                event("record_param_comms", "cpu_op", host - 3, 6, **number, **about)
            )
        if self._launches:
            number["correlation"] = self._count
            self.events.append(event("cudaLaunchKernel", "cuda_runtime", host, 2, **number))
        own = about if about and self._own else {}
        self.events.append(event(name, "kernel", ts, dur, stream, **number, stream=stream, **own))

    def mark(self, name: str, ts: float, dur: float) -> None:
        """An annotation of the host."""
        self.events.append(event(name, "user_annotation", ts, dur))


def profiled(
    steps: int = 3,
    *,
    host_us: float = STEP_US,
    launches: bool = True,
    records: bool = True,
    own: bool = True,
    seen: str = "",
) -> list[dict]:
    """The events of some iterations of data parallelism.

    Args:
        host_us: what the host needs for a step; it is ahead of the device with less than it takes.
        launches, records, own: see :class:`Recording`.
        seen: what annotations of steps the device has: none, ``first`` kernel of each step, or
            one on each of the ``streams``.
    """
    recording = Recording(launches=launches, records=records, own=own)
    for i in range(steps):
        host, at = 7_000 + host_us * i, 10_000 + STEP_US * i
        name = f"ProfilerStep#{i}"
        recording.mark(name, host, host_us * 0.95)
        recording.kernel("gemm", host + 0.01 * host_us, at, 40_000)
        about = collective("_allgather_base", "BFloat16", 1_000_000, 16_000_000)
        recording.kernel(_GATHER, host + 0.02 * host_us, at + 1, 10_000, 20, about)
        recording.kernel("gemm_backward", host + 0.4 * host_us, at + 40_100, 55_000)
        about = collective("allreduce", "Float", 250_000_000, 250_000_000)
        recording.kernel(_ALL, host + 0.6 * host_us, at + 65_000, 34_000, 20, about)
        spans = {"first": [(at, 16, 7)], "streams": [(at, 95_100, 7), (at + 1, 98_999, 20)]}
        recording.events += [
            event(name, "gpu_user_annotation", begin, dur, stream)
            for begin, dur, stream in spans.get(seen, [])
        ]
    return recording.events


def moved(job: ImportedJob) -> dict[str, float]:
    """Payload times runs times groups of each operation."""
    total: dict[str, float] = {}
    for one in job.collectives:
        total[one.op] = total.get(one.op, 0.0) + one.bytes * one.count * len(one.groups)
    return total
