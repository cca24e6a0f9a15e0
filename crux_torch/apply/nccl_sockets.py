"""The TCP connections that NCCL made in this process (``NCCL_NET=Socket``).

NCCL publishes no address, and its sockets have no option of their own. But the transport library is
loaded before NCCL and sees which library calls ``connect`` or ``accept``: libnccl, or one of its
plugins (``libnccl-net…``). NCCL makes a communicator at a group's first operation, and connections
between two ranks at the first operation that needs them, on its own threads. So Crux asks for them
again and again.

All connections of NCCL count: those that carry data, the one beside them that carries sizes, the
bootstrap ring, and its service for reliability (RAS). The last two carry next to nothing, but in
the default class they would wait behind other jobs' data whenever a communicator is made. NCCL's
service threads make the connections, so nobody knows which communicator one belongs to. Nothing
depends on that, because class and rate belong to the job.
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
