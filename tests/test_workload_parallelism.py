"""Layouts partition the ranks, and their collectives move the bytes that the sources say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.sim.catalogue import MODELS, WorkloadError, model
from crux_torch.sim.parallelism import Layout, iteration, layout_of

layouts = st.builds(
    lambda expert, groups, tensor, pipeline, micro: Layout(
        expert * groups, tensor, pipeline, expert, micro
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
)


@given(layouts)
def test_groups_partition_the_ranks(layout: Layout) -> None:
    for groups, size in (
        (layout.data_groups(), layout.data),
        (layout.tensor_groups(), layout.tensor),
        (layout.expert_groups(), layout.expert),
    ):
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.gpus))


@given(layouts)
def test_a_data_and_a_tensor_group_share_one_rank_or_none(layout: Layout) -> None:
    tensor = [set(g) for g in layout.tensor_groups()]
    assert all(len(t & set(d)) <= 1 for d in layout.data_groups() for t in tensor)


@given(layouts)
def test_stage_pairs_are_neighbours(layout: Layout) -> None:
    pairs = layout.stage_pairs()
    assert len(pairs) == (layout.pipeline - 1) * layout.data * layout.tensor
    assert all(b - a == layout.tensor * layout.data for a, b in pairs)


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
    assert (data.op, data.purpose, data.at) == ("allreduce", "data", 0.5)
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
    sends = next(c for c in iteration(llama, layout) if c.purpose == "pipeline")
    ways = Counter(b > a for a, b in sends.groups)
    assert ways == {True: 4, False: 4}
    total = sends.bytes * sends.count * len(sends.groups)
    whole_batch = llama.activation_bytes_per_sample * llama.samples_per_gpu * 6
    assert total == pytest.approx(2 * 2 * whole_batch), "two boundaries, two directions"
    assert layout.bubble == pytest.approx(2 / 6)


def test_expert_parallelism_exchanges_in_every_second_layer() -> None:
    gpt = model("gpt")
    layout = Layout(data=8, expert=4)
    exchange = next(c for c in iteration(gpt, layout) if c.purpose == "expert")
    assert exchange.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert exchange.count == 4 * 12
    assert exchange.bytes == 2 * gpt.activation_bytes_per_sample * 32


def test_embeddings_travel_there_and_their_gradients_back() -> None:
    ctr = model("ctr")
    parts = [c for c in iteration(ctr, Layout(data=8)) if c.purpose == "embedding"]
    assert [c.at for c in parts] == [0.0, 1.0]
    assert {c.bytes for c in parts} == {8192 * 26 * 128 * 2}


def test_one_gpu_moves_nothing() -> None:
    assert all(iteration(entry, Layout(data=1)) == () for entry in MODELS.values())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Layout(data=0), "layout.data is 0"),
        (lambda: Layout(data=2, tensor=1.5), "layout.tensor is 1.5"),  # type: ignore[arg-type]
        (lambda: Layout(data=4, expert=3), "expected a divisor of data, 4"),
        (lambda: layout_of(model("bert"), 0), "a job of 0 GPUs"),
        (lambda: iteration(model("ctr"), Layout(data=1, tensor=2)), "ctr has no stack of layers"),
        (lambda: iteration(model("bert"), Layout(2), gradient_start=2), "gradient_start is 2"),
        (lambda: iteration(model("bert"), Layout(2), buckets=0), "buckets is 0"),
    ],
)
def test_errors(call: Callable[[], object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        call()
