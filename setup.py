"""Builds crux_torch and cruxrun. Needs a C++17 compiler, but no CUDA toolkit and no GPU.

The extension must be built against the torch that it will run with, so the installation must not be
isolated: ``pip install --no-build-isolation '.[live]'``. ``CRUX_BUILD=sim pip install .`` builds
only the simulator and the commands, without torch. See docs/start/install.md.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

OLDEST_TORCH = (2, 11)
#: What torch added to c10d after 2.11, as overrides of the class's virtual methods. Each becomes
#: CRUX_C10D_HAS_<NAME> if it compiles.
NEWER_METHODS = {
    "ADDEPHEMERALTIMEOUT": (
        "Backend",
        "void addEphemeralTimeout(const std::chrono::milliseconds&) override;",
    ),
    "GATHER_INTO_TENSOR": (
        "Backend",
        "c10::intrusive_ptr<Work> gather_into_tensor("
        "at::Tensor&, at::Tensor&, const GatherOptions&) override;",
    ),
    "GETCOMPLETIONKEY": ("Work", "uint64_t getCompletionKey() const override;"),
    "GETTIMEOUT": ("Work", "std::chrono::milliseconds getTimeout() const override;"),
    "ISINITIALIZED": ("Backend", "bool isInitialized() override;"),
    "SETBOUNDDEVICEID": ("Backend", "void setBoundDeviceId(std::optional<at::Device>) override;"),
    "STARTTIMEESTIMATE": (
        "Backend",
        "void startTimeEstimate() override; float endTimeEstimate() override;",
    ),
    "SUPPORTSABORTHOOKS": (
        "Backend",
        "bool supportsAbortHooks() const override; "
        "void registerAbortHook(int64_t, AbortHook) override; "
        "void unregisterAbortHook(int64_t) override;",
    ),
    "SUPPORTSCOMPLETIONHOOKS": (
        "Backend",
        "bool supportsCompletionHooks() const override; "
        "void registerCompletionHook(int64_t, CompletionHook) override; "
        "void unregisterCompletionHook(int64_t) override;",
    ),
    "SUPPORTSRECONFIGURE": (
        "Backend",
        "bool supportsReconfigure() const override; "
        "ReconfigureHandle get_reconfigure_handle() const override; "
        "c10::intrusive_ptr<Work> reconfigure(const ReconfigureOptions&) override;",
    ),
    "SUPPORTSWINDOW": (
        "Backend",
        "bool supportsWindow() const override; "
        "c10::intrusive_ptr<Window> new_window(const std::optional<at::Tensor>&) override;",
    ),
    "SUSPEND": (
        "Backend",
        "void suspend() override; void resume() override; "
        "std::unordered_map<std::string, uint64_t> getMemoryStats() override;",
    ),
}
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


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def c10d_macros(torch: Any, cpp_extension: Any) -> list[tuple[str, str]]:
    """A macro for each of ``NEWER_METHODS`` that the installed headers let a subclass override.

    One compilation asks for all, each on a line of its own; ``build/`` keeps the answer.
    """
    methods = list(NEWER_METHODS.items())
    source = (
        '#include <torch/csrc/distributed/c10d/Backend.hpp>\nnamespace c10d {\n#line 1 "probe"\n'
    )
    source += "".join(f"struct P{name} : {base} {{ {code} }};\n" for name, (base, code) in methods)
    source += "}\n"
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    key = "\n".join([torch.__version__, *compiler(), *include, source])
    kept = Path("build", f"c10d-{torch.__version__}.json")
    if kept.exists() and (known := json.loads(kept.read_text()))["key"] == key:
        return [(macro, "1") for macro in known["macros"]]
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True)
    all_errors = ["-ferror-limit=0"] if "clang" in version.stdout else []
    in_english = {**os.environ, "LC_ALL": "C"}
    log = ""
    # The headers of newer releases need C++20.
    for standard in ("c++20", "c++17"):
        command = [*compiler(), f"-std={standard}", *include, *all_errors, "-fsyntax-only"]
        log = subprocess.run(
            [*command, "-x", "c++", "-"],
            input=source + "int",
            env=in_english,
            text=True,
            capture_output=True,
        ).stderr
        errors = re.findall(r"^(.+?):(\d+):\d+: (?:fatal )?error", log, re.M)
        absent = {int(line) for file, line in errors if file == "probe"}
        # The last line is wrong on purpose: a compiler whose errors can't be read is noticed.
        if all(file == "probe" for file, _ in errors) and len(methods) + 2 in absent:
            break
    else:
        raise SystemExit(f"crux-torch: torch's headers do not compile:\n{log[-4000:]}")
    macros = [f"CRUX_C10D_HAS_{m[0]}" for line, m in enumerate(methods, 1) if line not in absent]
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps({"key": key, "macros": macros}))
    return [(macro, "1") for macro in macros]


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
        define_macros=[("NDEBUG", None), *c10d_macros(torch, cpp_extension)],
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
        # A running program may have the old file mapped: never write into it.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, self.name)
            command = [
                *compiler(), "-std=c++17", "-O2", "-g0", "-Wall", "-fPIC", "-pthread",
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
    command = [*compiler(), "-x", "c++", "-fsyntax-only", "-"]
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


def compile_commands(extensions: list[Any]) -> list[dict[str, Any]]:
    """The command of each C++ file alone, as clangd and tools/compile_alone.py want them."""
    include = [f"-I{sysconfig.get_path('include')}"]
    found = []

    def add(source: str, *flags: str) -> None:
        arguments = [*compiler(), *include, *flags, "-c", source]
        found.append({"directory": os.getcwd(), "file": source, "arguments": arguments})

    for extension in extensions:
        flags = [*extension.extra_compile_args, *(f"-I{path}" for path in extension.include_dirs)]
        flags += [
            f"-D{name}" + (f"={value}" if value else "") for name, value in extension.define_macros
        ]
        for source in extension.sources:
            name = Path(source)
            made = name.parent.name == "unity"
            for one in sources_of(name.stem) if made else [source]:
                add(one, "-std=c++20", *flags)
    for library in shared_libraries() if TORCH else []:
        for source in library.sources:
            add(source, "-std=c++17", *library.flags)
    return found


TORCH = import_torch() if wants_torch() else None


class BuildExtensions(TORCH[1].BuildExtension if TORCH else build_ext):
    """The extensions, and with torch the shared libraries beside them."""

    def run(self) -> None:
        super().run()
        commands = Path("build", "compile_commands.json")
        commands.parent.mkdir(exist_ok=True)
        commands.write_text(json.dumps(compile_commands(self.extensions), indent=1))
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
    package_data={
        "crux_torch": [
            "py.typed",
            "*.pyi",
            "host/*.csv",
            "report/page/*.jinja",
            "report/page/*.js",
            "sim/*.yaml",
        ]
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtensions},
)
