"""The operator's page of a large cluster in Chromium: bytes, time to render, time to first paint.

    python benchmarks/page.py [--jobs 1000] [--repeats 5] [--out DIR]

Hosts stand in racks of 20 under a ToR switch, and every ToR switch has one uplink to each of 20
aggregation switches: 1,000 hosts have 2,000 links. A job has two to four hosts, drawn at random,
and is slowed down at random. An hour of samples and a full audit log are there. The page is served
over loopback, piece by piece. From the begin of the navigation, the browser reports its *first
paint*, and when the *whole* page was there; *render* is the server's part of that. On a machine
that does other things, too, the least of the visits says more than their median. Both the first
visit and the page of one job are opened.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from pathlib import Path

import click

from crux_torch.agreement.audit import MAX_PLANS, AuditEntry
from crux_torch.agreement.operator import OperatorSettings
from crux_torch.agreement.records import JobRecord, Plan, PlanEntry, StepTimes
from crux_torch.cli.results import Result, json_option, publish
from crux_torch.measure.profile import HostFlow, JobProfile, ProfileBurst
from crux_torch.network.topology import Link, Topology, TopologyBuilder
from crux_torch.report.cluster_status import ClusterStatus
from crux_torch.report.page.hour import HOUR_S
from crux_torch.report.page.operator_page import OperatorPage
from crux_torch.report.page.server import PageServer
from crux_torch.report.step_times import steps_of
from crux_torch.settings import Marks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lab.browser import Browser, available

RACK, AGGREGATIONS = 20, 20
LINK_BPS = 12.5e9
#: Seconds between two samples of the hour.
SAMPLE_S = 120.0
MARKS = Marks(tcp=tuple(range(8)), usable=tuple(range(8)))
#: Name, width, height, whether in the dark, and address of each picture.
PICTURES = (
    ("page", 1200, 1500, False, "?job=tenant-0/train-0000"),
    ("page-narrow", 400, 1500, True, "?link=tor0->agg0"),
)
#: Goals for 1,000 jobs and 2,000 links.
GOAL_S, GOAL_BYTES = 1.0, 1_000_000


def fabric(hosts: int) -> Topology:
    """Racks of hosts below aggregation switches."""
    builder = TopologyBuilder()
    aggregations = [builder.node(f"agg{i}", "aggregation") for i in range(AGGREGATIONS)]
    for number in range(hosts):
        if number % RACK == 0:
            tor = builder.node(f"tor{number // RACK}", "tor")
            for aggregation in aggregations:
                builder.cable(tor, aggregation, Link(LINK_BPS))
        host = builder.node(f"host{number:04}", "host", f"host{number:04}")
        builder.cable(host, tor, Link(LINK_BPS))
    return builder.build()


class Crowd:
    """The state of a cluster of many jobs, as a ``ClusterReader`` gives it; drawn from a seed."""

    def __init__(self, jobs: int, hosts: int, seed: int = 0) -> None:
        self.topology: Topology | None = fabric(hosts)
        self._draw = random.Random(seed)
        names = [f"host{number:04}" for number in range(hosts)]
        self._jobs = tuple(
            self._job(f"tenant-{n % 7}/train-{n:04}", self._draw.sample(names, n % 3 + 2))
            for n in range(jobs)
        )
        entries = tuple(
            PlanEntry(job=job.job, level=n % 8, priority=1e12, intensity=1e12, correction=1.0)
            for n, job in enumerate(sorted(self._jobs, key=lambda job: job.job))
        )
        self._plan = Plan(
            epoch=MAX_PLANS, fingerprint="f", valid_s=15.0, author=self._jobs[0].job,
            policy="crux", digest="d", entries=entries,
        )  # fmt: skip

    def _job(self, name: str, hosts: list[str]) -> JobRecord:
        compute_s = self._draw.uniform(0.2, 2.0)
        flows = tuple(
            HostFlow(a, b, self._draw.uniform(1e8, 4e9))
            for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True)
        )
        t_s = max(flow.bytes for flow in flows) / LINK_BPS
        profile = JobProfile(
            period_s=compute_s + t_s, period_source="marks", compute_s=compute_s, flops=1e15,
            flops_source="counted", gpus=8 * len(hosts), flows=flows,
            bursts=(ProfileBurst(0.5, 1.0),), t_s=t_s, t_source="topology", t_measured_s=t_s,
            overlap=0.0, exposed_s=t_s, iterations=20, measured_alone=True,
        )  # fmt: skip
        about = {"job": name, "hosts": tuple(hosts), "gpus": 8 * len(hosts), "marks": MARKS}
        return JobRecord(incarnation="i", state="running", profile=profile, **about)

    def read(self) -> ClusterStatus:
        """The state, with step times that vary from one reading to the next."""
        told = {
            job.job: StepTimes(
                step_s=job.profile.period_s * self._draw.uniform(1.0, 2.5),
                iterations=40,
                age_s=0.5,
                profile_age_s=720.0,
            )
            for job in self._jobs
            if job.profile is not None
        }
        steps = steps_of(self._jobs, told)
        operator = OperatorSettings()
        return ClusterStatus(
            "tcp://10.0.0.1:29410", "large", self._jobs, self._plan, None, operator, (), steps
        )

    def audit(self) -> tuple[AuditEntry, ...]:
        """A full log."""
        return tuple(
            AuditEntry(
                kind="plan", at_s=1.8e9 + n, who=self._jobs[0].job, before=n, after=n + 1,
                why=tuple(f"{job.job} came" for job in self._jobs[:16]),
                changes=tuple(f"{job.job}: level 3 -> 5" for job in self._jobs[:16]),
            )
            for n in range(MAX_PLANS)
        )  # fmt: skip


def page_of(crowd: Crowd) -> OperatorPage:
    """A page that has seen an hour."""
    now_s = time.time() - HOUR_S

    def clock() -> float:
        return now_s

    page = OperatorPage(crowd, clock)
    while now_s < time.time():
        page.refresh()
        now_s += SAMPLE_S
    return page


def measure(page: OperatorPage, address: str, repeats: int) -> dict[str, float]:
    """Medians of some visits, each by a browser that has seen nothing."""
    query = dict([address.split("=")]) if address else {}
    render_s, paint_s, whole_s = [], [], []
    for _ in range(repeats):
        page.refresh()
        begin = time.perf_counter()
        size = len(page.html(query))
        render_s.append(time.perf_counter() - begin)
        # What was rendered is not served again.
        page.refresh()
        with PageServer(page.routes(), ("127.0.0.1", 0)) as server, Browser() as browser:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            browser.open(f"http://127.0.0.1:{server.server_port}/?{address}")
            entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paint_s.append(browser.value(entry) / 1e3)
            entry = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
            whole_s.append(browser.value(entry) / 1e3)
            server.shutdown()
    return {
        "bytes": size,
        "render_s": statistics.median(render_s),
        "first_paint_s": statistics.median(paint_s),
        "first_paint_least_s": min(paint_s),
        "whole_s": statistics.median(whole_s),
    }


def picture(page: OperatorPage, folder: Path) -> None:
    """Writes what the page looks like: in the light, and of a link in the dark at 400 pixels."""
    with PageServer(page.routes(), ("127.0.0.1", 0)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}/"
        for name, width, height, is_dark, address in PICTURES:
            with Browser(width, height, is_dark) as browser:
                browser.open(where + address)
                (folder / f"{name}.png").write_bytes(browser.picture())
        server.shutdown()


@click.command()
@click.option("--jobs", default=1000, show_default=True, type=click.IntRange(1))
@click.option("--hosts", default=1000, show_default=True, type=click.IntRange(1))
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@json_option
@click.option("--pictures", type=click.Path(path_type=Path), help="Only write pictures to DIR.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/page.{json,txt}.")
def main(
    jobs: int,
    hosts: int,
    repeats: int,
    json_path: Path | None,
    pictures: Path | None,
    out: Path | None,
) -> None:
    """Measure the operator's page in Chromium."""
    if available() is None:
        raise click.ClickException("no chromium here: apt-get install chromium")
    crowd = Crowd(jobs, hosts)
    page = page_of(crowd)
    if pictures is not None:
        picture(page, pictures)
        return
    links = len(crowd.topology.edges) // 2 if crowd.topology is not None else 0
    rows = [
        {"page": name, **measure(page, address, repeats)}
        for name, address in (("all", ""), ("one job", "job=tenant-0/train-0000"))
    ]
    lines = [f"{jobs} jobs, {hosts} hosts, {links} links; medians of {repeats} visits"]
    for row in rows:
        ok = row["first_paint_s"] < GOAL_S and row["bytes"] < GOAL_BYTES
        within = f"{'within' if ok else 'NOT within'} {GOAL_S:g} s and {GOAL_BYTES / 1e6:g} MB"
        lines.append(
            f"{row['page']}: {row['bytes'] / 1e6:.2f} MB, rendered in {row['render_s']:.2f} s, "
            f"first paint after {row['first_paint_s']:.2f} s, "
            f"at least {row['first_paint_least_s']:.2f} s ({within}), "
            f"whole after {row['whole_s']:.2f} s"
        )
    settings = {"jobs": jobs, "hosts": hosts, "links": links, "repeats": repeats}
    publish(Result("page", settings, rows), "\n".join(lines) + "\n", json_path, out)


if __name__ == "__main__":
    main()
