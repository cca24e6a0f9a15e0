"""Tori of two and three dimensions: every host has a router that forwards for its neighbours."""

from __future__ import annotations

from itertools import product
from math import prod

from crux_torch.fabric.builders.server import GBPS, Cabling, GpuServer, Racks, at_least, positive
from crux_torch.fabric.topology import Link, Topology, TopologyError


def torus(
    shape: tuple[int, ...] = (4, 4),
    server: GpuServer | None = None,
    link_Bps: float = 100 * GBPS,
    link_delay_s: float = 1e-6,
) -> Topology:
    """Hosts ``h0``... in row-major order on a torus.

    Args:
        shape: hosts along each dimension; two or three dimensions, each 2 or more long. A
            dimension of length 2 has one link between its two hosts, not two.
        server: what a host holds; its NICs lead to the host's router.
        link_Bps: bytes per second of a link between routers, each direction.
        link_delay_s: delay of every link of the network.
    """
    if not isinstance(shape, tuple | list) or len(shape) not in (2, 3):
        raise TopologyError(f"shape is {shape!r}; expected two or three lengths")
    for i, length in enumerate(shape):
        at_least(2, **{f"shape[{i}]": length})
    positive("link_Bps", link_Bps)
    server = server or GpuServer()
    server.check_size(prod(shape))
    racks = Racks(server, Cabling(link_delay_s=link_delay_s))
    places = list(product(*(range(length) for length in shape)))
    routers = {
        place: racks.builder.node("router" + "_".join(map(str, place)), "router")
        for place in places
    }
    for i, place in enumerate(places):
        racks.host(f"h{i}", [(routers[place],)] * racks.server.nics)
    for place in places:
        for axis, length in enumerate(shape):
            if length == 2 and place[axis] == 1:
                continue
            after = (*place[:axis], (place[axis] + 1) % length, *place[axis + 1 :])
            racks.builder.cable(routers[place], routers[after], Link(link_Bps, link_delay_s))
    return racks.builder.build()
