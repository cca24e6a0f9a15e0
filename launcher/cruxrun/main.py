"""Launching a job: torchrun's parser and agent, with Crux set up around them."""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from crux_torch.apply import preload
from crux_torch.control.left_out import start_line
from crux_torch.errors import SettingsError
from crux_torch.log_lines import news, to_stderr
from crux_torch.settings import Settings
from crux_torch.store.endpoint import OWN_TABLES, sharing
from crux_torch.store.unix_place import UNIX
from crux_torch.variables import misspelt_in_words
from cruxrun import autoload, flags, launched, marks, prechecks
from cruxrun.devices import chosen_devices
from cruxrun.job_name import job_name

PROG = "cruxrun"
logger = logging.getLogger(PROG)


def _torchrun(args: Namespace) -> None:
    run: Callable[[Namespace], None] = torchrun.run
    run(args)


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
    parser = get_args_parser()
    args = parser.parse_args(argv)
    try:
        if flags.is_disabled(args, os.environ):
            with _environment({"CRUX_DISABLE": "1"}):
                _torchrun(args)
            return
        exports, settings = flags.environment(args, os.environ)
        topology = prechecks.topology_of(settings)
        if topology is not None:
            exports |= prechecks.named_host(topology, settings)
            exports |= marks.of_the_topology(settings, topology)
    except SettingsError as error:
        _refuse(error)

    exports["CRUX_ATTACH"] = "1"
    started_by_a_rank = bool(os.environ.get("CRUX_JOB_OF"))
    exports["CRUX_JOB_OF"] = ""
    if not exports.get("CRUX_JOB") and (started_by_a_rank or not os.environ.get("CRUX_JOB")):
        exports["CRUX_JOB"] = job_name(args)
    with ExitStack() as stack:
        stack.enter_context(_environment(exports))
        settings = Settings.from_env()
        to_stderr(logger, f"cruxrun {settings.job}", settings.log_level, alone=True)
        to_stderr(logging.getLogger("crux_torch"), f"cruxrun {settings.job}", settings.log_level)
        if unknown := misspelt_in_words(os.environ):
            logger.warning("%s", unknown)
        obstacle = launched.obstacle(os.environ)
        if obstacle:
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
        stack.enter_context(_hosted_store(settings))
        stack.enter_context(_hosted_tables(settings))
        try:
            devices = stack.enter_context(chosen_devices(args, settings))
        except SettingsError as error:
            _refuse(error)
        stack.enter_context(_environment(devices))
        _torchrun(args)


def _refuse(error: SettingsError) -> NoReturn:
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
def _hosted_tables(settings: Settings) -> Iterator[None]:
    """Keep the load tables of the policy mlcc while the job runs, if their place is this host."""
    host: Any = None
    if settings.policy == "mlcc" and not settings.dry_run:
        try:
            from crux_torch.fabric.loaders import load_topology
            from crux_torch.store.host import StoreHost

            topology = load_topology(settings.topology) if settings.topology else None
            named = topology.addresses[topology.tables][0] if topology and topology.tables else ""
            address = f"[{named}]" if ":" in named else named
            host = StoreHost(
                f"tcp://{address}:{settings.tables_port}" if named else OWN_TABLES,
                settings.store_secret,
                settings.store_group,
                module="crux_torch.control.tables_server",
                arguments=(f"--slot-s={settings.slot_ms / 1e3}",),
                dscp=settings.control_dscp,
            )
            host.start()
        except Exception as error:
            logger.warning("the load tables are not kept here, rates are not paced: %s", error)
    try:
        yield
    finally:
        if host is not None:
            host.stop()


@contextmanager
def _hosted_store(settings: Settings) -> Iterator[None]:
    """Keep the embedded store running while the job runs, if its address is this host's.

    If that can't be done, the job runs on with one warning.
    """
    host: Any = None
    endpoint = settings.store
    if endpoint.startswith(("tcp:", UNIX)):
        try:
            from crux_torch.store.host import StoreHost

            shared = sharing(endpoint, settings.store_secret, settings.store_group)
            if shared:
                logger.warning("%s", shared)
            host = StoreHost(settings.store, settings.store_secret, settings.store_group)
            host.start()
        except Exception as error:
            logger.warning("the store %s is not hosted here: %s", endpoint, error)
            host = None
    try:
        yield
    finally:
        if host is not None:
            try:
                host.stop()
            except Exception as error:
                logger.warning("the store %s did not stop cleanly: %s", endpoint, error)


def _name_completion(parser: ArgumentParser) -> None:
    """Make ``--print-completion`` (torch >= 2.15) write a script for cruxrun.

    torch's own action renames the parser to "torchrun" before it prints.
    """
    action: Any = next((a for a in parser._actions if a.dest == "print_completion"), None)
    if action is None:
        return
    stock = type(action)

    class _Named(stock):  # type: ignore[misc, valid-type]
        def __call__(
            self, parser: ArgumentParser, namespace: Namespace, values: Any, option: Any = None
        ) -> None:
            try:
                shtab: Any = import_module("shtab")
            except ImportError:
                super().__call__(parser, namespace, values, option)
            else:
                print(shtab.complete(parser, shell=values))
                parser.exit()

    action.__class__ = _Named
