"""MLTCP: who has sent most of an iteration takes most of a link (Rajasekaran et al., HotNets '24).

Hosts coordinate nothing: each flow's congestion window grows faster the larger the share of its
iteration that it has sent. So jobs that collide drift apart. Only the simulator plays it.
"""

from __future__ import annotations

from dataclasses import replace

from crux_torch.schedule.model import Cluster, Decision, SchedulerOptions
from crux_torch.schedule.papers.baselines import ecmp

#: Aggressiveness F(r) = SLOPE * r + INTERCEPT for TCP Reno; not checked against the paper's text.
SLOPE, INTERCEPT = 1.75, 0.25


def mltcp(cluster: Cluster, options: SchedulerOptions) -> Decision:
    """Returns ECMP's plan, in which flows weigh more the more they have sent."""
    return replace(ecmp(cluster, options), weight_by_sent=True)


def weight(sent: float) -> float:
    """Returns the weight of a flow beside others of its level.

    Windows of flows that lose packets together grow in proportion to F, and so do their rates.

    Args:
        sent: share of the iteration's bytes that the flow has sent, from 0 to 1.
    """
    return SLOPE * min(max(sent, 0.0), 1.0) + INTERCEPT
