"""lldpd in namespaces."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from control_fakes import until

LLDPD, LLDPCLI = "/usr/sbin/lldpd", "/usr/sbin/lldpcli"
#: Seconds in which daemons start and hear each other, also on a busy machine.
BOUND_S = 120.0

needs_lldpd = pytest.mark.skipif(not Path(LLDPD).exists(), reason="there is no lldpd")


def ask(socket: Path, *words: str) -> str | None:
    """The output of ``lldpcli``; None where it fails."""
    argv = [LLDPCLI, "-u", str(socket), *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


@contextmanager
def daemons(names: Mapping[str, str]) -> Iterator[Path]:
    """An lldpd in each namespace, which tells its system's name and its ports' interfaces.

    Args:
        names: namespace -> the name that its lldpd tells.

    Yields:
        The folder of their sockets, which are called like the namespaces.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # lldpcli gives up its privileges before it connects.
        folder.chmod(0o755)
        # An lldpd that has a program to configure it starts paused, until that resumes it. Each
        # lldpcli reads all settings and writes all: a second one at the time would pause it again.
        options = ("-d", "-L", "")
        for namespace in names:
            socket = str(folder / namespace)
            argv = ["ip", "netns", "exec", namespace, LLDPD, *options, "-u", socket]
            running = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
            stack.callback(running.wait)
            stack.callback(running.terminate)
        for namespace, name in names.items():
            for words in (f"system hostname {name}", "lldp portidsubtype ifname"):
                command = ["configure", *words.split()]
                answers = partial(ask, folder / namespace, *command)
                until(lambda: answers() is not None, BOUND_S, f"lldpd of {name}")  # noqa: B023
        yield folder
