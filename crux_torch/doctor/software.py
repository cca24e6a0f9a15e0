"""What has to be installed: torch, the extension, the stock backends, the entry point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from crux_torch.doctor.check import Check, Part
from cruxrun.launched import obstacle

OLDEST_TORCH = (2, 11)


def torch_release() -> Check:
    """Whether torch imports and is recent enough."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    remedy = f"pip install 'torch>={oldest}'"
    try:
        import torch
    except Exception as error:
        return Part("torch", "jobs do not start").broken(f"does not import: {error}", remedy)
    part = Part("torch", "the crux backend does not load")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        return part.broken(f"{torch.__version__}, older than {oldest}", remedy)
    return part.ok(torch.__version__)


def extension() -> Check:
    """Whether the C++ extension is built for this torch."""
    part = Part("extension", "jobs use the stock backends; Crux measures and steers nothing")
    try:
        import_module("crux_torch._C")
    except ModuleNotFoundError as error:
        return part.missing(str(error), "see docs/install.md")
    except Exception as error:
        remedy = "build it for this torch: pip install --no-build-isolation --no-deps ."
        return part.broken(f"does not load: {error}", remedy)
    return part.ok("crux_torch._C loads")


def backends() -> Iterator[Check]:
    """Which stock backends this torch has."""
    try:
        import torch
        import torch.distributed as dist
    except Exception:
        return
    part = Part("gloo", "no collectives on CPU tensors")
    if dist.is_available() and dist.is_gloo_available():
        yield part.ok("available for CPU tensors")
    else:
        yield part.missing("not in this torch", "install a torch that is built with USE_GLOO")
    part = Part("nccl", "no collectives on CUDA tensors")
    if not (dist.is_available() and dist.is_nccl_available()):
        yield part.missing("not in this torch", "install a CUDA build of torch")
    elif not torch.cuda.is_available():
        remedy = "nothing if there is no GPU; else install the NVIDIA driver"
        yield part.missing("this torch has NCCL, but no GPU is usable", remedy)
    else:
        yield part.ok(f"{torch.cuda.device_count()} GPUs")


def autoload(env: Mapping[str, str]) -> Check:
    """Whether ``import torch`` in a worker of cruxrun attaches Crux."""
    part = Part("autoload", "scripts under cruxrun use the stock backends")
    found = obstacle(env)
    if found:
        remedy = "install the package, unset the variable, or call crux_torch.attach()"
        return part.missing(found, remedy)
    return part.ok("under cruxrun, `import torch` attaches Crux")
