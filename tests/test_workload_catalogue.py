"""The catalogue against the figures that it says it comes from."""

from __future__ import annotations

import pytest

from crux_torch.sim.catalogue import (
    MODELS,
    PAPER_MODELS,
    WorkloadError,
    model,
    transformer_flops,
    transformer_parameters,
)


def test_the_papers_models_are_there() -> None:
    names = [m.name for m in PAPER_MODELS]
    assert len(names) == len(set(names)) == 12
    open_models = {"bert", "gpt", "resnet", "nmt", "multi-interests"}
    stand_ins = {"ctr", "transformer-nlp"}
    assert open_models | stand_ins <= set(names)
    assert len(set(names) - open_models - stand_ins) == 5, "five variants"


@pytest.mark.parametrize(
    ("name", "samples_per_s"),
    [("bert", 78), ("bert-128", 415), ("resnet", 2470), ("transformer-nlp", 57_287 / 8 / 512)],
)
def test_compute_time_is_the_published_throughput(name: str, samples_per_s: float) -> None:
    entry = model(name)
    assert entry.compute_s() == pytest.approx(entry.samples_per_gpu / samples_per_s)


def test_throughput_on_v100_is_the_published_one() -> None:
    assert model("nmt").compute_s(125e12) == pytest.approx(5120 / 32_153)
    assert model("ctr").compute_s(125e12) == pytest.approx(8192 / 875e3)


def test_llama_65b_takes_the_published_time() -> None:
    entry = model("llama-65b")
    assert entry.compute_s() == pytest.approx(entry.samples_per_gpu * 2048 / 380)


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


def test_megatron_flops_are_equation_3() -> None:
    layers, hidden, sequence, vocabulary = 36, 4096, 2048, 51_200
    published = (
        96
        * sequence
        * layers
        * hidden**2
        * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    )
    ours = transformer_flops(layers, hidden, sequence, vocabulary, sequence, recompute=True)
    assert ours == pytest.approx(published)
    assert transformer_parameters(96, 12288, 2048, 51_200) == pytest.approx(174.6e9, rel=1e-3)


def test_megatron_rows_run_at_the_published_rate() -> None:
    entry = model("gpt-7b")
    assert entry.flops_per_gpu / entry.compute_s() == pytest.approx(142e12)
    assert (entry.samples_per_gpu, entry.tensor, entry.pipeline) == (4, 4, 1)


def test_gpt_computes_for_less_than_the_iteration_of_figure_7() -> None:
    gpt = model("gpt")
    assert gpt.compute_s() < 1.53 < gpt.with_batch(64).compute_s()


@pytest.mark.parametrize("entry", MODELS.values(), ids=lambda m: m.name)
def test_every_entry_is_possible(entry: object) -> None:
    assert 0 < entry.achieved < 0.6  # type: ignore[attr-defined]
    assert entry.gradient_bytes_per_parameter in (2, 4)  # type: ignore[attr-defined]
    assert entry.source  # type: ignore[attr-defined]


def test_errors() -> None:
    with pytest.raises(WorkloadError, match="model 'alexnet' is unknown; expected one of bert"):
        model("alexnet")
    with pytest.raises(WorkloadError, match="samples_per_gpu is 0"):
        model("bert").with_batch(0)
