"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results here.",
)
threads_option = click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
