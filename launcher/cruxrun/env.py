"""``crux env``: the variables that make a job run under Crux without ``cruxrun``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from crux_torch.apply import preload
from crux_torch.errors import SettingsError
from crux_torch.job_name import NAMESPACE
from crux_torch.settings import Settings
from cruxrun import flags

#: Names of one host, which don't hold for the others.
OWN = ("CRUX_HOST",)


def shell(variables: Mapping[str, str]) -> str:
    """Returns lines for ``eval "$(crux env)"``."""
    return "".join(f"export {name}={shlex.quote(text)}\n" for name, text in variables.items())


def slurm(variables: Mapping[str, str]) -> str:
    """Returns what a Slurm TaskProlog prints: Slurm takes everything after ``=`` as it is."""
    return "".join(f"export {name}={text}\n" for name, text in variables.items())


def as_json(variables: Mapping[str, str]) -> str:
    """Returns one JSON object."""
    return json.dumps(variables, indent=2) + "\n"


def container_patch(variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns a strategic merge patch for one container of a pod template.

    The namespace tells equally named jobs apart. Probing the paths of live connections needs
    NET_RAW.
    """
    env: list[dict[str, Any]] = [{"name": n, "value": text} for n, text in variables.items()]
    namespace = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    env.append({"name": NAMESPACE, "valueFrom": namespace})
    return {"env": env, "securityContext": {"capabilities": {"add": ["NET_RAW"]}}}


def kubernetes(variables: Mapping[str, str]) -> str:
    """Returns :func:`container_patch` as YAML."""
    patch: str = yaml.safe_dump(container_patch(variables), sort_keys=False)
    return patch


def patched(manifests: str, variables: Mapping[str, str], container: str = "") -> str:
    """Returns Kubernetes manifests whose containers have the variables.

    Containers are found at any depth, so this holds for a Job, a PyTorchJob, a RayCluster or a
    TrainingRuntime. A TrainJob's own variables go to ``spec.trainer.env``.

    Args:
        manifests: YAML of one object or more.
        container: name of the only container to patch; "" for all of them. Init containers are
            left alone.

    Raises:
        SettingsError: this is no YAML, or has no such container.
    """
    try:
        objects = list(yaml.safe_load_all(manifests))
    except yaml.YAMLError as error:
        raise SettingsError(f"no YAML: {error}") from None
    patch = container_patch(variables)
    found = [c for c in _containers(objects) if container in ("", c.get("name"))]
    for one in found:
        _merge_env(one, patch["env"])
        security = one["securityContext"] = one.get("securityContext") or {}
        capabilities = security["capabilities"] = security.get("capabilities") or {}
        added = capabilities.get("add") or []
        capabilities["add"] = added + [c for c in ("NET_RAW",) if c not in added]
    jobs = [o for o in objects if isinstance(o, dict) and o.get("kind") == "TrainJob"]
    for job in jobs:
        _merge_env(job["spec"].setdefault("trainer", {}), patch["env"])
    if not found and not jobs:
        named = f"the name {container!r}" if container else "a pod template"
        raise SettingsError(f"no container with {named}, and no TrainJob")
    text: str = yaml.safe_dump_all(objects, sort_keys=False)
    return text


def _containers(tree: object) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        own = tree.get("containers")
        if isinstance(own, list):
            yield from (one for one in own if isinstance(one, dict))
        for value in tree.values():
            yield from _containers(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _containers(value)


def _merge_env(holder: dict[str, Any], env: list[dict[str, Any]]) -> None:
    ours = {entry["name"] for entry in env}
    kept = [entry for entry in holder.get("env") or [] if entry.get("name") not in ours]
    holder["env"] = kept + env


FORMATS: dict[str, Callable[[Mapping[str, str]], str]] = {
    "shell": shell,
    "json": as_json,
    "slurm": slurm,
    "kubernetes": kubernetes,
}


def variables(arguments: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for a job with the ``--crux-*`` flags in ``arguments``.

    Raises:
        SettingsError: a value or a combination can't be used.
    """
    parser = argparse.ArgumentParser(prog="crux env", add_help=False, allow_abbrev=False)
    flags.add_flags(parser)
    found, _ = flags.attach_environment(parser.parse_args(arguments), env)
    settings = Settings.from_env({**env, **found})
    return found | preload.environment(settings, env)


@click.command("env", context_settings={"ignore_unknown_options": True})
@click.option(
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    default="shell",
    show_default=True,
    help="shell: for eval. slurm: lines of a TaskProlog. kubernetes: a patch of a container.",
)
@click.option(
    "--patch",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Print these Kubernetes manifests with the variables in their containers; - reads stdin.",
)
@click.option(
    "--container", default="", metavar="NAME", help="With --patch, only the containers so named."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--crux-FLAG ...]")
def env_command(
    format_name: str, patch: Path | None, container: str, arguments: tuple[str, ...]
) -> None:
    """Print the variables that make a job run under Crux without cruxrun.

    Every --crux-* flag of cruxrun works here. A process with these variables that imports torch
    attaches Crux, whoever started it:

        eval "$(crux env --crux-topology cluster.yaml)"; torchrun ... train.py

    The package has to be installed in the job's Python.
    """
    try:
        found = variables(list(arguments), os.environ)
    except SettingsError as error:
        raise click.ClickException(flags.with_flags(str(error))) from None
    if container and patch is None:
        raise click.UsageError("--container names a container of --patch FILE")
    if patch is not None or format_name == "kubernetes":
        found = {name: text for name, text in found.items() if name not in OWN}
    if obstacle := preload.autoload_obstacle(os.environ):
        click.echo(f"crux env: {obstacle}: nothing will attach", err=True)
    if patch is None:
        click.echo(FORMATS[format_name](found), nl=False)
        return
    try:
        with click.open_file(str(patch)) as file:
            click.echo(patched(file.read(), found, container), nl=False)
    except (SettingsError, OSError, UnicodeError) as error:
        raise click.ClickException(f"--patch {patch}: {error}") from None
