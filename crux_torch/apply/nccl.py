"""NCCL's part: its variables, the traffic classes of its communicators, and its TCP connections.

NCCL has no call that changes a communicator's class later, so communicators keep it until a
handover replaces them. It is ``ncclConfig_t.trafficClass``: the whole TOS byte with its ECN bits
(``apply.dscp``), which torch takes as ``Options().config.traffic_class``. Over sockets NCCL ignores
it; there the sockets themselves are marked. A class that the user chose stays: the script's in its
options, or the operator's in NCCL's own variables, which NCCL ranks above the options.

With the verbs shim a communicator's class is a label, which the shim replaces before the device
sees it (docs/understand/transport.md). Both ends use the sender's class, so a label is made from
the group's name alone: the same on every rank, except for its two ECN bits. NCCL also copies the
class to the service level, of which devices read four bits; labels leave the upper two of those
zero. On InfiniBand the service level decides the priority, so there are no labels.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import logging
import os
import pwd
import sys
import threading
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crux_torch.apply.dscp import process_ecn
from crux_torch.apply.transport import Transport, TransportError
from crux_torch.apply.wire import QueuePairs
from crux_torch.host.interfaces import read_devices
from crux_torch.logs import WarnOnce

_warn = WarnOnce(logging.getLogger(__name__))

SYSTEM_FILE = Path("/etc/nccl.conf")
USER_FILE = ".nccl.conf"
VARIABLE = "NCCL_CONF_FILE"
ENVIRONMENT = "environment"
#: The room in NCCL's line buffers, without the terminating zero.
_MAX_BYTES = 1023
#: Larger files are not NCCL's.
_MAX_FILE_BYTES = 1 << 20
_strtoll = ctypes.CDLL(None).strtoll
_strtoll.restype = ctypes.c_longlong
_strtoll.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)

_LABEL_STEP = 16
LABEL_COUNT = 15
#: ECN bits of a sender: not capable, ECT(1), ECT(0).
ECN_BITS = (0, 1, 2)
#: Registers a label, its owner, and the DSCP to send with: :meth:`QueuePairs.label`.
Register = Callable[[int, str, int], None]

#: Beginnings of the callers' file names; the second is a torch with NCCL linked in.
LIBRARIES = ("libnccl", "libtorch_cuda")

#: NCCL_CONFIG_UNDEF_INT of <nccl.h>: the script chose none.
UNDEFINED = -(1 << 31)

Version = tuple[int, ...]
#: The release that brought each (read in NCCL's tagged sources). ``HOME``: it is where NCCL looks
#: for the user's file; before, the user database says where.
SINCE: dict[str, Version] = {
    "NCCL_IB_FIFO_TC": (2, 22, 3),
    "trafficClass": (2, 26, 2),
    "NCCL_ENV_PLUGIN": (2, 28, 7),
    "GIN": (2, 28, 7),
    "HOME": (2, 30, 3),
    "NCCL_IB_OOO_RQ": (2, 30, 3),
    "ginTrafficClass": (2, 30, 3),
    "NCCL_GIN_IB_TC": (2, 30, 7),
}

#: NCCL's own variables, and how each changes the class of a communicator.
OVERRIDES = {
    "NCCL_IB_TC": "NCCL makes its queue pairs with that class, whatever level the job has",
    "NCCL_IB_FIFO_TC": "NCCL's clear-to-send messages get that class, its data gets the job's",
    "NCCL_IB_SL": "the service level stays, so InfiniBand's lanes and PFC priorities do not follow",
}

#: Variables and modules that take traffic out of Crux's reach, and what then happens to it.
BYPASSES = {
    "NCCL_IB_OOO_RQ": "NCCL makes its queue pairs past the verbs shim: class and port stay",
    "NCCL_GIN_IB_TC": "the queue pairs that GPUs drive (GIN) get that class, and no path",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "torchcomms makes the groups: they are not measured",
}
BYPASSING_MODULES = {
    "torchcomms": "its communicators are not measured, and get no class",
    "nccl.core": "communicators that nccl4py makes are not measured, and get no class",
}


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a variable, never empty, and its source: ``ENVIRONMENT``, or a file's path."""

    text: str
    source: str


class NcclVariables:
    """NCCL's variables as NCCL will read them: from the environment, else from its two files.

    NCCL reads ``NCCL_CONF_FILE`` (if it is not set, ``.nccl.conf`` in the user's home: ``HOME``,
    before NCCL 2.30.3 the one in the user database) and then ``/etc/nccl.conf``. It puts each line
    ``NAME=VALUE`` into the environment unless the name is already there. A variable that is set but
    empty hides the value of the files, and counts as unset.

    Args:
        env: of the process that loads NCCL.
        home: of its user; by default where that NCCL looks.
        version: of NCCL; default: of the one that torch has loaded, else the newest known.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        home: Path | None = None,
        system_file: Path | None = None,
        version: Version | None = None,
    ) -> None:
        self._env = env
        version = version or loaded_version()
        if env.get(VARIABLE):
            files = [Path(env[VARIABLE])]
        else:
            home = home or _home(env, version)
            files = [home / USER_FILE] if home is not None else []
        self._read: dict[str, Value] = {}
        for file in (*files, system_file or SYSTEM_FILE):
            for name, text in _lines(file, strips_return=has("HOME", version)):
                self._read.setdefault(name, Value(text, str(file)))

    def get(self, name: str) -> Value | None:
        """Returns the variable ``name``, or None if NCCL uses its default."""
        if name in self._env:
            text = self._env[name]
            return Value(text, ENVIRONMENT) if text else None
        found = self._read.get(name)
        return found if found is not None and found.text else None

    def integer(self, name: str) -> int | None:
        """Returns a number as NCCL's ``strtoll(…, 0)`` reads it; None if it is not set, or -1.

        A text that does not begin with a number is 0, as in NCCL.
        """
        value = self.get(name)
        if value is None:
            return None
        number: int = _strtoll(os.fsencode(value.text), None, 0)
        return None if number == -1 else number


def loaded_version() -> Version | None:
    """Returns the release of the NCCL that torch has loaded in this process, or None."""
    try:
        version: Version = tuple(sys.modules["torch"].cuda.nccl.version())
    except Exception:
        return None
    return version


def has(feature: str, version: Version | None) -> bool:
    """True if NCCL ``version`` has ``feature``; None is the newest known."""
    return version is None or version >= SINCE.get(feature, ())


def _home(env: Mapping[str, str], version: Version | None) -> Path | None:
    if has("HOME", version):
        return Path(env["HOME"]) if env.get("HOME") else None
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _lines(file: Path, strips_return: bool) -> list[tuple[str, str]]:
    """Names and values in the order of the file; none if it can't be read."""
    # The lab of emulated devices reads this module in a Python without msgspec.
    from crux_torch.files import read_file

    try:
        raw = read_file(file, _MAX_FILE_BYTES)
    except OSError:
        return []
    # NCCL strips no blanks, so " NCCL_IB_TC" and "NCCL_IB_TC " are other names.
    text = raw.decode(errors="replace").split("\n")
    text = [line.removesuffix("\r") for line in text] if strips_return else text
    lines = (line.partition("=") for line in text)
    found = ((name, value) for name, equals, value in lines if equals and name[:1] != "#")
    return [(name[:_MAX_BYTES], value[:_MAX_BYTES]) for name, value in found]


class NcclLabels:
    """The labels of this process's communicators.

    Thread safety: any thread may call every method; a lock orders them.

    Args:
        load: gives the function that registers a label, or None if the transport library would
            see no queue pairs.
    """

    def __init__(self, load: Callable[[], Register | None]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._owners: dict[int, list[str]] = {}
        self._dscp = 0

    def give(self, owner: str, ecn: int = 0) -> int | None:
        """Returns the class for a new communicator: a label, or None without the verbs shim.

        Args:
            owner: the group's name; names that share a label are listed together.
        """
        register = self._load()
        if register is None or not owner:
            return None
        label = label_of(owner)
        with self._lock:
            owners = self._owners.setdefault(label, [])
            if owner not in owners:
                owners.append(owner)
            return label | ecn if self._register(register, label) else None

    def set_dscp(self, dscp: int) -> None:
        """Set the DSCP (0 to 63; 0 at first) of queue pairs that connect from now on.

        That includes those of older communicators, which connect when they are first used.
        """
        with self._lock:
            if dscp == self._dscp:
                return
            self._dscp = dscp
            register = self._load() if self._owners else None
            if register is not None:
                for label in self._owners:
                    self._register(register, label)

    def _register(self, register: Register, label: int) -> bool:
        # A peer's host may use other ECN bits, and both ends use the sender's class.
        try:
            for ecn in ECN_BITS:
                register(label | ecn, ",".join(self._owners[label]), self._dscp)
        except TransportError:
            return False
        return True


def label_of(owner: str) -> int:
    """Returns a group's label: a multiple of 16 from 16 to 240; neighbouring groups differ."""
    number = int(owner) if owner.isdecimal() and owner.isascii() else zlib.crc32(owner.encode())
    return _LABEL_STEP * (1 + number % LABEL_COUNT)


def _load() -> Register | None:
    try:
        pairs = QueuePairs()
    except TransportError:
        return None
    return pairs.label if pairs.are_seen and not _has_infiniband() else None


@functools.cache
def _has_infiniband() -> bool:
    ports = (port for device in read_devices() for port in device.ports)
    return any(port.active and port.link_layer == "InfiniBand" for port in ports)


LABELS = NcclLabels(_load)


def made_by_nccl() -> frozenset[int]:
    """Returns the inodes of NCCL's open TCP connections (``NCCL_NET=Socket``).

    The transport library sees which library calls ``connect`` or ``accept``: libnccl, or one of its
    plugins (``libnccl-net…``). All of them count, and new ones may come with any operation
    (docs/operate/classes.md, "NCCL over sockets"). None if the transport library was not loaded
    first.
    """
    try:
        transport = Transport.load()
        if not transport.sees_sockets:
            return frozenset()
        found = transport.connections()
    except TransportError:
        return frozenset()
    return frozenset(c.id for c in found if c.kind == "tcp" and c.owner.startswith(LIBRARIES))


@dataclass(frozen=True, slots=True)
class Override:
    """A variable of NCCL that overrides a communicator's class; ``what``: its effect."""

    name: str
    value: int
    source: str
    what: str

    def __str__(self) -> str:
        where = "" if self.source == ENVIRONMENT else f" in {self.source}"
        return f"{self.name}={self.value}{where}"


def overrides(env: Mapping[str, str], version: Version | None = None) -> list[Override]:
    """Returns the variables in the environment ``env`` that override the class of communicators.

    Args:
        version: of NCCL; default: of the one that torch has loaded, else the newest known.
    """
    version = version or loaded_version()
    variables = NcclVariables(env, version=version)
    names = [name for name in OVERRIDES if has(name, version)]
    given = {name: (variables.integer(name), variables.get(name)) for name in names}
    return [
        Override(name, number, value.source, OVERRIDES[name])
        for name, (number, value) in given.items()
        if number is not None and value is not None
    ]


def has_users_class(env: Mapping[str, str]) -> bool:
    """True if ``NCCL_IB_TC`` is set in the environment ``env``, or in NCCL's files."""
    return NcclVariables(env).integer("NCCL_IB_TC") is not None


def unreached(
    env: Mapping[str, str], modules: Collection[str] = (), version: Version | None = None
) -> dict[str, str]:
    """Returns the effect of each variable or loaded module that bypasses Crux."""
    version = version or loaded_version()
    variables = NcclVariables(env, version=version)
    given = {name: variables.get(name) for name in BYPASSES if has(name, version)}
    found = {name: BYPASSES[name] for name, value in given.items() if value and value.text != "0"}
    return found | {name: what for name, what in BYPASSING_MODULES.items() if name in modules}


def with_class(
    options: Any,
    dscp: int | None,
    *,
    new: Any,
    owner: str = "",
    env: Mapping[str, str] | None = None,
    labels: NcclLabels = LABELS,
    ecn: int | None = None,
) -> Any:
    """Returns the script's options for a NCCL communicator, with the job's class added.

    The script's own object is not changed, because it may use it for the next group too. If the
    class can't be given, or has no effect, a warning says why, once for each process. Never raises;
    after an error it returns ``options`` unchanged.

    Args:
        dscp: DSCP of the job's level (0 to 63), or None if there is none yet.
        new: creates empty options: ``ProcessGroupNCCL.Options``.
        owner: name of the group; default: the one in ``options``.
        env: NCCL's variables; default: this process's environment.
        labels: with the verbs shim one of them replaces the class.
        ecn: the two ECN bits; default: those for the settings and this host's devices.
    """
    try:
        ecn = process_ecn().bits if ecn is None else ecn
        owner = owner or getattr(options, "group_name", "")
        label = labels.give(owner, ecn)
        traffic_class = label if label is not None else None if dscp is None else dscp << 2 | ecn
        if traffic_class is None:
            return options
        return _with_class(options, traffic_class, new, os.environ if env is None else env)
    except Exception as error:
        _warn("options", f"NCCL communicators get no traffic class: {error}")
        return options


def _with_class(options: Any, traffic_class: int, new: Any, env: Mapping[str, str]) -> Any:
    chosen = UNDEFINED if options is None else options.config.traffic_class
    if chosen != UNDEFINED:
        said = f"the script's traffic_class={chosen} for NCCL stays, whatever level it has"
        _warn("chosen", said)
        return options
    found = overrides(env)
    for override in found:
        _warn(override.name, f"{override} is set: {override.what}")
    if any(override.name == "NCCL_IB_TC" for override in found):
        return options
    classed = new() if options is None else copy.copy(options)
    classed.config.traffic_class = traffic_class
    return classed
