"""Builds crux_torch and cruxrun: one wheel, with the extension for the torch that is installed.

Install with ``pip install --no-build-isolation``: the extension must be built against the torch
that it will run with. Needs no CUDA toolkit and no GPU.
"""

import os
import re
from pathlib import Path

# An earlier install of this package may be half replaced while this one is built.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup
from torch.utils import cpp_extension

C10D_HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
#: What torch added to c10d after 2.11; each becomes CRUX_C10D_HAS_<NAME> where the headers have it.
NEWER_METHODS = (
    "addEphemeralTimeout",
    "gather_into_tensor",
    "getCompletionKey",
    "getTimeout",
    "isInitialized",
    "setBoundDeviceId",
    "startTimeEstimate",
    "supportsAbortHooks",
    "supportsCompletionHooks",
    "supportsReconfigure",
    "supportsWindow",
    "suspend",
)
COMPILE_ARGS = ["-O2", "-g0", "-fvisibility=hidden", "-Wall"]


def c10d_macros() -> list[tuple[str, str]]:
    """A macro for each of ``NEWER_METHODS`` that the installed headers declare virtual."""
    text = "".join((C10D_HEADERS / name).read_text() for name in ("Backend.hpp", "Work.hpp"))
    virtuals = set(re.findall(r"virtual\s[^;{(]*?\b(\w+)\s*\(", text))
    return [(f"CRUX_C10D_HAS_{name.upper()}", "1") for name in NEWER_METHODS if name in virtuals]


def torch_extension() -> cpp_extension.CppExtension:
    sources = [
        "csrc/bindings/delegating_backend_py.cc",
        "csrc/bindings/module.cc",
        "csrc/bindings/recorder_py.cc",
        "csrc/process_group/delegating_backend.cc",
        "csrc/process_group/delegating_backend_passed_on.cc",
        "csrc/process_group/recorder.cc",
        "csrc/process_group/teardown.cc",
        "csrc/process_group/waited_work.cc",
    ]
    return cpp_extension.CppExtension(
        "crux_torch._C",
        sources,
        define_macros=c10d_macros(),
        extra_compile_args=COMPILE_ARGS,
        depends=[str(p) for p in Path("csrc").rglob("*.h")],
    )


def plain_extension(name: str) -> Pybind11Extension:
    """``crux_torch._NAME`` from ``csrc/NAME``: without torch."""
    sources = [f"csrc/bindings/{name}_py.cpp", *sorted(map(str, Path("csrc", name).glob("*.cc")))]
    return Pybind11Extension(
        f"crux_torch._{name}",
        sources,
        cxx_std=17,
        # No fused multiply-add: the same input gives the same output on every machine.
        extra_compile_args=["-O2", "-g0", "-ffp-contract=off", "-pthread"],
        extra_link_args=["-pthread"],
        depends=[str(p) for p in Path("csrc", name).glob("*.h")],
    )


setup(
    packages=[
        *find_packages(include=["crux_torch", "crux_torch.*"]),
        *find_packages("launcher", include=["cruxrun", "cruxrun.*"]),
    ],
    package_dir={"cruxrun": "launcher/cruxrun"},
    package_data={"crux_torch": ["py.typed", "*.pyi"]},
    ext_modules=[torch_extension(), plain_extension("fluid"), plain_extension("schedule")],
    cmdclass={"build_ext": cpp_extension.BuildExtension},
)
