"""What programs and a plan ask for, and what crosses the wire: NCCL's own code, without a GPU.

    python benchmarks/nccl_wire.py [--out DIR]

The network code of the installed libnccl and perftest move data between two Soft-RoCE devices of an
emulated machine (docs/research/without-gpu.md), without and with the shim. A row is what one of
them sends one way. NCCL tells the device class, service level and flow label of each queue pair
(``asked``), the shim may change them (``given``), and the capture has the packets (``wire``). Then
NCCL chooses NICs on hosts that are described to it, and the table holds its rings.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from crux_torch.cli.results import Result, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rdma"))
import pcie_layouts
from scenarios.pair import PLANNED_DSCP, PLANNED_PORTS

from lab.nccl import graph, library
from lab.nccl.library import NcclUnavailableError
from lab.rdma.guest import Guest
from lab.rdma.play import Outcome, play
from lab.rdma.requirement import LabUnavailableError
from lab.rdma.verbs_shim import environment

_LIMIT_S = 400
_PROGRAMS = {"nccl": "no class", "nccl group": "its own class"}
#: Of perftest, which tells no class.
_PERFTEST = "write_bw"
_HEADS = ("communicator", "shim", "to", "asked", "given", "wire", "planned", "UDP ports")


def sent(outcome: Outcome, program: str, case: str, destination: str) -> dict[str, Any]:
    """What one communicator's queue pairs sent to one address."""
    step = outcome.steps[f"{program} {case}"]
    told = json.loads(step.processes[0].stdout)
    packets = [p for p in outcome.capture("pair", step) if p.destination == destination]
    ports = sorted({p.source_port for p in packets})
    ours = {(p.qpn, p.tos) for p in packets}
    vectors = [
        one for one in told["connected"] if (one["peer"], one["given"]["traffic_class"]) in ours
    ]
    planned = case == "shim" and program == "nccl"
    return {
        "communicator": _PROGRAMS[program],
        "shim": "yes" if case == "shim" else "no",
        "to": destination,
        "asked": sorted({_vector(one["asked"]) for one in vectors}),
        "given": sorted({_vector(one["given"]) for one in vectors}),
        "wire": sorted({f"{p.tos}" for p in packets}),
        "planned": [str(PLANNED_DSCP[destination] << 2)] if planned else ["-"],
        "UDP ports": [
            "as planned"
            if case == "shim" and set(ports) == set(PLANNED_PORTS[destination])
            else f"{len(ports)} of the device's"
            if case == "plain"
            else str(ports)
        ],
    }


def sent_by_perftest(outcome: Outcome, case: str, destination: str) -> dict[str, Any]:
    """What its queue pairs sent to one address."""
    step = outcome.steps[f"{_PERFTEST} {case}"]
    packets = [p for p in outcome.capture("pair", step) if p.destination == destination]
    ports = {p.source_port for p in packets}
    planned = case == "shim"
    as_planned = bool(ports) and ports <= set(PLANNED_PORTS[destination])
    return {
        "communicator": "perftest",
        "shim": "yes" if planned else "no",
        "to": destination,
        "asked": "-",
        "given": "-",
        "wire": sorted({f"{p.tos}" for p in packets}),
        "planned": f"{PLANNED_DSCP[destination] << 2}" if planned else "-",
        "UDP ports": "as planned" if as_planned else f"{len(ports)} of the device's",
    }


def _vector(vector: dict[str, int]) -> str:
    return f"{vector['traffic_class']}/{vector['service_level']}"


def table(rows: list[dict[str, Any]], rings: dict[str, list[graph.Channel]], head: str) -> str:
    texts = [_HEADS, *(tuple(_text(row[name]) for name in _HEADS) for row in rows)]
    widths = [max(len(text[i]) for text in texts) for i in range(len(_HEADS))]
    lines = [head, "asked, given: class/service level; wire: the byte of DSCP and ECN", ""]
    lines += [
        "  ".join(f"{t:<{w}}" for t, w in zip(text, widths, strict=True)).rstrip() for text in texts
    ]
    lines.append("")
    for name, channels in rings.items():
        used = ", ".join(f"{ring.enters} at GPU {ring.gpus[0]}" for ring in channels)
        lines.append(f"{name}: {len(channels)} rings, by NIC {used}")
    return "\n".join(lines) + "\n"


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else ", ".join(value)


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write DIR/nccl_wire.{json,txt}.")
def main(json_path: Path | None, out: Path | None) -> None:
    """Prints what NCCL asked for beside what was seen on the wire."""
    try:
        guest, path = Guest.prepare(), library.installed()
        outcome = play(guest, "pair", environment(), str(path), timeout_s=_LIMIT_S)
    except (LabUnavailableError, NcclUnavailableError) as error:
        raise click.ClickException(f"no lab here: {error}") from None
    rows = [
        sent(outcome, program, case, destination)
        for program in _PROGRAMS
        for case in ("plain", "shim")
        for destination in PLANNED_DSCP
    ]
    rows += [
        sent_by_perftest(outcome, case, destination)
        for case in ("plain", "shim")
        for destination in PLANNED_DSCP
    ]
    rings = {}
    for layout in (pcie_layouts.hgx_h100, pcie_layouts.dgx_a100):
        with tempfile.TemporaryDirectory() as folder:
            pcie_layouts.write(Path(folder, "sysfs"), layout())
            rings[layout.__name__] = graph.channels(Path(folder, "sysfs"), Path(folder))
    version = json.loads(outcome.steps["nccl plain"].processes[0].stdout)["version"]
    settings = {"nccl": version, "kernel": guest.kernel.release, "device": "rdma_rxe, emulated"}
    head = f"NCCL {version} on Soft-RoCE, Linux {guest.kernel.release} in an emulated machine"
    publish(Result("nccl_wire", settings, rows), table(rows, rings, head), json_path, out)
    outcome.remove()


if __name__ == "__main__":
    main()
