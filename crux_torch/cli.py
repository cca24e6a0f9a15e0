"""The command ``crux``: what the operator of a cluster, or of one machine, types.

Subcommands are loaded when they are used, so that ``crux --help`` stays quick and an optional part
that is missing costs only its own command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module

import click


@dataclass(frozen=True, slots=True)
class Subcommand:
    """Where a subcommand lives (``module:attribute``) and its line in ``crux --help``."""

    target: str
    summary: str


#: Every subcommand; one more line makes one more command.
SUBCOMMANDS: dict[str, Subcommand] = {
    "status": Subcommand("crux_torch.cli:status", "The cluster's jobs and the plan in force."),
    "probe": Subcommand(
        "crux_torch.fabric.probe_cli:probe_command", "Which source ports take which path to a host."
    ),
    "host": Subcommand(
        "crux_torch.fabric.host_cli:host_command", "GPUs, PCIe, NVLink and NICs of this host."
    ),
    "doctor": Subcommand("crux_torch.cli:doctor", "What Crux finds here, and what it misses."),
    "sim": Subcommand("crux_torch.sim.cli:sim", "Simulate jobs on a network, under any policy."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def __init__(self, *args: object, subcommands: Mapping[str, Subcommand], **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.subcommands = subcommands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.subcommands)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        subcommand = self.subcommands.get(name)
        if subcommand is None:
            return None
        module, _, attribute = subcommand.target.partition(":")
        try:
            command: click.Command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            missing = error.name or str(error)
            remedy = (
                "it is not part of this installation"
                if missing.split(".")[0] == __name__.split(".")[0]
                else f"pip install the package that provides {missing!r}"
            )
            raise click.ClickException(f"crux {name} needs {missing}: {remedy}") from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, s.summary) for name, s in self.subcommands.items()])


@click.group(
    cls=LazyGroup,
    subcommands=SUBCOMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def main() -> None:
    """Crux: training jobs that share a network better."""


@click.command()
@click.option("--store", help="tcp://HOST:PORT of the store [default: CRUX_STORE].")
@click.option("--cluster", help="Name of the cluster [default: CRUX_CLUSTER].")
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(min=0, max=3600),
    default=0.0,
    metavar="SECONDS",
    help="Look again after that long: jobs that died without a word are gone once their lease is "
    "over, and a plan that nobody renews is told from one in force.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(store: str | None, cluster: str | None, settle_s: float, as_json: bool) -> None:
    """The cluster's jobs and the plan in force, as its store has them."""
    from crux_torch.errors import CruxError, SettingsError
    from crux_torch.report.cluster_status import as_json_text, read_status, render
    from crux_torch.settings import Settings

    given = {"CRUX_STORE": store, "CRUX_CLUSTER": cluster}
    try:
        settings = Settings.from_env({**os.environ, **{k: v for k, v in given.items() if v}})
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
    if settings.store == "none":
        raise click.UsageError("CRUX_STORE=none: there is no store to read; give --store")
    try:
        found = read_status(settings.store, settings.cluster, settle_s)
    except CruxError as error:
        raise click.ClickException(
            f"the store {settings.store} can't be read: {error}. The first cruxrun on its host "
            "starts it; from another host its port has to be open"
        ) from None
    if as_json:
        click.echo(as_json_text(found))
    else:
        render(found)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """What Crux finds on this machine, what it misses, what that costs and how to get it.

    The exit code is 0 unless a part is broken: what is merely missing costs something, but jobs
    train.
    """
    from crux_torch.doctor import examine

    checks = examine(os.environ)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.part) for check in checks)
        colours = {"ok": "green", "missing": "yellow", "broken": "red"}
        for check in checks:
            state = click.style(f"{check.state:8}", fg=colours[check.state])
            click.echo(f"{state} {check.part:{width}}  {check.finding}")
            indent = " " * (width + 11)
            if check.cost:
                click.echo(f"{indent}cost: {check.cost}")
            if check.remedy:
                click.echo(f"{indent}to get it: {check.remedy}")
    if any(check.state == "broken" for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main(prog_name="crux")
