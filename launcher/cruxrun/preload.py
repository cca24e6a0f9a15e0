"""What libraries of Crux the processes of a job load, and the variables that make them.

The transport library comes before everything else (``LD_PRELOAD``). The stand-in for libibverbs is
loaded only where there are RDMA devices: elsewhere no queue pair exists that it could see. NCCL
loads the profiler plugin, where the settings ask for it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from crux_torch.apply import nccl_profiler, standin, transport
from crux_torch.fabric.rdma import read_devices
from crux_torch.settings import Settings

logger = logging.getLogger("cruxrun")

VARIABLE = "LD_PRELOAD"
#: A sanitizer's runtime ends the process unless it is loaded before everything else.
_SANITIZER = re.compile(r"lib(asan|tsan|lsan|ubsan|hwasan|clang_rt)\b")


def environment(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that make workers load what the settings ask for.

    What can't be loaded is left out, and one line says so: without the transport library a job runs
    as it did, but its connections take the paths that the network gives them.

    Args:
        settings: ``transport`` and ``nccl_profiler``.
        env: what the workers inherit; libraries that it preloads already are kept.

    Returns:
        ``LD_PRELOAD``, with RDMA devices also what makes NCCL take the stand-in;
        ``NCCL_PROFILER_PLUGIN``.
    """
    return _transport(settings, env) | _nccl_profiler(settings, env)


def _nccl_profiler(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    if not settings.nccl_profiler:
        return {}
    try:
        return nccl_profiler.environment(env)
    except nccl_profiler.NcclProfilerError as error:
        # It was asked for, unlike the rest.
        logger.warning("NCCL's use of the network is not measured: %s", error)
        return {}


def _transport(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    if not settings.transport:
        return {}
    found = obstacle()
    if found:
        logger.info("paths of connections can't be chosen: %s", found)
        return {}
    variables = {VARIABLE: _with(str(transport.LIBRARY), env.get(VARIABLE, ""))}
    if read_devices():
        variables |= standin.environment({**env, **variables})
    return variables


def obstacle() -> str | None:
    """What keeps the library from being preloaded, or None."""
    try:
        transport.Transport.load()
    except transport.TransportError as error:
        return str(error)
    if re.search(r"[\s:]", str(transport.LIBRARY)):
        return f"{VARIABLE} can't name {transport.LIBRARY}: it has a space or a colon"
    if not transport.LIBRARY.is_file():
        return f"{transport.LIBRARY} is not there: build it with `pip install -e .`"
    return None


def _with(library: str, preloaded: str) -> str:
    kept = [entry for entry in re.split(r"[\s:]+", preloaded) if entry and entry != library]
    sanitizers = [entry for entry in kept if _SANITIZER.match(os.path.basename(entry))]
    others = [entry for entry in kept if entry not in sanitizers]
    return ":".join([*sanitizers, library, *others])
