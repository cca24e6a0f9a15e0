"""Whether libcrux_transport.so is there, and sees a process's connections from the first one on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping

from crux_torch.apply import transport
from crux_torch.apply.transport import Transport, TransportError
from crux_torch.doctor.check import Check
from crux_torch.settings import Settings
from cruxrun.preload import environment, obstacle

START_TIMEOUT_S = 10.0
#: Asks the library whether it is first in line; without torch, so it takes no second.
_ASK = (
    "import ctypes; library = ctypes.CDLL(None); "
    "print(hasattr(library, 'crux_transport_abi') and library.crux_transport_sees_sockets())"
)


def library() -> Iterator[Check]:
    """Whether the library is there, loads, and is of this package's version."""
    part = "transport library"
    cost = "priorities, rates and paths are planned and carried out on no connection"
    try:
        Transport.load()
    except TransportError as error:
        absent = not transport.LIBRARY.exists()
        remedy = "build it: pip install . (a C++17 compiler; no torch, no RDMA headers needed)"
        yield Check(part, "missing" if absent else "broken", str(error), cost, remedy)
    else:
        yield Check(part, "ok", "loads")


def preload(env: Mapping[str, str], settings: Settings) -> Iterator[Check]:
    """Whether a process that is started with the library in LD_PRELOAD gets it."""
    part = "transport preload"
    cost = "source ports can't be chosen, and queue pairs not be set; classes still can"
    if not settings.transport:
        switch = "CRUX_TRANSPORT"
        yield Check(part, "missing", f"switched off: {switch}=0", cost, f"unset {switch}")
        return
    found = obstacle()
    if found:
        yield Check(part, "missing", found, cost, "build it, where the loader can read it")
        return
    started = {**env, **environment(settings, env)}
    remedy = f"let the loader read {transport.LIBRARY} (not on noexec, no AT_SECURE, glibc)"
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-c", _ASK],
            env=started,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Check(part, "missing", str(error), cost, remedy)
        return
    if asked.returncode == 0 and asked.stdout.strip() == "1":
        yield Check(part, "ok", "connections of a process under cruxrun go through the library")
    else:
        said = asked.stderr.strip().splitlines()[-1:] or ["the process does not go through it"]
        yield Check(part, "missing", said[0], cost, remedy)
