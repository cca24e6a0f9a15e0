"""Ideal: what every job would do with the network to itself."""

from __future__ import annotations

from dataclasses import replace

from crux_torch.schedule.ecmp import ecmp
from crux_torch.schedule.model import Cluster, Decision
from crux_torch.schedule.options import SchedulerOptions


def ideal(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """No contention: every job alone on the default paths. An upper bound, not a schedule."""
    return replace(ecmp(cluster, options), isolated=True)
