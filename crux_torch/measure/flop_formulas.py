"""FLOPs of operators that torch's own registry leaves out, and the data type that each computes in.

Here are the operators whose count follows from the shapes alone, by qualified name, since releases
differ in which they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Formula = Callable[..., int]

#: Two values in a byte.
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
_FLOATS = {torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}


def formulas() -> dict[str, Formula]:
    """The formula of each operator that has one, by qualified name (``aten::mm``).

    A formula takes the operator's arguments, and its result as ``out_val``.
    """
    registered = {getattr(op, "_qualified_op_name", ""): f for op, f in flop_registry.items()}
    found = {**OWN, **registered, **PREFERRED}
    in_place = {f"{name}_": count for name, count in found.items()}
    return {**in_place, **found}


def precision(name: str, args: Sequence[Any], on_cuda: bool) -> str:
    """What the operator ``name`` computes in, as its first tensor tells.

    Args:
        args: the tensors among them may be stand-ins.
        on_cuda: the first tensor itself is on a GPU.

    Returns:
        a key of ``PeakFlops.flops``; empty where none fits.
    """
    tensor = _first_tensor(args)
    if tensor is None:
        return ""
    if tensor.dtype == torch.float32:
        return "tf32" if on_cuda and _tf32(name) else "fp32"
    if tensor.dtype == _PACKED:
        return "fp4"
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return "fp8"
    return _FLOATS.get(tensor.dtype, "")


def _first_tensor(args: Sequence[Any]) -> Tensor | None:
    for arg in args:
        first = arg[0] if isinstance(arg, list | tuple) and arg else arg
        if isinstance(first, Tensor):
            return first
    return None


def _tf32(name: str) -> bool:
    backends: Any = torch.backends
    own: str = (backends.cudnn.conv if "conv" in name else backends.cuda.matmul).fp32_precision
    return (backends.fp32_precision if own == "none" else own) == "tf32"


def _depth(a: Tensor) -> int:
    """The dimension that a product of ``a`` and another contracts."""
    return a.shape[-1] * (2 if a.dtype == _PACKED else 1)


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * prod(a.shape[:-1]) * _depth(a) * b.shape[-1]


def _product_and_sum(_: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    return _product(a, b)


def _products(a: Sequence[Tensor], b: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return sum(map(_product, a, b))


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Groups change the number of products only where both are 3d: one for each. Rows beyond the
    last group's end count as well: where it ends is known to the device only."""
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * _depth(a) * b.shape[-1]


def _matrix_vector(a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _sum_and_matrix_vector(_: Tensor, a: Tensor, *__: Any, **___: Any) -> int:
    return _matrix_vector(a)


def _convolution(_: Tensor, weight: Tensor, *__: Any, out_val: Tensor, **___: Any) -> int:
    """Each output takes one product for each weight of its filter."""
    return 2 * out_val.numel() * prod(weight.shape[1:])


def _transposed_convolution(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Each input goes into one product for each weight of its filter."""
    return 2 * x.numel() * prod(weight.shape[1:])


def _convolution_gradients(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """Each gradient, of the input and of the weight, takes the products of the forward once."""
    transposed, wanted = rest[4], rest[7]
    each = (x if transposed else grad).numel() * prod(weight.shape[1:])
    return 2 * each * sum(map(bool, wanted[:2]))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and outputs, (batch, heads, length, width); a causal mask saves nothing, as torch has
    it. With grouped queries there are as many products as the query has heads."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """Scores again, and two products each for the gradients of scores and values, queries and
    keys."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


def _recurrent(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Each step of each sequence takes a product with each weight; packed sequences are one
    dimension of steps."""
    return 2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _recurrent_backward(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return 2 * _recurrent(x, weights)


def _recurrent_layer(x: Tensor, of_input: Tensor, of_state: Tensor, *_: Any, **__: Any) -> int:
    return _recurrent(x, (of_input, of_state))


def _recurrent_layer_backward(
    x: Tensor, of_input: Tensor, of_state: Tensor, *_: Any, **__: Any
) -> int:
    return _recurrent_backward(x, (of_input, of_state))


def _named(names: str, count: Formula) -> dict[str, Formula]:
    return {f"aten::{name}": count for name in names.split()}


_ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
]

#: Where torch's formulas fail or count too much (docs/work.md).
PREFERRED: dict[str, Formula] = {
    **_named("convolution_backward", _convolution_gradients),
    **_named(" ".join(_ATTENTION), _attention),
    **_named(" ".join(f"{name}_backward" for name in _ATTENTION), _attention_backward),
}

#: What torch's registry lacks, in some release or in all.
OWN: dict[str, Formula] = {
    **_named("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", _grouped_product),
    **_named("_scaled_mm _scaled_mm_v2 _int_mm", _product),
    **_named("_scaled_addmm _addmm_activation addbmm", _product_and_sum),
    **_named("_foreach_mm", _products),
    **_named("mv dot vdot", _matrix_vector),
    **_named("addmv", _sum_and_matrix_vector),
    **_named(
        "cudnn_convolution_relu cudnn_convolution_add_relu mkldnn_convolution miopen_convolution "
        "miopen_convolution_relu miopen_convolution_add_relu miopen_depthwise_convolution "
        "_conv_depthwise2d conv_depthwise3d slow_conv3d_forward slow_conv_dilated2d "
        "slow_conv_dilated3d",
        _convolution,
    ),
    **_named("_cudnn_rnn miopen_rnn", _recurrent),
    **_named("_cudnn_rnn_backward miopen_rnn_backward", _recurrent_backward),
    **_named("mkldnn_rnn_layer", _recurrent_layer),
    **_named("mkldnn_rnn_layer_backward", _recurrent_layer_backward),
    **_named(
        "cudnn_convolution_transpose miopen_convolution_transpose slow_conv_transpose2d "
        "slow_conv_transpose3d",
        _transposed_convolution,
    ),
}
