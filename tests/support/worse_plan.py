"""lab.train under a default policy that was made worse by hand: who computes most goes last."""

from __future__ import annotations

import runpy

from crux_torch.schedule.default import crux as policy
from crux_torch.schedule.default.search import Assignment
from crux_torch.schedule.model import SchedulerOptions


def worst(component: policy.Component, options: SchedulerOptions) -> tuple[Assignment, str]:
    """A level of its own for each job, the lower the more of its time its devices compute."""
    jobs = component.jobs
    order = sorted(range(len(jobs)), key=lambda j: -jobs[j].gpus * jobs[j].compute_s)
    level = tuple(order.index(j) for j in range(len(jobs)))
    return Assignment(component.selected, level), ""


if __name__ == "__main__":
    policy.decide = worst
    runpy.run_module("lab.train", run_name="__main__")
