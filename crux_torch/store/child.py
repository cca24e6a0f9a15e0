"""How a process of the store is started: without torch, and apart from its parent's terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: What would load torch, or our libraries, into it.
_UNFIT_VARIABLES = ("LD_PRELOAD", "CRUX_ATTACH")


def start_child(
    module: str, *arguments: str, fd: int, kept: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``python -m module --fd FD``, with that descriptor, and those ``kept`` open."""
    return subprocess.Popen(
        [sys.executable, "-m", module, f"--fd={fd}", *arguments],
        env=_environment(os.environ),
        # Neither the terminal's signals nor its parent's pipes are its own.
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(fd, *kept),
    )


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for a process that finds the same packages from any folder."""
    kept = {name: text for name, text in env.items() if name not in _UNFIT_VARIABLES}
    path = os.pathsep.join(str(Path(folder or ".").resolve()) for folder in sys.path)
    return {**kept, "PYTHONPATH": path}
