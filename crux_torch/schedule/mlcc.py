"""mlcc: the network's own paths and one level; the hosts book and pace their flows in slots."""

from __future__ import annotations

from dataclasses import replace

from crux_torch.schedule.ecmp import ecmp
from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions
from crux_torch.schedule.rates import SLOT_S


def mlcc(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """What a plan says under mlcc. The rates are no part of it: every flow finds its own, again and
    again, with what :mod:`crux_torch.schedule.rates` says."""
    return replace(ecmp(cluster, options), slot_s=SLOT_S)
