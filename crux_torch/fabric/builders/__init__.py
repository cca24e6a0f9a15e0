"""Networks by name: each builder returns a validated topology."""

from __future__ import annotations

from collections.abc import Callable

from crux_torch.fabric.builders.clos import crux_testbed, double_sided, fat_tree, two_layer_clos
from crux_torch.fabric.builders.rail import rail_optimised
from crux_torch.fabric.builders.server import Cabling, GpuServer
from crux_torch.fabric.builders.torus import torus
from crux_torch.fabric.topology import Topology

BUILDERS: dict[str, Callable[..., Topology]] = {
    "testbed": crux_testbed,
    "two_layer_clos": two_layer_clos,
    "double_sided": double_sided,
    "fat_tree": fat_tree,
    "rail_optimised": rail_optimised,
    "torus": torus,
}

__all__ = ["BUILDERS", "Cabling", "GpuServer"]
