"""The libraries of Crux that the processes of a job load, and the variables that name them.

``LD_PRELOAD`` names the transport library first. The stand-in for libibverbs is added only on a
host with RDMA devices, because elsewhere there are no queue pairs.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, MutableMapping

from crux_torch.apply import standin, transport
from crux_torch.host.rdma import read_devices
from crux_torch.settings import Settings

logger = logging.getLogger("cruxrun")

VARIABLE = "LD_PRELOAD"
#: What ``LD_PRELOAD`` becomes in the first Python interpreter that has loaded the library: there
#: the library takes both variables out of the environment (csrc/transport/transport.cc).
THEN_VARIABLE = "CRUX_LD_PRELOAD_THEN"
#: A sanitizer's runtime ends the process unless it is loaded before everything else.
_SANITIZER = re.compile(r"lib(asan|tsan|lsan|ubsan|hwasan|clang_rt)\b")


def environment(
    settings: Settings, env: Mapping[str, str], for_interpreter: bool = False
) -> dict[str, str]:
    """The variables that make workers load the transport library, if the settings ask for it.

    If it can't be loaded, one line says so, and the job runs without it. Libraries that ``env``,
    which the workers inherit, preloads already are kept.

    Args:
        settings: of the job.
        env: the environment that the workers inherit.
        for_interpreter: the workers are Python interpreters, and what they start goes without.
    """
    if not settings.transport:
        return {}
    found = obstacle()
    if found:
        logger.info("paths of connections can't be chosen: %s", found)
        return {}
    variables = {VARIABLE: _with(str(transport.LIBRARY), env)}
    if read_devices():
        variables |= standin.environment({**env, **variables})
    if for_interpreter:
        variables[THEN_VARIABLE] = ":".join(_others(env))
    return variables


def leave_to_this_process(env: MutableMapping[str, str]) -> None:
    """Take Crux's libraries out of ``LD_PRELOAD``, so that programs started from here go without.

    What is loaded stays loaded. For a process that ``cruxrun`` did not start as an interpreter.
    Programs of another libc, of a sanitizer, or in a sandbox could not start with them, and a group
    that they make is of another job.
    """
    kept = _others(env)
    if kept == _entries(env):
        return
    if kept:
        env[VARIABLE] = ":".join(kept)
    else:
        del env[VARIABLE]


def obstacle() -> str | None:
    """Why the library can't be preloaded, or None."""
    try:
        transport.Transport.load()
    except transport.TransportError as error:
        return str(error)
    if re.search(r"[\s:]", str(transport.LIBRARY)):
        return f"{VARIABLE} can't name {transport.LIBRARY}: it has a space or a colon"
    if not transport.LIBRARY.is_file():
        return f"{transport.LIBRARY} is not there: `pip install --no-build-isolation .` makes it"
    return None


def _entries(env: Mapping[str, str]) -> list[str]:
    return [entry for entry in re.split(r"[\s:]+", env.get(VARIABLE, "")) if entry]


def _others(env: Mapping[str, str]) -> list[str]:
    """Returns the libraries in ``LD_PRELOAD`` that are not Crux's."""
    ours = str(transport.LIBRARY)
    return [each for each in _entries(env) if each != ours and not standin.is_standin(each)]


def _with(library: str, env: Mapping[str, str]) -> str:
    kept = [entry for entry in _entries(env) if entry != library]
    sanitizers = [entry for entry in kept if _SANITIZER.match(os.path.basename(entry))]
    others = [entry for entry in kept if entry not in sanitizers]
    return ":".join([*sanitizers, library, *others])
