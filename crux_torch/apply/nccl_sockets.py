"""The TCP connections that NCCL made in this process (``NCCL_NET=Socket``).

The transport library is loaded before NCCL and sees which library calls ``connect`` or ``accept``:
libnccl, or one of its plugins (``libnccl-net…``). All of NCCL's connections count, and new ones may
come with any operation (docs/classes.md, "NCCL over sockets").
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
