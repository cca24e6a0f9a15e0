"""Whether libcrux_transport.so loads, and is preloaded into the processes of a job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from crux_torch.apply import transport
from crux_torch.apply.preload import environment, obstacle
from crux_torch.apply.transport import Transport, TransportError
from crux_torch.doctor.check import Check, Part
from crux_torch.settings import Settings

START_TIMEOUT_S = 10.0
#: Asks the library whether it intercepts socket calls; without torch, so it is quick.
_ASK = (
    "import ctypes; library = ctypes.CDLL(None); "
    "print(hasattr(library, 'crux_transport_abi') and library.crux_transport_sees_sockets())"
)


def library() -> Check:
    """Whether the library exists, loads, and has this package's version."""
    cost = "no connection follows the plan: no priorities, rates or paths"
    part = Part("transport library", cost)
    try:
        Transport.load()
    except TransportError as error:
        finding = part.broken if transport.LIBRARY.exists() else part.missing
        return finding(str(error), "build it: pip install --no-build-isolation .")
    return part.ok("loads")


def preload(env: Mapping[str, str], settings: Settings) -> Check:
    """Whether LD_PRELOAD puts the library into a process."""
    cost = "no paths, and no settings of queue pairs; priorities of sockets still work"
    part = Part("transport preload", cost)
    if not settings.transport:
        return part.missing("switched off: CRUX_TRANSPORT=0", "unset CRUX_TRANSPORT")
    found = obstacle()
    if found:
        return part.missing(found, "install Crux in a folder that the loader can read")
    started = {**env, **environment(settings, env)}
    remedy = f"make {transport.LIBRARY} loadable: glibc, no noexec mount, no setuid program"
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-c", _ASK],
            env=started,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return part.missing(str(error), remedy)
    if asked.returncode == 0 and asked.stdout.strip() == "1":
        return part.ok("processes under cruxrun load the library first")
    said = asked.stderr.strip().splitlines()[-1:] or ["the process does not use the library"]
    return part.missing(said[0], remedy)
