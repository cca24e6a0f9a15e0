"""Launching a job: torchrun's parser and agent, with Crux set up around them."""

from __future__ import annotations

import logging
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from crux_torch.agreement.problems import start_line
from crux_torch.apply import preload
from crux_torch.errors import SettingsError
from crux_torch.logs import news, one_line, to_stderr
from crux_torch.misspelt import misspelt_text
from crux_torch.settings import SUMMARY_VARIABLE, Settings
from crux_torch.store.endpoint import OWN_TABLES
from crux_torch.store.host import host_of
from cruxrun import autoload, completion, flags
from cruxrun.devices import chosen_devices

if TYPE_CHECKING:
    from crux_torch.network.topology import Topology
    from crux_torch.store.host import StoreHost

PROG = "cruxrun"
logger = logging.getLogger(PROG)


def get_args_parser() -> ArgumentParser:
    """torchrun's parser, with the group "crux" added."""
    parser = torchrun.get_args_parser()
    parser.prog = PROG
    parser.description = (
        "Launch a training job as torchrun does, and let Crux measure it and schedule its "
        "communication. Every argument of torchrun works as in torchrun."
    )
    parser.epilog = "cruxrun --version shows the release."
    flags.add_flags(parser)
    _name_completion(parser)
    return parser


@record
def main(argv: Sequence[str] | None = None) -> None:
    """Launch a job as torchrun does.

    Args:
        argv: the command line; default: this process's. ``PET_*`` and ``CRUX_*`` are read too.

    Raises:
        SystemExit: with code 2 for a command line or a setting that can't be used.
        ChildFailedError: when workers fail more often than ``--max-restarts`` allows.
    """
    run: Callable[[Namespace], None] = torchrun.run
    parser = get_args_parser()
    if instruction := os.environ.get(completion.VARIABLE):
        try:
            print(completion.script(parser, instruction), end="")
        except ValueError as error:
            _refuse(error)
        return
    args = parser.parse_args(argv)
    try:
        if flags.is_disabled(args, os.environ):
            with _environment({"CRUX_DISABLE": "1"}):
                run(args)
            return
        variables, settings, topology = flags.job_environment(args, os.environ)
    except SettingsError as error:
        _refuse(error)
    with ExitStack() as stack:
        stack.enter_context(_environment(variables))
        to_stderr(logger, f"cruxrun {settings.job}", settings.log_level, alone=True)
        to_stderr(logging.getLogger("crux_torch"), f"cruxrun {settings.job}", settings.log_level)
        if unknown := misspelt_text(os.environ):
            logger.warning("%s", unknown)
        if obstacle := preload.autoload_obstacle(os.environ):
            logger.warning(
                "%s: the script runs on the stock backends, unless it calls crux_torch.attach()",
                obstacle,
            )
        if args.run_path and args.start_method == "fork":
            # A forked worker inherits torch, so no import of torch calls the entry point.
            os.register_at_fork(after_in_child=autoload.attach_if_launched)
        news(logger).info("%s", start_line(settings, topology))
        preloaded = preload.environment(settings, os.environ, not args.no_python)
        stack.enter_context(_environment(preloaded))
        stack.enter_context(_hosted(f"the store {settings.store}", lambda: host_of(settings)))
        stack.enter_context(_hosted("the load tables", lambda: _tables(settings, topology)))
        try:
            devices = stack.enter_context(chosen_devices(args, settings))
        except SettingsError as error:
            _refuse(error)
        stack.enter_context(_environment(devices))
        stack.enter_context(_summed_up(settings))
        run(args)


def _refuse(error: Exception) -> NoReturn:
    """End with what is wrong, without the hundred flags that there are."""
    print(f"{PROG}: error: {flags.with_flags(str(error))}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the workers, and put back what was there for whoever called us."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


@contextmanager
def _hosted(what: str, make: Callable[[], StoreHost | None]) -> Iterator[None]:
    """Keep a server running while the job runs; if that fails, one warning says so."""
    host: StoreHost | None = None
    try:
        if (host := make()) is not None:
            host.start()
    except Exception as error:
        logger.warning("%s: not kept here: %s", what, error)
        host = None
    try:
        yield
    finally:
        if host is not None:
            host.stop()


@contextmanager
def _summed_up(settings: Settings) -> Iterator[None]:
    """Print the job's summary at its end, where its leader ran on this host."""
    with ExitStack() as stack:
        try:
            # What a job can't write costs it nothing but the summary.
            folder = stack.enter_context(TemporaryDirectory(prefix="cruxrun-"))
            file = "" if settings.quiet else os.path.join(folder, "summary")
        except OSError:
            file = ""
        stack.enter_context(_environment({SUMMARY_VARIABLE: file}))
        try:
            yield
        finally:
            try:
                _print_summary(file, settings.job)
            except Exception as error:
                logger.debug("no summary: %s", error)


def _print_summary(file: str, job: str) -> None:
    if not file or not os.path.exists(file):
        return
    from crux_torch.agent.summary import read_summary, summary_lines

    if (found := read_summary(file)) is not None:
        lines = map(one_line, summary_lines(found, job, time.time()))
        news(logger).info("%s", "\n    ".join(lines))


def _tables(settings: Settings, topology: Topology | None) -> StoreHost | None:
    """Returns the host of the load tables, if the policy is mlcc."""
    if settings.policy != "mlcc" or settings.dry_run:
        return None
    from crux_torch.store.host import StoreHost

    named = topology.addresses[topology.tables][0] if topology and topology.tables else ""
    address = f"[{named}]" if ":" in named else named
    return StoreHost(
        f"tcp://{address}:{settings.tables_port}" if named else OWN_TABLES,
        settings.store_secret,
        settings.store_group,
        module="crux_torch.agreement.load_tables",
        arguments=(f"--slot-s={settings.slot_ms / 1e3}",),
        dscp=settings.control_dscp,
    )


def _name_completion(parser: ArgumentParser) -> None:
    """Make ``--print-completion`` (torch >= 2.15) write a script for cruxrun.

    torch's own action renames the parser to "torchrun" before it prints.
    """
    action: Any = next((a for a in parser._actions if a.dest == "print_completion"), None)
    if action is None:
        return

    class Named(type(action)):  # type: ignore[misc]
        def __call__(self, parser: ArgumentParser, space: Any, shell: Any, *rest: Any) -> None:
            try:
                shtab: Any = import_module("shtab")
            except ImportError:
                super().__call__(parser, space, shell, *rest)
            else:
                print(shtab.complete(parser, shell=shell))
                parser.exit()

    action.__class__ = Named
