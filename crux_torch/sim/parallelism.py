"""Data, tensor and pipeline parallelism as the collectives of one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from crux_torch.sim.catalogue import Model

Op = Literal["allreduce", "alltoall", "send"]
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the GPUs of a job divide the work: ``tensor`` GPUs share a layer of a pipeline's stage.

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
        """Ranks of the job."""
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
