"""``crux top``: the cluster's jobs and links on a screen that renews itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from crux_torch.cli.results import number, put_json
from crux_torch.cli.status import of_a_cluster, settings_of, store_errors
from crux_torch.report.cluster_status import ClusterReader
from crux_torch.report.tables import Grid, console, json_text, say
from crux_torch.report.top_rows import JOB_COLUMNS, LINK_COLUMNS, TopView, ordered, top_view

#: Columns of text; the others are numbers.
TEXT = ("job", "trial", "state", "hosts", "link", "jobs")


@click.command("top", context_settings={"show_default": True})
@of_a_cluster
@number("--every every_s", 0.5, 3600, 2.0, "Read the store again after SECONDS.", "SECONDS")
@click.option("--once", is_flag=True, help="Print the tables once and end.")
def top(
    store: str | None, cluster: str | None, json_path: Path | None, every_s: float, once: bool
) -> None:
    """Show the cluster's jobs, links and plan on a screen that renews itself.

    The keys are on its last line. NO_COLOR switches colours off.
    """
    settings = settings_of(store, cluster)
    with store_errors(settings, "read the cluster's state"), ClusterReader(settings) as reader:
        if not once and json_path is None:
            from crux_torch.report.top_app import TopApp

            TopApp(reader, every_s).run()
            return
        status, audit = reader.read(), reader.audit()
        view = top_view(status, reader.topology, audit, time.time())
    if not put_json(json_path, json_text(_plain(view, msgspec.to_builtins(status)))):
        print_once(view)


def _plain(view: TopView, status: dict[str, Any]) -> dict[str, Any]:
    """The state as ``crux status --json`` has it, with the links and why the plan changed."""
    return {**status, "links": msgspec.to_builtins(view.loads), "why": view.why}


def print_once(view: TopView) -> None:
    """Print ``view`` as tables."""
    to = console()
    for line in (*view.head, *([f"why: {view.why}"] if view.why else ())):
        say(to, line)
    for rows, columns in ((view.jobs, JOB_COLUMNS), (view.links, LINK_COLUMNS)):
        first = "slowdown" if columns is JOB_COLUMNS else "planned"
        shown = [
            {name: row.cells[name] for name in columns} for row in ordered(rows, first, False, "")
        ]
        if shown:
            Grid(shown, text=TEXT).print(to)
