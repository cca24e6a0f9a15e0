"""Progress of a long command on standard error: a bar on a terminal, else a line at times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

#: Seconds before the first line, and between two lines, where there is no terminal.
FIRST_S, PERIOD_S = 2.0, 5.0

T = TypeVar("T")


@contextmanager
def counted(
    what: str, total: int | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int | None], None]]:
    """Gives a function to call with the number of steps done, and of all or None for ``total``.

    Args:
        what: the steps, as a word or two.
        total: number of steps; None: not known yet.
    """
    if sys.stderr.isatty():
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        console = Console(stderr=True)
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done, every: bar.update(task, completed=done, total=every or total)
        return
    began_s = clock()
    due_s = began_s + FIRST_S

    def say(done: int, every: int | None) -> None:
        nonlocal due_s
        now_s, of = clock(), every or total
        if now_s < due_s or not of:
            return
        due_s = now_s + PERIOD_S
        left = f", {(now_s - began_s) / done * (of - done):.0f} s left" if done else ""
        click.echo(f"{what}: {done} of {of}{left}", err=True)

    yield say


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yields ``items``, and shows how many the caller is done with.

    Args:
        total: number of items, where they have no length.
    """
    size = len(items) if isinstance(items, Sized) else total
    with counted(what, size) as say:
        for done, item in enumerate(items):
            say(done, None)
            yield item
