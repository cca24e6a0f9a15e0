"""FLOPs of the operators that ran, as the extension noted them without changing a kernel."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from crux_torch import _C
from crux_torch.measure.flop_formulas import Formula, formulas, precision

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
    """Counts what runs in this thread, and in autograd's threads on its behalf.

    Use it as a context manager, or call :meth:`begin` and :meth:`end`. One counts at a time in a
    process.

    Args:
        found_module: called with ``(module, args, kwargs)`` of the outermost module that runs, in
            the middle of its call.

    Attributes:
        by_precision: FLOPs by what they are computed in (``bf16``, ``tf32``); under the empty name
            those whose data type has no peak of its own. Known after the end.
        uncounted: operators without a formula that do tensor work (docs/work.md). Known after the
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
