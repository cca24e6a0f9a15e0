"""Data, tensor, pipeline and expert parallelism as the collectives of one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from crux_torch.sim.catalogue import Model, WorkloadError

Op = Literal["allreduce", "alltoall", "send"]
Purpose = Literal["data", "tensor", "pipeline", "expert", "embedding"]
Group = tuple[int, ...]

#: Experts that a token is sent to, and layers for each one with experts (GShard: 2 and 2).
EXPERTS_A_TOKEN = 2
LAYERS_AN_EXPERT_LAYER = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """How the GPUs of a job divide the work.

    Ranks count up through the tensor group first, then data, then pipeline, as in Megatron-LM:
    neighbours in a host share layers, and stages are farthest apart.

    Attributes:
        data: replicas.
        tensor: GPUs that share a layer.
        pipeline: stages.
        expert: GPUs over which a replica group spreads its experts; divides ``data``; 1 for none.
        microbatches: pieces that a replica's batch runs through the pipeline in.
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "expert", "microbatches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WorkloadError(f"layout.{name} is {value!r}; expected 1 or more")
        if self.data % self.expert:
            raise WorkloadError(
                f"layout.expert is {self.expert}; expected a divisor of data, {self.data}"
            )

    @property
    def gpus(self) -> int:
        """Ranks of the job."""
        return self.data * self.tensor * self.pipeline

    @property
    def bubble(self) -> float:
        """Time that the pipeline stands still, over the time that it computes: (p - 1) / m."""
        return (self.pipeline - 1) / self.microbatches

    def rank(self, data: int, tensor: int, pipeline: int) -> int:
        """The rank at that place."""
        return tensor + self.tensor * (data + self.data * pipeline)

    def data_groups(self) -> tuple[Group, ...]:
        """Ranks that hold the same parameters."""
        return tuple(
            tuple(self.rank(d, t, p) for d in range(self.data))
            for p in range(self.pipeline)
            for t in range(self.tensor)
        )

    def tensor_groups(self) -> tuple[Group, ...]:
        """Ranks that share each layer."""
        return tuple(
            tuple(self.rank(d, t, p) for t in range(self.tensor))
            for p in range(self.pipeline)
            for d in range(self.data)
        )

    def expert_groups(self) -> tuple[Group, ...]:
        """Ranks that hold one set of experts between them."""
        return tuple(
            group[i : i + self.expert]
            for group in self.data_groups()
            for i in range(0, self.data, self.expert)
        )

    def stage_pairs(self) -> tuple[Group, ...]:
        """(earlier, later) ranks of neighbouring stages."""
        return tuple(
            (self.rank(d, t, p), self.rank(d, t, p + 1))
            for p in range(self.pipeline - 1)
            for d in range(self.data)
            for t in range(self.tensor)
        )


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation of an iteration, run by each of its groups.

    Attributes:
        op: name of the operation.
        bytes: its payload on one rank: the buffer of an all-reduce, all that a rank gives to an
            all-to-all (its own share included), the message of a send.
        groups: ranks of each group; for ``send`` the sender and the receiver.
        at: share of the iteration's compute that is done when it may start.
        purpose: which parallelism it belongs to.
        count: times an iteration.
    """

    op: Op
    bytes: float
    groups: tuple[Group, ...]
    at: float
    purpose: Purpose
    count: int = 1


def layout_of(model: Model, gpus: int) -> Layout:
    """The model's published layout, shrunk until it divides ``gpus``.

    Microbatches are four a stage, the fewest for which a pipeline is commonly run.

    Raises:
        WorkloadError: ``gpus`` is not 1 or more.
    """
    if gpus < 1:
        raise WorkloadError(f"a job of {gpus} GPUs; expected 1 or more")
    tensor = gcd(model.tensor, gpus)
    pipeline = gcd(model.pipeline, gpus // tensor)
    microbatches = 4 * pipeline if pipeline > 1 else 1
    return Layout(gpus // (tensor * pipeline), tensor, pipeline, microbatches=microbatches)


def iteration(
    model: Model, layout: Layout, *, gradient_start: float = 0.5, buckets: int = 1
) -> tuple[Collective, ...]:
    """The collectives of one iteration of ``model``.

    Args:
        model: what is trained.
        layout: how it is divided.
        gradient_start: share of the compute that is done when the first gradients can be reduced;
            half, as the paper takes it (§4.2, Example 2).
        buckets: parts that the gradients are reduced in, evenly spread over what is left of the
            compute.

    Raises:
        WorkloadError: an argument out of its range, or layers that the model doesn't have.
    """
    if not 0 <= gradient_start <= 1:
        raise WorkloadError(f"gradient_start is {gradient_start}; expected 0 to 1")
    if buckets < 1:
        raise WorkloadError(f"buckets is {buckets}; expected 1 or more")
    if not model.hidden and (layout.tensor > 1 or layout.pipeline > 1 or layout.expert > 1):
        raise WorkloadError(f"{model.name} has no stack of layers to divide: use data parallelism")
    return (
        *_embedding(model, layout),
        *_tensor(model, layout),
        *_pipeline(model, layout),
        *_expert(model, layout),
        *_data(model, layout, gradient_start, buckets),
    )


def _samples_per_replica(model: Model, layout: Layout) -> float:
    return model.samples_per_gpu * layout.tensor * layout.pipeline


def _data(
    model: Model, layout: Layout, gradient_start: float, buckets: int
) -> tuple[Collective, ...]:
    """Every replica's gradients are summed; each rank holds a share of the parameters."""
    if layout.data == 1:
        return ()
    share = model.gradient_bytes / (layout.tensor * layout.pipeline)
    return tuple(
        Collective(
            "allreduce",
            share / buckets,
            layout.data_groups(),
            gradient_start + (1 - gradient_start) * i / buckets,
            "data",
        )
        for i in range(buckets)
    )


def _tensor(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """Two all-reduces of the activations a layer, forward and backward (Megatron-LM)."""
    if layout.tensor == 1:
        return ()
    micro = _samples_per_replica(model, layout) / layout.microbatches
    times = 4 * -(-model.layers // layout.pipeline) * layout.microbatches
    payload = model.activation_bytes_per_sample * micro
    return (Collective("allreduce", payload, layout.tensor_groups(), 0.0, "tensor", times),)


def _pipeline(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """Activations to the next stage, their gradients back; each rank of a tensor group sends its
    share (the scatter/gather of Narayanan et al., SC '21, §4.1)."""
    if layout.pipeline == 1:
        return ()
    micro = _samples_per_replica(model, layout) / layout.microbatches
    payload = model.activation_bytes_per_sample * micro / layout.tensor
    forward = layout.stage_pairs()
    backward = tuple((later, earlier) for earlier, later in forward)
    times = layout.microbatches
    return (Collective("send", payload, forward + backward, 0.0, "pipeline", times),)


def _expert(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """Tokens to their experts and back, forward and backward, in every second layer (GShard)."""
    if layout.expert == 1:
        return ()
    micro = _samples_per_replica(model, layout) / layout.microbatches
    payload = EXPERTS_A_TOKEN * model.activation_bytes_per_sample * micro / layout.tensor
    layers = -(-model.layers // layout.pipeline) // LAYERS_AN_EXPERT_LAYER
    times = 4 * layers * layout.microbatches
    return (Collective("alltoall", payload, layout.expert_groups(), 0.0, "expert", times),)


def _embedding(model: Model, layout: Layout) -> tuple[Collective, ...]:
    """Rows of sharded tables before the forward pass, their gradients after the backward one."""
    if not model.exchange_bytes_per_sample or layout.gpus == 1:
        return ()
    payload = model.exchange_bytes_per_sample * model.samples_per_gpu
    everyone = (tuple(range(layout.gpus)),)
    return tuple(Collective("alltoall", payload, everyone, at, "embedding") for at in (0.0, 1.0))
