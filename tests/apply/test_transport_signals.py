"""Signals, forks and cancelled threads in the transport library: ``cpp/signal_storm.cc``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from places import TESTS
from verbs_fakes import Fakes
from verbs_fakes import build as build_fakes

from crux_torch.apply.transport import LIBRARY

pytestmark = pytest.mark.slow

SOURCES = TESTS / "cpp"
STORM_S = 2
#: A madvise() of a kernel that can't wipe memory in a child.
NO_WIPING = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
int madvise(void *at, size_t size, int advice) {
  if (advice != MADV_WIPEONFORK) return syscall(SYS_madvise, at, size, advice);
  errno = EINVAL;
  return -1;
}
"""


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("storm") / "signal_storm"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no compiler {compiler[0]}")
    command = [*compiler, "-std=c++17", "-O1", "-pthread", "signal_storm.cc", "-ldl"]
    subprocess.run([*command, "-o", str(program)], cwd=SOURCES, check=True, timeout=120)
    return program


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    return build_fakes(tmp_path_factory.mktemp("fakes"))


def rides_out(storm: Path, seed: int, *arguments: str, **env: str) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "LD_PRELOAD"))}
    steering = {"CRUX_TRANSPORT_STEER_ALL": "1", "CRUX_TRANSPORT_PROBE_MS": "5"}
    done = subprocess.run(
        [str(storm), str(seed), str(STORM_S), *arguments],
        env={**clean, **steering, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_signals_hit_it_ends_with_the_library_as_without(storm: Path, seed: int) -> None:
    rides_out(storm, seed)
    rides_out(storm, seed, LD_PRELOAD=str(LIBRARY))


def test_so_it_does_with_queue_pairs(storm: Path, fakes: Fakes, tmp_path: Path) -> None:
    rides_out(storm, 3, **fakes.environment(tmp_path))


def test_so_it_does_where_the_kernel_wipes_nothing_in_children(storm: Path, tmp_path: Path) -> None:
    source, library = tmp_path / "no_wiping.c", tmp_path / "no_wiping.so"
    source.write_text(NO_WIPING)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run(
        [*compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60
    )
    rides_out(storm, 4, "fork", LD_PRELOAD=f"{library}:{LIBRARY}")
