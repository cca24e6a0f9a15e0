"""Counts the files of the package that a reader opens to follow one thing from end to end.

A walk runs a real program in which every process notes the files whose functions ran, between two
functions named here. What runs beside the walk in the same process at the same time counts as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 300

#: Runs first in each process, since Python imports a module of this name by itself.
WATCHER = textwrap.dedent("""
    import json, os, sys, threading
    out, first, last = os.environ["WALK"].split(os.pathsep)
    package = (f"{os.sep}crux_torch{os.sep}", f"{os.sep}launcher{os.sep}cruxrun{os.sep}")
    files, state, CO_OPTIMIZED = set(), ["" if first else "walking"], 1
    def imports(frame):
        while frame := frame.f_back:
            if frame.f_code.co_name == "<module>" and any(
                each in frame.f_code.co_filename for each in package
            ):
                return "__main__" not in frame.f_code.co_filename
    def note(frame, event, _):
        code = frame.f_code
        if state[0] != "walking":
            if not state[0] and event == "call" and code.co_name == first:
                state[0] = "walking"
        elif event == "call" and code.co_flags & CO_OPTIMIZED and code.co_filename not in files:
            if any(each in code.co_filename for each in package) and not imports(frame):
                files.add(code.co_filename)
        if state[0] == "walking" and last and event == "return" and code.co_name == last:
            state[0] = "over"
            write()
    def write():
        with open(f"{out}/{os.getpid()}.json", "w") as file:
            json.dump([state[0], os.environ.get("RANK", ""), sorted(files)], file)
    threading.setprofile(note)
    sys.setprofile(note)
    import atexit
    atexit.register(write)
""")

JOB = textwrap.dedent("""
    import sys, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import os
    os.environ["CRUX_HOST"] = "host" + os.environ["RANK"]
    def first_step():
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end = time.monotonic() + float(sys.argv[1])
    first_step()
    while True:
        ended = torch.tensor(float(time.monotonic() > end))
        first_step()
        dist.all_reduce(ended)
        time.sleep(0.02)
        if ended:
            break
    dist.destroy_process_group()
""")


@dataclass(frozen=True)
class Walk:
    """One way through the package.

    Attributes:
        name: both ends.
        command: arguments of Python; ``{tree}`` and ``{folder}`` are filled in.
        first, last: functions between which files count; empty: from the start, to the end.
        env: variables of the program.
    """

    name: str
    command: tuple[str, ...]
    first: str = ""
    last: str = ""
    env: tuple[tuple[str, str], ...] = ()


_CRUXRUN = ("-m", "cruxrun", "--standalone", "--nproc-per-node=2", "{folder}/job.py")
_MARKS = (("CRUX_DSCP_MAP", "0,8,16,24,32,40,48,56"), ("CRUX_TUNING", "start_s=0.1"))
WALKS = (
    Walk("record to profile", (*_CRUXRUN, "20"), "drain", "merge", _MARKS),
    Walk("record to DSCP", (*_CRUXRUN, "40"), "drain", "apply_level", _MARKS),
    Walk(
        "scenario to output", ("-m", "crux_torch.cli", "sim", "run", "{tree}/examples/spines.json")
    ),
    Walk("cruxrun to first step", (*_CRUXRUN, "0.2"), "", "first_step", _MARKS),
    Walk(
        "dispatch to choice",
        ("-m", "crux_torch.cli", "dispatch", "--gpus=2", "--table={folder}/host.csv"),
    ),
)


def files_of(walk: Walk, tree: Path) -> list[str]:
    """Returns the files on one walk through the package in ``tree``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(WATCHER)
        (folder / "job.py").write_text(JOB)
        (folder / "host.csv").write_text("0 1,20.0\n")
        (folder / "out").mkdir()
        path = os.pathsep.join((str(folder), str(tree), str(tree / "launcher")))
        watched = os.pathsep.join((str(folder / "out"), walk.first, walk.last))
        env = {k: v for k, v in os.environ.items() if not k.startswith("CRUX_")}
        done = subprocess.run(
            [sys.executable, *(part.format(tree=tree, folder=folder) for part in walk.command)],
            env={**env, "PYTHONPATH": path, "WALK": watched, **dict(walk.env)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise RuntimeError(f"{walk.name}: {done.stderr[-2000:]}")
        found = [json.loads(file.read_text()) for file in (folder / "out").glob("*.json")]
    seen = {file for state, rank, files in found if rank in ("", "0") for file in files}
    if walk.last and not any(state == "over" for state, _, _ in found):
        raise RuntimeError(f"{walk.name}: {walk.last}() was not reached")
    return sorted(str(Path(file).relative_to(tree)) for file in seen)


def count(tree: Path) -> Iterator[tuple[str, int]]:
    """Yields each walk with the number of files on it."""
    for walk in WALKS:
        yield walk.name, len(files_of(walk, tree.resolve()))
