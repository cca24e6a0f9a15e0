"""The catalogue against the figures that it says it comes from."""

from __future__ import annotations

import pytest

from crux_torch.sim.catalogue import (
    MODELS,
    Model,
    WorkloadError,
    model,
    transformer_flops,
    transformer_parameters,
)


@pytest.mark.parametrize(
    ("name", "samples_per_s"),
    [
        ("bert", 78),
        ("bert-128", 415),
        ("resnet", 2470),
        ("transformer-nlp", 57_287 / 8 / 512),
        ("llama-65b", 380 / 2048),
        # Published for a V100 of 125 TFLOP/s; an A100 has 312.
        ("nmt", 32_153 * 312 / 125),
        ("ctr", 875e3 * 312 / 125),
        ("gpt-7b", 142e12 / model("gpt-7b").flops_per_sample),
    ],
)
def test_compute_time_is_the_published_throughput(name: str, samples_per_s: float) -> None:
    entry = model(name)
    assert entry.compute_s == pytest.approx(entry.samples_per_gpu / samples_per_s)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert", 336e6),
        ("gpt", 355e6),
        ("gpt-3b", 3.6e9),
        ("gpt-7b", 7.5e9),
        ("gpt-13b", 13e9),
        ("nmt", 213e6),
        ("nmt-base", 65e6),
        ("ctr", 2.37e6),
        ("transformer-nlp", 4e9),
    ],
)
def test_parameters_are_near_the_published_ones(name: str, parameters: float) -> None:
    assert model(name).parameters == pytest.approx(parameters, rel=0.06)


def test_transformers_follow_the_published_equations() -> None:
    layers, hidden, sequence, vocabulary = 36, 4096, 2048, 51_200
    published = (
        96
        * sequence
        * layers
        * hidden**2
        * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    )
    ours = transformer_flops(layers, hidden, sequence, vocabulary, sequence, recompute=True)
    assert model("gpt-7b").flops_per_sample == ours == pytest.approx(published)
    assert transformer_parameters(96, 12288, 2048, 51_200) == pytest.approx(174.6e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "width", "history"), [("multi-interests", 64, 50), ("multi-interests-large", 128, 100)]
)
def test_multi_interests_are_counted_from_their_layers(name: str, width: int, history: int) -> None:
    dense = 2 * width * 4 * width + 4 * width * width
    products = history * width**2 + 3 * 2 * 4 * history * width + 4 * dense + 4 * 11 * width
    entry = model(name)
    assert (entry.parameters, entry.flops_per_sample) == (width**2 + dense, 6 * products)
    assert entry.exchange_bytes_per_sample == 2 * width * (history + 11)


@pytest.mark.parametrize("entry", [m for m in MODELS.values() if "llama" in m.name])
def test_llama_counts_parameters_and_attention(entry: Model) -> None:
    attention = 12 * entry.layers * entry.hidden * 2048
    assert entry.flops_per_sample == 2048 * (6 * entry.parameters + attention)


def test_gpt_computes_for_less_than_the_iteration_of_figure_7() -> None:
    assert model("gpt").compute_s < 1.53 < 2 * model("gpt").compute_s


@pytest.mark.parametrize("entry", MODELS.values(), ids=lambda m: m.name)
def test_every_entry_is_possible(entry: Model) -> None:
    assert 0 < entry.achieved < 0.6
    assert entry.gradient_bytes_per_parameter in (2, 4)
    assert entry.source


def test_an_unknown_model_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="model 'alexnet' is unknown; expected one of bert"):
        model("alexnet")
