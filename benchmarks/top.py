"""Times `crux top` redrawing a large cluster, and `crux explain` explaining a job of it.

    python benchmarks/top.py [--jobs N] [--json FILE]

Made-up jobs of two hosts each below a leaf-spine network, without a store: the view is computed in
a thread of its own, the redraw is what keeps the screen from answering keys.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from crux_torch.agreement.inputs import agreed
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.planner import compute_entries
from crux_torch.agreement.records import JobRecord, Plan, StepTimes
from crux_torch.cli.results import Result, json_option, publish
from crux_torch.measure.profile import HostFlow, JobProfile, ProfileBurst
from crux_torch.network.topology import Link, Topology, TopologyBuilder
from crux_torch.report.cluster_status import ClusterStatus
from crux_torch.report.explanation import explain
from crux_torch.report.step_times import steps_of
from crux_torch.report.top_app import Rows, TopApp
from crux_torch.report.top_rows import loads_of, top_view
from crux_torch.settings import Marks

#: Hosts below a leaf, spines, and the capacity of every link.
BELOW, SPINES, LINK_Bps = 20, 8, 12.5e9
SCHEDULERS = ("crux", "crux-paper", "sincronia", "varys")
MARKS = Marks(tcp=tuple(range(8)), usable=tuple(range(8)))


def network(hosts: int) -> Topology:
    """A leaf-spine network of so many hosts."""
    builder = TopologyBuilder()
    spines = [builder.node(f"spine{j}", "aggregation") for j in range(SPINES)]
    for i in range(-(-hosts // BELOW)):
        leaf = builder.node(f"leaf{i}", "tor")
        for spine in spines:
            builder.cable(leaf, spine, Link(LINK_Bps))
        for k in range(BELOW):
            builder.cable(builder.node(f"h{i * BELOW + k}", "host"), leaf, Link(LINK_Bps))
    return builder.build()


def record(number: int, hosts: tuple[str, str], rng: random.Random) -> JobRecord:
    """A job that sends the same both ways for up to two thirds of its step."""
    compute_s, moved = rng.uniform(0.1, 0.4), rng.uniform(0.2, 1.0) * 2.5e9
    profile = JobProfile(
        period_s=compute_s + moved / LINK_Bps, period_source="marks", compute_s=compute_s,
        flops=rng.uniform(1, 10) * 1e14, flops_source="counted", gpus=16,
        flows=(HostFlow(*hosts, moved), HostFlow(*hosts[::-1], moved)),
        bursts=(ProfileBurst(1.0, 1.0),), t_s=moved / LINK_Bps, t_source="topology",
        t_measured_s=moved / LINK_Bps, overlap=0.0, exposed_s=moved / LINK_Bps, iterations=12,
        measured_alone=True,
    )  # fmt: skip
    return JobRecord(
        job=f"job-{number:04}", incarnation="i", hosts=hosts, gpus=16, state="running",
        profile=profile, marks=MARKS,
    )  # fmt: skip


def cluster(jobs: int, seed: int = 1) -> tuple[ClusterStatus, Topology]:
    """So many jobs on random hosts under the paper's plan, and their network."""
    rng = random.Random(seed)
    topology = network(2 * jobs)
    hosts = list(topology.hosts)
    rng.shuffle(hosts)
    records = tuple(record(n, (hosts[2 * n], hosts[2 * n + 1]), rng) for n in range(jobs))
    levels = agreed(records, topology).levels
    entries = compute_entries(records, topology, policy="crux-paper", levels=levels)
    plan = Plan(
        epoch=1, fingerprint="f", valid_s=15.0, author="job-0000", policy="crux-paper", digest="d",
        entries=entries,
    )  # fmt: skip
    told = {
        r.job: StepTimes(step_s=rng.uniform(1, 2) * r.profile.period_s, iterations=30, age_s=1.0)
        for r in records
        if r.profile
    }
    status = ClusterStatus(
        "unix:", "bench", records, plan, True, OperatorSettings(), (), steps_of(records, told)
    )
    return status, topology


def timed(work: Callable[[], object], times: int) -> float:
    """Median seconds of a call."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


class _NoReader:
    """A store that is not read."""

    topology = None

    def read(self) -> ClusterStatus:
        return ClusterStatus("unix:", "bench", (), None, None, OperatorSettings())

    def audit(self) -> tuple[()]:
        return ()


async def redraw_s(status: ClusterStatus, topology: Topology, times: int) -> float:
    """Median seconds from a view to painted lines, at 80 by 24, in another order each time."""
    view = top_view(status, topology, (), time.time())
    app = TopApp(_NoReader(), every_s=3600.0)  # type: ignore[arg-type]
    async with app.run_test(size=(80, 24)):
        await app.workers.wait_for_complete()
        table = app.query_one("#jobs", Rows)

        def draw() -> None:
            table.backwards = not table.backwards
            app.show(status, view, ())
            for y in range(table.size.height):
                table.render_line(y)

        return timed(draw, times)


@click.command()
@click.option("--jobs", default=1000, show_default=True, help="Of the large cluster.")
@click.option("--times", default=20, show_default=True, help="Repetitions; the median counts.")
@json_option
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/top.{json,txt}.")
def main(jobs: int, times: int, json_path: Path | None, out: Path | None) -> None:
    """Times redraws of `crux top`, and `crux explain`."""
    rows: list[dict[str, Any]] = []
    for count in (100, jobs):
        status, topology = cluster(count)
        links = len(loads_of(status, topology))
        rows += [
            {"jobs": count, "links": links, "what": what, "s": seconds}
            for what, seconds in (
                ("top: redraw", asyncio.run(redraw_s(status, topology, times))),
                ("top: view, loads known", timed(
                    lambda s=status, t=topology: top_view(s, t, (), 0.0, loads={}), times)),
                ("top: loads of links", timed(
                    lambda s=status, t=topology: loads_of(s, t), max(3, times // 5))),
                ("explain", timed(
                    lambda s=status, t=topology: explain(
                        s, t, (), "job-0000", schedulers=SCHEDULERS), 3)),
            )
        ]  # fmt: skip
    text = "".join(
        f"{row['jobs']:5} jobs {row['links']:5} links  {row['what']:24} {1e3 * row['s']:8.1f} ms\n"
        for row in rows
    )
    publish(Result("top", {"times": times}, rows), text, json_path, out)


if __name__ == "__main__":
    main()
