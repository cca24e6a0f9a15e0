"""What this process's NCCL communicators move over the network, from the NCCL profiler plugin.

NCCL loads the plugin (``libcrux_nccl_profiler.so``) where ``NCCL_PROFILER_PLUGIN`` names it, when
the first communicator is made; ``cruxrun --crux-nccl-profiler`` sets that. NCCL loads one profiler
plugin, so a plugin that the user chose stays, and nothing is seen here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crux_torch.apply.nccl_conf import ENVIRONMENT, NcclVariables
from crux_torch.errors import CruxError

LIBRARY = Path(__file__).parents[1] / "libcrux_nccl_profiler.so"
#: What NCCL finds its profiler plugin by.
VARIABLE = "NCCL_PROFILER_PLUGIN"
#: NCCL copies the name into a buffer of MAX_STR_LEN bytes, and cuts what is longer.
MAX_PATH_BYTES = 254

_ABI = 1
_NAME_CHARS = 64
#: A communicator may be made between asking how many there are and reading them.
_SPARE = 8


class NcclProfilerError(CruxError, OSError):
    """The plugin can't be read in this process; the message says why."""


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """What was moved over the network so far, all channels together.

    What stays inside a host (NVLink, PCIe, shared memory) is not in it. The flags that NCCL's
    protocols put among the data are: as much again with LL, a fifteenth with LL128. Headers and
    retransmissions are not.

    Attributes:
        collectives: operations that were started.
        point_to_point: sends and receives that were started.
        sends: transfers that the network reported done.
        sent_bytes: that it was handed.
        receives, received_bytes: that it delivered; a network that reports no sizes makes the
            bytes 0.
        sending_s: seconds with at least one send in the network's hands, a union and no sum: over
            InfiniBand until it was acknowledged, over TCP until the kernel had taken it.
        untracked: operations that could not be followed; they are in none of these.
    """

    collectives: int = 0
    point_to_point: int = 0
    sends: int = 0
    sent_bytes: int = 0
    receives: int = 0
    received_bytes: int = 0
    sending_s: float = 0.0
    untracked: int = 0

    def since(self, before: NetworkUse) -> NetworkUse:
        """What came on top of ``before``, an earlier state of the same thing."""
        now, then = asdict(self), asdict(before)
        return NetworkUse(**{name: now[name] - then[name] for name in now})


@dataclass(frozen=True, slots=True)
class CommunicatorUse:
    """One NCCL communicator of this process.

    Attributes:
        id: NCCL's ``commHash``, the same on all its ranks.
        name: that it was given (``ncclConfig_t.commName``), or empty; at most 63 characters.
        rank, ranks, nodes: of the communicator.
        ended: whether NCCL has finalized it.
        use: what it moved.
    """

    id: int
    name: str
    rank: int
    ranks: int
    nodes: int
    ended: bool
    use: NetworkUse


_COUNTERS = (
    "collectives",
    "point_to_point",
    "sends",
    "sent_bytes",
    "receives",
    "received_bytes",
    "sending_ns",
    "untracked",
)


class _Traffic(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _COUNTERS)


class _Communicator(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_CHARS),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
        ("nodes", ctypes.c_int32),
        ("ended", ctypes.c_int32),
        ("traffic", _Traffic),
    )


class NcclProfiler:
    """The plugin that NCCL has loaded; its methods may be called from any thread.

    Args:
        library: that exports ``crux_nccl_profiler_*``.

    Raises:
        NcclProfilerError: it is of another version.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.crux_nccl_profiler_abi.restype = ctypes.c_int32
        abi = library.crux_nccl_profiler_abi()
        if abi != _ABI:
            raise NcclProfilerError(f"{LIBRARY.name} is of version {abi}, not {_ABI}")
        self._communicators = library.crux_nccl_profiler_communicators
        self._communicators.restype = ctypes.c_int32
        self._communicators.argtypes = (ctypes.c_void_p, ctypes.c_int32)
        self._totals = library.crux_nccl_profiler_totals
        self._forwarded = library.crux_nccl_profiler_forwarded
        for function in (self._totals, self._forwarded):
            function.restype = None
            function.argtypes = (ctypes.POINTER(_Traffic),)

    @classmethod
    def loaded(cls, path: Path = LIBRARY) -> NcclProfiler | None:
        """The plugin at ``path`` where NCCL has loaded it in this process, else None.

        Never loads it: what NCCL has not loaded has seen nothing.

        Raises:
            NcclProfilerError: what is loaded is of another version.
        """
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return None
        try:
            return cls(library)
        except AttributeError as error:
            raise NcclProfilerError(f"{path} is no such plugin: {error}") from None

    def communicators(self) -> list[CommunicatorUse]:
        """The communicators of this process, oldest first; of the ended ones the newest 64."""
        room = self._communicators(None, 0) + _SPARE
        rows = (_Communicator * room)()
        count = min(room, self._communicators(rows, room))
        return [
            CommunicatorUse(
                id=row.id,
                name=row.name.decode(errors="replace"),
                rank=row.rank,
                ranks=row.ranks,
                nodes=row.nodes,
                ended=bool(row.ended),
                use=_use(row.traffic),
            )
            for row in rows[:count]
        ]

    def totals(self) -> NetworkUse:
        """What this process moved: all communicators, and what it forwarded."""
        traffic = _Traffic()
        self._totals(ctypes.byref(traffic))
        return _use(traffic)

    def forwarded(self) -> NetworkUse:
        """What NCCL's proxy of this process sent for other processes of the host (PXN)."""
        traffic = _Traffic()
        self._forwarded(ctypes.byref(traffic))
        return _use(traffic)


def _use(traffic: _Traffic) -> NetworkUse:
    values = {name: getattr(traffic, name) for name in _COUNTERS}
    return NetworkUse(sending_s=values.pop("sending_ns") / 1e9, **values)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """What makes NCCL load the plugin.

    Args:
        env: what the workers inherit.

    Raises:
        NcclProfilerError: NCCL would not load it, and why.
    """
    found = obstacle(env)
    if found:
        raise NcclProfilerError(found)
    return {VARIABLE: str(LIBRARY)}


def obstacle(env: Mapping[str, str]) -> str | None:
    """What keeps NCCL from loading the plugin, or None."""
    chosen = NcclVariables(env).get(VARIABLE)
    if chosen is not None and chosen.text != str(LIBRARY):
        where = "" if chosen.source == ENVIRONMENT else f" in {chosen.source}"
        return f"{VARIABLE}={chosen.text} is set{where}, and NCCL loads one profiler plugin"
    if not LIBRARY.is_file():
        return f"{LIBRARY} is not there: build it with `pip install -e .`"
    if len(os.fsencode(LIBRARY)) > MAX_PATH_BYTES:
        return f"NCCL cuts paths of plugins at {MAX_PATH_BYTES} bytes, and {LIBRARY} is longer"
    return None


def status(wanted: bool) -> dict[str, Any] | None:
    """What :func:`crux_torch.status` shows under ``nccl_network``.

    Args:
        wanted: whether the settings ask for the plugin.

    Returns:
        None where it is neither wanted nor loaded.
    """
    try:
        profiler = NcclProfiler.loaded()
        if profiler is None:
            if not wanted:
                return None
            why = obstacle(os.environ) or _not_yet(os.environ)
            return {"loaded": False, "why_not": why}
        return {
            "loaded": True,
            "totals": asdict(profiler.totals()),
            "forwarded": asdict(profiler.forwarded()),
            "communicators": [asdict(one) for one in profiler.communicators()],
        }
    except NcclProfilerError as error:
        return {"loaded": False, "why_not": str(error)}


def _not_yet(env: Mapping[str, str]) -> str:
    if NcclVariables(env).get(VARIABLE) is None:
        return f"{VARIABLE} is not set: start the job with cruxrun"
    return "no NCCL communicator was made yet"
