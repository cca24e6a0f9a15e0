"""Networks by name: the paper's three clusters, fat trees, rail-optimised networks and tori.

Arguments that several builders take:
    server: inside of every host.
    cabling: capacities and delays of the network's links; default: sized by ``oversubscription``,
        the rate below a layer over the rate above it, in the fullest group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, inf, prod

from crux_torch.network.topology import Link, Topology, TopologyBuilder, TopologyError, check_size

GBPS = 1e9 / 8
#: PCIe 4.0: 16 GT/s a lane, 128b/130b coding, 16 lanes, each direction.
PCIE4_X16_Bps = 16e9 * 16 * 128 / 130 / 8
#: Third-generation NVLink of an A100: 12 links of 25 GB/s, each direction.
NVLINK3_Bps = 300e9
#: The fastest link of networks that are sized by their rates.
LARGEST_LINK_Bps = 400 * GBPS


def _at_least(least: int, **counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise TopologyError(f"{name} is {value!r}; expected a whole number, {least} or more")


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise TopologyError(f"{name} is {value!r}; expected a number above 0")


@dataclass(frozen=True, slots=True)
class GpuServer:
    """A host with GPUs on PCIe switches, NICs beside them, and NVLink between all GPUs.

    Each PCIe switch serves an equal share of the GPUs and of the NICs; its link to a NIC is what
    those GPUs share (§6.1, Figure 18: every two GPUs). The defaults are that testbed's host.

    Attributes:
        pcie_switches: divides ``gpus`` and ``nics``.
        nic_Bps: bytes per second of a NIC, all its ports together, each direction.
        pcie_Bps: bytes per second of every PCIe link, each direction.
        nvlink_Bps: bytes per second between a GPU and the NVSwitch, each direction; 0: no NVLink.
    """

    gpus: int = 8
    nics: int = 4
    pcie_switches: int = 4
    nic_Bps: float = 200 * GBPS
    pcie_Bps: float = PCIE4_X16_Bps
    nvlink_Bps: float = NVLINK3_Bps

    def __post_init__(self) -> None:
        for name in ("gpus", "nics", "pcie_switches"):
            _at_least(1, **{f"server.{name}": getattr(self, name)})
        if self.gpus % self.pcie_switches or self.nics % self.pcie_switches:
            raise TopologyError(
                f"server: {self.gpus} GPUs and {self.nics} NICs do not divide evenly among "
                f"{self.pcie_switches} PCIe switches"
            )
        for name in ("nic_Bps", "pcie_Bps", *(["nvlink_Bps"] if self.nvlink_Bps else [])):
            _positive(f"server.{name}", getattr(self, name))

    def check_size(self, hosts: int) -> None:
        """Refuse more hosts than a topology has room for; raises TopologyError."""
        inside = self.gpus + self.nics + self.pcie_switches
        check_size(hosts * (1 + inside), 2 * hosts * inside)

    def add_to(self, builder: TopologyBuilder, host: str) -> tuple[str, ...]:
        """Adds ``host`` and all that is in it. Returns its NICs."""
        builder.node(host, "host")
        # Costs above NVLink's, so that GPUs of one host use NVLink if there is any.
        pcie = Link(self.pcie_Bps, cost=2)
        switches = [f"{host}/pcie{i}" for i in range(self.pcie_switches)]
        nics = tuple(f"{host}/nic{i}" for i in range(self.nics))
        for switch in switches:
            builder.node(switch, "pcie", host)
            builder.cable(switch, host, pcie)
        if self.nvlink_Bps:
            builder.node(f"{host}/nvswitch", "nvswitch", host)
        for i in range(self.gpus):
            gpu = builder.node(f"{host}/gpu{i}", "gpu", host)
            builder.cable(gpu, switches[i * self.pcie_switches // self.gpus], pcie)
            if self.nvlink_Bps:
                builder.cable(gpu, f"{host}/nvswitch", Link(self.nvlink_Bps))
        for i, nic in enumerate(nics):
            builder.node(nic, "nic", host)
            builder.cable(switches[i * self.pcie_switches // self.nics], nic, pcie)
        return nics


@dataclass(frozen=True, slots=True)
class Cabling:
    """Capacities and delays of the network's links.

    Attributes:
        tor_aggregation_Bps, aggregation_core_Bps: bytes per second of one link between two layers.
        tor_aggregation_links, aggregation_core_links: parallel links between each such pair.
        link_delay_s: delay of every link of the network, switch latency included.
    """

    tor_aggregation_Bps: float = 100 * GBPS
    tor_aggregation_links: int = 1
    aggregation_core_Bps: float = 100 * GBPS
    aggregation_core_links: int = 1
    link_delay_s: float = 1e-6

    def __post_init__(self) -> None:
        for layer in ("tor_aggregation", "aggregation_core"):
            _positive(f"cabling.{layer}_Bps", getattr(self, f"{layer}_Bps"))
            _at_least(1, **{f"cabling.{layer}_links": getattr(self, f"{layer}_links")})
        if not 0 <= self.link_delay_s < inf:
            raise TopologyError(
                f"cabling.link_delay_s is {self.link_delay_s!r}; expected seconds, 0 or more"
            )


def sized_cabling(
    *,
    below_tor_Bps: float,
    tors_below_aggregation: int,
    aggregations: int,
    cores: int = 0,
    oversubscription: float = 1.0,
) -> Cabling:
    """Cables by a ratio: each layer's rate upwards is its rate downwards over a ratio.

    A connection above ``LARGEST_LINK_Bps`` is made of parallel links.

    Args:
        below_tor_Bps: bytes per second from the hosts into one ToR.
        tors_below_aggregation: ToRs that an aggregation switch serves.
        aggregations: aggregation switches above a ToR.
        cores: core switches above an aggregation switch; 0: there are none.
        oversubscription: 1 for none, 2 when half the rate leads upwards, at every layer.
    """
    _positive("oversubscription", oversubscription)
    tor_pair_Bps = below_tor_Bps / aggregations / oversubscription
    tor_links = ceil(tor_pair_Bps / LARGEST_LINK_Bps)
    sized = Cabling(tor_pair_Bps / tor_links, tor_links)
    if not cores:
        return sized
    core_pair_Bps = tor_pair_Bps * tors_below_aggregation / cores / oversubscription
    core_links = ceil(core_pair_Bps / LARGEST_LINK_Bps)
    return replace(
        sized, aggregation_core_Bps=core_pair_Bps / core_links, aggregation_core_links=core_links
    )


@dataclass(frozen=True, slots=True)
class _Racks:
    """Hosts, switches and cables of one network while a builder collects them."""

    server: GpuServer
    cabling: Cabling
    builder: TopologyBuilder = field(default_factory=TopologyBuilder)

    def host(self, name: str, switches_of_nic: list[tuple[str, ...]]) -> None:
        """Add a host and a port from each NIC to each of its switches, the NIC's rate shared."""
        nics = self.server.add_to(self.builder, name)
        for nic, switches in zip(nics, switches_of_nic, strict=True):
            link = Link(self.server.nic_Bps / len(switches), self.cabling.link_delay_s)
            for switch in switches:
                self.builder.cable(nic, switch, link)

    def switches(self, kind: str, name: str, count: int) -> list[str]:
        """Add ``name``0, ``name``1 and so on."""
        check_size(len(self.builder.nodes) + count, 0)
        return [self.builder.node(f"{name}{i}", kind) for i in range(count)]

    def join(self, below: Iterable[str], above: Sequence[str]) -> None:
        """Cable every switch below to every one above: ToRs to aggregations, these to cores."""
        c = self.cabling
        to_core = self.builder.nodes[above[0]].kind == "core"
        rate_Bps = c.aggregation_core_Bps if to_core else c.tor_aggregation_Bps
        count = c.aggregation_core_links if to_core else c.tor_aggregation_links
        for a, b in product(below, above):
            self.builder.cable(a, b, Link(rate_Bps, c.link_delay_s), count)


#: Figure 18's cables: two links of 100 Gbps from every ToR to every aggregation switch, which
#: makes 1.6 Tbps up for the 1.6 Tbps of the two hosts below.
TESTBED_CABLING = Cabling(tor_aggregation_Bps=100 * GBPS, tor_aggregation_links=2)


def crux_testbed(server: GpuServer | None = None, cabling: Cabling = TESTBED_CABLING) -> Topology:
    """The paper's testbed (§6.1, Figure 18): 12 hosts of 8 GPUs, 6 ToRs, 8 aggregation switches.

    Args:
        server: default: 8 GPUs, 4 NICs of 200 Gbps, a PCIe link to the NIC for every two GPUs.
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
    _at_least(1, hosts=hosts, tors=tors, aggregations=aggregations)
    server = server or GpuServer()
    server.check_size(hosts)
    cabling = cabling or sized_cabling(
        below_tor_Bps=ceil(hosts / tors) * server.nics * server.nic_Bps,
        tors_below_aggregation=tors,
        aggregations=aggregations,
        oversubscription=oversubscription,
    )
    racks = _Racks(server, cabling)
    tor_names = racks.switches("tor", "tor", tors)
    aggregation_names = racks.switches("aggregation", "agg", aggregations)
    for i in range(hosts):
        racks.host(f"h{i}", [(tor_names[i * tors // hosts],)] * server.nics)
    racks.join(tor_names, aggregation_names)
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
    _at_least(1, hosts=hosts, pods=pods)
    _at_least(2, tors_per_pod=tors_per_pod)
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
    _at_least(
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
    racks = _Racks(server, cabling)
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
            racks.join(group, cores[core_group])
        if tor_group not in tors:
            tors[tor_group] = racks.switches("tor", f"{tor_group}/tor", tors_per_group)
            racks.join(tors[tor_group], aggregations[aggregation_group])
        racks.host(host, [tuple(tors[tor_group])] * server.nics)
    return racks.builder.build()


def fat_tree(
    k: int = 4, server: GpuServer | None = None, link_Bps: float | None = None
) -> Topology:
    """The k-ary fat tree (Al-Fares et al., SIGCOMM 2008): k pods, k³/4 hosts, (k/2)² cores.

    Args:
        k: ports of a switch, an even number.
        server: all its NICs go to its one edge switch.
        link_Bps: bytes per second between switches; default: all NICs of one host together,
            which gives the full bisection that the fat tree is for.
    """
    _at_least(2, k=k)
    if k % 2:
        raise TopologyError(f"k is {k}; expected an even number")
    server = server or GpuServer()
    server.check_size(k**3 // 4)
    rate = link_Bps or server.nic_Bps * server.nics
    racks = _Racks(server, Cabling(tor_aggregation_Bps=rate, aggregation_core_Bps=rate))
    half = k // 2
    cores = racks.switches("core", "core", half * half)
    for pod in range(k):
        edge = racks.switches("tor", f"pod{pod}/tor", half)
        upper = racks.switches("aggregation", f"pod{pod}/agg", half)
        for i, tor in enumerate(edge, start=pod * half):
            for host in range(i * half, (i + 1) * half):
                racks.host(f"h{host}", [(tor,)] * server.nics)
            racks.join([tor], upper)
        for i, aggregation in enumerate(upper):
            racks.join([aggregation], cores[i * half : (i + 1) * half])
    return racks.builder.build()


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
        server: has as many rails as NICs.
    """
    _at_least(1, hosts=hosts, hosts_per_group=hosts_per_group, spines=spines)
    server.check_size(hosts)
    racks = _Racks(server, cabling or Cabling())
    spine_names = racks.switches("aggregation", "spine", spines)
    for group in range(-(-hosts // hosts_per_group)):
        rails = racks.switches("tor", f"group{group}/rail", server.nics)
        racks.join(rails, spine_names)
        first = group * hosts_per_group
        for i in range(first, min(first + hosts_per_group, hosts)):
            racks.host(f"h{i}", [(tor,) for tor in rails])
    return racks.builder.build()


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
        server: its NICs lead to the host's router.
        link_Bps: bytes per second of a link between routers, each direction.
        link_delay_s: delay of every link of the network.
    """
    if not isinstance(shape, tuple | list) or len(shape) not in (2, 3):
        raise TopologyError(f"shape is {shape!r}; expected two or three lengths")
    for i, length in enumerate(shape):
        _at_least(2, **{f"shape[{i}]": length})
    _positive("link_Bps", link_Bps)
    server = server or GpuServer()
    server.check_size(prod(shape))
    racks = _Racks(server, Cabling(link_delay_s=link_delay_s))
    places = list(product(*(range(length) for length in shape)))
    routers = {
        place: racks.builder.node("router" + "_".join(map(str, place)), "router")
        for place in places
    }
    for i, place in enumerate(places):
        racks.host(f"h{i}", [(routers[place],)] * server.nics)
    for place in places:
        for axis, length in enumerate(shape):
            if length == 2 and place[axis] == 1:
                continue
            after = (*place[:axis], (place[axis] + 1) % length, *place[axis + 1 :])
            racks.builder.cable(routers[place], routers[after], Link(link_Bps, link_delay_s))
    return racks.builder.build()


BUILDERS: dict[str, Callable[..., Topology]] = {
    "testbed": crux_testbed,
    "two_layer_clos": two_layer_clos,
    "double_sided": double_sided,
    "fat_tree": fat_tree,
    "rail_optimised": rail_optimised,
    "torus": torus,
}
