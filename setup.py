"""Builds crux_torch and cruxrun: one wheel, with the extension for the torch that is installed.

Install with ``pip install --no-build-isolation``: the extension must be built against the torch
that it will run with. Needs no CUDA toolkit and no GPU.
"""

import os
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
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
        *sorted(map(str, Path("csrc/bindings").glob("*.cc"))),
        *sorted(map(str, Path("csrc/links").glob("*.cc"))),
        *sorted(map(str, Path("csrc/process_group").glob("*.cc"))),
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


@dataclass(frozen=True)
class SharedLibrary:
    """A library of its own inside the package, loaded into programs that have neither torch nor
    Python.

    Its C++ runtime is linked in and hidden: preloaded, it must not decide which libstdc++ the
    program gets.

    Attributes:
        name: file name in ``crux_torch/``.
        soname: what the loader knows it by.
        sources: what is compiled.
        version_script: lists what it exports.
        flags: for this library alone.
    """

    name: str
    soname: str
    sources: tuple[str, ...]
    version_script: str
    flags: tuple[str, ...] = ()

    def build(self, folder: Path, force: bool) -> None:
        """Builds it into ``folder``, where it is older than its sources or ``force`` says so."""
        target = folder / self.name
        inputs = [*self.sources, self.version_script, __file__]
        inputs += [str(p) for source in self.sources for p in Path(source).parent.glob("*.h")]
        newest = max(os.stat(p).st_mtime for p in inputs)
        if not force and target.exists() and newest < target.stat().st_mtime:
            return
        folder.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        # A running program may have the old file mapped: never write into it.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, self.name)
            command = [
                *compiler, "-std=c++17", "-O2", "-g0", "-Wall", "-fPIC", "-pthread",
                "-fvisibility=hidden", "-shared", "-static-libgcc",
                f"-Wl,-soname,{self.soname}", f"-Wl,--version-script={self.version_script}",
                "-Wl,-z,defs,-z,nodelete", *self.flags, *self.sources, "-o", str(made),
            ]  # fmt: skip
            print(shlex.join(command), flush=True)
            # Some distributions keep libstdc++.a in a package of its own.
            if subprocess.run([*command, "-static-libstdc++"], check=False).returncode:
                subprocess.run(command, check=True)
            os.replace(made, target)


def has_header(name: str) -> bool:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=f"#include <{name}>\n", text=True, capture_output=True)
    return done.returncode == 0


def shared_libraries() -> list[SharedLibrary]:
    """``libcrux_transport.so``, its queue-pair half where rdma-core's headers are installed, and
    ``libcrux_nccl_profiler.so``."""
    verbs = has_header("infiniband/verbs.h")
    sources = sorted(map(str, Path("csrc/transport").glob("*.cc")))
    if verbs:
        sources += sorted(map(str, Path("csrc/transport/verbs").glob("*.cc")))
    libraries = [
        SharedLibrary(
            "libcrux_transport.so",
            "libcrux_transport.so",
            tuple(sources),
            "csrc/transport/exports.map",
            ("-DCRUX_HAS_VERBS",) if verbs else (),
        ),
        SharedLibrary(
            "libcrux_nccl_profiler.so",
            "libcrux_nccl_profiler.so",
            tuple(sorted(map(str, Path("csrc/nccl_profiler").glob("*.cc")))),
            "csrc/nccl_profiler/exports.map",
        ),
    ]
    if verbs:
        libraries.append(
            SharedLibrary(
                "libcrux_ibverbs.so",
                "libcrux_ibverbs.so",
                ("csrc/transport/standin/standin.cc",),
                "csrc/transport/standin/standin.map",
                ("-fno-exceptions", "-fno-rtti"),
            )
        )
    return libraries


class BuildExtensions(cpp_extension.BuildExtension):
    """The extensions, and the shared libraries beside them."""

    def run(self) -> None:
        super().run()
        folder = Path("." if self.inplace else self.build_lib, "crux_torch")
        for library in shared_libraries():
            library.build(folder, bool(self.force))

    def get_outputs(self) -> list[str]:
        built = [str(Path(self.build_lib, "crux_torch", lib.name)) for lib in shared_libraries()]
        return [*super().get_outputs(), *built]


setup(
    packages=[
        *find_packages(include=["crux_torch", "crux_torch.*"]),
        *find_packages("launcher", include=["cruxrun", "cruxrun.*"]),
    ],
    package_dir={"cruxrun": "launcher/cruxrun"},
    package_data={"crux_torch": ["py.typed", "*.pyi"]},
    ext_modules=[torch_extension(), plain_extension("fluid"), plain_extension("schedule")],
    cmdclass={"build_ext": BuildExtensions},
)
