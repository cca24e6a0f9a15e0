"""Which queue pairs belong to which NCCL communicator, told by the traffic class it was given.

NCCL names no communicator to verbs. But the class that a communicator is given arrives in the
address vector of each of its queue pairs, and the stand-in for libibverbs writes another one there
before the device sees it. So where the stand-in is loaded, a communicator's class is a label: the
transport library notes the owner, and sends with the DSCP of the job's level.

NCCL exchanges the class of the sender, so a label is made from the group's name alone and is the
same in every rank but for its two ECN bits, which are those that go out. NCCL also copies the class
to the service level, of which devices read four bits: labels leave the other two of those zero. On
InfiniBand the service level is what a priority goes by, so there are no labels.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable

from crux_torch.apply.queue_pairs import QueuePairs
from crux_torch.apply.transport import TransportError
from crux_torch.fabric.rdma import read_devices

_STEP = 16
COUNT = 15
#: What a sender may say: not capable, ECT(1), ECT(0).
ECN_BITS = (0, 1, 2)
#: Tells the library of a label, its owner, and the DSCP to send with: :meth:`QueuePairs.label`.
Tell = Callable[[int, str, int], None]


class NcclLabels:
    """The labels of this process's communicators; its methods may be called from any thread.

    Args:
        load: gives what tells the library of a label, or None where no queue pair would be seen.
    """

    def __init__(self, load: Callable[[], Tell | None]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._owners: dict[int, list[str]] = {}
        self._dscp = 0

    def give(self, owner: str, ecn: int = 0) -> int | None:
        """The class to make the communicator of the group ``owner`` with.

        Args:
            owner: the group's name; names that share a label are listed together.
            ecn: the two ECN bits to send with.

        Returns:
            A label, or None where the stand-in is not loaded.
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
        """What queue pairs that connect from now on send with, 0 to 63; 0 at first.

        It counts for communicators that were made before, too: they connect when they are used.
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
        # A peer's host may be configured for other bits, and both ends take the sender's class.
        try:
            for ecn in ECN_BITS:
                tell(label | ecn, ",".join(self._owners[label]), self._dscp)
        except TransportError:
            return False
        return True


def label_of(owner: str) -> int:
    """A multiple of 16 from 16 to 240; torch numbers groups, and neighbours get different ones."""
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
