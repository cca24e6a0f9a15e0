"""Layouts partition the ranks, and their collectives move the bytes that the sources say."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.sim.catalogue import MODELS, model
from crux_torch.sim.parallelism import Layout, iteration, layout_of

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
