"""The commands of docs/start/first-ten-minutes.md run, and print what the page shows."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from control_fakes import until
from loopback import free_port
from training_job import BOUND_S, ROOT, environment

PAGE = (ROOT / "docs/start/first-ten-minutes.md").read_text()
pytestmark = pytest.mark.slow


class Step(NamedTuple):
    command: str
    shown: list[str]


def steps() -> Iterator[Step]:
    """Each command of the page, with its here-document, and the lines shown below it."""
    for block in re.findall(r"^```\n(\$ .*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            command = 1
            if "<<END" in lines[0]:
                command += lines.index("END")
            yield Step("\n".join(lines[:command]), lines[command:])


def pattern(line: str) -> str:
    """What a line of the page stands for: ``...`` for anything, figures and names for others."""
    kinds = {
        r"\.\.\.": ".*",
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d": r"\S+ \S+",
        r"train_mlp-[0-9a-f]{8}": r"train_mlp-[0-9a-f]{8}",
        r"\bvm\b": re.escape(socket.gethostname()),
        r"loss [\d.]+": r"loss [\d.]+",
        r"level \d+": r"level \d+",
        r"torch \d[\w.]*": r"torch \S+",
        r"CAP_NET_RAW, ": "(CAP_NET_RAW, )?",
    }
    found, at = "", 0
    for match in re.finditer("|".join(f"(?:{kind})" for kind in kinds), line):
        stands = next(to for kind, to in kinds.items() if re.fullmatch(kind, match[0]))
        found += re.escape(line[at : match.start()]) + stands
        at = match.end()
    return found + re.escape(line[at:])


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_the_page_is_what_happens(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    store = {"CRUX_STORE": f"tcp://127.0.0.1:{free_port()}"}
    env = {**environment(), **store, "PATH": path, "CRUX_PROFILE_S": "3"}
    how = {"cwd": tmp_path, "env": env, "start_new_session": True}
    said, code, job = tmp_path / "said", 0, None
    done = []

    def unseen(step: Step) -> list[str]:
        text = said.read_text()
        return [line for line in step.shown if not re.search(f"^{pattern(line)}$", text, re.M)]

    try:
        for step in steps():
            with said.open("w") as out:
                command = step.command.replace("echo $?", f"echo {code}")
                background = command.endswith(" &")
                if background:
                    words = command.removesuffix(" &").split()
                    job = subprocess.Popen(words, stdout=out, stderr=out, **how)  # type: ignore[call-overload]
                    until(lambda step=step: not unseen(step), BOUND_S, said.read_text())  # type: ignore[misc]
                else:
                    run = ["bash", "-c", command]
                    code = subprocess.run(
                        run, stdout=out, stderr=out, timeout=BOUND_S, **how
                    ).returncode  # type: ignore[call-overload]
            assert not unseen(step), f"{step.command}: {unseen(step)}\nof\n{said.read_text()}"
            done.append(step.command.split()[0])
            if job is not None and not background:
                # The page says so after the command that looks at the job.
                job.send_signal(signal.SIGINT)
                assert job.wait(BOUND_S) == 130
                job = None
    finally:
        if job is not None:
            job.terminate()
            job.wait(BOUND_S)
    assert done.count("cruxrun") == 3
    assert {"crux", "cat", "echo"} <= set(done)
