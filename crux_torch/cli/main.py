"""The command ``crux``, for whoever runs a cluster or one machine of it.

A subcommand is imported when it is called. So ``crux --help`` is quick, and where an optional
package is missing only the commands that need it fail.
"""

from __future__ import annotations

import signal
from importlib import import_module
from typing import Any

import click

from crux_torch._version import __version__

#: Every subcommand: where it is (``module:attribute``), and its line in ``crux --help``.
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "status": ("crux_torch.cli.status:status", "Show the cluster's jobs and its plan."),
    "cluster": ("crux_torch.cli.cluster:group", "Operate a cluster: drain, weigh, pin, audit."),
    "store": ("crux_torch.cli.store:group", "Keep the cluster's store running between jobs."),
    "doctor": ("crux_torch.cli.doctor:doctor", "Check what is missing on this machine."),
    "check": ("crux_torch.cli.check:check", "Compare the hosts of a job before it starts."),
    "host": ("crux_torch.cli.host:host", "Show this host's GPUs, PCIe, NVLink and NICs."),
    "probe": ("crux_torch.cli.probe:probe_command", "Find which source port takes which path."),
    "sim": ("crux_torch.cli.sim:sim", "Simulate jobs on a network under a scheduler."),
    "dispatch": ("crux_torch.cli.dispatch:dispatch", "Choose which GPUs to give to a job."),
}
#: The extra of crux-torch that installs a module.
EXTRAS = {"scipy": "sim", "torch": "live"}


def _missing(command: str, error: ModuleNotFoundError) -> click.ClickException:
    module = (error.name or str(error)).split(".")[0]
    if module in EXTRAS:
        remedy = f"pip install 'crux-torch[{EXTRAS[module]}]'"
    elif module == __name__.split(".")[0]:
        remedy = "it is not part of this installation"
    else:
        remedy = f"pip install the package that provides {module!r}"
    return click.ClickException(f"crux {command} needs {error.name or error}: {remedy}")


class LazyGroup(click.Group):
    """The group of ``SUBCOMMANDS``, which are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in SUBCOMMANDS:
            return None
        module, _, attribute = SUBCOMMANDS[name][0].partition(":")
        try:
            command: click.Command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise _missing(name, error) from None
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # As shells report what a signal has ended.
            raise SystemExit(128 + signal.SIGINT) from None
        except ModuleNotFoundError as error:
            raise _missing(str(ctx.invoked_subcommand), error) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in SUBCOMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="crux")
def main() -> None:
    """Crux: network scheduling for training jobs that share a cluster."""
