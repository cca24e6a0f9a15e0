"""Options that several simulator commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

scenario_argument = click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs that are played at the same time.",
)


def names_option(flag: str, name: str, known: Iterable[str], default: str) -> Callable[..., Any]:
    """An option for a comma-separated list of ``known`` names; ``all`` stands for all of them."""
    known = list(known)
    return click.option(
        flag,
        name,
        default=default,
        show_default=True,
        callback=lambda _context, _option, value: chosen(value, known),
        help=f"Comma-separated: {', '.join(known)}; or all.",
    )


def chosen(value: str, known: list[str]) -> tuple[str, ...]:
    names = tuple(known) if value == "all" else tuple(value.split(","))
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; expected some of {', '.join(known)}")
    return names
