"""Builds crux_torch and cruxrun. Needs a C++17 compiler, but no CUDA toolkit and no GPU.

The extension must be built against the torch that it will run with, so the installation must not be
isolated: ``pip install --no-build-isolation '.[live]'``. ``CRUX_BUILD=sim pip install .`` builds
only the simulator and the commands, without torch. See docs/install.md.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

OLDEST_TORCH = (2, 11)
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


def wants_torch() -> bool:
    """Whether this command builds the extension for torch."""
    part = os.environ.get("CRUX_BUILD") or "all"
    if part not in ("all", "sim"):
        raise SystemExit(f"crux-torch: CRUX_BUILD={part!r}: expected all or sim")
    only_sources = {"sdist", "egg_info", "clean", "--name", "--version"} & set(sys.argv[1:])
    return part == "all" and not only_sources


def import_torch() -> tuple[Any, Any]:
    """torch and its ``cpp_extension``; one line says what to do where there is none."""
    # An earlier installation of this package may be half replaced while this one is built.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    wanted = ".".join(map(str, OLDEST_TORCH))
    found = "can't be imported"
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        found += f" ({error})"
    else:
        if tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST_TORCH:
            return torch, cpp_extension
        found = f"is {torch.__version__}"
    raise SystemExit(
        f"crux-torch: torch {wanted} or newer has to be installed before crux-torch is built, and "
        f"here torch {found}: run `pip install 'torch>={wanted}' setuptools pybind11 ninja`, then "
        "`pip install --no-build-isolation '.[live]'`; for the simulator and the commands alone, "
        "run `CRUX_BUILD=sim pip install .`"
    )


def c10d_macros(torch: Any) -> list[tuple[str, str]]:
    """A macro for each of ``NEWER_METHODS`` that the installed headers declare virtual."""
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    text = "".join((headers / name).read_text() for name in ("Backend.hpp", "Work.hpp"))
    virtuals = set(re.findall(r"virtual\s[^;{(]*?\b(\w+)\s*\(", text))
    return [(f"CRUX_C10D_HAS_{name.upper()}", "1") for name in NEWER_METHODS if name in virtuals]


def sources_of(folder: str) -> list[str]:
    return sorted(map(str, Path("csrc", folder).glob("*.cc")))


def unity_source(name: str) -> str:
    """A file that includes all of ``csrc/NAME/*.cc``.

    Parsing torch's headers takes most of the time that one file needs, so it is done once for each
    folder instead of once for each file.
    """
    made = Path("build", "unity", f"{name}.cc")
    text = "".join(f'#include "../../{source}"\n' for source in sources_of(name))
    made.parent.mkdir(parents=True, exist_ok=True)
    # An unchanged file keeps its date, so that it is not compiled again.
    if not made.exists() or made.read_text() != text:
        made.write_text(text)
    return str(made)


def torch_extension(torch: Any, cpp_extension: Any) -> Any:
    """``crux_torch._C_torch2_15``, or as the installed torch is called: see crux_torch/_C.py."""
    release = "_".join(torch.__version__.split(".")[:2])
    folders = ("bindings", "links", "operators", "process_group")
    return cpp_extension.CppExtension(
        f"crux_torch._C_torch{release}",
        [
            unity_source("bindings"),
            unity_source("process_group"),
            *sources_of("links"),
            *sources_of("operators"),
        ],
        # setuptools passes NDEBUG only if Python was built with it; torch always is.
        define_macros=[("NDEBUG", None), *c10d_macros(torch)],
        extra_compile_args=COMPILE_ARGS,
        depends=[str(path) for folder in folders for path in Path("csrc", folder).iterdir()],
    )


def plain_extension(name: str) -> Any:
    """``crux_torch._NAME`` from ``csrc/NAME``: without torch."""
    from pybind11.setup_helpers import Pybind11Extension

    sources = [f"csrc/bindings/{name}_py.cpp", *sources_of(name)]
    return Pybind11Extension(
        f"crux_torch._{name}",
        sources,
        cxx_std=17,
        # No fused multiply-add: the same input gives the same output on every machine.
        extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-pthread"],
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
    """``libcrux_transport.so``, and ``libcrux_ibverbs.so`` if rdma-core's headers are installed."""
    verbs = has_header("infiniband/verbs.h")
    sources = sources_of("transport")
    if verbs:
        sources += sources_of("transport/verbs")
    libraries = [
        SharedLibrary(
            "libcrux_transport.so",
            "libcrux_transport.so",
            tuple(sources),
            "csrc/transport/exports.map",
            ("-DCRUX_HAS_VERBS",) if verbs else (),
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


TORCH = import_torch() if wants_torch() else None


class BuildExtensions(TORCH[1].BuildExtension if TORCH else build_ext):
    """The extensions, and with torch the shared libraries beside them."""

    def run(self) -> None:
        super().run()
        folder = Path("." if self.inplace else self.build_lib, "crux_torch")
        if TORCH:
            # Python would import a file of this name rather than _C.py.
            for wrong in folder.glob("_C.*.so"):
                wrong.unlink()
            for library in shared_libraries():
                library.build(folder, bool(self.force))

    def get_outputs(self) -> list[str]:
        libraries = shared_libraries() if TORCH else []
        built = [str(Path(self.build_lib, "crux_torch", lib.name)) for lib in libraries]
        return [*super().get_outputs(), *built]


def extensions() -> list[Any]:
    """What this command compiles; nothing for an sdist, which needs no pybind11 either."""
    if "sdist" in sys.argv or "egg_info" in sys.argv:
        return []
    found = [plain_extension("fluid"), plain_extension("schedule")]
    return [torch_extension(*TORCH), *found] if TORCH else found


setup(
    packages=[
        *find_packages(include=["crux_torch", "crux_torch.*"]),
        *find_packages("launcher", include=["cruxrun", "cruxrun.*"]),
    ],
    package_dir={"cruxrun": "launcher/cruxrun"},
    package_data={"crux_torch": ["py.typed", "*.pyi", "host/*.csv", "sim/*.yaml"]},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtensions},
)
