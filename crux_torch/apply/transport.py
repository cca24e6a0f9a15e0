"""Lists and sets the connections of this process through libcrux_transport.so.

``cruxrun`` preloads the library (``csrc/transport``, ``LD_PRELOAD``). Then it sees every TCP
connection being made and steers those that have a route. If :meth:`Transport.load` loads it later,
it can still set options of live connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from crux_torch.errors import CruxError

LIBRARY = Path(__file__).parents[1] / "libcrux_transport.so"

Kind = Literal["tcp", "qp"]
How = Literal[
    "untouched", "at_connect", "at_rtr", "live_option", "live_device", "needs_switch", "refused"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
HOWS: tuple[How, ...] = get_args(How)
#: The rate of a call that leaves the rate as it is.
LEAVE_RATE = 2**64 - 1

_ABI = 6
_MAX_HOPS = 16
_MAX_PORTS = 64


class TransportError(CruxError, OSError):
    """libcrux_transport.so can't be used, or refuses a request. Says what to do."""


@dataclass(frozen=True, slots=True)
class Route:
    """The settings that a plan gives to the connections of this process to one address.

    Attributes:
        destination: IPv4 or IPv6 address of the peer.
        hops: the path, as (TTL, address) pairs. At each listed TTL, one of the addresses listed
            with it has to answer. Empty: any path.
        dscp: class of TCP connections, 0 to 63; None leaves it.
        qp_dscp: class of queue pairs whose program asks for DSCP 0; None leaves it.
        overrides: True to give ``qp_dscp`` to all queue pairs, whatever their program asks for.
        rate_Bps: limit of each connection in bytes per second; None for no limit.
        udp_ports: UDP source ports that are known to lead over the path (RoCEv2).
    """

    destination: str
    hops: tuple[tuple[int, str], ...] = ()
    dscp: int | None = None
    qp_dscp: int | None = None
    overrides: bool = False
    rate_Bps: int | None = None
    udp_ports: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for address in (self.destination, *(address for _, address in self.hops)):
            ipaddress.ip_address(address)
        if len(self.hops) > _MAX_HOPS:
            raise ValueError(f"a route lists at most {_MAX_HOPS} addresses of hops")
        if any(not 1 <= ttl <= 255 for ttl, _ in self.hops):
            raise ValueError("a TTL is from 1 to 255")
        if any(dscp is not None and not 0 <= dscp <= 63 for dscp in (self.dscp, self.qp_dscp)):
            raise ValueError("a DSCP value is from 0 to 63")
        if self.rate_Bps is not None and not 0 < self.rate_Bps < LEAVE_RATE:
            raise ValueError("a rate is a positive number of bytes per second")
        if any(not 0 < port < 65536 for port in self.udp_ports):
            raise ValueError("a port is from 1 to 65535")


@dataclass(frozen=True, slots=True)
class Connection:
    """One open connection of this process, as it was when it was listed.

    Attributes:
        id: of a socket its inode; of a queue pair a number that is never used again.
        how: how it got its settings; ``refused`` if at least one of them failed.
        error: errno of the last setting if it failed, else 0. If it was the search for a path:
            ETIMEDOUT, nobody answered; EHOSTUNREACH, only other paths did; EADDRINUSE, no source
            port was left; ERANGE, a listed TTL reaches the destination itself; ENOTUNIQ, one source
            port got answers from several paths, so packets are sprayed.
        owner: of a queue pair its communicator, if a label names it; of a socket the library that
            made it.
        local_port: of a queue pair the UDP source port, 0 if unknown.
        device, qpn, peer_qpn, flow_label, state: of a queue pair; ``enum ibv_qp_state``.
        rate_Bps: limit in bytes per second; None for no limit.
        bytes_sent, bytes_received: of a socket, without retransmissions. A queue pair has sent what
            this process posted to it by ``ibv_post_send()``, and received 0.
        probes: packets sent to find its path.
        via_ttl, via: the last hop that was probed (0 without a probe), and its answer.
        accepted: True for a socket that the other end opened, and chose the path of.
    """

    id: int
    kind: Kind
    how: How
    error: int
    fd: int
    owner: str
    device: str
    local: str
    peer: str
    local_port: int
    peer_port: int
    qpn: int
    peer_qpn: int
    flow_label: int
    dscp: int | None
    state: int
    rate_Bps: int | None
    bytes_sent: int
    bytes_received: int
    probes: int
    via_ttl: int
    via: str
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class SocketSetting:
    """A live socket's TOS or traffic class, and its pacing limit in bytes per second (None: none).

    ``original``: before the library first changed the socket, at connect or live; ``before`` this
    call; ``after``: as read back. None also if it can't be read.

    Attributes:
        errno: of the call that failed, 0 if none did, ENOENT if the socket is closed.
    """

    errno: int = 0
    original_tos: int | None = None
    before_tos: int | None = None
    after_tos: int | None = None
    original_rate_Bps: int | None = None
    before_rate_Bps: int | None = None
    after_rate_Bps: int | None = None


_TYPES: dict[str, Any] = {
    "int32": c_int32,
    "uint16": c_uint16,
    "uint32": c_uint32,
    "uint64": c_uint64,
    "address": ctypes.c_char * 46,
    "name": ctypes.c_char * 64,
    "reason": ctypes.c_char * 96,
}


def _fields(*declared: str) -> list[tuple[str, Any]]:
    """The fields of a structure; each text begins with the type of the names that follow."""
    split = (text.split() for text in declared)
    return [(name, _TYPES[kind]) for kind, *names in split for name in names]


# The structures of crux_transport.h.
class _Hop(ctypes.Structure):
    _fields_ = _fields("int32 ttl", "address address")


class _Route(ctypes.Structure):
    _fields_ = (
        *_fields("address destination", "int32 dscp qp_dscp overrides"),
        *_fields("uint64 rate_Bps", "uint32 hop_count"),
        ("hops", _Hop * _MAX_HOPS),
        ("port_count", c_uint32),
        ("ports", c_uint16 * _MAX_PORTS),
    )


class _Connection(ctypes.Structure):
    _fields_ = _fields(
        "uint64 id",
        "int32 kind how error fd",
        "name owner device",
        "address local peer",
        "uint16 local_port peer_port",
        "uint32 qpn peer_qpn flow_label",
        "int32 dscp state",
        "uint64 rate_Bps bytes_sent bytes_received",
        "uint32 probes",
        "int32 via_ttl",
        "address via",
        "int32 accepted",
    )


class _SocketSetting(ctypes.Structure):
    _fields_ = _fields(
        "int32 original_tos before_tos after_tos",
        "uint64 original_rate_Bps before_rate_Bps after_rate_Bps",
    )


class QueuePairOutcome(ctypes.Structure):
    """Result of changing a queue pair; ``how`` is an index of ``HOWS``."""

    _fields_ = _fields("int32 how error", "reason reason")


#: The functions of the library: return type and arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "abi": (c_int,),
    "sees_sockets": (c_int,),
    "sees_queue_pairs": (c_int,),
    "set_routes": (c_int, POINTER(_Route), c_size_t),
    "set_port_range": (c_int, c_uint16, c_uint16),
    "skip_ports": (c_int, POINTER(c_uint16), c_size_t),
    "connections": (c_size_t, POINTER(_Connection), c_size_t),
    "set_socket": (c_int, c_int, c_uint64, c_int32, c_uint64, POINTER(_SocketSetting)),
    "label": (c_int, c_int32, c_char_p, c_int32),
    "change_queue_pair": (c_int, c_uint64, c_uint32, c_uint64, POINTER(QueuePairOutcome)),
}


def is_preloaded() -> bool:
    """True if ``connect()`` of this process goes through the library."""
    try:
        return Transport.load().sees_sockets
    except TransportError:
        return False


class Transport:
    """The library in this process.

    Thread safety: any thread may call every method; the library has its own locks.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"crux_transport_{name}")
            function.restype, function.argtypes = result, arguments

    @staticmethod
    @functools.cache
    def load() -> Transport:
        """Returns the preloaded library if there is one, else the one in this package.

        Raises:
            TransportError: it is missing, can't be loaded, or is of another version.
        """
        # A preloaded library is in the global scope. A second copy would not know its connections.
        library = ctypes.CDLL(None)
        path = "the preloaded libcrux_transport.so"
        if not hasattr(library, "crux_transport_abi"):
            path = str(LIBRARY)
            try:
                library = ctypes.CDLL(path)
            except OSError as error:
                raise TransportError(
                    f"{error}: `pip install --no-build-isolation .` makes it"
                ) from None
        try:
            abi = library.crux_transport_abi()
            if abi != _ABI:
                said = f"has ABI {abi}, this package expects {_ABI}"
                raise TransportError(
                    f"{path} {said}: `pip install --no-build-isolation .` rebuilds it"
                )
            transport = Transport(library)
        except AttributeError as error:
            raise TransportError(f"{path} is incomplete ({error}): rebuild it") from None
        transport.skip_ports(*store_ports(os.environ))
        return transport

    @property
    def sees_sockets(self) -> bool:
        """True if ``connect()`` of this process goes through the library."""
        return bool(self.library.crux_transport_sees_sockets())

    @property
    def sees_queue_pairs(self) -> bool:
        """True if queue pairs of this process go through the shim for libibverbs."""
        return bool(self.library.crux_transport_sees_queue_pairs())

    def set_routes(self, routes: Sequence[Route]) -> None:
        """Replaces the routes for connections that are made from now on.

        If two have the same destination, the later one counts.

        Raises:
            TransportError: the library refuses them; the old routes stay.
        """
        array = (_Route * len(routes))(*map(_c_route, routes))
        self.checked("set_routes", array, len(routes))

    def set_port_range(self, first: int, last: int) -> None:
        """Sets the TCP source ports to choose from, inclusive; default 20000 to 28999.

        Raises:
            TransportError: the range is empty, or begins below 1024.
        """
        if not (0 <= first <= 65535 and 0 <= last <= 65535):
            raise TransportError(f"ports {first} to {last} are no port range")
        self.checked("set_port_range", first, last)

    def skip_ports(self, *ports: int) -> None:
        """Adds destination ports of rendezvous stores, which are never steered."""
        numbers = [port for port in ports if 0 < port < 65536]
        self.checked("skip_ports", (c_uint16 * len(numbers))(*numbers), len(numbers))

    def connections(self) -> list[Connection]:
        """Returns the open connections that the library saw being made, or has changed."""
        capacity = 64
        while True:
            array = (_Connection * capacity)()
            count = self.library.crux_transport_connections(array, capacity)
            if count <= capacity:
                return [_connection(c) for c in array[:count]]
            capacity = count + 64

    def set_socket(
        self, fd: int, inode: int, dscp: int | None = None, rate_Bps: int | None = None
    ) -> SocketSetting:
        """Sets class and pacing of a live TCP socket of this process; with neither, only reads.

        Never raises; the result says what failed.

        Args:
            fd, inode: a descriptor that the socket had when it was found, and its identity. If the
                descriptor is another file by now, nothing happens.
            dscp: 0 to 63; None leaves it. The two ECN bits stay.
            rate_Bps: limit in bytes per second, 0 for no limit; None leaves it.
        """
        read = _SocketSetting()
        dscp = -1 if dscp is None else dscp
        rate_Bps = LEAVE_RATE if rate_Bps is None else rate_Bps
        error = self.library.crux_transport_set_socket(fd, inode, dscp, rate_Bps, read)
        return SocketSetting(
            error,
            *map(_known, (read.original_tos, read.before_tos, read.after_tos)),
            *map(_limit, (read.original_rate_Bps, read.before_rate_Bps, read.after_rate_Bps)),
        )

    def checked(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library; raises TransportError if it refuses."""
        error = getattr(self.library, f"crux_transport_{name}")(*arguments)
        if error:
            raise TransportError(error, f"crux_transport_{name}: {os.strerror(error)}")


def store_ports(env: Mapping[str, str]) -> set[int]:
    """Returns the ports of the rendezvous stores that a job's environment names."""
    ports = set()
    for name in ("MASTER_PORT", "PET_RDZV_ENDPOINT", "CRUX_STORE"):
        text = env.get(name, "")
        with contextlib.suppress(ValueError):
            port = urlsplit(text if "//" in text else f"//{text}").port
            ports.add(port if port is not None else int(text))
    return ports


def _c_route(route: Route) -> _Route:
    hops = [_Hop(ttl, address.encode()) for ttl, address in route.hops]
    ports = route.udp_ports[:_MAX_PORTS]
    return _Route(
        route.destination.encode(),
        -1 if route.dscp is None else route.dscp,
        -1 if route.qp_dscp is None else route.qp_dscp,
        int(route.overrides),
        route.rate_Bps or 0,
        len(hops),
        (_Hop * _MAX_HOPS)(*hops),
        len(ports),
        (c_uint16 * _MAX_PORTS)(*ports),
    )


def _connection(c: _Connection) -> Connection:
    values: dict[str, Any] = {name: getattr(c, name) for name, *_ in _Connection._fields_}
    for name in ("owner", "device", "local", "peer", "via"):
        values[name] = values[name].decode(errors="replace")
    values["kind"] = KINDS[c.kind - 1]
    values["how"] = HOWS[c.how]
    values["dscp"] = _known(c.dscp)
    values["rate_Bps"] = _limit(c.rate_Bps)
    values["accepted"] = bool(c.accepted)
    return Connection(**values)


def _known(value: int) -> int | None:
    return None if value < 0 else value


def _limit(rate_Bps: int) -> int | None:
    return None if rate_Bps in (0, LEAVE_RATE) else rate_Bps
