"""Prints which symbols of torch the built extension needs, and what the stable ABI has for each.

    python tools/stable_abi.py [--symbols]

The stable ABI is what torch's headers in ``torch/csrc/stable``, ``torch/headeronly`` and
``torch/csrc/inductor/aoti_torch/c`` declare; torch keeps that between minor releases. A counterpart
counts only if its name is in these headers of the installed torch. Needs ``nm`` and ``c++filt``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import torch

from crux_torch import _C

HEADERS = ("csrc/stable", "headeronly", "csrc/inductor/aoti_torch/c")
LIBRARIES = ("libc10", "libtorch_cpu", "libtorch_python")
#: Groups of symbols, by how a demangled name begins once `vtable for` and the like are gone; what
#: Crux does with them; and the name in the stable headers that would do the same, if any.
GROUPS = (
    ("c10d::Backend", "the class that Crux's backend derives from", "class Backend"),
    ("c10d::Work", "the class of what a collective returns", "class Work"),
    ("c10d::", "process groups and their stores", "class ProcessGroup"),
    ("at::RecordFunction", "callbacks before and after each operator", "RecordFunctionCallback"),
    ("at::addThreadLocalCallback", "the same", "addThreadLocalCallback"),
    ("at::removeCallback", "the same", "removeCallback"),
    ("torch::autograd::", "the autograd node that runs", "get_current_node"),
    ("torch::jit::toPyObject", "an operator's arguments, shown to Python", "toPyObject"),
    ("c10::impl::raw_local_dispatch_key_set", "dispatch keys of the thread", "DispatchKeySet"),
    ("c10::impl::getGlobalPyInterpreter", "tensors to Python, by pybind11", "PyInterpreter"),
    ("c10::impl::device_guard_impl_registry", "the current device", "DeviceGuard"),
    ("at::_ops::", "operators", "torch_call_dispatcher"),
    ("at::detail::empty_meta", "a tensor without data", "aoti_torch_empty_strided"),
    ("c10::TensorImpl", "inline functions of at::Tensor", "class Tensor"),
    ("c10::UndefinedTensorImpl", "the same", "class Tensor"),
    ("caffe2::TypeMeta", "the same", "class Tensor"),
    ("c10::StorageImpl", "bytes of a tensor", "data_ptr"),
    ("c10::Device", "names of devices", "class Device"),
    ("c10::operator<<", "the same", "class Device"),
    ("c10::detail::torch", "TORCH_CHECK", "STD_TORCH_CHECK"),
    ("c10::Error", "the same", "STD_TORCH_CHECK"),
    ("c10::ValueError", "the same", "STD_TORCH_CHECK"),
    ("c10::warn", "TORCH_WARN", "aoti_torch_warn"),
    ("c10::Warning", "the same", "aoti_torch_warn"),
)


def symbols(file: str, *flags: str) -> set[str]:
    """Names of the dynamic symbols of ``file``, without versions."""
    listed = subprocess.run(["nm", "-D", *flags, file], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}


def needed() -> list[str]:
    """Demangled symbols that the extension takes from torch's libraries."""
    folder = Path(torch.__file__).parent / "lib"
    offered = {s for lib in LIBRARIES for s in symbols(f"{folder / lib}.so", "--defined-only")}
    wanted = sorted(symbols(str(_C.__file__), "--undefined-only") & offered)
    filtered = subprocess.run(
        ["c++filt"], input="\n".join(wanted), capture_output=True, text=True, check=True
    )
    # Weak copies of the C++ runtime's templates, that torch's libraries happen to export.
    return [name for name in filtered.stdout.splitlines() if not name.startswith("std::")]


def group_of(symbol: str) -> tuple[str, str, str]:
    """The entry of :data:`GROUPS` for a demangled symbol."""
    name = re.sub(r"^(vtable|typeinfo|typeinfo name|guard variable) for ", "", symbol)
    for group in GROUPS:
        if name.startswith(group[0]):
            return group
    return (name.partition("(")[0], "not in this script's list", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--symbols", action="store_true", help="list each symbol, too")
    args = parser.parse_args()
    for tool in ("nm", "c++filt"):
        if not shutil.which(tool):
            parser.error(f"{tool} is missing: install binutils")
    include = Path(torch.__file__).parent / "include/torch"
    text = "\n".join(
        file.read_text() for name in HEADERS for file in sorted((include / name).rglob("*.h"))
    )
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for symbol in needed():
        found[group_of(symbol)].append(symbol)
    stable = 0
    print(f"torch {torch.__version__}\n")
    print(f"{'symbols':7}  {'from':38}  {'used for':42}  stable ABI")
    for group in sorted(found, key=lambda g: GROUPS.index(g) if g in GROUPS else len(GROUPS)):
        names = found[group]
        start, use, counterpart = group
        has = bool(counterpart) and re.search(rf"\b{counterpart}\b", text) is not None
        stable += len(names) * has
        print(f"{len(names):7}  {start:38}  {use:42}  {counterpart if has else 'none'}")
        for name in names if args.symbols else ():
            print(f"{'':9}{name}")
    total = sum(map(len, found.values()))
    print(
        f"\n{total} symbols of torch, {stable} with a stable counterpart, {total - stable} without"
    )


if __name__ == "__main__":
    main()
