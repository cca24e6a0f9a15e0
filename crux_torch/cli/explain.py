"""``crux explain``: why a job's steps take as long as they do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from crux_torch.cli.results import names_option, put_json
from crux_torch.cli.status import of_a_cluster, settings_of, store_errors
from crux_torch.report.cluster_status import ClusterReader
from crux_torch.report.explain_text import render
from crux_torch.report.explanation import explain
from crux_torch.report.tables import json_text
from crux_torch.schedule.schedulers import LIVE
from crux_torch.words import listed, safe

#: Policies that can be played in a moment; mlcc's slots take minutes.
PLAYED = [name for name in LIVE if name != "mlcc"]
#: Names that an error lists.
NAMES_LISTED = 20


@click.command("explain")
@click.argument("job", required=False)
@of_a_cluster
@click.option(
    "--names",
    type=click.Choice(["all", "own"]),
    default="all",
    show_default=True,
    help="Whose names to show: all jobs', or only those of JOB's tenant (crux cluster tenant).",
)
@names_option("--schedulers", "schedulers", PLAYED, "crux,crux-paper,sincronia,varys")
def explain_command(
    job: str | None,
    store: str | None,
    cluster: str | None,
    json_path: Path | None,
    names: str,
    schedulers: tuple[str, ...],
) -> None:
    """Say what JOB's steps wait for: on which links, with which jobs, and what would help.

    Without JOB: the job that CRUX_JOB names, or the only one of the cluster. Times are measured
    where the store has them. What each other job costs is simulated: the jobs as they were
    measured, on the paths and levels in force, with and without it.
    """
    settings = settings_of(store, cluster)
    with store_errors(settings, "read the cluster's state"), ClusterReader(settings) as reader:
        status, audit = reader.read(), reader.audit()
        chosen = _chosen(job, [record.job for record in status.jobs], names == "all")
        found = explain(
            status, reader.topology, audit, chosen, schedulers=schedulers, all_names=names == "all"
        )
    if not put_json(json_path, json_text(msgspec.to_builtins(found))):
        render(found)


def _chosen(job: str | None, jobs: Sequence[str], all_names: bool) -> str:
    """The job that is asked about."""
    named = job or os.environ.get("CRUX_JOB")
    if named in jobs:
        return str(named)
    if named is None and len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise click.ClickException("no job runs in this cluster (--store, --cluster)")
    known = f"{len(jobs)} run"
    if all_names:
        known = f"there are: {listed([safe(each) for each in jobs], NAMES_LISTED)}"
    reason = f"no job {safe(named)!r} runs" if named else "which job?"
    raise click.UsageError(f"{reason}; {known}")
