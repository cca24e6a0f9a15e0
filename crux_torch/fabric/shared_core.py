"""The topology that is assumed when none is known: one core that everyone shares."""

from __future__ import annotations

from collections.abc import Sequence

from crux_torch.fabric.topology import Link, Topology, TopologyBuilder


def shared_core(
    hosts: Sequence[str], capacity_Bps: float, core_Bps: float | None = None
) -> Topology:
    """Hosts around one core link: ``up:HOST``, ``core``, ``down:HOST`` on every path.

    Any two jobs that leave their hosts contend on ``core``. That is the safe assumption: it
    orders jobs that may never meet, and never misses two that do.

    Args:
        hosts: their names, each once.
        capacity_Bps: bytes per second of every host's link, each way.
        core_Bps: bytes per second of the core; default: as much as one host's link.

    Raises:
        TopologyError: no host, a name twice, or a capacity that is not positive.
    """
    builder = TopologyBuilder()
    ingress = builder.node("core/in", "core")
    egress = builder.node("core/out", "core")
    link = Link(capacity_Bps)
    for host in hosts:
        builder.node(host, "host")
        builder.arrow(host, ingress, link, name=f"up:{host}")
        builder.arrow(egress, host, link, name=f"down:{host}")
    builder.arrow(ingress, egress, Link(core_Bps or capacity_Bps), name="core")
    return builder.build()
