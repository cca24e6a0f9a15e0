"""``LD_PRELOAD`` of a job's processes: the transport library first, then the verbs shim.

The shim is added only on a host with RDMA devices, because elsewhere there are no queue pairs.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, MutableMapping
from importlib.metadata import entry_points

from crux_torch.apply import transport, verbs_shim
from crux_torch.host.interfaces import read_devices
from crux_torch.settings import Settings

logger = logging.getLogger("cruxrun")

#: The function that ``import torch`` calls, in the entry-point group ``torch.backends``.
ENTRY_POINT = "cruxrun.autoload:attach_if_launched"
VARIABLE = "LD_PRELOAD"
#: Value of ``LD_PRELOAD`` from the first Python interpreter on that has loaded the
#: library, which takes both variables out of the environment (csrc/transport/transport.cc).
THEN_VARIABLE = "CRUX_LD_PRELOAD_THEN"
#: A sanitizer's runtime ends the process unless it is loaded before everything else.
_SANITIZER = re.compile(r"lib(asan|tsan|lsan|ubsan|hwasan|clang_rt)\b")


def environment(
    settings: Settings, env: Mapping[str, str], for_interpreter: bool = False
) -> dict[str, str]:
    """Returns the variables that make workers load the libraries, if the settings ask for it.

    If the transport library can't be loaded, one line says so, and the job runs without it.

    Args:
        env: environment that the workers inherit; the libraries that it preloads are kept.
        for_interpreter: the workers are Python interpreters, and programs that they start go
            without.
    """
    if not settings.transport:
        return {}
    found = obstacle()
    if found:
        logger.info("paths of connections can't be chosen: %s", found)
        return {}
    variables = {VARIABLE: _with(str(transport.LIBRARY), env)}
    if read_devices():
        variables |= verbs_shim.environment({**env, **variables})
    if for_interpreter:
        variables[THEN_VARIABLE] = ":".join(_others(env))
    return variables


def leave_to_this_process(env: MutableMapping[str, str]) -> None:
    """Takes Crux's libraries out of ``LD_PRELOAD``, so that programs started from here go without.

    Loaded libraries stay loaded. For a process that ``cruxrun`` did not start as an interpreter.
    Programs of another libc, of a sanitizer, or in a sandbox could not start with them, and a group
    that they make is of another job.
    """
    kept = _others(env)
    if kept == verbs_shim.preload_entries(env):
        return
    if kept:
        env[VARIABLE] = ":".join(kept)
    else:
        del env[VARIABLE]


def autoload_obstacle(env: Mapping[str, str]) -> str | None:
    """Returns what keeps ``import torch`` in ``env`` from attaching Crux, or None."""
    switch = env.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if switch != "1":
        return f"TORCH_DEVICE_BACKEND_AUTOLOAD={switch} switches torch's entry points off"
    if not any(e.value == ENTRY_POINT for e in entry_points(group="torch.backends")):
        return "the entry point of the group torch.backends is not installed"
    return None


def obstacle() -> str | None:
    """Returns the reason why the library can't be preloaded, or None."""
    try:
        transport.Transport.load()
    except transport.TransportError as error:
        return str(error)
    if re.search(r"[\s:]", str(transport.LIBRARY)):
        return f"{VARIABLE} can't name {transport.LIBRARY}: it has a space or a colon"
    if not transport.LIBRARY.is_file():
        return f"{transport.LIBRARY} is not there: `pip install --no-build-isolation .` makes it"
    return None


def _others(env: Mapping[str, str]) -> list[str]:
    """Returns the libraries in ``LD_PRELOAD`` that are not Crux's."""
    entries = verbs_shim.preload_entries(env)
    return [e for e in entries if e != str(transport.LIBRARY) and not verbs_shim.is_shim(e)]


def _with(library: str, env: Mapping[str, str]) -> str:
    kept = [entry for entry in verbs_shim.preload_entries(env) if entry != library]
    sanitizers = [entry for entry in kept if _SANITIZER.match(os.path.basename(entry))]
    others = [entry for entry in kept if entry not in sanitizers]
    return ":".join([*sanitizers, library, *others])
