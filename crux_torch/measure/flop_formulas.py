"""FLOPs of operators that torch's own registry leaves out, and the data type that each computes in.

``torch.utils.flop_counter`` counts what it knows; what it does not know counts nothing there. Here
are the operators whose count follows from the shapes alone. By operator's qualified name, since
releases differ in which they have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

Shape = Sequence[int]
Formula = Callable[..., int]

#: Formulas of torch that read offsets from the device, to tell how long each sequence is.
_READS_VALUES = re.compile(r"::(_flash_attention|_efficient_attention|_varlen_attn)_?")
#: Two values in a byte.
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
_FLOATS = {torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}


def formula(packet: Any) -> Formula | None:
    """The formula of an operator (``packet``) or higher-order operator; None where there is none.

    Args:
        packet: an ``OpOverloadPacket`` or a ``HigherOrderOperator``.
    """
    name: str = getattr(packet, "_qualified_op_name", "")
    if name in PREFERRED:
        return PREFERRED[name]
    found: Formula | None = flop_registry.get(packet) or OWN.get(name)
    if found is not None and _READS_VALUES.search(name):
        return _unless_capturing(found)
    return found


def precision(name: str, args: Sequence[Any]) -> str:
    """What an operator computes in, as a key of ``PeakFlops.flops``; empty where none fits.

    Args:
        name: the operator's qualified name.
        args: its positional arguments; the first tensor tells.
    """
    tensor = _first_tensor(args)
    if tensor is None:
        return ""
    if tensor.dtype == torch.float32:
        return "tf32" if tensor.is_cuda and _tf32(name) else "fp32"
    if tensor.dtype == _PACKED:
        return "fp4"
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return "fp8"
    return _FLOATS.get(tensor.dtype, "")


def _first_tensor(args: Sequence[Any]) -> torch.Tensor | None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg
        if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor):
            return arg[0]
    return None


def _tf32(name: str) -> bool:
    backends: Any = torch.backends
    convolves = "conv" in name
    chosen = backends.cudnn.conv if convolves else backends.cuda.matmul
    own: str = chosen.fp32_precision
    return (backends.fp32_precision if own == "none" else own) == "tf32"


def _unless_capturing(reads_values: Formula) -> Formula:
    """Reading from the device while a CUDA graph is captured would make the capture fail."""

    def guarded(*args: Any, **kwargs: Any) -> int:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("its sequences' lengths can't be read during a capture")
        return reads_values(*args, **kwargs)

    return guarded


def _depth(a: torch.Tensor) -> int:
    """The dimension that a product of ``a`` and another contracts."""
    return a.shape[-1] * (2 if a.dtype == _PACKED else 1)


def _product(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * prod(a.shape[:-1]) * _depth(a) * b.shape[-1]


def _product_and_sum(_: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return _product(*args, **kwargs)


def _products(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    return sum(_product(x, y) for x, y in zip(a, b, strict=True))


def _grouped_product(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Groups part the rows of ``a`` (2d, 3d), the columns of ``b`` (3d, 2d) or the contracted
    dimension (2d, 2d), and in none of them change the number of products; where both are 3d there
    is one product for each. Rows beyond the last group's end count as well: where it ends is known
    to the device only."""
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * _depth(a) * b.shape[-1]


def _matrix_vector(a: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _sum_and_matrix_vector(_: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return _matrix_vector(*args, **kwargs)


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any
) -> int:
    """Each output takes one product for each weight of its filter."""
    return 2 * out_val.numel() * prod(weight.shape[1:])


def _transposed_convolution(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> int:
    """Each input goes into one product for each weight of its filter."""
    return 2 * x.numel() * prod(weight.shape[1:])


def _convolution_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any
) -> int:
    """Each gradient, of the input and of the weight, takes the products of the forward once."""
    transposed, wanted = rest[4], rest[7]
    each = (x if transposed else grad).numel() * prod(weight.shape[1:])
    return 2 * each * sum(map(bool, wanted[:2]))


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores and outputs, (batch, heads, length, width); a causal mask saves nothing, as torch has
    it. With grouped queries there are as many products as the query has heads."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> int:
    """Scores again, and two products each for the gradients of scores and values, queries and
    keys."""
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


_ATTENTION = ("flash", "flash_for_cpu", "efficient", "cudnn", "fused")


def _attention_name(kind: str, backward: bool) -> str:
    flavour, _, device = kind.partition("_for_")
    tail = f"_for_{device}" if device else "_overrideable" if kind == "fused" else ""
    end = "_backward" if backward else ""
    return f"aten::_scaled_dot_product_{flavour}_attention{tail}{end}"


#: Attention over whole tensors: torch's formulas of 2.11 reject grouped queries. Gradients of
#: convolutions: torch's formula counts a weight's once for each pair of groups.
PREFERRED: dict[str, Formula] = {
    "aten::convolution_backward": _convolution_gradients,
} | {
    _attention_name(kind, backward): _attention_backward if backward else _attention
    for kind in _ATTENTION
    for backward in (False, True)
}

#: What torch's registry lacks, in some release or in all.
OWN: dict[str, Formula] = {
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm_v2": _grouped_product,
    "aten::_scaled_mm": _product,
    "aten::_scaled_mm_v2": _product,
    "aten::_scaled_addmm": _product_and_sum,
    "aten::_int_mm": _product,
    "aten::_addmm_activation": _product_and_sum,
    "aten::addbmm": _product_and_sum,
    "aten::_foreach_mm": _products,
    "aten::mv": _matrix_vector,
    "aten::dot": _matrix_vector,
    "aten::vdot": _matrix_vector,
    "aten::addmv": _sum_and_matrix_vector,
    "aten::cudnn_convolution_relu": _convolution,
    "aten::cudnn_convolution_add_relu": _convolution,
    "aten::mkldnn_convolution": _convolution,
    "aten::miopen_convolution": _convolution,
    "aten::miopen_convolution_relu": _convolution,
    "aten::miopen_convolution_add_relu": _convolution,
    "aten::miopen_depthwise_convolution": _convolution,
    "aten::_conv_depthwise2d": _convolution,
    "aten::conv_depthwise3d": _convolution,
    "aten::slow_conv3d_forward": _convolution,
    "aten::slow_conv_dilated2d": _convolution,
    "aten::slow_conv_dilated3d": _convolution,
    "aten::cudnn_convolution_transpose": _transposed_convolution,
    "aten::miopen_convolution_transpose": _transposed_convolution,
    "aten::slow_conv_transpose2d": _transposed_convolution,
    "aten::slow_conv_transpose3d": _transposed_convolution,
}
