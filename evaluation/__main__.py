"""``python -m evaluation``: the paper's evaluation, run again in the simulator."""

from __future__ import annotations

import click

from evaluation.commands.beyond import beyond
from evaluation.commands.dispatch import dispatch
from evaluation.commands.dispatch_contention import dispatch_contention
from evaluation.commands.figures import figures
from evaluation.commands.optimality import optimality
from evaluation.commands.snapshots import snapshots
from evaluation.commands.spraying import spraying
from evaluation.commands.testbed import testbed
from evaluation.commands.torus import torus
from evaluation.commands.trace import trace
from evaluation.commands.variants import variants


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def evaluation() -> None:
    """The paper's evaluation, run again in the simulator (docs/evaluation.md)."""


for _command in (
    testbed,
    optimality,
    trace,
    torus,
    snapshots,
    spraying,
    beyond,
    variants,
    dispatch,
    dispatch_contention,
    figures,
):
    evaluation.add_command(_command)

if __name__ == "__main__":
    evaluation(prog_name="python -m evaluation")
