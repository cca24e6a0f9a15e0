"""From a scenario to a cluster: what a scheduler needs to decide levels and paths itself."""

from __future__ import annotations

from crux_torch.schedule.model import Burst, Cluster, Flow, Job
from crux_torch.sim.scenario import Scenario, ScenarioError, ScenarioJob


def cluster_of(scenario: Scenario) -> tuple[Cluster, dict[str, tuple[int, ...]]]:
    """The scenario's jobs and links, and the paths in use as ``SchedulerOptions.default_path``.

    A job without alternatives gets one flow for each link, so that its bytes may differ from link
    to link. A job with alternatives gets one flow that takes one of them, which needs the same
    bytes on every link of every alternative.

    Raises:
        ScenarioError: what a cluster can't hold: delays, jobs that end, bursts that spread over
            links differently, alternatives of unequal bytes.
    """
    for name, link in scenario.links.items():
        if link.delay_s:
            raise ScenarioError(f"links.{name}.delay_s: schedulers know no delays, expected 0")
    jobs, default = [], {}
    for name, job in scenario.jobs.items():
        if job.iterations is not None:
            raise ScenarioError(f"jobs.{name}.iterations: expected jobs that run to the horizon")
        flows, chosen = _flows(name, job)
        default[name] = chosen
        jobs.append(
            Job(
                name=name,
                gpus=job.gpus,  # type: ignore[arg-type]
                flops=job.flops,
                compute_s=job.compute_s,
                flows=flows,
                bursts=_bursts(name, job),
            )
        )
    capacity_Bps = {name: link.capacity_Bps for name, link in scenario.links.items()}
    return Cluster(capacity_Bps, tuple(jobs)), default


def _flows(name: str, job: ScenarioJob) -> tuple[tuple[Flow, ...], tuple[int, ...]]:
    if not job.paths or len(job.paths) < 2:
        total: dict[str, float] = {}
        for burst in job.sent:
            for link, moved in burst.traffic.items():
                total[link] = total.get(link, 0.0) + moved
        flows = tuple(Flow(moved, ((link,),)) for link, moved in total.items() if moved > 0)
        return flows, (0,) * len(flows)
    sizes = {moved for traffic in job.paths.values() for moved in traffic.values()}
    if len(sizes) > 1 or job.path is None:
        raise ScenarioError(
            f"jobs.{name}.paths: expected the same bytes on every link of every alternative, and "
            "`path` to name the one in use"
        )
    flow = Flow(max(sizes, default=0.0), tuple(tuple(traffic) for traffic in job.paths.values()))
    return (flow,), (list(job.paths).index(job.path),)


def _bursts(name: str, job: ScenarioJob) -> tuple[Burst, ...]:
    total = sum(sum(burst.traffic.values()) for burst in job.sent)
    if total <= 0:
        return (Burst(1.0, 1.0),)
    bursts = []
    for burst in job.sent:
        share = sum(burst.traffic.values()) / total
        for link in {link for other in job.sent for link in other.traffic}:
            whole = sum(other.traffic.get(link, 0.0) for other in job.sent)
            if abs(burst.traffic.get(link, 0.0) - share * whole) > 1e-9 * whole:
                raise ScenarioError(
                    f"jobs.{name}.bursts: expected each burst to carry the same share of every "
                    f"link's bytes; link {link!r} differs"
                )
        bursts.append(Burst(burst.at, share))
    return tuple(bursts)
