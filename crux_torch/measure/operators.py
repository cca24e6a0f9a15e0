"""FLOPs of the operators that ran, as the extension noted them without changing a kernel.

torch's own registry has the formulas of most operators. Here are those that it leaves out and whose
count follows from the shapes alone, by qualified name, since releases differ in which they have.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from crux_torch import _C

Formula = Callable[..., int]

#: Namespaces whose operators move or mark data: collectives, views, profiler ranges.
_NO_WORK = frozenset(
    {
        "prim",
        "prims",
        "profiler",
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "fsdp",
        "symm_mem",
        "inductor",
        "streams",
    }
)
#: Of aten, the operators that contract a dimension; all others cost O(elements) or move data.
_CONTRACTS = re.compile(
    r"(?<!ga)(?<!cu)mm|matmul|conv(?!ert)|attention|transformer|rnn|lstm|gru|einsum|linalg(?!_(check_errors|vector_norm|cross|diagonal|vecdot))|fft|cdist"
    r"|(?<!upsample_)(?<!upsample_bi)(?<!upsample_tri)linear"
    r"|(^|_)(dot|vdot|mv|addmv|addr|ger|cholesky|svd|qr|lu|inverse)(_|$)"
)
#: Products in code that inductor made which no operator stands for: Triton kernels, templates for
#: CPUs, and calls past the dispatcher from its C++ wrapper.
_COMPILED_PRODUCTS = re.compile(
    r"\btl\.dot\b|micro_gemm|flex_attention|aoti_torch_\w*(mm|convolution|attention)"
)
COMPILED = "kernels of torch.compile"


class OperatorCount:
    """Counts operators that run in this thread, and in autograd's threads on its behalf.

    Use it as a context manager, or call :meth:`begin` and :meth:`end`. One counts at a time in a
    process.

    Args:
        found_module: called with ``(module, args, kwargs)`` of the outermost module that runs, in
            the middle of its call.

    Attributes:
        by_precision: FLOPs by what they are computed in (``bf16``, ``tf32``); under the empty name
            those whose data type has no peak of its own. Known after the end.
        uncounted: operators without a formula that do tensor work (docs/understand/measuring.md).
        Known after the
            end.
    """

    def __init__(self, found_module: Callable[[Any, Any, Any], None] | None = None) -> None:
        self.by_precision: Counter[str] = Counter()
        self.uncounted: set[str] = set()
        self._found_module = found_module
        self._last_module: Any = None
        self._formulas: dict[str, Formula] = {}

    def begin(self) -> None:
        """Count from now on.

        Raises:
            RuntimeError: torch's debug build, which has another layout of what is read here.
        """
        if torch.version.debug:
            raise RuntimeError("operators can't be counted in a debug build of torch")
        self._formulas = formulas()
        _C.begin_operators(set(self._formulas), self._look_for_module)

    def end(self) -> None:
        """Stop counting, and sum up; in the thread that began."""
        calls, others = _C.end_operators()
        # Lengths of sequences are read here: no mode of the script's shall see that.
        with torch._C._DisableTorchDispatch():
            for name, args, kwargs, out, on_cuda, times in calls:
                try:
                    count = self._formulas[name](*args, **kwargs, out_val=out)
                    self.by_precision[precision(name, args, on_cuda)] += int(count) * times
                except Exception:
                    self.uncounted.add(name)
        working = {op for op, _ in others if _does_work(*op)}
        if _compiled_products():
            self.uncounted.add(COMPILED)
        # Of operators that call each other, the outermost.
        self.uncounted |= {
            op[0] for op, caller in others if op in working and caller not in working
        }

    def __enter__(self) -> OperatorCount:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _look_for_module(self) -> None:
        if self._found_module is None:
            return
        try:
            frame = _outermost_call(sys._getframe(1))
            # The call's own arguments: _wrapped_call_impl(self, *args, **kwargs).
            values = {} if frame is None else frame.f_locals
            module = values.get("self")
            if module is not None and module is not self._last_module:
                self._last_module = module
                self._found_module(module, values.get("args", ()), values.get("kwargs", {}))
        except Exception:
            return


def _outermost_call(frame: Any) -> Any:
    code = torch.nn.Module._wrapped_call_impl.__code__
    found = None
    while frame is not None:
        if frame.f_code is code:
            found = frame
        frame = frame.f_back
    return found


@cache
def _does_work(name: str, overload: str) -> bool:
    namespace, _, short = name.partition("::")
    if not short or namespace in _NO_WORK:
        return False
    if namespace == "aten" and not _CONTRACTS.search(short):
        return False
    full = f"{name}.{overload}" if overload else name
    if torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
        # Others do its work.
        return False
    func = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
    return not (func.is_view or torch.Tag.pointwise in func.tags)


def _compiled_products() -> bool:
    """True if inductor has made kernels in this process that multiply and are no operators."""
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is None:
        return False
    files = [getattr(module, "__file__", None) for module in codecache.PyCodeCache.modules]
    return any(_multiplies(file) for file in files if file)


@cache
def _multiplies(file: str) -> bool:
    try:
        return _COMPILED_PRODUCTS.search(Path(file).read_text()) is not None
    except OSError:
        return False


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
    """Precision in which the operator ``name`` computes, by its first tensor.

    Args:
        args: the tensors among them may be stand-ins.
        on_cuda: the first tensor itself is on a GPU.

    Returns:
        A key of ``PeakFlops.flops``; empty where none fits.
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
    transposed, gradients = rest[4], rest[7]
    each = (x if transposed else grad).numel() * prod(weight.shape[1:])
    return 2 * each * sum(map(bool, gradients[:2]))


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

#: Where torch's formulas fail or count too much (docs/understand/measuring.md).
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
