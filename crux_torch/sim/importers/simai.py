"""SimAI workload files: the layers of one training iteration as AICB writes them.

The first line names the parallelism, the second the number of layers. A layer has a name, a
dependency, then compute (ns), collective and bytes of the forward pass, of the input gradients and
of the weight gradients, and the time of the update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from crux_torch.sim.catalogue import Collective, Group
from crux_torch.sim.importers.workload import ImportedJob, ImportFailed, collectives_of

POLICIES = ("HYBRID_TRANSFORMER_FWD_IN_BCKWD", "HYBRID_TRANSFORMER")
OPS = {
    "ALLREDUCE": "allreduce",
    "ALLGATHER": "allgather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "alltoall",
}
FIELDS = 12
#: GPUs of a workload that is read; more is taken for a broken file.
MOST_GPUS = 1 << 20


@dataclass(frozen=True, slots=True)
class _Layout:
    """Ranks count up in tensor groups first, then experts, replicas and pipeline stages."""

    tensor: int
    expert: int
    pipeline: int
    virtual: int
    microbatches: int
    gpus: int

    def groups(self, kind: str) -> tuple[Group, ...]:
        """Ranks of each group: ``TP``, ``DP``, ``EP``, or ``DP_EP``, the replicas of experts."""
        data = self.gpus // (self.tensor * self.pipeline)
        expert = 1 if kind == "DP" else self.expert
        ranks = np.arange(self.gpus).reshape(self.pipeline, data // expert, expert, self.tensor)
        axis = {"TP": 3, "EP": 2, "DP_EP": 1, "DP": 1}[kind]
        moved = np.moveaxis(ranks, axis, -1)
        return tuple(map(tuple, moved.reshape(-1, moved.shape[-1]).tolist()))

    def stage_pairs(self) -> tuple[Group, ...]:
        """Each rank with the one that has its place in the next stage."""
        stages = np.arange(self.gpus).reshape(self.pipeline, -1)
        pairs = zip(stages[:-1].ravel().tolist(), stages[1:].ravel().tolist(), strict=True)
        return tuple(pairs)


class _Phase(NamedTuple):
    """Compute in ns, and the collective that follows it."""

    compute_ns: int
    op: str
    bytes: int


def read_simai(text: str) -> ImportedJob:
    """One iteration of the job that a SimAI workload file describes.

    A layer's collectives start when its compute is done: forward in the order of the file, then
    backward in reverse, input gradients before weight gradients. The file is about one stage of a
    pipeline. All stages are taken to do the same, and computation lasts longer by the pipeline's
    bubble. Activations go to the next stage, and gradients back, once for each microbatch.

    Raises:
        ImportFailed: names the line.
    """
    lines = text.splitlines()
    layout, stage_bytes = _head(lines[0] if lines else "")
    layers = list(_layers(lines))
    forward = [layer[0] for layer in layers]
    backward = [phase for layer in reversed(layers) for phase in (layer[1], layer[2])]
    total_ns = sum(phase.compute_ns for phase in forward + backward)
    if not total_ns:
        raise ImportFailed("no layer computes, expected one with a time above 0")
    done_ns, found = 0, []
    for i, phase in enumerate(forward + backward):
        done_ns += phase.compute_ns
        # What follows a weight gradient is of data parallelism where it has no suffix.
        weights = i >= len(forward) and (i - len(forward)) % 2 == 1
        found += _collectives(phase, layout, "DP" if weights else "TP", done_ns / total_ns)
    if layout.pipeline > 1 and stage_bytes > 0:
        half = sum(phase.compute_ns for phase in forward) / total_ns
        found += _between_stages(layout, stage_bytes, half)
    bubble = (layout.pipeline - 1) / (layout.virtual * layout.microbatches)
    return ImportedJob(layout.gpus, total_ns * 1e-9 * (1 + bubble), tuple(found))


def _head(line: str) -> tuple[_Layout, float]:
    words = line.split()
    if not words or words[0] not in POLICIES:
        raise ImportFailed(f"line 1: got {line[:60]!r}, expected one of {', '.join(POLICIES)}")
    given: dict[str, str] = {}
    for name, value in pairwise(words):
        given.setdefault(name.rstrip(":"), value)

    def number(name: str, default: int | None) -> int:
        if name not in given and default is not None:
            return default
        value = given.get(name, "nothing")
        if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
            raise ImportFailed(f"line 1: {name}: got {value}, expected a number of 1 or more")
        return int(value)

    layout = _Layout(
        number("model_parallel_NPU_group", None),
        number("ep", 1),
        number("pp", 1),
        number("vpp", 1),
        number("ga", 1),
        number("all_gpus", None),
    )
    if layout.gpus > MOST_GPUS:
        raise ImportFailed(f"line 1: all_gpus: got {layout.gpus}, expected {MOST_GPUS} at most")
    if layout.gpus % (layout.tensor * layout.pipeline * layout.expert):
        raise ImportFailed(
            f"line 1: all_gpus: got {layout.gpus}, expected a multiple of model_parallel_NPU_group "
            f"x pp x ep = {layout.tensor * layout.pipeline * layout.expert}"
        )
    stage_bytes = given.get("pp_comm", "0")
    if not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?", stage_bytes):
        raise ImportFailed(f"line 1: pp_comm: got {stage_bytes}, expected bytes")
    return layout, float(stage_bytes)


def _layers(lines: list[str]) -> Iterator[tuple[_Phase, _Phase, _Phase]]:
    count = lines[1].strip() if len(lines) > 1 else "nothing"
    if not re.fullmatch(r"[0-9]{1,9}", count):
        raise ImportFailed(f"line 2: got {count[:60]!r}, expected the number of layers")
    given = [(i, line.split()) for i, line in enumerate(lines[2:], 3) if line.strip()]
    if len(given) < int(count):
        raise ImportFailed(f"line 2: got {count} layers, but {len(given)} lines follow")
    for number, words in given[: int(count)]:
        if len(words) < FIELDS:
            raise ImportFailed(f"line {number}: got {len(words)} fields, expected {FIELDS}")
        forward, inputs, weights = (_phase(number, words[i : i + 3]) for i in (2, 5, 8))
        yield forward, inputs, weights


def _phase(line: int, words: list[str]) -> _Phase:
    for word in (words[0], words[2]):
        if not re.fullmatch(r"[0-9]{1,18}", word):
            raise ImportFailed(f"line {line}: got {word[:60]!r}, expected a whole number")
    return _Phase(int(words[0]), _checked(line, words[1]), int(words[2]))


def _checked(line: int, op: str) -> str:
    base, _, group = op.partition("_")
    if op != "NONE" and (base not in OPS or group not in ("", "EP", "DP_EP")):
        known = ", ".join(OPS)
        raise ImportFailed(
            f"line {line}: got {op[:60]!r}, expected NONE or one of {known}, with _EP or _DP_EP"
        )
    return op


def _collectives(phase: _Phase, layout: _Layout, plain: str, at: float) -> list[Collective]:
    if phase.op == "NONE" or not phase.bytes:
        return []
    base, _, group = phase.op.partition("_")
    return collectives_of(OPS[base], phase.bytes, layout.groups(group or plain), at)


def _between_stages(layout: _Layout, bytes: float, half: float) -> Iterator[Collective]:
    """Evenly spread over the forward pass, and back over the rest."""
    pairs = layout.stage_pairs()
    back = tuple((after, before) for before, after in pairs)
    sent = layout.microbatches * layout.virtual
    for i in range(sent):
        done = (i + 1) / sent
        yield Collective("send", bytes, pairs, half * done)
        yield Collective("send", bytes, back, half + (1 - half) * done)
