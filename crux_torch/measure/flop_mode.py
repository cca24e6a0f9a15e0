"""The dispatch mode that applies torch's FLOP formulas and never raises into the model."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crux_torch.measure.flop_formulas import formula, precision

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
    r"(?<!ga)mm|matmul|conv(?!ert)|attention|transformer|rnn|lstm|gru|einsum|linalg(?!_(vector_norm|cross|diagonal|vecdot))|fft|cdist"
    r"|(?<!upsample_)(?<!upsample_bi)(?<!upsample_tri)linear"
    r"|(^|_)(dot|vdot|mv|addmv|addr|ger|cholesky|svd|qr|lu|inverse)(_|$)"
)
_SIZES = ("is_contiguous", "numel", "size", "storage_offset", "stride")
#: Queries that a tensor subclass answers itself.
_QUERIES = frozenset(
    [
        *_SIZES,
        *(f"sym_{name}" for name in _SIZES),
        "dim",
        "is_non_overlapping_and_dense",
        "is_strides_like_format",
        "layout",
    ]
)


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs in this thread, and in autograd's threads on its behalf.

    Args:
        found_module: called with ``(module, args, kwargs)`` of the outermost module that runs.

    Attributes:
        by_precision: FLOPs so far by what they are computed in (``bf16``, ``tf32``); under the
            empty name those whose data type has no peak of its own.
        uncounted: operators without a formula that do tensor work (docs/work.md), and how often
            each ran.
    """

    supports_higher_order_operators = True

    def __init__(self, found_module: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_precision: Counter[str] = Counter()
        self.uncounted: Counter[str] = Counter()
        self._found_module = found_module
        self._last_module: Any = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: without this, fullgraph=True raises under a mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            out = func(*args, **kwargs)
            self._count(func, str(func), out, args, kwargs)
            return out
        packet = func._overloadpacket
        if packet.__name__ in _QUERIES or _is_sharded(types):
            # The subclass dispatches to its local tensors, and those come here again.
            return NotImplemented
        self._look_for_module()
        if formula(packet) is None and func is not torch.ops.prim.device.default:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        self._count(packet, func.name(), out, args, kwargs, func)
        return out

    def _count(
        self, key: Any, name: str, out: Any, args: Any, kwargs: dict[str, Any], func: Any = None
    ) -> None:
        count = formula(key)
        if count is not None:
            try:
                self.by_precision[precision(name, args)] += int(count(*args, **kwargs, out_val=out))
            except Exception:
                # A formula that rejects its arguments must not reach the model.
                self.uncounted[name] += 1
        elif func is None or _does_work(func):
            self.uncounted[name] += 1

    def _look_for_module(self) -> None:
        try:
            frame = _outermost_call(sys._getframe(2))
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
def _does_work(func: Any) -> bool:
    if func.namespace in _NO_WORK or func.is_view or torch.Tag.pointwise in func.tags:
        return False
    if func.namespace != "aten":
        return True
    return _CONTRACTS.search(func._schema.name.removeprefix("aten::")) is not None


def _is_sharded(types: Any) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return any(issubclass(t, DTensor) for t in types)
