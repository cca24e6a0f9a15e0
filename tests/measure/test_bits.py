"""Counting changes no bit of what any operator of torch computes, forward or backward."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT

torch = pytest.importorskip("torch")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from training_job import environment  # noqa: E402

from crux_torch.measure.operators import OperatorCount  # noqa: E402

#: Their outputs are whatever the memory held.
UNINITIALISED = ("empty", "new_empty", "resize")
SAMPLES = 4
BOUND_S = 400.0
#: Of ``bits_job.py``: these train in fp32, and with ``+bf16`` under autocast.
KINDS = ["llama", "vit", "mamba", "moe", "conv", "lstm", "prod", "checkpoint"]

Watch = Callable[[], AbstractContextManager[Any]]


def tensors_in(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def bits(tensor: Any) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def fresh(value: Any) -> Any:
    """A copy of a sample's arguments whose tensors are leaves of their own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(fresh(item) for item in value)
    return value


def run(op: Any, sample: Any, watch: Watch) -> list[bytes] | str:
    """Outputs and gradients, or the name of the error."""
    torch.manual_seed(0)
    args = fresh((sample.input, sample.args, sample.kwargs))
    try:
        with watch():
            out = op(args[0], *args[1], **args[2])
            outputs = list(tensors_in(out))
            wanted = [t for t in outputs if t.requires_grad]
            leaves = [t for t in tensors_in(args) if t.requires_grad and t.is_leaf]
            grads = []
            if wanted and leaves:
                # Of ones, a gradient's reductions would come out alike in any order.
                ramp = [torch.linspace(0.3, 1.7, t.numel(), dtype=torch.float64) for t in wanted]
                seeds = [r.reshape(t.shape).to(t.dtype) for r, t in zip(ramp, wanted, strict=True)]
                grads = torch.autograd.grad(wanted, leaves, seeds, allow_unused=True)
        return [bits(t) for t in (*outputs, *grads) if t is not None]
    except (RuntimeError, ValueError, AssertionError) as error:
        return type(error).__name__


def differing(op: Any, dtype: Any, watch: Watch) -> tuple[int, list[str]]:
    """Samples tried, and those whose bits change under ``watch`` alone."""
    torch.manual_seed(1)
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    tried, found = 0, []
    # op.sample_inputs() would look through the whole stack for a unittest, which takes longer.
    samples = op.sample_inputs_func(op, "cpu", dtype, grad)
    for i, sample in enumerate(itertools.islice(samples, SAMPLES)):
        tried += 1
        stock = run(op, sample, nullcontext)
        # What differs between two stock runs tells nothing.
        if run(op, sample, watch) != stock and run(op, sample, nullcontext) == stock:
            found.append(f"{op.formatted_name} sample {i}")
    return tried, found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_operator_of_torch(dtype: Any) -> None:
    counts: list[OperatorCount] = []

    def watch() -> OperatorCount:
        counts.append(OperatorCount())
        return counts[-1]

    tried, changed = 0, []
    for op in op_db:
        if dtype not in op.supported_dtypes("cpu") or op.name.startswith(UNINITIALISED):
            continue
        samples, found = differing(op, dtype, watch)
        tried += samples
        changed += found
    assert not changed
    assert tried > 1500
    assert sum(bool(count.by_precision.total()) for count in counts) > 100, "it did count"


@pytest.mark.parametrize("name", ["prod", "nn.functional.silu"])
def test_the_sweep_sees_what_a_dispatch_mode_changes(name: str) -> None:
    changed = []
    for op in op_db:
        if op.name == name:
            changed += differing(op, torch.float32, lambda: FlopCounterMode(display=False))[1]
    assert changed


def trained(launcher: str, folder: Path, first: int, cases: Sequence[str]) -> list[Any]:
    """What each rank of a job computed in each case, as hashes of every step."""
    folder.mkdir()
    script = SUPPORT.joinpath("bits_job.py")
    options = ["--standalone", "--nproc-per-node=2", script, folder, str(first), *cases]
    crux = {"CRUX_STORE": "none", "CRUX_PROFILE_S": "2"}
    ran = subprocess.run(
        [sys.executable, "-m", launcher, *options],
        env={**environment([SUPPORT]), **crux},
        cwd=folder,
        timeout=BOUND_S,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def assert_trained_alike(folder: Path, cases: Sequence[str]) -> None:
    under_crux = trained("cruxrun", folder / "crux", 0, cases)
    first = len(under_crux[0][cases[0]])
    assert first > 20, "it was measured and trained on"
    assert trained("torch.distributed.run", folder / "stock", first, cases) == under_crux


@pytest.mark.slow
def test_trainings(tmp_path: Path) -> None:
    """Losses, gradients and weights of every step: warm-up, measured, counted, and after that."""
    mixed = [f"{kind}+bf16" for kind in KINDS]
    assert_trained_alike(tmp_path, [*KINDS, *mixed, "fsdp:checkpoint", "tp:llama"])


@pytest.mark.full
def test_compiled_trainings(tmp_path: Path) -> None:
    kinds = ["llama", "mamba", "conv"]
    assert_trained_alike(
        tmp_path, [f"compile:{kind}{how}" for how in ("", "+bf16") for kind in kinds]
    )
