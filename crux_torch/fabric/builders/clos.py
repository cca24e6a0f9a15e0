"""Trees of ToR, aggregation and core switches: the paper's three clusters, and fat trees.

What several builders take: ``server`` is what a host holds. ``cabling`` has the capacities and
delays of the network's links; by default ``oversubscription`` sizes them, the rate below a layer
over the rate above it, in the fullest group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil

from crux_torch.fabric.builders.server import (
    GBPS,
    Cabling,
    GpuServer,
    Racks,
    at_least,
    sized_cabling,
)
from crux_torch.fabric.topology import Topology, TopologyError

#: Figure 18's cables: two links of 100 Gbps from every ToR to every aggregation switch, which
#: makes 1.6 Tbps up for the 1.6 Tbps of the two hosts below.
TESTBED_CABLING = Cabling(tor_aggregation_Bps=100 * GBPS, tor_aggregation_links=2)


def crux_testbed(server: GpuServer | None = None, cabling: Cabling = TESTBED_CABLING) -> Topology:
    """The paper's testbed (§6.1, Figure 18): 12 hosts of 8 GPUs, 6 ToRs, 8 aggregation switches.

    Args:
        server: default: 8 GPUs, 4 NICs of 200 Gbps, a PCIe link to the NIC for every two GPUs.
        cabling: default: two links of 100 Gbps between every ToR and aggregation switch.
    """
    return two_layer_clos(hosts=12, tors=6, aggregations=8, server=server, cabling=cabling)


def two_layer_clos(
    hosts: int = 346,
    tors: int = 173,
    aggregations: int = 16,
    server: GpuServer | None = None,
    cabling: Cabling | None = None,
    oversubscription: float = 1.0,
) -> Topology:
    """Every host on one ToR, every ToR on every aggregation switch.

    The defaults are the paper's two-layer cluster (§6.1: 173 ToRs, 16 aggregation switches); it
    does not give the number of hosts, and two a ToR is the testbed's ratio.

    Args:
        hosts: hosts ``h0``..., filled in ToR by ToR.
    """
    at_least(1, hosts=hosts, tors=tors, aggregations=aggregations)
    server = server or GpuServer()
    server.check_size(hosts)
    cabling = cabling or sized_cabling(
        below_tor_Bps=ceil(hosts / tors) * server.nics * server.nic_Bps,
        tors_below_aggregation=tors,
        aggregations=aggregations,
        oversubscription=oversubscription,
    )
    racks = Racks(server, cabling)
    tor_names = racks.switches("tor", "tor", tors)
    aggregation_names = racks.switches("aggregation", "agg", aggregations)
    for i in range(hosts):
        racks.host(f"h{i}", [(tor_names[i * tors // hosts],)] * racks.server.nics)
    racks.tors_to_aggregations(tor_names, aggregation_names)
    return racks.builder.build()


def double_sided(
    hosts: int = 264,
    pods: int = 3,
    tors_per_pod: int = 2,
    aggregations_per_pod: int = 4,
    cores: int = 32,
    server: GpuServer | None = None,
    cabling: Cabling | None = None,
    oversubscription: float = 1.0,
) -> Topology:
    """Three layers, every NIC with a port to both ToRs of its pair (§6.1).

    The defaults are the paper's: 6 ToRs, 12 aggregation and 32 core switches, eight links a host
    to two ToRs. How they group is not said there; the published topology of that cluster has
    three groups of aggregation switches, hence three pods. 264 hosts hold the "2,000+ GPUs".

    Args:
        hosts: hosts ``h0``..., filled in pod by pod, ToR pair by ToR pair.
        tors_per_pod: an even number: they come in pairs.
        cores: core switches, each joined to every aggregation switch.
    """
    at_least(1, hosts=hosts, pods=pods)
    at_least(2, tors_per_pod=tors_per_pod)
    if tors_per_pod % 2:
        raise TopologyError(f"tors_per_pod is {tors_per_pod}; expected an even number")
    server = server or GpuServer()
    server.check_size(hosts)
    pairs = pods * tors_per_pod // 2
    places = {}
    for i in range(hosts):
        pair = i * pairs // hosts
        pod = pair // (tors_per_pod // 2)
        places[f"h{i}"] = ("dc", f"pod{pod}", f"pod{pod}/pair{pair}")
    return grouped_clos(places, server, cabling, 2, aggregations_per_pod, cores, oversubscription)


def grouped_clos(
    places: Mapping[str, tuple[str, str, str]],
    server: GpuServer,
    cabling: Cabling | None,
    tors_per_group: int,
    aggregations_per_group: int,
    cores_per_group: int,
    oversubscription: float = 1.0,
) -> Topology:
    """Three layers of switch groups, full meshes between a group and the groups above it.

    Args:
        places: for each host its core, aggregation and ToR group.
        server: every NIC has a port to each ToR of the host's group.
        tors_per_group, aggregations_per_group, cores_per_group: switches of a group of each layer.
    """
    at_least(
        1,
        tors_per_group=tors_per_group,
        aggregations_per_group=aggregations_per_group,
        cores_per_group=cores_per_group,
    )
    hosts_below = Counter(tor_group for _, _, tor_group in places.values())
    groups_below = Counter(group for group, _ in {(a, t) for _, a, t in places.values()})
    cabling = cabling or sized_cabling(
        below_tor_Bps=max(hosts_below.values()) * server.nics * server.nic_Bps / tors_per_group,
        tors_below_aggregation=max(groups_below.values()) * tors_per_group,
        aggregations=aggregations_per_group,
        cores=cores_per_group,
        oversubscription=oversubscription,
    )
    racks = Racks(server, cabling)
    cores: dict[str, list[str]] = {}
    aggregations: dict[str, list[str]] = {}
    tors: dict[str, list[str]] = {}
    for host, (core_group, aggregation_group, tor_group) in places.items():
        if core_group not in cores:
            cores[core_group] = racks.switches("core", f"{core_group}/core", cores_per_group)
        if aggregation_group not in aggregations:
            group = racks.switches(
                "aggregation", f"{aggregation_group}/agg", aggregations_per_group
            )
            aggregations[aggregation_group] = group
            racks.aggregations_to_cores(group, cores[core_group])
        if tor_group not in tors:
            tors[tor_group] = racks.switches("tor", f"{tor_group}/tor", tors_per_group)
            racks.tors_to_aggregations(tors[tor_group], aggregations[aggregation_group])
        racks.host(host, [tuple(tors[tor_group])] * server.nics)
    return racks.builder.build()


def fat_tree(
    k: int = 4, server: GpuServer | None = None, link_Bps: float | None = None
) -> Topology:
    """The k-ary fat tree (Al-Fares et al., SIGCOMM 2008): k pods, k³/4 hosts, (k/2)² cores.

    Args:
        k: ports of a switch, an even number.
        server: what a host holds; all its NICs go to its one edge switch.
        link_Bps: bytes per second between switches; default: all NICs of one host together,
            which gives the full bisection that the fat tree is for.
    """
    at_least(2, k=k)
    if k % 2:
        raise TopologyError(f"k is {k}; expected an even number")
    server = server or GpuServer()
    server.check_size(k**3 // 4)
    rate = link_Bps or server.nic_Bps * server.nics
    racks = Racks(server, Cabling(tor_aggregation_Bps=rate, aggregation_core_Bps=rate))
    half = k // 2
    cores = racks.switches("core", "core", half * half)
    for pod in range(k):
        edge = racks.switches("tor", f"pod{pod}/tor", half)
        upper = racks.switches("aggregation", f"pod{pod}/agg", half)
        for i, tor in enumerate(edge, start=pod * half):
            for host in range(i * half, (i + 1) * half):
                racks.host(f"h{host}", [(tor,)] * server.nics)
            racks.tors_to_aggregations([tor], upper)
        for i, aggregation in enumerate(upper):
            racks.aggregations_to_cores([aggregation], cores[i * half : (i + 1) * half])
    return racks.builder.build()
