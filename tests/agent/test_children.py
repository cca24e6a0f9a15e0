"""What a rank starts is not the rank: it takes neither its job's name nor its libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_job import environment

from crux_torch.apply.transport import LIBRARY

pytestmark = pytest.mark.slow

#: Makes a process group, tells what it is, and runs the program in its arguments.
RANK = """
import json, os, subprocess, sys, time
from datetime import timedelta
import torch.distributed as dist
import crux_torch
crux_torch.attach()
store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60))
for _ in range(2):
    group = dist.PrefixStore(str(time.time()), store)
    dist.init_process_group("gloo", store=group, rank=0, world_size=1)
    while "job" not in (status := crux_torch.status()):
        time.sleep(0.02)
    told = [status["job"], os.environ.get("LD_PRELOAD", "")]
    dist.destroy_process_group()
print(json.dumps(told), flush=True)
if sys.argv[1:]:
    sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


def run(*arguments: str, **env: str) -> list[Any]:
    """What the rank, and a rank that it starts, say of themselves."""
    done = subprocess.run(
        [sys.executable, "-c", RANK, *arguments],
        env={**environment(), "CRUX_STORE": "none", "CRUX_JOB": "mine", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_child_that_makes_a_group_is_another_job_and_preloads_nothing_of_crux() -> None:
    other = "libm.so.6"
    (job, preloaded), (childs, childs_preloaded) = run(
        sys.executable, "-c", RANK, LD_PRELOAD=f"{LIBRARY}:{other}"
    )
    assert (job, preloaded) == ("mine", other)
    assert childs not in ("", "mine")
    assert childs_preloaded == other


def test_what_cruxrun_starts_in_a_rank_is_a_job_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(RANK)
    launcher = [sys.executable, "-m", "cruxrun", "--standalone", "--nproc-per-node=1"]
    (mine, _), (childs, preloaded) = run(*launcher, str(script))
    assert mine == "mine"
    assert childs.startswith("child-")
    assert (mine, preloaded) == ("mine", "")
    (_, _), (named, _) = run(*launcher, "--crux-job=eval", str(script))
    assert named == "eval"


#: How programs are built that end at once where Crux's library is preloaded.
UNFIT = {"asan": ["gcc", "-fsanitize=address"], "musl": ["musl-gcc"]}


@pytest.fixture(params=UNFIT)
def unfit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    program = tmp_path / "program"
    command = [*UNFIT[request.param], "-x", "c", "-", "-o", str(program)]
    source = "int main(void) { return 0; }\n"
    if (
        shutil.which(command[0]) is None
        or subprocess.run(command, input=source, text=True).returncode
    ):
        pytest.skip(f"no {' '.join(UNFIT[request.param])} (apt-get install gcc musl-tools)")
    env = {**os.environ, "LD_PRELOAD": str(LIBRARY)}
    assert subprocess.run([str(program)], env=env).returncode != 0, "it can't start with a preload"
    return program


def test_a_program_of_a_sanitizer_or_another_libc_starts_in_a_rank(unfit: Path) -> None:
    run(str(unfit), LD_PRELOAD=str(LIBRARY))


def test_it_starts_before_the_ranks_first_group_too(unfit: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess\nsubprocess.run([{str(unfit)!r}], check=True)\n")
    launcher = [sys.executable, "-m", "cruxrun", "--standalone", "--nproc-per-node=1"]
    subprocess.run(
        [*launcher, str(script)],
        env={**environment(), "CRUX_STORE": "none"},
        check=True,
        timeout=300,
    )
