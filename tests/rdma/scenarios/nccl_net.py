"""NCCL's own InfiniBand code moves data both ways between two devices of one process.

Usage: nccl_net.py LIBRARY [GROUP DSCP]    (GROUP: a communicator with a class; else NCCL's default)

Prints, as JSON, where NCCL found each function of libibverbs, the address vectors that it asked for
and that the device has, who owns the queue pairs, and what was posted to them. With the shim a
group's class is a label, which stands for DSCP; without, it is DSCP itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from crux_torch.apply.nccl import LABELS
from crux_torch.apply.wire import QueuePairs
from lab.nccl.library import Library
from lab.nccl.net import Net, finished
from lab.nccl.verbs import Verbs

#: Enough for messages on each of a connection's queue pairs.
MESSAGE_BYTES = 1 << 18
ECN = 2


def main(path: str, group: str | None = None, dscp: str = "0") -> None:
    library = Library(Path(path))
    traffic_class = None
    if group is not None:
        LABELS.set_dscp(int(dscp))
        label = LABELS.give(group, ECN)
        traffic_class = int(dscp) << 2 | ECN if label is None else label
    net = Net(library, "ncclNetIb", traffic_class)
    verbs = Verbs(library)
    devices = net.devices()
    opened, arrived = [], []
    for source, destination in ((0, 1), (1, 0)):
        handle, listener = net.listen(destination)
        sender, receiver = finished(net.connector(source, handle), net.acceptor(listener))
        data = os.urandom(MESSAGE_BYTES)
        _, received = finished(net.send(sender, data), net.receive(receiver, len(data)))
        arrived.append(received == data)
        opened.append((sender, receiver, listener))
    pairs = QueuePairs().list() if QueuePairs().are_seen else []
    for connection in opened:
        net.close(*connection)
    net.finalize()
    told = {"version": library.version, "devices": devices, "arrived": arrived}
    told |= {"traffic_class": traffic_class, "owners": sorted(pair.owner for pair in pairs)}
    told["posted"] = [(pair.peer, pair.peer_qpn, pair.bytes_sent) for pair in pairs]
    print(json.dumps(told | {"origins": verbs.origins, "connected": verbs.connected}))


if __name__ == "__main__":
    main(*sys.argv[1:])
