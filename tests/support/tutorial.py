"""Follows a page of the documentation: its commands in one shell, and what the page shows of each.

Only blocks of code whose first line begins with ``$`` are commands and their output.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from control_fakes import until
from loopback import free_port
from training_job import BOUND_S, ROOT, environment

#: What differs from machine to machine, and a pattern of what stands there.
KINDS = {
    r"\.\.\.": ".*",
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ": r"\S+ \S+Z",
    r"\d{4}-\d\d-\d\d \d\d:\d\dZ": r"\S+ \S+Z",
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d": r"\S+ \S+",
    r"train_mlp-[0-9a-f]{8}": r"train_mlp-[0-9a-f]{8}",
    r"\bvm\b": re.escape(socket.gethostname()),
    r"loss [\d.]+": r"loss [\d.]+",
    r"level \d+": r"level \d+",
    r"torch \d[\w.]*": r"torch \S+",
    r"port \d+": r"port \d+",
    r"\d+ probes in \d+ s": r"\d+ probes in \d+ s",
    r"\broot@vm\b": r"\S+@\S+",
    r"\d+\.\d{3,}": r"[\d.e-]+",
    r"CAP_NET_RAW, ": "(CAP_NET_RAW, )?",
}


class Step(NamedTuple):
    command: str
    shown: list[str]


def steps(page: str) -> Iterator[Step]:
    """Each command of the page, with its further lines, and the lines shown below it."""
    for block in re.findall(r"^```\n(\$ .*?)^```$", page, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            size = 1
            if "<<END" in lines[0]:
                size += lines.index("END")
            while not _is_whole(lines[:size]):
                size += 1
            yield Step("\n".join(lines[:size]), lines[size:])


def _is_whole(lines: list[str]) -> bool:
    if lines[-1].endswith("\\"):
        return False
    try:
        shlex.split("\n".join(lines), comments=True)
    except ValueError:
        return "<<END" in lines[0]
    return True


def pattern(line: str) -> str:
    """Returns the expression that a line of the page stands for.

    ``...`` stands for anything, figures and names for other ones.
    """
    found, at = "", 0
    for match in re.finditer("|".join(f"(?:{kind})" for kind in KINDS), line):
        stands = next(to for kind, to in KINDS.items() if re.fullmatch(kind, match[0]))
        found += re.escape(line[at : match.start()]) + stands
        at = match.end()
    return found + re.escape(line[at:])


def follow(page: str, folder: Path, **env: str) -> list[str]:
    """Run the page's commands in ``folder``, in a shell with job control.

    A job in the background runs on until the page ends it. Its lines may come later than it starts.

    Args:
        env: variables of the shell, beside those of :func:`environment`.

    Returns:
        the commands that ran.

    Raises:
        AssertionError: a command does not print what the page shows.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    said = folder.with_name(folder.name + ".said")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    store = f"tcp://127.0.0.1:{free_port()}"
    variables = {**environment(), "CRUX_STORE": store, "CRUX_PROFILE_S": "3", "PATH": path, **env}
    done = []
    with said.open("ab") as out:
        shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            text=True,
            start_new_session=True,
        )
    assert shell.stdin is not None
    try:
        # Also where this process is killed, the shell comes to the end of its input.
        ending = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"
        print(f"set -m; {ending}", file=shell.stdin, flush=True)
        for number, step in enumerate(steps(page)):
            before = said.stat().st_size
            end = f"[end of {number}]"
            kept = f"code=$?; echo '{end}'; (exit $code)"
            print(f"{step.command}\n{kept}", file=shell.stdin, flush=True)

            def unseen(step: Step = step, before: int = before) -> list[str]:
                text = said.read_bytes()[before:].decode()
                return [x for x in step.shown if not re.search(f"^{pattern(x)}$", text, re.M)]

            until(lambda end=end: end in said.read_text(), BOUND_S, step.command)  # type: ignore[misc]
            if step.command.endswith(" &"):
                until(lambda unseen=unseen: not unseen(), BOUND_S, step.command)  # type: ignore[misc]
            assert not unseen(), f"{step.command}: {unseen()}\nof\n{said.read_text()}"
            done.append(step.command)
    finally:
        shell.stdin.close()
        try:
            shell.wait(BOUND_S)
        finally:
            shell.kill()
    return done
