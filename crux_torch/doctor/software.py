"""What has to be installed: torch, the extension, stock backends, the launcher's entry point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from crux_torch.doctor.check import Check
from cruxrun.autoload import obstacle

OLDEST_TORCH = (2, 11)


def torch_release() -> Iterator[Check]:
    """Whether torch imports and is recent enough."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    remedy = f"pip install 'torch>={oldest}'"
    try:
        import torch
    except Exception as error:
        yield Check("torch", "broken", f"does not import: {error}", "nothing works", remedy)
        return
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        found = f"{torch.__version__}, older than {oldest}"
        yield Check("torch", "broken", found, "the backend can't be used", remedy)
    else:
        yield Check("torch", "ok", torch.__version__)


def extension() -> Iterator[Check]:
    """Whether the C++ extension is there and was built for this torch."""
    cost = "jobs train on the stock backends, unmeasured"
    try:
        import_module("crux_torch._C")
    except ModuleNotFoundError as error:
        yield Check("extension", "missing", str(error), cost, "build it: pip install .")
    except Exception as error:
        remedy = "build it again for this torch: pip install --force-reinstall --no-deps ."
        yield Check("extension", "broken", f"does not load: {error}", cost, remedy)
    else:
        yield Check("extension", "ok", "crux_torch._C loads")


def backends() -> Iterator[Check]:
    """Which stock backends there are to delegate to."""
    try:
        import torch
        import torch.distributed as dist
    except Exception:
        return
    if dist.is_available() and dist.is_gloo_available():
        yield Check("gloo", "ok", "CPU tensors go through Gloo")
    else:
        remedy = "a build of torch with USE_GLOO"
        yield Check("gloo", "missing", "not in this torch", "no collectives on the CPU", remedy)
    cost = "no collectives on CUDA tensors"
    if not (dist.is_available() and dist.is_nccl_available()):
        yield Check("nccl", "missing", "not in this torch", cost, "a CUDA build of torch")
    elif not torch.cuda.is_available():
        found = "in this torch, but no GPU can be used"
        yield Check("nccl", "missing", found, cost, "a machine with NVIDIA GPUs and their driver")
    else:
        yield Check("nccl", "ok", f"{torch.cuda.device_count()} GPUs")


def autoload(env: Mapping[str, str]) -> Iterator[Check]:
    """Whether ``import torch`` in a worker attaches Crux."""
    found = obstacle(env)
    if found:
        cost = "cruxrun launches scripts, but they run on the stock backends"
        remedy = "install the package, unset the variable, or call crux_torch.attach()"
        yield Check("autoload", "missing", found, cost, remedy)
    else:
        yield Check("autoload", "ok", "import torch attaches Crux under cruxrun")
