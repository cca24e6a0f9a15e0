"""The RDMA queue pairs of this process, and changing one that is in use.

They are seen where libibverbs is the stand-in (:mod:`crux_torch.apply.standin`). Class and UDP
source port are set when a queue pair connects: by the label of its communicator, or by the route to
its peer (:class:`crux_torch.apply.transport.Route`). A live one is changed by the device's own call
where there is one (mlx5: port, rate), else by a reset that continues its packet numbers, where its
owner allows that; else it takes a switch to new connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from crux_torch.apply.transport import Connection, How, Transport, TransportError

#: As an owner: all of this process's queue pairs.
ALL_OWNERS = "*"
_HOWS: tuple[How, ...] = get_args(How)
_LEAVE_RATE = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a change.

    Attributes:
        how: by what means; ``needs_switch`` where only a new connection can have what is wanted.
        error: errno, 0 where it was made. ETIMEDOUT, EBUSY and ECANCELED may be tried again.
        applied: whether the new setting is in force; else the old one is.
        took_s: seconds that it took.
        reason: why it was not made, in words; else empty.
    """

    how: How
    error: int
    applied: bool
    took_s: float
    reason: str


class _Change(ctypes.Structure):
    _fields_ = (
        ("dscp", ctypes.c_int32),
        ("udp_port", ctypes.c_uint32),
        ("rate_Bps", ctypes.c_uint64),
        ("timeout_ms", ctypes.c_uint32),
    )


class _Outcome(ctypes.Structure):
    _fields_ = (
        ("how", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("applied", ctypes.c_int32),
        ("took_ns", ctypes.c_uint64),
        ("reason", ctypes.c_char * 96),
    )


class QueuePairs:
    """The queue pairs of this process; its methods may be called from any thread.

    Args:
        transport: the library; by default the one that is loaded.

    Raises:
        TransportError: there is none, or it is of another version.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport.load()
        library = self._transport.library
        try:
            for name, arguments in _FUNCTIONS:
                function = getattr(library, name)
                function.restype, function.argtypes = ctypes.c_int, arguments
        except AttributeError as error:
            raise TransportError(
                f"libcrux_transport.so is incomplete ({error}): rebuild it"
            ) from None

    @property
    def are_seen(self) -> bool:
        """Whether queue pairs of this process go through the stand-in."""
        return self._transport.sees_queue_pairs

    def list(self) -> list[Connection]:
        """Those that exist, in the order in which they were created."""
        return [one for one in self._transport.connections() if one.kind == "qp"]

    def label(self, traffic_class: int, owner: str, dscp: int | None = None) -> None:
        """Queue pairs that connect with ``traffic_class`` from now on belong to ``owner``.

        Args:
            traffic_class: 1 to 255; what a NCCL communicator was given as its ``trafficClass``.
            owner: the communicator.
            dscp: 0 to 63; what they go out with, beside the label's two ECN bits. None: with the
                label itself.

        Raises:
            TransportError: a value is out of range.
        """
        self._call("label", traffic_class, owner.encode(), -1 if dscp is None else dscp)

    def follow(self, on: bool = True) -> None:
        """Follows the work of devices that are opened from now on: only then can they be reset.

        ``CRUX_LIVE_QP=1`` does so from the start.

        Raises:
            TransportError: the library was built without verbs.
        """
        self._call("follow_queue_pairs", int(on))

    def allow_reset(self, owner: str, allow: bool = True) -> None:
        """Queue pairs of ``owner`` may be reset in use; ``ALL_OWNERS``: all of this process.

        Who allows it promises that nobody sends to a queue pair while it is changed (its peer is
        held, or silent by design), that its program posts and polls by ``ibv_post_send``,
        ``ibv_post_recv`` and ``ibv_poll_cq``, that it has no settings from outside the verbs that
        a reset would lose, and that both ends' timeouts and retries bridge a few milliseconds.

        Raises:
            TransportError: the owner is empty.
        """
        self._call("allow_reset", 0, owner.encode(), int(allow))

    def allow_reset_of(self, id: int, allow: bool = True) -> None:
        """The same for one queue pair. Raises TransportError (ENOENT) where it is gone."""
        self._call("allow_reset", id, None, int(allow))

    def hold(self, id: int, timeout_s: float = 1.0, lease_s: float = 1.0) -> None:
        """Holds back its sends, and waits until those that are out are done.

        Args:
            id: as in :meth:`list`.
            timeout_s: seconds to wait; after it nothing is held.
            lease_s: seconds after which it goes on by itself.

        Raises:
            TransportError: ETIMEDOUT, ENOENT, EBUSY, ECANCELED (the program modified or released
                it meanwhile), ENOTCONN, EOPNOTSUPP (its work is not followed).
        """
        self._call("hold", id, _ms(timeout_s), _ms(lease_s))

    def release(self, id: int) -> None:
        """Lets its sends go on. Raises TransportError: EINVAL where it is not held, ENOENT."""
        self._call("release", id)

    @contextlib.contextmanager
    def held(self, *ids: int, timeout_s: float = 1.0, lease_s: float = 1.0) -> Iterator[None]:
        """Holds several, as both ends of a connection in one process; releases what it held.

        Raises:
            TransportError: one could not be held; then none is.
        """
        with contextlib.ExitStack() as stack:
            for id in ids:
                self.hold(id, timeout_s, lease_s)
                stack.callback(self._release_quietly, id)
            yield

    def change(
        self,
        id: int,
        *,
        dscp: int | None = None,
        udp_port: int | None = None,
        rate_Bps: int | None = None,
        timeout_s: float = 1.0,
    ) -> Change:
        """Changes a live queue pair by the best means that there is. Never leaves it half changed.

        Args:
            id: as in :meth:`list`.
            dscp: 0 to 63; None leaves it.
            udp_port: 49152 to 65535; None leaves it.
            rate_Bps: bytes per second at most, 0 for no limit; None leaves it.
            timeout_s: seconds to wait for what it has sent, unless it is held.
        """
        wanted = _Change(
            -1 if dscp is None else dscp,
            udp_port or 0,
            _LEAVE_RATE if rate_Bps is None else rate_Bps,
            _ms(timeout_s),
        )
        outcome = _Outcome()
        error = self._transport.library.crux_transport_change_queue_pair(
            id, ctypes.byref(wanted), ctypes.byref(outcome)
        )
        reason = outcome.reason.decode() or (os.strerror(error) if error else "")
        applied = error == 0 and bool(outcome.applied)
        return Change(_HOWS[outcome.how], error, applied, outcome.took_ns * 1e-9, reason)

    def _release_quietly(self, id: int) -> None:
        # Its lease may be over, or the program may have destroyed it.
        with contextlib.suppress(TransportError):
            self.release(id)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._transport.library, f"crux_transport_{name}")(*arguments)
        if error:
            raise TransportError(error, f"crux_transport_{name}: {os.strerror(error)}")


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


_FUNCTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("crux_transport_label", (ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32)),
    ("crux_transport_follow_queue_pairs", (ctypes.c_int,)),
    ("crux_transport_allow_reset", (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int)),
    ("crux_transport_hold", (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)),
    ("crux_transport_release", (ctypes.c_uint64,)),
    (
        "crux_transport_change_queue_pair",
        (ctypes.c_uint64, ctypes.POINTER(_Change), ctypes.POINTER(_Outcome)),
    ),
)
