"""Builds the C++ half of the fakes with torch's own tools, once for each torch."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: Virtual functions that not every torch has; each becomes FAKE_GPU_HAS_<NAME> where it does.
NEWER_METHODS = (
    "addEphemeralTimeout",
    "clone",
    "getCompletionKey",
    "getTimeout",
    "isInitialized",
    "isStreamCapturing",
    "setBoundDeviceId",
    "supportsAbortHooks",
    "supportsCompletionHooks",
)
HEADERS = (
    "torch/csrc/distributed/c10d/Backend.hpp",
    "torch/csrc/distributed/c10d/Work.hpp",
    "c10/core/impl/DeviceGuardImplInterface.h",
)


def available() -> tuple[bool, str]:
    """Whether the fakes can be built and run here, and if not, why."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return False, "the fake NCCL runs on Gloo, and this torch has none"
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        return False, "the fake accelerator needs a C++ compiler"
    if _ninja() is None:
        return False, "the fake accelerator needs ninja"
    return True, ""


def _ninja() -> str | None:
    beside = Path(sys.executable).parent
    return shutil.which("ninja", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")


def macros() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    text = "".join((include / name).read_text() for name in HEADERS)
    virtuals = set(re.findall(r"virtual\s[^;{(]*?\b(\w+)\s*\(", text))
    return [f"-DFAKE_GPU_HAS_{name.upper()}" for name in NEWER_METHODS if name in virtuals]


def _build(name: str, sources: list[Path]) -> ModuleType:
    """The extension ``name``, built where it is out of date; any number of processes may ask."""
    from torch.utils import cpp_extension

    folder = ROOT / "build" / f"fake_gpu-{torch.__version__}" / name
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}.so"
    inputs = [*sources[0].parent.glob("*.*"), Path(__file__)]
    with (folder / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        newest = max(path.stat().st_mtime for path in inputs)
        if not library.exists() or library.stat().st_mtime < newest:
            # torch's own lock outlives a build that was killed.
            (folder / "lock").unlink(missing_ok=True)
            os.environ["PATH"] = f"{Path(_ninja() or '').parent}{os.pathsep}{os.environ['PATH']}"
            cpp_extension.load(
                name,
                [str(source) for source in sources],
                extra_cflags=["-O1", "-g0", "-fvisibility=hidden", "-Wall", *macros()],
                build_directory=str(folder),
                verbose=bool(os.environ.get("FAKE_GPU_VERBOSE")),
                is_python_module=False,
            )
            # Not now: a source may have changed while it was compiled.
            os.utime(library, (newest, newest))
    return _load(name, library)


def _load(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def native() -> ModuleType:
    """The device and the communication backend."""
    return _build("fake_gpu_native", [HERE / "csrc" / "everything.cc"])


@functools.cache
def offenders() -> ModuleType:
    """Backends that do what the notes forbid: a library of its own, as a backend under test is."""
    return _build("fake_gpu_offenders", [HERE / "csrc" / "offender" / "offender.cc"])


def ahead() -> None:
    """Builds everything that can be built here, so that no test waits for it."""
    if available()[0]:
        offenders()
        native()
