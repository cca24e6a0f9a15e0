"""Counts W of one iteration, the FLOPs of its operators, once for each set of input shapes."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crux_torch.measure.iterations import IterationMarks

log = logging.getLogger(__name__)

#: At most so many signatures, outermost modules, calls of an iteration and tensors of a call are
#: remembered.
MAX_SIGNATURES = 256
MAX_ROOTS = 32
MAX_CALLS = 512
MAX_TENSORS = 64
#: While new signatures keep coming, the pause between two counts doubles, up to so many iterations.
MAX_PAUSE = 1024

#: Modules of these packages multiply in calls of C++ extensions, which are no operators of torch.
EXTENSIONS = (
    "transformer_engine.",
    "apex.fused_dense",
    "apex.mlp",
    "deepspeed.ops.",
    "flash_attn.ops.",
)

#: Stands for every signature beyond ``MAX_SIGNATURES``.
OTHER = -1

Signature = tuple[Any, ...]

_given: float | None = None


def give_flops(flops: float) -> None:
    """See :func:`crux_torch.count_flops`."""
    global _given
    if not 0 <= flops < float("inf"):
        raise ValueError(f"an iteration of {flops} FLOPs: expected a number, 0 or more")
    _given = float(flops) or None


def given_flops() -> float | None:
    """FLOPs of an iteration on this rank by the script, which knows better than the count."""
    return _given


@dataclass(frozen=True, slots=True)
class FlopCount:
    """The result of a count.

    Attributes:
        by_precision: FLOPs of an iteration on this rank by what they are computed in.
        iterations: iterations that these are means over.
        left_out: iterations whose signature was never counted.
        uncounted_ops: operators and modules met that multiply and count nothing, by name.
    """

    by_precision: Mapping[str, float]
    iterations: int
    left_out: int
    uncounted_ops: tuple[str, ...]

    @property
    def flops(self) -> float:
        """FLOPs of an iteration on this rank."""
        return sum(self.by_precision.values())


class FlopMeter:
    """Counts FLOPs between two iteration marks, in the training thread.

    docs/understand/measuring.md says what is counted. torch's own ``FlopCounterMode`` can't run
    inside a training
    job: as any dispatch mode, it makes torch choose other kernels, which round differently.

    A signature is the shapes that entered the outermost modules in one iteration, in order. The
    meter finds these modules while it counts, and gives each a forward pre-hook, except where that
    would change what runs: the shapes of these are not part of the signature.

    Args:
        marks: where iterations end; :meth:`install` listens to it.
    """

    def __init__(self, marks: IterationMarks) -> None:
        self._marks = marks
        self._unlisten: Any = None
        self._ids: dict[Signature, int] = {}
        self._flops: dict[int, Mapping[str, int]] = {}
        self._seen: Counter[int] = Counter()
        self._uncounted: set[str] = set()
        self._roots: list[weakref.ref[Any]] = []
        self._hooks: list[Any] = []
        self._calls: list[Any] = []
        self._operators: Any = None
        self._spoiled = False
        self._thread: int | None = None
        self._incomplete = True
        self._pause = 1
        self._wait = 0
        self._started = False
        self._closing = False

    def install(self) -> None:
        """Listen to the marks; the count begins at the next one."""
        self._closing = False
        if self._unlisten is None:
            self._unlisten = self._marks.add_listener(self._on_mark)

    def remove(self) -> None:
        """Stop listening and take the module hooks away.

        Called in the training thread, it ends a count that is under way. Called in another thread,
        it can't, and the count ends at the training thread's next mark.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._roots = [], []
        self._closing = True
        if self._ends_here():
            self._end_count()
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None

    def count(self) -> FlopCount | None:
        """The mean over the iterations seen; None before the first count, or if all are zero."""
        seen = Counter(self._seen)
        counted = {s: n for s, n in seen.items() if s in self._flops}
        iterations = sum(counted.values())
        total: Counter[str] = Counter()
        for signature, times in counted.items():
            for name, flops in self._flops[signature].items():
                total[name] += flops * times
        if not any(total.values()):
            return None
        return FlopCount(
            by_precision={name: flops / iterations for name, flops in total.items()},
            iterations=iterations,
            left_out=sum(seen.values()) - iterations,
            uncounted_ops=tuple(sorted(self._uncounted)),
        )

    def _on_mark(self, mark_ns: int) -> None:
        try:
            if not self._ends_here():
                self._spoiled = True
                return
            counted = self._end_count()
            if self._closing:
                self._stop_listening()
                return
            if self._started:
                self._end_iteration(counted)
            self._begin_iteration()
        except Exception:
            self.remove()
            log.warning("counting FLOPs failed; W comes from time instead", exc_info=True)

    def _begin_iteration(self) -> None:
        from crux_torch.measure.operators import OperatorCount

        self._started = True
        self._calls = []
        if not self._incomplete:
            return
        if self._wait > 0:
            self._wait -= 1
            return
        self._spoiled = False
        self._thread = threading.get_ident()
        operators = OperatorCount(self._found_module)
        operators.begin()
        self._operators = operators

    def _ends_here(self) -> bool:
        """False while a count is under way in another thread."""
        return self._operators is None or self._thread == threading.get_ident()

    def _end_count(self) -> Any:
        operators, self._operators = self._operators, None
        if operators is not None:
            operators.end()
        return operators

    def _end_iteration(self, counted: Any) -> None:
        if counted is not None:
            self._wait = self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
            if self._spoiled:
                # Its calls may be those of several iterations.
                return
        signature = self._id(tuple(self._calls))
        self._seen[signature] += 1
        if counted is not None and signature not in self._flops and signature != OTHER:
            self._flops[signature] = dict(counted.by_precision)
            self._uncounted.update(counted.uncounted)
        self._incomplete = len(self._flops) < len(self._ids)
        if not self._incomplete:
            self._pause, self._wait = 1, 0

    def _id(self, signature: Signature) -> int:
        if signature not in self._ids and len(self._ids) >= MAX_SIGNATURES:
            return OTHER
        return self._ids.setdefault(signature, len(self._ids))

    def _found_module(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module was met while counting: watch its inputs from now on."""
        if len(self._roots) >= MAX_ROOTS:
            return
        known = [root for ref in self._roots if (root := ref()) is not None]
        # Recomputed blocks run outside their parent's call and are no roots.
        if any(module is child for root in known for child in root.modules()):
            return
        self._roots.append(weakref.ref(module))
        for kind in {base for child in module.modules() for base in type(child).__mro__}:
            if kind.__module__.startswith(EXTENSIONS):
                self._uncounted.add(f"{kind.__module__}.{kind.__qualname__}")
        if _may_be_hooked(module):
            self._hooks.append(
                module.register_forward_pre_hook(_Hook(self._pre_hook), with_kwargs=True)
            )
        self._note(module, args, kwargs)

    def _pre_hook(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        try:
            self._note(module, args, kwargs)
        except Exception:
            self._spoiled = True

    def _note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(self._calls) < MAX_CALLS:
            index = next((i for i, ref in enumerate(self._roots) if ref() is module), -1)
            self._calls.append((index, module.training, _shapes((args, kwargs))))


class _Hook:
    """A forward pre-hook that does nothing on a copy of the module, and needs no Crux where such a
    copy is unpickled."""

    def __init__(self, called: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._called = called

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._called(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def _may_be_hooked(module: Any) -> bool:
    """False for a module compiled in place, which a hook would recompile without ever being called,
    and for the one kind that looks for hooks before it chooses its kernels."""
    from torch import nn

    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return not compiled and not isinstance(module, nn.TransformerEncoderLayer)


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the first tensors in nested tuples, lists and dicts."""
    import torch

    shapes: list[tuple[int, ...]] = []
    pending = [value]
    while pending and len(shapes) < MAX_TENSORS:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            shapes.append(tuple(item.shape))
        elif isinstance(item, dict):
            pending.extend(reversed(list(item.values())))
        elif isinstance(item, (tuple, list)):
            pending.extend(reversed(item))
    return tuple(shapes)
