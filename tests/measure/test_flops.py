"""W: equal to the analytic count, without a trace in the training."""

from __future__ import annotations

import copy
import os
import pickle
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from places import ROOT

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from crux_torch.measure.flops import FlopCount, FlopMeter  # noqa: E402  # noqa: E402
from crux_torch.measure.iterations import IterationMarks  # noqa: E402
from crux_torch.measure.operators import COMPILED, OperatorCount  # noqa: E402  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture
def meter() -> Iterator[FlopMeter]:
    marks = IterationMarks()
    marks.install()
    meter = FlopMeter(marks)
    meter.install()
    yield meter
    meter.remove()
    marks.remove()


def counted(meter: FlopMeter) -> FlopCount:
    count = meter.count()
    assert count is not None
    return count


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for attention, feed in zip(self.attention, self.feed, strict=True):
            x = x + attention(x)
            x = x + feed(x)
        return self.head(x)


def train(model: nn.Module, make_input: Callable[[], torch.Tensor], steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(make_input()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


#: Of ``mlp``: forward, weights' gradients, and inputs' gradients of all but the first layer.
OF_16_ROWS = 2 * 2 * 16 * (32 * 64 + 64 * 8) + 2 * 16 * 64 * 8


def test_mlp(meter: FlopMeter) -> None:
    train(mlp(), lambda: torch.randn(16, 32), 4)
    count = counted(meter)
    assert count.flops == OF_16_ROWS
    assert count.iterations == 3
    assert count.left_out == 0
    assert count.uncounted_ops == ()


def test_gpt(meter: FlopMeter) -> None:
    vocabulary, width, heads, layers, batch, length = 50, 32, 4, 2, 3, 16
    train(
        Gpt(vocabulary, width, heads, layers),
        lambda: torch.randint(vocabulary, (batch, length)),
        4,
    )
    tokens = batch * length
    weights = layers * (3 + 1 + 4 + 4) * width**2 + vocabulary * width
    # Attention: two products forward, five backward (the scores are computed again).
    products = layers * 7 * 2 * batch * length**2 * width
    count = counted(meter)
    assert count.flops == 3 * 2 * tokens * weights + products
    assert count.uncounted_ops == ()


class Bottleneck(nn.Module):
    """He et al. 2016, with the stride in the 3x3 convolution, as everybody builds it since."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.skip = (
            nn.Identity()
            if stride == 1 and inputs == 4 * width
            else nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    blocks, inputs = [], 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for i in range(depth):
            blocks.append(Bottleneck(inputs, 64 << stage, 2 if stage and not i else 1))
            inputs = 4 * (64 << stage)
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2048, 1000),
    )


def resnet50_products(size: int) -> tuple[int, int]:
    """Multiply-adds of one image, and of its first convolution, by the table of the paper."""
    side = size // 2
    first = side**2 * 49 * 3 * 64
    total, inputs, side = first, 64, side // 2
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for i in range(depth):
            before = side
            side = side // 2 if stage and not i else side
            total += before**2 * inputs * width + side**2 * (9 * width**2 + 4 * width**2)
            total += 0 if i else side**2 * inputs * 4 * width
            inputs = 4 * width
    return total + 2048 * 1000, first


@pytest.mark.slow
def test_resnet50(meter: FlopMeter) -> None:
    products, first = resnet50_products(32)
    assert resnet50_products(224)[0] == pytest.approx(4.09e9, rel=0.01), "4.1 G, as published"
    train(resnet50(), lambda: torch.randn(2, 3, 32, 32), 2)
    count = counted(meter)
    # Backward takes twice forward's, but nothing needs the gradient of the images.
    assert count.flops == pytest.approx(2 * 2 * (3 * products - first), rel=0.01)
    assert count.uncounted_ops == ()


class To(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16)


def test_data_types_are_told_apart(meter: FlopMeter) -> None:
    mixed = nn.Sequential(nn.Linear(32, 64), To(), nn.Linear(64, 8).to(torch.bfloat16))
    train(mixed, lambda: torch.randn(16, 32), 3)
    count = counted(meter)
    assert count.by_precision == {"fp32": 2 * 2 * 16 * 32 * 64, "bf16": 3 * 2 * 16 * 64 * 8}
    assert count.flops == sum(count.by_precision.values())


def test_equals_torchs_own_counter(meter: FlopMeter) -> None:
    model = nn.Sequential(nn.Embedding(50, 32), mlp())
    tokens = torch.randint(50, (2, 8))
    with FlopCounterMode(display=False) as reference:
        model(tokens).float().square().mean().backward()
    train(model, lambda: tokens, 3)
    count = counted(meter)
    assert count.flops == reference.get_total_flops()


def test_checkpointing_counts_what_is_computed_again(meter: FlopMeter) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    train(Checkpointed(*mlp()), lambda: torch.randn(16, 32), 4)
    count = counted(meter)
    # The second forward stops early: nothing needs the last layer's output.
    assert count.flops == OF_16_ROWS + 2 * 16 * 32 * 64
    assert count.left_out == 0


@pytest.mark.slow
def test_mean_over_signatures(meter: FlopMeter) -> None:
    sizes = iter([16, 16, 16, 8] * 30)
    train(mlp(), lambda: torch.randn(next(sizes), 32), 81)
    count = counted(meter)
    assert count.left_out == 0, "both signatures were met while counting"
    # 80 whole iterations after the first mark: 60 of 16 rows and 20 of 8.
    assert count.flops == pytest.approx(OF_16_ROWS * (60 + 20 / 2) / 80, rel=1e-9)


def test_gradient_accumulation_is_one_iteration(meter: FlopMeter) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        for _ in range(3):
            model(torch.randn(16, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counted(meter).flops == 3 * OF_16_ROWS


def test_training_is_the_same_bit_for_bit() -> None:
    def run(counted: bool) -> list[float]:
        torch.manual_seed(0)
        marks = IterationMarks()
        meter = FlopMeter(marks)
        if counted:
            marks.install()
            meter.install()
        try:
            return train(mlp(), lambda: torch.randn(16, 32), 6)
        finally:
            meter.remove()
            marks.remove()

    assert run(counted=True) == run(counted=False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_in_full(meter: FlopMeter, backend: str, in_place: bool) -> None:
    torch._dynamo.reset()
    model = mlp()
    if in_place:
        model.compile(backend=backend, fullgraph=True)
    else:
        model = torch.compile(model, backend=backend, fullgraph=True)
    train(model, lambda: torch.randn(16, 32), 6)
    count = counted(meter)
    assert (count.flops, count.left_out) == (OF_16_ROWS, 0)


def test_names_what_it_can_not_count(meter: FlopMeter) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.softmax(x @ self.weight, -1).clone().transpose(0, 1)
            return y.sum() + torch.fft.rfft(x).abs().sum() + torch.linalg.det(self.weight)

    train(Model(), lambda: torch.randn(16, 32), 3)
    count = counted(meter)
    names = " ".join(count.uncounted_ops)
    assert "fft" in names
    assert "linalg" in names
    for cheap in ("softmax", "clone", "transpose", "sum", "mean", "abs", "mul"):
        assert cheap not in names


def test_a_formula_that_fails_does_not_reach_the_model(
    meter: FlopMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crux_torch.measure import operators

    def broken(*args: object, **kwargs: object) -> int:
        raise AssertionError("unsupported layout")

    monkeypatch.setitem(operators.flop_registry, torch.ops.aten.addmm, broken)
    losses = train(mlp(), lambda: torch.randn(16, 32), 4)
    count = counted(meter)
    assert len(losses) == 4
    assert count.uncounted_ops == ("aten::addmm",)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_counts_what_runs_under_the_scripts_own_modes(meter: FlopMeter) -> None:
    with Passing() as mine:
        train(mlp(), lambda: torch.randn(16, 32), 3)
        assert torch._C._get_dispatch_stack_at(0) is mine
    assert counted(meter).flops == OF_16_ROWS


def test_removed_while_counting_leaves_nothing(meter: FlopMeter) -> None:
    model = mlp()
    train(model, lambda: torch.randn(16, 32), 1)
    meter.remove()
    train(model, lambda: torch.randn(16, 32), 3)
    assert not model._forward_pre_hooks
    assert meter.count() is None


def test_removed_by_another_thread_ends_with_the_iteration(meter: FlopMeter) -> None:
    model = mlp()
    train(model, lambda: torch.randn(16, 32), 1)
    other = threading.Thread(target=meter.remove)
    other.start()
    other.join()
    train(model, lambda: torch.randn(16, 32), 3)
    assert meter.count() is None
    assert not meter._marks._listeners


def test_a_counted_module_can_be_copied_and_pickled(meter: FlopMeter) -> None:
    model = mlp()
    train(model, lambda: torch.randn(16, 32), 3)
    assert model._forward_pre_hooks
    before = len(meter._calls)
    x = torch.randn(16, 32)
    pickled = pickle.dumps(model)
    assert b"crux" not in pickled
    for copied in (copy.deepcopy(model), pickle.loads(pickled)):
        assert torch.equal(copied(x), model(x))
    assert len(meter._calls) == before + 2, "only the model itself counts"


def test_a_module_that_looks_for_hooks_gets_none(meter: FlopMeter) -> None:
    """Outside training it takes another kernel if it has one."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    train(layer, lambda: torch.randn(2, 4, 16), 3)
    assert counted(meter).flops > 0
    assert not layer._forward_pre_hooks


@pytest.mark.slow
def test_what_inductor_makes_from_templates_is_named(meter: FlopMeter) -> None:
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)

    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inputs(x)
            constant = y.detach()
            return y * compiled(constant, constant, constant)

    # One kernel needs neither processes that compile nor headers that are compiled ahead.
    with config.patch(compile_threads=1, cpp_cache_precompile_headers=False):
        train(Flex(), lambda: torch.randn(1, 2, 128, 16), 3)
    count = counted(meter)
    assert count.flops == 2 * 2 * 256 * 16 * 16
    assert COMPILED in count.uncounted_ops


def test_what_is_batched_or_cast_counts_once() -> None:
    a, b = torch.randn(4, 5), torch.randn(3, 5, 6)
    with OperatorCount() as ran:
        torch.func.vmap(torch.mm, (None, 0))(a, b)
    assert ran.by_precision.total() == 3 * 2 * 4 * 5 * 6
    with OperatorCount() as ran, torch.autocast("cpu", torch.bfloat16):
        torch.bmm(b, b.mT)
    assert ran.by_precision == {"bf16": 3 * 2 * 5 * 5 * 6}


def test_an_operator_that_fails_does_not_count() -> None:
    with OperatorCount() as ran, pytest.raises(RuntimeError):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert not ran.by_precision


def test_what_a_mode_only_traces_does_not_count() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with OperatorCount() as ran, FakeTensorMode():
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    assert not ran.by_precision
    assert not ran.uncounted


def test_other_threads_do_not_count() -> None:
    other = threading.Thread(target=lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 2)))
    with OperatorCount() as ran:
        other.start()
        other.join()
    assert not ran.by_precision


def test_a_forked_child_counts_for_itself_alone() -> None:
    def product() -> None:
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))

    with OperatorCount() as ran:
        product()
        if (child := os.fork()) == 0:
            product()
            with OperatorCount() as own:
                product()
            os._exit(0 if own.by_precision.total() == 24 else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert ran.by_precision == {"fp32": 24}


def test_the_extension_refuses_another_layout_of_torchs_records() -> None:
    """``RecordFunction`` has a member more where NDEBUG is not defined."""
    source = ROOT / "csrc/operators/operator_count.cc"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    ran = subprocess.run(
        [*compiler, "-E", "-UNDEBUG", source], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode != 0
    assert "must be compiled with -DNDEBUG" in ran.stderr


def test_a_sharded_product_counts_what_this_rank_computes(meter: FlopMeter) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = nn.Sequential(nn.Linear(32, 64, bias=False))
        parallelize_module(model, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel()})
        train(model, lambda: torch.randn(16, 32), 4)
    finally:
        dist.destroy_process_group()
    count = counted(meter)
    assert count.flops == 2 * (2 * 16 * 32 * 64) / 4
