"""The TCP connections that NCCL made in this process (``NCCL_NET=Socket``).

NCCL publishes no address, and its sockets bear no option that others lack. But the transport
library, loaded before NCCL, saw which library called ``connect`` or ``accept``: libnccl, or one of
its plugins (``libnccl-net…``). A communicator is made at a group's first operation, and connections
between two ranks at the first operation that needs them, on threads of NCCL; so the question is
asked again and again, and never answered by what happened when the group was made.

All that NCCL makes counts: the connections that carry data and the one beside them that carries
their sizes, the bootstrap ring, and its service for reliability (RAS), which carry next to nothing.
They are the same job's, and left in the default class they would wait behind other jobs' data
whenever a communicator is made. Which communicator a connection belongs to nobody knows: NCCL's
service threads make them. Class and rate are a job's, so nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from crux_torch.apply.transport import Connection, Transport, TransportError

#: What the callers' file names begin with; the second is a torch with NCCL linked in.
LIBRARIES = ("libnccl", "libtorch_cuda")


def made_by_nccl() -> frozenset[int]:
    """Inodes of NCCL's connections that are open; none where the library was not loaded first."""
    try:
        transport = Transport.load()
        if not transport.sees_sockets:
            return frozenset()
        return of_nccl(transport.connections())
    except TransportError:
        return frozenset()


def of_nccl(connections: Iterable[Connection]) -> frozenset[int]:
    """Inodes of those that NCCL made, or accepted."""
    return frozenset(c.id for c in connections if c.kind == "tcp" and c.owner.startswith(LIBRARIES))
