"""The ``--crux-*`` flags, and the environment that they give the job's processes."""

from __future__ import annotations

import os
import re
import socket
import uuid
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.distributed.run import parse_min_max_nnodes

from crux_torch.errors import SettingsError
from crux_torch.host.machine import host_in
from crux_torch.job_name import digest, job_name, rendezvous
from crux_torch.network.topology import Topology, TopologyError
from crux_torch.settings import (
    ATTACH_VARIABLE,
    JOB_OF_VARIABLE,
    LAUNCHED_VARIABLE,
    SETTINGS,
    Setting,
    Settings,
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the group "crux": a flag for each setting, also with underscores for dashes."""
    group = parser.add_argument_group(
        "crux",
        "Each flag sets the environment variable in brackets for every process of the job. It wins "
        "over a variable that is set already.",
    )
    for setting in SETTINGS:
        names = (setting.flag, "--" + setting.flag[2:].replace("-", "_"))
        meaning, default = setting.meaning, ""
        how: dict[str, Any]
        if isinstance(setting.default, bool):
            how = {"action": "store_const", "const": f"{not setting.default:d}"}
            meaning = f"do not {meaning}" if setting.default else meaning
        else:
            how = {"type": partial(_check, setting), "metavar": setting.field.upper()}
            default = f"; default {setting.default_text}" if setting.default_text else ""
        text = f"{meaning[0].upper()}{meaning[1:]} [{setting.env}{default}]".replace("%", "%%")
        group.add_argument(*names, dest=_dest(setting), help=text, **how)


def is_disabled(args: Namespace, env: Mapping[str, str]) -> bool:
    """Returns True if the flag or the variable asks for plain torchrun.

    Raises:
        SettingsError: the variable is neither true nor false.
    """
    if args.crux_disable is not None:
        return True
    return Settings.from_env({"CRUX_DISABLE": env.get("CRUX_DISABLE", "")}).disable


def job_environment(
    args: Namespace, env: Mapping[str, str]
) -> tuple[dict[str, str], Settings, Topology | None]:
    """Returns the variables to set for the job's processes, the job's settings, and its topology.

    The variables also give what only this host's ``cruxrun`` knows: the job's name, and what
    :func:`attach_environment` adds.

    Raises:
        SettingsError: a value or a combination can't be used.
    """
    variables, topology = attach_environment(args, env)
    # A rank that starts another job has its own job's name in its environment.
    if not variables.get("CRUX_JOB") and (env.get(JOB_OF_VARIABLE) or not env.get("CRUX_JOB")):
        variables["CRUX_JOB"] = name_of_job(args)
    variables |= {LAUNCHED_VARIABLE: "1", JOB_OF_VARIABLE: ""}
    return variables, Settings.from_env({**env, **variables}), topology


def attach_environment(
    args: Namespace, env: Mapping[str, str]
) -> tuple[dict[str, str], Topology | None]:
    """Returns the variables that attach Crux with the given flags, and the job's topology.

    The variables also give the host's name in the topology, and the DSCP maps of its ``qos``.

    Raises:
        SettingsError: a value or a combination can't be used.
    """
    given = {s.env: getattr(args, _dest(s)) for s in SETTINGS}
    variables = {name: text for name, text in given.items() if text is not None}
    settings = Settings.from_env({**env, **variables})
    if settings.dispatch not in ("", "auto") and not os.path.isfile(settings.dispatch):
        raise SettingsError(f"CRUX_DISPATCH={settings.dispatch!r}: expected auto, or a file")
    topology = _topology(settings)
    if topology is not None:
        variables |= _host_name(topology, settings) | dscp_maps(topology, settings)
    return {**variables, ATTACH_VARIABLE: "1"}, topology


def with_flags(message: str) -> str:
    """Returns ``message`` with each variable preceded by the flag that sets it."""
    flags = {setting.env: setting.flag for setting in SETTINGS}
    return re.sub(
        r"\bCRUX_[A-Z_]+\b",
        lambda match: f"{flags[match[0]]} ({match[0]})" if match[0] in flags else match[0],
        message,
    )


def name_of_job(args: Namespace) -> str:
    """Returns a name that all nodes of the job make alike and that no other job makes.

    Before the rendezvous, the nodes of a job share only its id and its endpoint. The name is made
    from both, because people copy the id from one script to the next. The name of a job on one
    node ends in a random suffix.

    Args:
        args: the command line, before torchrun fills in what ``--standalone`` implies.
    """
    run_id = args.rdzv_id if args.rdzv_id not in ("", "none") and not args.standalone else ""
    stem = run_id or os.path.splitext(os.path.basename(args.training_script))[0]
    if args.standalone or parse_min_max_nnodes(args.nnodes)[1] == 1:
        suffix = uuid.uuid4().hex[:8]
    else:
        endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
        suffix = digest(run_id, rendezvous(endpoint))
    return job_name(stem, suffix)


def _topology(settings: Settings) -> Topology | None:
    if not settings.topology:
        return None
    named = f"CRUX_TOPOLOGY={settings.topology!r}"
    if not os.path.isfile(settings.topology):
        raise SettingsError(f"{named}: no such file")
    # Late: most jobs of one host have no topology, and the loaders take time to import.
    from crux_torch.network.loaders import load_topology

    try:
        return load_topology(settings.topology)
    except TopologyError as error:
        reason = str(error).removeprefix(f"{settings.topology}: ")
        raise SettingsError(f"{named}: {reason}") from None


def _host_name(topology: Topology, settings: Settings) -> dict[str, str]:
    """Returns ``CRUX_HOST`` if this host has another name in the topology than its own."""
    name = settings.host or socket.gethostname()
    try:
        host = host_in(topology, settings.host)
    except TopologyError as error:
        raise SettingsError(f"CRUX_TOPOLOGY={settings.topology!r}: {error}") from None
    return {} if host == name else {"CRUX_HOST": host}


def dscp_maps(topology: Topology, settings: Settings) -> dict[str, str]:
    """Returns the topology's ``qos`` as settings, so that every process knows it at once."""
    if topology.qos is None:
        return {}
    from crux_torch.network.qos import with_qos

    found = with_qos(settings, topology.qos)
    if found is settings:
        return {}
    names = ("levels", "reserved_levels", "dscp_map", "rdma_dscp_map")
    changed = [setting for setting in SETTINGS if setting.field in names]
    return {s.env: s.text_of(getattr(found, s.field)) for s in changed}


def _dest(setting: Setting) -> str:
    return f"crux_{setting.field}"


def _check(setting: Setting, text: str) -> str:
    # An empty value means the default, as an empty variable does.
    if text:
        try:
            setting.parse(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r}: {error}") from None
    return text
