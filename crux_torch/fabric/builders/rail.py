"""Rail-optimised networks: NIC i of every host on the switches of rail i."""

from __future__ import annotations

from crux_torch.fabric.builders.server import GBPS, Cabling, GpuServer, Racks, at_least
from crux_torch.fabric.topology import Topology

#: One NIC and one PCIe switch a GPU: the usual host of a rail-optimised network.
RAIL_SERVER = GpuServer(gpus=8, nics=8, pcie_switches=8, nic_Bps=200 * GBPS)


def rail_optimised(
    hosts: int = 32,
    hosts_per_group: int = 16,
    spines: int = 8,
    server: GpuServer = RAIL_SERVER,
    cabling: Cabling | None = None,
) -> Topology:
    """Groups of hosts; in each group one ToR a rail; every ToR on every spine.

    Args:
        hosts: hosts ``h0``..., group by group.
        hosts_per_group: hosts below one set of rail ToRs.
        spines: aggregation switches above all ToRs.
        server: what a host holds; it has as many rails as NICs.
        cabling: capacities and delays of the network's links.
    """
    at_least(1, hosts=hosts, hosts_per_group=hosts_per_group, spines=spines)
    server.check_size(hosts)
    racks = Racks(server, cabling or Cabling())
    spine_names = racks.switches("aggregation", "spine", spines)
    for group in range(-(-hosts // hosts_per_group)):
        rails = racks.switches("tor", f"group{group}/rail", server.nics)
        racks.tors_to_aggregations(rails, spine_names)
        first = group * hosts_per_group
        for i in range(first, min(first + hosts_per_group, hosts)):
            racks.host(f"h{i}", [(tor,) for tor in rails])
    return racks.builder.build()
