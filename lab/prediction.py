"""Steps that the simulator predicts for a turn of the contest, from the jobs measured alone."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from crux_torch.agent.rates import BURST_BYTES, LEAST_BURSTS
from crux_torch.agreement.inputs import plan_inputs
from crux_torch.agreement.records import JobRecord
from crux_torch.network.loaders import parse_yaml
from crux_torch.schedule.model import Cluster, Decision, Job
from crux_torch.schedule.papers.intensity import link_traffic
from crux_torch.schedule.papers.mlcc import SLOT_S
from crux_torch.sim.play import play
from lab.contest import NONE, Scenario, policy_of

#: Simulated iterations of the longest job; where mlcc books slots, which takes longer, fewer.
SIMULATED, IN_SLOTS = 200, 50
#: And of a job alone, for the rate that it reaches.
CALIBRATED = 40
#: Of what jobs reach on a link alone, what they may reach beside others, and the policy whose turns
#: tell what a level reaches beside other levels.
SHARES = tuple(round(1.0 - 0.01 * i, 2) for i in range(16))
ORDERED_BY = "crux-paper"
#: Share up to which the job's rate or computation is found.
EXACT = 1e-3
#: Share of a frame on the wire that is payload, for TCP and frames of 1,514 bytes.
PAYLOAD = 1448 / 1514


class Alone:
    """The jobs of a turn on the paths that their packets took, as each ran alone.

    Attributes:
        scenario: of the turn.
        cluster, path: see :func:`on_paths`.
        jobs: see :func:`as_alone`.
        longest_s: the longest step of a job alone.
    """

    def __init__(
        self,
        scenario: Scenario,
        records: Sequence[Mapping[str, Any]],
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        self.scenario = scenario
        self.cluster, self.path = on_paths(scenario, records, rows)
        alone_s = {row["job"]: row["alone_s"] for row in rows}
        self.longest_s = max(alone_s.values())
        slack_bytes = float(scenario.fabric().spec.queue_bytes)
        self.jobs = {
            job.name: as_alone(
                self.cluster, job, self.path[job.name], alone_s[job.name], slack_bytes
            )
            for job in self.cluster.jobs
        }


@dataclass(frozen=True)
class Reached:
    """Shares of its rate alone that a job reaches where others send (:func:`with_queues`).

    Attributes:
        together: several jobs of one level.
        beside: a level, where there are others.
    """

    together: float = 1.0
    beside: float = 1.0


def fitted(
    played: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]], Alone]],
) -> dict[str, Reached]:
    """Returns the shares of each scenario, by the turns of the others: no turn predicts itself.

    ``together`` has the least median error of a step under ``NONE``, then ``beside`` has it under
    ``ORDERED_BY``. Without such turns they are 1.

    Args:
        played: turns with their jobs.
    """
    found = {turn["scenario"]: Reached() for turn, _, _ in played}
    means: dict[tuple[int, Reached], dict[str, float]] = {}

    def error(policy: str, reached: Reached, but: str) -> float:
        """Median error in the policy's turns of all scenarios but one; 0 without any."""
        errors = []
        for i, (turn, jobs, alone) in enumerate(played):
            if turn["policy"] != policy or turn["scenario"] == but:
                continue
            if (i, reached) not in means:
                means[i, reached] = predict(alone, turn, reached)
            steps = [(means[i, reached].get(job["job"]), job["step_s"]) for job in jobs]
            errors += [abs(mean / step_s - 1.0) for mean, step_s in steps if mean and step_s]
        return statistics.median(errors) if errors else 0.0

    for name in found:
        for policy, which in ((NONE, "together"), (ORDERED_BY, "beside")):
            tried = [replace(found[name], **{which: share}) for share in SHARES]
            found[name] = min(tried, key=lambda reached: error(policy, reached, name))
    return found


def predict(alone: Alone, turn: Mapping[str, Any], reached: Reached) -> dict[str, float]:
    """Mean step of each job of a turn in the fluid engine.

    What it knows of a job was measured while the job was alone: the record, and the median step
    (:func:`as_alone`), and what jobs reach beside each other in other scenarios. Of the turn it
    knows paths, levels, shifts and the order of arrival.
    """
    scenario, path = alone.scenario, alone.path
    level = {name: turn["levels"].get(name, 0) for name in alone.jobs}
    grids: Mapping[str, Sequence[float]] = turn.get("grids", {})
    # Live, mlcc books the links that every path crosses: with several spines, none that jobs share.
    books = policy_of(turn["policy"]) == "mlcc" and scenario.spines == 1
    arrived_s = scenario.arrivals(random.Random(turn["seed"]))
    report = play(
        with_queues(alone.cluster, path, level, alone.jobs, reached),
        Decision(
            path=path,
            level=level,
            slot_s=SLOT_S if books else None,
            shift_s={name: shift_s for name, (shift_s, _) in grids.items()},
            grid_s={name: period_s for name, (_, period_s) in grids.items()},
        ),
        (IN_SLOTS if books else SIMULATED) * alone.longest_s,
        start_s={name: at_s for name, at_s in arrived_s.items() if name not in grids},
        slack_bytes=None if books else float(scenario.fabric().spec.queue_bytes),
        least_Bps=LEAST_BURSTS * BURST_BYTES / SLOT_S,
    )
    means = {name: job.mean_iteration_s for name, job in report.jobs.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def on_paths(
    scenario: Scenario, records: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]]
) -> tuple[Cluster, dict[str, tuple[int, ...]]]:
    """The jobs of a turn as they were measured alone, and the paths that their packets took."""
    cluster = plan_inputs(
        msgspec.convert(records, tuple[JobRecord, ...]),
        parse_yaml(scenario.fabric().topology_yaml()),
    )
    payload_Bps = {link: PAYLOAD * rate_Bps for link, rate_Bps in cluster.capacity_Bps.items()}
    cluster = replace(cluster, capacity_Bps=payload_Bps)
    spines = {row["job"]: f"spine{row['spine'] or 0}" for row in jobs}
    path = {
        job.name: tuple(
            next(i for i, c in enumerate(f.candidates) if any(spines[job.name] in s for s in c))
            for f in job.flows
        )
        for job in cluster.jobs
    }
    return cluster, path


def wanted(
    scenario: Scenario, records: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]]
) -> float:
    """Returns the load of the busiest link if every job ran as alone, as a share of its rate."""
    cluster, path = on_paths(scenario, records, jobs)
    alone_s = {row["job"]: row["alone_s"] for row in jobs}
    total: Counter[str] = Counter()
    for job in cluster.jobs:
        for link, amount in link_traffic(job, path[job.name]).items():
            total[link] += amount / alone_s[job.name] / cluster.capacity_Bps[link]
    return max(total.values())


def as_alone(
    cluster: Cluster, job: Job, path: tuple[int, ...], alone_s: float, slack_bytes: float
) -> tuple[Job, float]:
    """The job, and the share of a link's rate at which its step alone takes ``alone_s`` seconds.

    A step that is too short at the full rate lacks what the connections lose: their
    acknowledgements wait behind the data of the other direction, and ranks wait for each other's
    chunks. One that is too long was measured while the machine did other things, too: then the
    share is 1, and the job computes for less.
    """
    decision = Decision(path={job.name: path}, level={job.name: 0})

    def step_s(compute: float, share: float) -> float:
        rates_Bps = {link: share * rate_Bps for link, rate_Bps in cluster.capacity_Bps.items()}
        one = Cluster(rates_Bps, (replace(job, compute_s=compute * job.compute_s),))
        report = play(one, decision, CALIBRATED * alone_s, slack_bytes=slack_bytes)
        return report.jobs[job.name].mean_iteration_s or math.inf

    is_short = step_s(1.0, 1.0) < alone_s
    low, high = 0.0, 1.0
    while high - low > EXACT:
        middle = (low + high) / 2
        too_long = step_s(1.0, middle) > alone_s if is_short else step_s(middle, 1.0) <= alone_s
        low, high = (middle, high) if too_long else (low, middle)
    return (job, high) if is_short else (replace(job, compute_s=high * job.compute_s), 1.0)


def with_queues(
    cluster: Cluster,
    path: Mapping[str, tuple[int, ...]],
    level: Mapping[str, int],
    alone: Mapping[str, tuple[Job, float]],
    reached: Reached,
) -> Cluster:
    """The jobs of ``alone`` on their paths, on which each level of a link is a link of its own.

    A level has the mean of the shares of a link's rate that its jobs reach alone. Several jobs of
    one level reach less of it, since their acknowledgements wait behind each other's data. So does
    a level beside others, since a packet that is being sent is not interrupted. A link has one rate
    at all times: the loss also counts while one of them sends alone. All levels together have the
    link's rate.
    """
    capacity_Bps = dict(cluster.capacity_Bps)
    users: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    jobs = []
    for name, (job, share) in alone.items():
        mine = level[name]
        crossed: set[str] = set()
        flows = []
        for flow, chosen in zip(job.flows, path[name], strict=True):
            links = flow.candidates[chosen]
            crossed.update(links)
            route = tuple(itertools.chain(*((link, f"{link}@{mine}") for link in links)))
            flows.append(replace(flow, candidates=(route,) * len(flow.candidates)))
        for link in crossed:
            users[link][mine].append(share)
        jobs.append(replace(job, flows=tuple(flows)))
    for link, levels in users.items():
        for mine, shares in levels.items():
            part = statistics.mean(shares)
            part *= reached.together if len(shares) > 1 else 1.0
            part *= reached.beside if len(levels) > 1 else 1.0
            capacity_Bps[f"{link}@{mine}"] = part * cluster.capacity_Bps[link]
    return Cluster(capacity_Bps, tuple(jobs))
