"""Ideal: what every job would do with the network to itself."""

from __future__ import annotations

from dataclasses import replace

from crux_torch.schedule.ecmp import ecmp
from crux_torch.schedule.model import Cluster, Decision
from crux_torch.schedule.options import SchedulerOptions


def ideal(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Every job alone on the default paths: the paper's ideal (§6.2), and not a schedule.

    It bounds what priorities and time shifts can gain, not what paths can: alone, too, a job's own
    flows may meet on the paths that ECMP gives them, and a scheduler that selects paths parts them.
    """
    return replace(ecmp(cluster, options), isolated=True)
