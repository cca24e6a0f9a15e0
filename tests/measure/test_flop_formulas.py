"""Formulas of our own against loops of plain products, and against torch's where it has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import flop_registry  # noqa: E402

from crux_torch.measure import operators  # noqa: E402
from crux_torch.measure.operators import (  # noqa: E402
    OWN,
    PREFERRED,
    OperatorCount,
    formulas,
    precision,
)

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def tensor(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def count(op: str, *args: Any, out: Any = None) -> int:
    return formulas()[f"aten::{op}"](*args, out_val=out)


@pytest.mark.parametrize("name", sorted(OWN | PREFERRED))
def test_arguments_are_where_the_formula_takes_them(name: str) -> None:
    packet = getattr(aten, name.removeprefix("aten::"), None)
    if packet is None or not packet.overloads():
        pytest.skip(f"this torch has no {name}")
    schema = getattr(packet, packet.overloads()[0])._schema
    names = [argument.name for argument in schema.arguments]
    if name == "aten::convolution_backward":
        assert names[:3] == ["grad_output", "input", "weight"]
        assert (names[7], names[10]) == ("transposed", "output_mask")
    elif "rnn" in name:
        several = name.startswith(("aten::_cudnn", "aten::miopen"))
        assert names[:2] == ["input", "weight"] if several else names[1][:-1] == "weight"
    elif name.endswith("_backward"):
        assert names[1:4] == ["query", "key", "value"]
        assert names[0].startswith("grad_out")
    elif "attention" in name:
        assert names[:3] == ["query", "key", "value"]
    elif "conv" in name:
        assert names[:2] in (["self", "weight"], ["input", "weight"])
    elif OWN[name] in (operators._product_and_sum, operators._sum_and_matrix_vector):
        assert names[0] == "self"
        assert names[1] in ("mat1", "batch1", "mat")
    else:
        assert names[0] == "self"
        assert names[1] in ("mat2", "vec", "tensor", "other")


def test_what_torch_counts_as_well_is_counted_alike() -> None:
    for name in OWN:
        packet = getattr(aten, name.removeprefix("aten::"), None)
        if packet in flop_registry:
            assert formulas()[name] is flop_registry[packet], "torch's own wins where it has one"
    query, key, grad = tensor(2, 4, 16, 8), tensor(2, 4, 24, 8), tensor(2, 4, 16, 6)
    value = tensor(2, 4, 24, 6)
    for name in PREFERRED.keys() - {"aten::convolution_backward"}:
        packet = getattr(aten, name.removeprefix("aten::"), None)
        if packet in flop_registry:
            args = (grad, query, key, value) if name.endswith("backward") else (query, key, value)
            out = torch.empty(0)
            assert PREFERRED[name](*args) == flop_registry[packet](*args, out_val=out)


def test_grouped_queries_have_as_many_products_as_query_heads() -> None:
    query, few = tensor(2, 8, 16, 4), tensor(2, 2, 24, 4)
    many = tensor(2, 8, 24, 4)
    op = "_scaled_dot_product_flash_attention"
    assert count(op, query, few, few) == count(op, query, many, many)
    back = op + "_backward"
    assert count(back, query, query, few, few) == count(back, query, query, many, many)


def test_grouped_products() -> None:
    rows, depth, columns, groups = 12, 8, 6, 3
    one = 2 * rows * depth * columns
    flat, stack = tensor(rows, depth), tensor(groups, depth, columns)
    assert count("_grouped_mm", flat, stack) == one, "groups part the rows"
    assert count("_grouped_mm", tensor(groups, rows, depth), stack) == groups * one
    wide = tensor(depth, groups * columns)
    assert count("_grouped_mm", tensor(groups, rows, depth), wide) == groups * one
    assert count("_grouped_mm", tensor(rows, groups * depth), tensor(groups * depth, columns)) == (
        groups * one
    ), "groups part what is contracted"


def test_products() -> None:
    a, b, c = tensor(4, 5), tensor(5, 6), tensor(4, 6)
    assert count("_int_mm", a, b) == count("_addmm_activation", c, a, b) == 2 * 4 * 5 * 6
    assert count("addbmm", c, tensor(3, 4, 5), tensor(3, 5, 6)) == 3 * 2 * 4 * 5 * 6
    assert count("mv", a, tensor(5)) == count("addmv", tensor(4), a, tensor(5)) == 2 * 4 * 5
    assert count("dot", tensor(7), tensor(7)) == 2 * 7
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if packed is not None and hasattr(aten, "_scaled_mm_v2"):
        assert count("_scaled_mm_v2", tensor(4, 5, dtype=packed), tensor(5, 6, dtype=packed)) == (
            2 * 4 * 10 * 6
        )


def test_convolutions() -> None:
    x, weight, out = tensor(2, 4, 9, 9), tensor(6, 2, 3, 3), tensor(2, 6, 7, 7)
    each = 2 * 2 * 6 * 7 * 7 * 2 * 9
    assert count("mkldnn_convolution", x, weight, out=out) == each
    reference = flop_registry[aten.convolution]
    args = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2)
    assert reference(x, weight, *args, out_val=out) == each, "grouped, as torch counts it"
    back = tensor(4, 6, 3, 3)
    assert count("cudnn_convolution_transpose", x, back, out=None) == 2 * x.numel() * 6 * 9


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_each_gradient_of_a_convolution_takes_as_much_as_its_forward(
    transposed: bool, groups: int, dims: int, stride: int
) -> None:
    """Exactly, by the products that are there; torch's formula counts a weight's gradient once for
    each pair of groups."""
    form = getattr(torch.nn, f"Conv{'Transpose' * transposed}{dims}d")
    layer = form(16, 32, 3, stride=stride, groups=groups, bias=True)
    x = torch.zeros(2, 16, *[9] * dims, requires_grad=True)
    with OperatorCount() as ran:
        y = layer(x)
    per_output = 3**dims * 16 // groups
    forward = 2 * (x.numel() * 3**dims * 32 // groups if transposed else y.numel() * per_output)
    assert ran.by_precision == {"fp32": forward}
    with OperatorCount() as ran:
        y.sum().backward()
    assert ran.by_precision == {"fp32": 2 * forward}
    assert not ran.uncounted


def test_only_the_gradients_that_are_asked_for_count() -> None:
    layer = torch.nn.Conv2d(8, 8, 3, groups=2)
    with OperatorCount() as ran:
        layer(torch.zeros(2, 8, 9, 9)).sum().backward()
    assert ran.by_precision == {"fp32": 2 * 2 * 2 * 8 * 7 * 7 * 4 * 9}


def test_norms_are_no_tensor_work() -> None:
    with OperatorCount() as ran:
        torch.linalg.vector_norm(torch.ones(8))
        torch.linalg.det(torch.eye(3))
    assert ran.uncounted == {"aten::_linalg_det"}


def test_a_grouped_product_is_counted_where_it_runs() -> None:
    a, b = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(2, 16, 32, dtype=torch.bfloat16)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    try:
        with OperatorCount() as ran:
            torch._grouped_mm(a, b, offs=ends)
    except RuntimeError as error:
        pytest.skip(f"no grouped product on this CPU: {error}")
    assert ran.by_precision == {"bf16": 2 * 8 * 16 * 32}
    assert not ran.uncounted


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "fp64"),
        (torch.float32, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.float8_e4m3fn, "fp8"),
        (torch.float8_e5m2, "fp8"),
        (torch.float4_e2m1fn_x2, "fp4"),
        (torch.int8, ""),
        (torch.complex64, ""),
    ],
)
def test_precision(dtype: Any, name: str) -> None:
    assert precision("aten::mm", (tensor(2, 2, dtype=dtype),), False) == name
    assert precision("aten::_foreach_mm", ([tensor(2, 2, dtype=dtype)],), False) == name


def test_no_tensor_has_no_precision() -> None:
    assert precision("aten::mm", (1, [], None), False) == ""


@pytest.fixture
def switches() -> Iterator[Any]:
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    yield torch.backends
    torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before


def test_fp32_on_a_gpu_follows_the_switches(switches: Any) -> None:
    args = (tensor(2, 2, dtype=torch.float32),)
    switches.cuda.matmul.fp32_precision = "ieee"
    switches.cudnn.conv.fp32_precision = "tf32"
    assert precision("aten::mm", args, True) == "fp32"
    assert precision("aten::convolution", args, True) == "tf32"
    assert precision("aten::convolution", args, False) == "fp32"
    switches.cuda.matmul.fp32_precision = "tf32"
    switches.cudnn.conv.fp32_precision = "ieee"
    assert precision("aten::bmm", args, True) == "tf32"
    assert precision("aten::convolution_backward", args, True) == "fp32"


def test_recurrent_layers() -> None:
    x, weights = tensor(5, 3, 16), [tensor(128, 16), tensor(128, 32), tensor(128)]
    step = 2 * 128 * (16 + 32)
    assert count("_cudnn_rnn", x, weights) == 5 * 3 * step
    assert count("_cudnn_rnn_backward", tensor(11, 16), weights) == 2 * 11 * step, "packed"
    assert count("mkldnn_rnn_layer", x, *weights) == 5 * 3 * step
    assert count("mkldnn_rnn_layer_backward", x, *weights) == 2 * 5 * 3 * step
