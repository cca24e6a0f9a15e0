"""The command ``crux``, for whoever runs a cluster or one machine of it.

A subcommand is imported when it is called. So ``crux --help`` is quick, and where an optional
package is missing only the commands that need it fail.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import click

from crux_torch._version import __version__
from crux_torch.errors import CruxError

#: Every subcommand: where it is (``module:attribute``), and its line in ``crux --help``.
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "status": ("crux_torch.cli.status:status", "Show the cluster's jobs and its plan."),
    "top": ("crux_torch.cli.top:top", "Watch the jobs, links and plan on a screen."),
    "explain": (
        "crux_torch.cli.explain:explain_command",
        "Say what a job waits for, with whom, and what would help.",
    ),
    "exporter": ("crux_torch.cli.exporter:exporter", "Serve metrics and the operator's page."),
    "cluster": ("crux_torch.cli.cluster:group", "Operate a cluster: drain, weigh, pin, audit."),
    "store": ("crux_torch.cli.status:group", "Keep the cluster's store running between jobs."),
    "doctor": ("crux_torch.cli.doctor:doctor", "Check what is missing on this machine."),
    "check": ("crux_torch.cli.doctor:check", "Compare the hosts of a job before it starts."),
    "host": ("crux_torch.cli.host:host", "Show this host's GPUs, PCIe, NVLink and NICs."),
    "topology": ("crux_torch.cli.topology:group", "Make, check, draw and convert topologies."),
    "env": ("cruxrun.env:env_command", "Print what makes a job run under Crux without cruxrun."),
    "exec": ("crux_torch.cli.exec:exec_command", "Give any program a traffic class and a path."),
    "probe": ("crux_torch.cli.probe:probe_command", "Find which source port takes which path."),
    "qos": ("crux_torch.cli.qos:group", "See if marked packets reach their queues."),
    "sim": ("crux_torch.cli.sim:sim", "Simulate jobs on a network under a scheduler."),
    "dispatch": ("crux_torch.cli.dispatch:dispatch", "Choose which GPUs to give to a job."),
}
#: The extra of crux-torch that installs a module.
EXTRAS = {
    "joblib": "sim",
    "prometheus_client": "metrics",
    "scipy": "sim",
    "textual": "top",
    "torch": "live",
}


def _missing(command: str, error: ModuleNotFoundError) -> click.ClickException:
    module = (error.name or str(error)).split(".")[0]
    if module in EXTRAS:
        remedy = f"pip install 'crux-torch[{EXTRAS[module]}]'"
    elif module == __name__.split(".")[0]:
        remedy = "it is not part of this installation"
    else:
        remedy = f"pip install the package that provides {module!r}"
    return click.ClickException(f"crux {command} needs {error.name or error}: {remedy}")


@contextmanager
def _cleaned_up() -> Iterator[None]:
    """Let SIGTERM end a command by an exception, so that it removes what it made."""
    number = signal.SIGTERM
    aside = threading.current_thread() is not threading.main_thread()
    if aside or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, _end)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


class CleanGroup(click.Group):
    """A group whose commands remove what they made, and end their processes, at a signal.

    An error of Crux ends a command with one line.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _cleaned_up():
                return super().invoke(ctx)
        except CruxError as error:
            raise click.ClickException(str(error)) from None
        except KeyboardInterrupt:
            # As shells report what a signal has ended.
            raise SystemExit(128 + signal.SIGINT) from None


class LazyGroup(CleanGroup):
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
        except ModuleNotFoundError as error:
            raise _missing(str(ctx.invoked_subcommand), error) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in SUBCOMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="crux")
def main() -> None:
    """Crux: network scheduling for training jobs that share a cluster."""
