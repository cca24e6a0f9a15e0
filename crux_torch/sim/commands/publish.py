"""What a command found: shown, and written where it was asked to."""

from __future__ import annotations

from pathlib import Path

import click

from crux_torch.sim.results import Result, ResultError, write_result


def publish(result: Result, text: str, json_path: Path | None, out: Path | None) -> None:
    """Prints ``text``; writes the rows to ``json_path``, and both to the folder ``out``.

    Raises:
        ClickException: a file can't be written.
    """
    click.echo(text, nl=False)
    try:
        if out is not None:
            write_result(result, text, out)
        if json_path is not None:
            json_path.write_text(result.to_json(), encoding="utf-8")
    except (OSError, ResultError) as error:
        raise click.ClickException(str(error)) from None
