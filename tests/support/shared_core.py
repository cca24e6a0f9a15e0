"""A network in which all hosts share one link."""

from __future__ import annotations

from collections.abc import Sequence

from crux_torch.network.topology import Link, Topology, TopologyBuilder


def shared_core(hosts: Sequence[str], capacity_Bps: float) -> Topology:
    """Every path is ``up:HOST``, ``core``, ``down:HOST``."""
    builder = TopologyBuilder()
    ingress = builder.node("core/in", "core")
    egress = builder.node("core/out", "core")
    link = Link(capacity_Bps)
    for host in hosts:
        builder.node(host, "host")
        builder.arrow(host, ingress, link, name=f"up:{host}")
        builder.arrow(egress, host, link, name=f"down:{host}")
    builder.arrow(ingress, egress, link, name="core")
    return builder.build()
