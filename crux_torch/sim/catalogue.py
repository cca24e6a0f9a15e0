"""The models that simulated jobs train; ``models.yaml`` holds published figures and sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from crux_torch.errors import CruxError
from crux_torch.host.peak import peak_flops


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
    """What one kind of training job computes and moves, per sample.

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
