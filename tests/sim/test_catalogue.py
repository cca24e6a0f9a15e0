"""Models of the catalogue, and the collectives of an iteration of each."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.sim.catalogue import (
    MODELS,
    Layout,
    Model,
    WorkloadError,
    iteration,
    layout_of,
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
        ("roberta", 125e6),
        ("camembert", 110e6),
        ("xlm", 250e6),
        ("gpt-1", 117e6),
        ("gpt-2", 1.558e9),
        # CASSINI, Table 3: MB of parameters; those of the wide one in half precision.
        ("vgg11", 507 * 2**20 / 4),
        ("vgg16", 528 * 2**20 / 4),
        ("vgg19", 549 * 2**20 / 4),
        ("wide-resnet-101", 243 * 2**20 / 2),
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


layouts = st.builds(Layout, st.integers(1, 12), *[st.integers(1, 4)] * 3)


@given(layouts)
def test_groups_partition_the_ranks_and_cross_at_one_rank_at_most(layout: Layout) -> None:
    for groups, size in (
        (layout.data_groups(), layout.data),
        (layout.tensor_groups(), layout.tensor),
    ):
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.gpus))
    tensor = [set(g) for g in layout.tensor_groups()]
    assert all(len(t & set(d)) <= 1 for d in layout.data_groups() for t in tensor)
    pairs = layout.stage_pairs()
    assert len(pairs) == (layout.pipeline - 1) * layout.data * layout.tensor
    assert all(b - a == layout.tensor * layout.data for a, b in pairs), "neighbouring stages"


def test_tensor_ranks_are_next_to_each_other() -> None:
    assert Layout(data=2, tensor=4).tensor_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Layout(data=2, tensor=2, pipeline=2).data_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 512))
def test_a_layout_fits_any_number_of_gpus(name: str, gpus: int) -> None:
    layout = layout_of(model(name), gpus)
    assert layout.gpus == gpus
    iteration(model(name), layout)


def test_data_parallelism_reduces_each_ranks_share() -> None:
    gpt = model("gpt-7b")
    (_, data) = iteration(gpt, Layout(data=2, tensor=4))
    assert (data.op, data.at) == ("allreduce", 0.5)
    assert data.bytes == gpt.parameters * 2 / 4
    assert len(data.groups) == 4


def test_buckets_share_the_gradients_and_the_time() -> None:
    bert = model("bert")
    parts = iteration(bert, Layout(data=4), gradient_start=0.2, buckets=4)
    assert sum(c.bytes for c in parts) == pytest.approx(bert.gradient_bytes)
    assert [c.at for c in parts] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_tensor_parallelism_reduces_four_times_a_layer() -> None:
    gpt = model("gpt-7b")
    (tensor,) = iteration(gpt, Layout(data=1, tensor=4, microbatches=2))
    assert tensor.count == 4 * 36 * 2
    # 4 sequences a GPU on 4 GPUs are 16, in 2 microbatches, of 2048 x 4096 halves each.
    assert tensor.bytes == 8 * 2048 * 4096 * 2


def test_pipeline_sends_activations_forward_and_gradients_back() -> None:
    llama = model("llama-65b")
    layout = Layout(data=1, tensor=2, pipeline=3, microbatches=6)
    sends = next(c for c in iteration(llama, layout) if c.op == "send")
    ways = Counter(b > a for a, b in sends.groups)
    assert ways == {True: 4, False: 4}
    total = sends.bytes * sends.count * len(sends.groups)
    whole_batch = llama.activation_bytes_per_sample * llama.samples_per_gpu * 6
    assert total == pytest.approx(2 * 2 * whole_batch), "two boundaries, two directions"
    assert layout.bubble == pytest.approx(2 / 6)


def test_embeddings_travel_there_and_their_gradients_back() -> None:
    ctr = model("ctr")
    parts = [c for c in iteration(ctr, Layout(data=8)) if c.op == "alltoall"]
    assert [c.at for c in parts] == [0.0, 1.0]
    assert {c.bytes for c in parts} == {8192 * 26 * 128 * 2}


def test_one_gpu_moves_nothing() -> None:
    assert all(iteration(entry, Layout(data=1)) == () for entry in MODELS.values())
