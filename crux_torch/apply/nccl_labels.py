"""Labels that tell which NCCL communicator a queue pair belongs to.

With the stand-in for libibverbs a communicator's class is a label, which the stand-in replaces
before the device sees it (docs/transport.md).

Both ends use the sender's class, so a label is made from the group's name alone: the same on every
rank, except for its two ECN bits. NCCL also copies the class to the service level, of which devices
read four bits; labels leave the upper two of those zero. On InfiniBand the service level decides
the priority, so there are no labels.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable

from crux_torch.apply.queue_pairs import QueuePairs
from crux_torch.apply.transport import TransportError
from crux_torch.host.rdma import read_devices

_STEP = 16
COUNT = 15
#: What a sender may say: not capable, ECT(1), ECT(0).
ECN_BITS = (0, 1, 2)
#: Tells the library of a label, its owner, and the DSCP to send with: :meth:`QueuePairs.label`.
Tell = Callable[[int, str, int], None]


class NcclLabels:
    """The labels of this process's communicators; its methods may be called from any thread.

    Args:
        load: returns the function that tells the library a label, or None if the library would
            see no queue pairs.
    """

    def __init__(self, load: Callable[[], Tell | None]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._owners: dict[int, list[str]] = {}
        self._dscp = 0

    def give(self, owner: str, ecn: int = 0) -> int | None:
        """The class for a new communicator: a label, or None if the stand-in is not loaded.

        Args:
            owner: the group's name; names that share a label are listed together.
        """
        tell = self._load()
        if tell is None or not owner:
            return None
        label = label_of(owner)
        with self._lock:
            owners = self._owners.setdefault(label, [])
            if owner not in owners:
                owners.append(owner)
            return label | ecn if self._told(tell, label) else None

    def set_dscp(self, dscp: int) -> None:
        """Sets the DSCP (0 to 63; 0 at first) of queue pairs that connect from now on.

        That includes those of older communicators, which connect when they are first used.
        """
        with self._lock:
            if dscp == self._dscp:
                return
            self._dscp = dscp
            tell = self._load() if self._owners else None
            if tell is not None:
                for label in self._owners:
                    self._told(tell, label)

    def _told(self, tell: Tell, label: int) -> bool:
        # A peer's host may use other ECN bits, and both ends use the sender's class.
        try:
            for ecn in ECN_BITS:
                tell(label | ecn, ",".join(self._owners[label]), self._dscp)
        except TransportError:
            return False
        return True


def label_of(owner: str) -> int:
    """A multiple of 16 from 16 to 240. Groups with neighbouring numbers get different ones."""
    number = int(owner) if owner.isdecimal() and owner.isascii() else zlib.crc32(owner.encode())
    return _STEP * (1 + number % COUNT)


def _load() -> Tell | None:
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
