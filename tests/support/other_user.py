"""Programs that other users of this host run: it takes root to start them."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

#: Users and a group that nothing else has, nor another process that runs these tests.
A, B, C, GROUP = (100_000 + 4 * os.getpid() + n for n in range(4))

_LOADS = "import crux_torch.store.host, crux_torch._version"


def _why_not() -> str:
    if os.geteuid() != 0:
        return "it takes root to start another user's programs"
    done = _start(A, _LOADS)
    _, errors = done.communicate(timeout=60)
    last = errors.strip().splitlines()[-1:] or [""]
    return f"other users can't run this checkout: {last[0]}" if done.returncode else ""


def _start(
    uid: int, code: str, groups: Sequence[int] = (), env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "XDG_"))}
    path = os.pathsep.join(str(Path(each or ".").resolve()) for each in (str(ROOT), *sys.path))
    all_groups = ",".join(map(str, (*groups, uid)))
    program = ["chroot", f"--userspec={uid}:{uid}", f"--groups={all_groups}", "/"]
    program += [sys.executable, "-c", code]
    command = f"{_opened()}exec {shlex.join(program)}"
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", command],
        env={**kept, "HOME": "/nonexistent", "PYTHONPATH": path, **(env or {})},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@cache
def _opened() -> str:
    """Commands that show others what they need of folders that are closed to them.

    An interpreter is often in the home of who made it. This is in a namespace of the program alone.
    """
    scratch = Path(tempfile.mkdtemp(prefix="crux-other-"))
    scratch.chmod(0o755)
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    needed: dict[Path, set[str]] = {}
    for path in map(Path, (sys.base_prefix, sys.prefix, ROOT)):
        for above, below in zip(reversed(path.parents), path.parts[1:], strict=True):
            if not above.stat().st_mode & 0o001:
                needed.setdefault(above, set()).add(below)
                break
    lines = ""
    for n, (folder, names) in enumerate(needed.items()):
        shown = scratch / str(n)
        for name in names:
            (shown / name).mkdir(parents=True)
            lines += f"mount --bind {shlex.quote(str(folder / name))} {shown / name}; "
        lines += f"mount --rbind {shown} {shlex.quote(str(folder))}; "
    return lines


needs_other_users = pytest.mark.skipif(bool(_reason := _why_not()), reason=_reason or "-")


class Program:
    """``code`` as the user ``uid``, of ``groups`` beside its own; it ends with the context."""

    def __init__(self, uid: int, code: str, groups: Sequence[int] = (), **env: str) -> None:
        self._process = _start(uid, code, groups, env)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def line(self) -> str:
        """Its next line of output; the errors that it ends with where there is none."""
        assert self._process.stdout is not None
        told = self._process.stdout.readline().strip()
        if told:
            return told
        return self._process.communicate()[1]


def output(uid: int, code: str, groups: Sequence[int] = (), **env: str) -> str:
    """What ``code`` prints, or the errors that it ends with."""
    process = _start(uid, code, groups, env)
    out, errors = process.communicate(timeout=120)
    return out.strip() or errors
