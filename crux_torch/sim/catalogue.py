"""The models that simulated jobs train, and the collectives of one iteration of each.

``models.yaml`` holds published figures and sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from crux_torch.errors import CruxError
from crux_torch.host.nvml import peak_flops


class WorkloadError(CruxError, ValueError):
    """A model, layout, trace or placement that can't be used: what is wrong, what was expected."""


def _published_peak(device: str, dtype: str) -> float:
    peak = peak_flops(device, dtype)
    assert peak is not None, f"{device} {dtype} is missing from the table of peaks"
    return peak


PUBLISHED = Path(__file__).with_name("models.yaml")
A100 = ("NVIDIA A100", "bf16")
A100_FLOPS = _published_peak(*A100)


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Computation and traffic of one kind of training job, per sample.

    Attributes:
        parameters: those whose gradients are reduced; sharded embedding tables are not.
        flops_per_sample: executed for one sample, forward, backward and recomputation.
        samples_per_gpu: global batch of one iteration over the number of GPUs.
        achieved: share of the device's peak FLOP/s that training reaches without contention.
        gradient_bytes_per_parameter: 2 where gradients are reduced in half precision, else 4.
        layers: of the stack that pipeline and tensor parallelism divide.
        hidden: width of an activation at a layer's boundary; 0 where there is no such stack.
        sequence: positions of a sample.
        exchange_bytes_per_sample: embeddings that a sample needs from tables sharded over all GPUs,
            in bytes; their gradients travel back.
        tensor, pipeline: GPUs that share a layer, and stages, as published.
    """

    name: str
    parameters: float
    flops_per_sample: float
    samples_per_gpu: float
    achieved: float
    gradient_bytes_per_parameter: int
    source: str
    layers: int = 1
    hidden: int = 0
    sequence: int = 1
    exchange_bytes_per_sample: float = 0.0
    tensor: int = 1
    pipeline: int = 1

    @property
    def gradient_bytes(self) -> float:
        """Bytes of one copy of all gradients."""
        return self.parameters * self.gradient_bytes_per_parameter

    @property
    def activation_bytes_per_sample(self) -> float:
        """Bytes at a layer's boundary for one sample, in half precision."""
        return 2.0 * self.sequence * self.hidden

    @property
    def flops_per_gpu(self) -> float:
        """FLOPs of one iteration on one GPU."""
        return self.flops_per_sample * self.samples_per_gpu

    @property
    def compute_s(self) -> float:
        """Seconds of one iteration's computation on A100s."""
        return self.flops_per_gpu / (A100_FLOPS * self.achieved)


def transformer_flops(
    layers: int, hidden: int, sequence: int, vocabulary: int, predicted: int, recompute: bool
) -> float:
    """FLOPs of one sequence (Narayanan et al., SC '21, equation 3).

    A layer takes 24 s h² + 4 s² h FLOPs forward, twice that backward, and once more if activations
    are recomputed. The output layer takes 6 h V for each of the ``predicted`` positions.
    """
    forward = layers * (24.0 * sequence * hidden**2 + 4.0 * sequence**2 * hidden)
    return forward * (4 if recompute else 3) + 6.0 * predicted * hidden * vocabulary


def transformer_parameters(layers: int, hidden: int, positions: int, vocabulary: int) -> float:
    """Parameters of a stack with learnt positions (Narayanan et al., SC '21, equation 2)."""
    stack = 12.0 * layers * hidden**2 * (1 + 13 / (12 * hidden))
    return stack + (vocabulary + positions) * hidden


def _achieved(rate: dict[str, Any], flops_per_sample: float) -> float:
    """The share of a device's peak at a published rate."""
    peak = _published_peak(rate.get("device", A100[0]), rate.get("dtype", A100[1]))
    if "flops_per_s" in rate:
        return float(rate["flops_per_s"] / peak)
    return float(rate["samples_per_s"] * flops_per_sample / peak)


def _load() -> dict[str, Model]:
    """The models of ``models.yaml`` by name, in its order."""
    entries: dict[str, dict[str, Any]] = msgspec.yaml.decode(PUBLISHED.read_bytes())
    rates = {name: entry.pop("rate") for name, entry in entries.items()}
    for entry in entries.values():
        if stack := entry.pop("transformer", None):
            size, vocabulary = (entry["layers"], entry["hidden"]), stack["vocabulary"]
            entry["parameters"] = transformer_parameters(*size, stack["positions"], vocabulary)
            entry["flops_per_sample"] = transformer_flops(
                *size, entry["sequence"], vocabulary, stack["predicted"], stack["recompute"]
            )
    found = {}
    for name, entry in entries.items():
        measured = rates[name].get("like", name)
        achieved = _achieved(rates[measured], entries[measured]["flops_per_sample"])
        found[name] = msgspec.convert({**entry, "name": name, "achieved": achieved}, Model)
    return found


MODELS = _load()


def model(name: str) -> Model:
    """The model of that name.

    Raises:
        WorkloadError: there is none.
    """
    if name not in MODELS:
        raise WorkloadError(f"model {name!r} is unknown; expected one of {', '.join(MODELS)}")
    return MODELS[name]


Op = Literal["allreduce", "alltoall", "send"]
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a job's work: ``tensor`` GPUs share a layer of a pipeline's stage.

    Ranks count up through the tensor group first, then data, then pipeline, as in Megatron-LM:
    neighbours in a host share layers, and stages are farthest apart. A replica's batch runs through
    the pipeline in ``microbatches`` pieces.
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def bubble(self) -> float:
        """Time that the pipeline stands still, over the time that it computes: (p - 1) / m."""
        return (self.pipeline - 1) / self.microbatches

    @property
    def _ranks(self) -> NDArray[np.int_]:
        """The rank at each stage, replica and place in the tensor group."""
        return np.arange(self.gpus).reshape(self.pipeline, self.data, self.tensor)

    def data_groups(self) -> tuple[Group, ...]:
        """Ranks that hold the same parameters."""
        return _groups(self._ranks.transpose(0, 2, 1), self.data)

    def tensor_groups(self) -> tuple[Group, ...]:
        """Ranks that share each layer."""
        return _groups(self._ranks, self.tensor)

    def stage_pairs(self) -> tuple[Group, ...]:
        """(earlier, later) ranks of neighbouring stages."""
        return _groups(np.stack([self._ranks[:-1], self._ranks[1:]], axis=-1), 2)


def _groups(ranks: NDArray[np.int_], size: int) -> tuple[Group, ...]:
    return tuple(map(tuple, ranks.reshape(-1, size).tolist()))


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation of an iteration, run by each of its groups ``count`` times.

    Attributes:
        bytes: its payload on one rank: the buffer of an all-reduce, all that a rank gives to an
            all-to-all (its own share included), the message of a send.
        groups: ranks of each group; for ``send`` the sender and the receiver.
        at: share of the iteration's compute that is done when it may start.
    """

    op: Op
    bytes: float
    groups: tuple[Group, ...]
    at: float
    count: int = 1


def layout_of(model: Model, gpus: int) -> Layout:
    """The model's published layout, shrunk until it divides ``gpus``.

    Microbatches are four a stage, the fewest for which a pipeline is commonly run.
    """
    tensor = gcd(model.tensor, gpus)
    pipeline = gcd(model.pipeline, gpus // tensor)
    microbatches = 4 * pipeline if pipeline > 1 else 1
    return Layout(gpus // (tensor * pipeline), tensor, pipeline, microbatches=microbatches)


def iteration(
    model: Model, layout: Layout, *, gradient_start: float = 0.5, buckets: int = 1
) -> tuple[Collective, ...]:
    """The collectives of one iteration of ``model``, divided as ``layout`` says.

    Args:
        gradient_start: share of the compute that is done when the first gradients can be reduced;
            half, as the paper takes it (§4.2, Example 2).
        buckets: parts that the gradients are reduced in, evenly spread over what is left of the
            compute.
    """
    found = []
    if model.exchange_bytes_per_sample and layout.gpus > 1:
        # Rows of sharded tables before the forward pass, their gradients after the backward one.
        payload = model.exchange_bytes_per_sample * model.samples_per_gpu
        everyone = (tuple(range(layout.gpus)),)
        found += [Collective("alltoall", payload, everyone, at) for at in (0.0, 1.0)]
    samples = model.samples_per_gpu * layout.tensor * layout.pipeline / layout.microbatches
    # Of one microbatch of a replica at a layer's boundary.
    activations = model.activation_bytes_per_sample * samples
    if layout.tensor > 1:
        # Two all-reduces of the activations a layer, forward and backward (Megatron-LM).
        times = 4 * -(-model.layers // layout.pipeline) * layout.microbatches
        found.append(Collective("allreduce", activations, layout.tensor_groups(), 0.0, times))
    if layout.pipeline > 1:
        # Activations to the next stage, and their gradients back. Each rank of a tensor group
        # sends its share (scatter/gather, Narayanan et al., SC '21, §4.1).
        forward = layout.stage_pairs()
        both = forward + tuple((later, earlier) for earlier, later in forward)
        payload = activations / layout.tensor
        found.append(Collective("send", payload, both, 0.0, layout.microbatches))
    if layout.data > 1:
        # Every replica's gradients are summed; each rank holds a share of the parameters.
        share = model.gradient_bytes / (layout.tensor * layout.pipeline)
        for i in range(buckets):
            at = gradient_start + (1 - gradient_start) * i / buckets
            found.append(Collective("allreduce", share / buckets, layout.data_groups(), at))
    return tuple(found)
