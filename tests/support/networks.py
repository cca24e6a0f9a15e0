"""Topologies that tests of several packages share, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from crux_torch.network.topology import Link, Topology, TopologyBuilder
from crux_torch.settings import Marks

LEAF_SPINE = """
version: 1
hosts: {h0: , h1: , h2: }
switches: {leaf0: tor, leaf1: tor, spine0: aggregation, spine1: aggregation}
links:
  - {between: [h0, leaf0], capacity_Bps: 1e9}
  - {between: [h2, leaf0], capacity_Bps: 1e9}
  - {between: [h1, leaf1], capacity_Bps: 1e9}
  - {between: [leaf0, spine0], capacity_Bps: 1e8}
  - {between: [leaf0, spine1], capacity_Bps: 1e8}
  - {between: [leaf1, spine0], capacity_Bps: 1e8}
  - {between: [leaf1, spine1], capacity_Bps: 1e8}
addresses:
  h0: [10.0.0.2]
  h1: [10.1.0.2, "fd00::2"]
  h2: [10.0.1.2]
  spine0: [10.100.0.2, 10.100.16.2]
  spine1: [10.100.1.2, 10.100.17.2]
"""
NETWORK = """
version: 1
hosts: {h0: , h1: }
switches: {tor: tor}
links: [{between: [h0, tor], capacity_Bps: 1e9}, {between: [tor, h1], capacity_Bps: 1e9}]
"""
QOS = """
qos:
  tcp:
    - {dscp: 0, priority: 0}
    - {dscp: 10, priority: 1}
    - {dscp: 18, priority: 2}
    - {dscp: 48, priority: 6, reserved_by: routing}
  rdma:
    - {dscp: 26, priority: 3, lossless: true, ecn: true}
    - {dscp: 28, priority: 4, lossless: true, ecn: true}
    - {dscp: 34, priority: 5, lossless: true, ecn: true}
    - {dscp: 48, priority: 6, reserved_by: routing}
"""
OF_QOS = Marks((0, 10, 18, 48), (26, 28, 34, 48), (0, 1, 2))


@st.composite
def networks(draw: st.DrawFn) -> Topology:
    """A random connected network of switches, with hosts of one to three NICs and two GPUs."""
    builder = TopologyBuilder()
    switches = [builder.node(f"s{i}", "tor") for i in range(draw(st.integers(1, 6)))]
    cost = st.integers(1, 3)
    for i, switch in enumerate(switches[1:], start=1):
        builder.cable(switch, switches[draw(st.integers(0, i - 1))], Link(1.0, cost=draw(cost)))
    for _ in range(draw(st.integers(0, 6))):
        a, b = draw(st.sampled_from(switches)), draw(st.sampled_from(switches))
        if a != b:
            builder.cable(a, b, Link(1.0, cost=draw(cost)), count=draw(st.integers(1, 2)))
    for h in range(draw(st.integers(2, 3))):
        host = builder.node(f"h{h}", "host")
        pcie = builder.node(f"h{h}/pcie", "pcie", host)
        builder.cable(host, pcie, Link(1.0, cost=2))
        for g in range(2):
            builder.cable(builder.node(f"h{h}/gpu{g}", "gpu", host), pcie, Link(1.0, cost=2))
        for n in range(draw(st.integers(1, 3))):
            nic = builder.node(f"h{h}/nic{n}", "nic", host)
            builder.cable(pcie, nic, Link(1.0, cost=2))
            for switch in draw(st.lists(st.sampled_from(switches), min_size=1, max_size=2)):
                builder.cable(nic, switch, Link(1.0))
    return builder.build()
