"""Test programs in C++, compiled on the host for the guest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from lab.rdma.guest import CACHE
from lab.rdma.requirement import LabUnavailableError

SOURCES = Path(__file__).resolve().parents[2] / "tests" / "rdma" / "programs"
_HEADER = Path("/usr/include/infiniband/verbs.h")


def build(name: str) -> Path:
    """The program of ``programs/NAME.cc``, compiled again only after a change.

    Raises:
        LabUnavailableError: this machine can't compile it.
    """
    source = SOURCES / f"{name}.cc"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise LabUnavailableError(f"no compiler {compiler}")
    if not _HEADER.exists():
        raise LabUnavailableError("not installed: libibverbs-dev")
    program = CACHE / name
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        written = program.with_suffix(f".{os.getpid()}")
        argv = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", str(source)]
        subprocess.run([*argv, "-o", str(written), "-libverbs", "-ldl", "-pthread"], check=True)
        written.rename(program)
    return program
