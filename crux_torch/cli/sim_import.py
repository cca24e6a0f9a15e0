"""``crux sim import``: workloads of other tools as one scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from crux_torch.cli.results import NEW_FILE, json_option, number, put_json, write_text
from crux_torch.files import read_file
from crux_torch.report.tables import json_text
from crux_torch.sim.importers import FORMATS, format_of, scenario_of
from crux_torch.sim.importers.workload import ImportedJob, ImportFailed
from crux_torch.sim.placement import PLACEMENTS
from crux_torch.sim.replay import TOPOLOGIES, topology_of

#: A longer file is refused, also after unpacking; the profiler's traces of a rank have gigabytes.
MAX_FILE_BYTES = 1 << 32


@click.command("import")
@click.argument("jobs", nargs=-1, required=True, metavar="NAME=PATH...")
@click.option("--out", type=NEW_FILE, required=True)
@click.option(
    "--topology", default="clos", help=f"One of {', '.join(TOPOLOGIES)}, or a topology file."
)
@click.option("--placement", type=click.Choice(list(PLACEMENTS)), default="hived")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    help="Of all files; default: what each begins like.",
)
@number("--bursts", 1, 10_000, 32, "Most bursts of an iteration.")
@click.option("--horizon", type=click.FloatRange(0.0, min_open=True), default=600.0)
@click.option(
    "--tflops",
    type=click.FloatRange(0.0, min_open=True),
    default=100.0,
    help="TFLOPs that a GPU computes in a second, the same for all jobs.",
)
@click.option("--spray", is_flag=True, help="The network sprays the packets of each flow.")
@click.option("--seed", default=0, help="Of GPUs and ports drawn at random.")
@json_option
def import_command(
    jobs: tuple[str, ...],
    out: Path,
    topology: str,
    placement: str,
    format_name: str | None,
    bursts: int,
    horizon: float,
    tflops: float,
    spray: bool,
    seed: int,
    json_path: Path | None,
) -> None:
    """Write a scenario of jobs that other tools describe, on one network.

    PATH is a file, or a folder with a file for each rank: a SimAI workload, Chrome traces of
    torch's profiler or of CRUX_TRACE, Chakra execution traces (.RANK.et or .RANK.json), or a GOAL
    schedule. Any of them may be packed by gzip.
    """
    found: dict[str, ImportedJob] = {}
    for given in jobs:
        name, _, path = given.partition("=")
        if not name or not path or name in found:
            raise click.ClickException(f"got {given!r}, expected NAME=PATH with a new NAME")
        found[name] = _read(Path(path), format_name)
    scenario, notes = scenario_of(
        found,
        topology_of(topology),
        placement=placement,
        bursts=bursts,
        seed=seed,
        horizon_s=horizon,
        flops_per_s=tflops * 1e12,
        spray=spray,
    )
    text = msgspec.json.encode(msgspec.to_builtins(scenario))
    write_text(out, msgspec.json.format(text, indent=1).decode() + "\n")
    rows: list[dict[str, Any]] = [
        {
            "job": name,
            "ranks": job.ranks,
            "compute_s": job.compute_s,
            "bursts": len(scenario.jobs[name].sent),
            "parts": max((len(burst.parts) for burst in scenario.jobs[name].sent), default=0),
            "bytes": sum(
                sum(part.values()) for burst in scenario.jobs[name].sent for part in burst.parts
            ),
            "notes": (*job.notes, *notes.get(name, ())),
        }
        for name, job in found.items()
    ]
    if put_json(json_path, json_text(rows)):
        return
    for row in rows:
        click.echo(
            f"{row['job']}: {row['ranks']} ranks, {row['compute_s']:.4g} s of compute, "
            f"{row['bursts']} bursts, {row['parts']} parts, {row['bytes']:.4g} bytes over all links"
            f"{'' if row['bytes'] else ': all that it sends stays inside its hosts'}"
        )
        for note in row["notes"]:
            click.echo(f"{row['job']}: {note}")


def _read(path: Path, format_name: str | None) -> ImportedJob:
    try:
        inside = [path]
        if path.is_dir():
            inside = sorted(f for f in path.iterdir() if f.is_file() and f.name[0] != ".")
        files = {str(file): read_file(file, MAX_FILE_BYTES, unpack=True) for file in inside}
    except OSError as error:
        raise click.ClickException(f"{error.filename or path}: {error.strerror}") from None
    if not files:
        raise click.ClickException(f"{path}: the folder holds no files")
    job = FORMATS[format_name or format_of(files)](files)
    if not job.collectives:
        raise ImportFailed(
            f"{path}: no rank sends anything to another, expected the files of all ranks of a job "
            "that communicates"
        )
    return job
