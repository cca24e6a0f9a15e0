"""What stands in a rack: the GPU server that every builder wires up, and the cables' figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, inf

from crux_torch.fabric.topology import Link, TopologyBuilder, TopologyError, check_size

GBPS = 1e9 / 8
#: PCIe 4.0: 16 GT/s a lane, 128b/130b coding, 16 lanes, each direction.
PCIE4_X16_Bps = 16e9 * 16 * 128 / 130 / 8
#: Third-generation NVLink of an A100: 12 links of 25 GB/s, each direction.
NVLINK3_Bps = 300e9


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
            at_least(1, **{f"server.{name}": getattr(self, name)})
        if self.gpus % self.pcie_switches or self.nics % self.pcie_switches:
            raise TopologyError(
                f"server: {self.gpus} GPUs and {self.nics} NICs do not divide evenly among "
                f"{self.pcie_switches} PCIe switches"
            )
        for name in ("nic_Bps", "pcie_Bps", *(["nvlink_Bps"] if self.nvlink_Bps else [])):
            positive(f"server.{name}", getattr(self, name))

    def check_size(self, hosts: int) -> None:
        """Refuse more hosts than a topology has room for; raises TopologyError."""
        inside = self.gpus + self.nics + self.pcie_switches
        check_size(hosts * (1 + inside), 2 * hosts * inside)

    def add_to(self, builder: TopologyBuilder, host: str) -> tuple[str, ...]:
        """Add ``host`` and all that is in it; returns its NICs."""
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
            positive(f"cabling.{layer}_Bps", getattr(self, f"{layer}_Bps"))
            at_least(1, **{f"cabling.{layer}_links": getattr(self, f"{layer}_links")})
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
    largest_link_Bps: float = 400 * GBPS,
) -> Cabling:
    """Cables by a ratio: each layer's rate upwards is its rate downwards over a ratio.

    Args:
        below_tor_Bps: bytes per second from the hosts into one ToR.
        tors_below_aggregation: ToRs that an aggregation switch serves.
        aggregations: aggregation switches above a ToR.
        cores: core switches above an aggregation switch; 0: there are none.
        oversubscription: 1 for none, 2 when half the rate leads upwards, at every layer.
        largest_link_Bps: a faster connection is made of parallel links, each no faster.
    """
    positive("oversubscription", oversubscription)
    tor_pair_Bps = below_tor_Bps / aggregations / oversubscription
    tor_links = ceil(tor_pair_Bps / largest_link_Bps)
    sized = Cabling(tor_pair_Bps / tor_links, tor_links)
    if not cores:
        return sized
    core_pair_Bps = tor_pair_Bps * tors_below_aggregation / cores / oversubscription
    core_links = ceil(core_pair_Bps / largest_link_Bps)
    return replace(
        sized,
        aggregation_core_Bps=core_pair_Bps / core_links,
        aggregation_core_links=core_links,
    )


@dataclass(frozen=True, slots=True)
class Racks:
    """The common start of every builder: servers, cables and the builder that collects them."""

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
        """Add switches of one kind: ``name``0, ``name``1 and so on."""
        check_size(len(self.builder.nodes) + count, 0)
        return [self.builder.node(f"{name}{i}", kind) for i in range(count)]

    def tors_to_aggregations(self, tors: Sequence[str], aggregations: Sequence[str]) -> None:
        """Join every ToR to every aggregation switch."""
        c = self.cabling
        self._mesh(tors, aggregations, c.tor_aggregation_Bps, c.tor_aggregation_links)

    def aggregations_to_cores(self, aggregations: Sequence[str], cores: Sequence[str]) -> None:
        """Join every aggregation switch to every core switch."""
        c = self.cabling
        self._mesh(aggregations, cores, c.aggregation_core_Bps, c.aggregation_core_links)

    def _mesh(
        self, below: Sequence[str], above: Sequence[str], rate_Bps: float, links: int
    ) -> None:
        for a, b in product(below, above):
            self.builder.cable(a, b, Link(rate_Bps, self.cabling.link_delay_s), links)


def at_least(least: int, **counts: int) -> None:
    """Refuse a count below ``least``."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise TopologyError(f"{name} is {value!r}; expected a whole number, {least} or more")


def positive(name: str, value: float) -> None:
    """Refuse what is not a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise TopologyError(f"{name} is {value!r}; expected a number above 0")
