"""PyTorch's own CUDA build with its own NCCL process groups, on a machine without a GPU.

    ok, reason = cuda_rig.available()          # else skip with the reason
    env = cuda_rig.environment(os.environ)     # builds once per torch; for a program to start with

A program that starts in this environment finds CUDA devices. Nothing in torch is replaced but
kernels:

* **libcuda.so.1** is the CUDA runtime, loaded first. Streams are threads with queues, events have
  monotonic timestamps. A capture breaks where the real one breaks, in each of its modes, also by
  another thread's calls. ``cudaFree`` waits for the device, as the real one does.
* **libnccl.so.2** is NCCL's C interface over TCP, around rings, on the interface that
  NCCL_SOCKET_IFNAME names. Making a communicator blocks until all its ranks are there, and takes
  device memory; a kernel whose peer is gone runs until the communicator is aborted.
* **operators.so** runs torch's operators for CUDA as the CPU's, on the same memory.
* **libnvidia-ml.so.1** is the part of NVML that Crux asks, without GPM: names, addresses, memory,
  and the share of time in which kernels ran. Only programs that :func:`nvml` is for find it.

A kernel that it does not know is refused with cudaErrorNotSupported and its name on stderr.
``cuda_rig.control`` is for use within such a program: faults, and what was called.

Variables: CUDA_RIG_DEVICES (1), CUDA_RIG_MEMORY_BYTES of each device and process (8 GiB),
CUDA_RIG_COMMUNICATOR_BYTES that a communicator takes of them (64 MiB).
"""

from __future__ import annotations

import fcntl
import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

CSRC = Path(__file__).parent / "csrc"
ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent
NVIDIA = TORCH.parent / "nvidia"
RUNTIME, NCCL, OPERATORS = "libcuda.so.1", "libnccl.so.2", "operators.so"
NVML = "libnvidia-ml.so.1"
#: The major release whose interface is implemented.
CUDA_MAJOR = "13"
#: Each library's sources.
SOURCES = {
    RUNTIME: ("stream.cc", "runtime.cc", "controls.cc"),
    NCCL: ("nccl.cc", "nccl_refused.cc", "wire.cc"),
    OPERATORS: ("operators.cc",),
    NVML: ("nvml.cc",),
}


def _headers() -> list[Path]:
    return [NVIDIA / f"cu{CUDA_MAJOR}/include", NVIDIA / "nccl/include"]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def available() -> tuple[bool, str]:
    """Whether the rig can be built and used here, and if not, why."""
    if (torch.version.cuda or "").split(".")[0] != CUDA_MAJOR:
        return (
            False,
            f"the rig needs a torch for CUDA {CUDA_MAJOR}, this is for {torch.version.cuda}",
        )
    missing = [str(folder) for folder in _headers() if not folder.is_dir()]
    if missing:
        return False, f"the rig needs the headers in {', '.join(missing)}"
    if shutil.which(_compiler()[0]) is None:
        return False, "the rig needs a C++ compiler"
    return True, ""


def _flags(library: str) -> list[str]:
    include = [CSRC / "headers", *_headers()]
    flags = ["-std=c++20", "-O1", "-g0", "-fPIC", "-shared", f"-Wl,-soname,{library}"]
    if library == OPERATORS:
        # torch's headers have warnings of their own.
        include += [TORCH / "include", TORCH / "include/torch/csrc/api/include"]
        flags += ["-w", f"-L{TORCH / 'lib'}"]
    else:
        flags += ["-O2", "-Wall", "-Wextra"]
    return flags + [f"-I{folder}" for folder in include]


def _linked(library: str, folder: Path) -> list[str]:
    if library == RUNTIME:
        return ["-lpthread", "-ldl"]
    torchs = ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"] if library == OPERATORS else []
    return [*torchs, str(folder / RUNTIME)]


@functools.cache
def build() -> Path:
    """Compiles what is out of date; the folder of the libraries. Any number of processes may ask.

    Raises:
        subprocess.CalledProcessError: the compiler said no.
    """
    folder = ROOT / "build" / f"cuda_rig-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    headers = [*CSRC.glob("*.h"), *CSRC.glob("headers/**/*.h"), Path(__file__)]
    with (folder / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        for library, names in SOURCES.items():
            sources = [CSRC / name for name in names]
            newest = max(path.stat().st_mtime for path in sources + headers)
            made = folder / library
            if made.exists() and made.stat().st_mtime >= newest:
                continue
            draft = folder / f"{library}.new"
            command = [*_compiler(), *_flags(library), *map(str, sources)]
            subprocess.run([*command, "-o", str(draft), *_linked(library, folder)], check=True)
            draft.replace(made)
            # Not now: a source may have changed while it was compiled.
            os.utime(made, (newest, newest))
    return folder


def environment(env: Mapping[str, str], devices: int = 1) -> dict[str, str]:
    """The variables that put a program on the rig.

    Args:
        env: what it inherits; libraries that it preloads already are kept.
        devices: that it finds.
    """
    folder = build()
    preloaded = [str(folder / RUNTIME), str(folder / NCCL)]
    others = [each for each in env.get("LD_PRELOAD", "").split(":") if each]
    return {
        "LD_PRELOAD": ":".join(dict.fromkeys([*others, *preloaded])),
        "CUDA_RIG_OPERATORS": str(folder / OPERATORS),
        "CUDA_RIG_DEVICES": str(devices),
    }


def nvml() -> dict[str, str]:
    """The variables with which a program on the rig finds NVML as well."""
    return {"LD_PRELOAD": str(build() / NVML)}


def active() -> bool:
    """Whether this process is on the rig."""
    return f"/{RUNTIME}" in os.environ.get("LD_PRELOAD", "") and "CUDA_RIG_OPERATORS" in os.environ


def ahead() -> None:
    """Builds what can be built here, so that no test waits for it."""
    if available()[0]:
        build()
