"""``crux host``: the inside of this host, as tables or for the topology file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import yaml

from crux_torch.cli.results import FILE, STDOUT, json_option, put_json
from crux_torch.host import nvml
from crux_torch.host.interfaces import Nic, read_nics
from crux_torch.host.machine import Host, Inside, as_entries, inside_of, join, read_cpu, usable_nics
from crux_torch.host.nvml import NvmlReport
from crux_torch.host.pcie import PcieTree
from crux_torch.network.loaders import dump_yaml, load_topology
from crux_torch.report.tables import Grid, console, json_text, say

GIGABYTE = 1e9


@click.command()
@json_option
@click.option("--yaml", "as_yaml", is_flag=True, help="Print entries for the topology file.")
@click.option(
    "--join",
    "cluster",
    type=FILE,
    metavar="FILE",
    help="Print the topology in FILE with this host's inside in place of the bare host.",
)
@click.option("--name", help="Name of this host in the topology [default: CRUX_HOST].")
@click.option(
    "--nic",
    "nics",
    multiple=True,
    metavar="NODE",
    help="With --join: the NIC (HOST/eth0) of one cable of this host. Repeat it for each cable.",
)
def host(
    json_path: Path | None,
    as_yaml: bool,
    cluster: Path | None,
    name: str | None,
    nics: tuple[str, ...],
) -> None:
    """Show GPUs, PCIe links, NVLinks and NICs of this host, and the nearest NIC of each GPU.

    PCIe is read from sysfs, GPUs from NVML. A note names what can't be seen.
    """
    if (json_path == STDOUT) + as_yaml + (cluster is not None) > 1:
        raise click.UsageError("only one of --json, --yaml and --join can be printed")
    if nics and cluster is None:
        raise click.UsageError("--nic goes with --join")
    report = nvml.bounded_report()
    named = name or os.environ.get("CRUX_HOST") or os.uname().nodename
    host = Host(named, report.gpus, read_cpu(), read_nics())
    tree = PcieTree.read()
    inside = inside_of(host, tree)
    if put_json(json_path, json_text(as_dictionary(host, report, tree, inside))):
        return
    if cluster is not None:
        joined = join(load_topology(cluster), inside, nics or None)
        click.echo(dump_yaml(joined), nl=False)
    elif as_yaml:
        for note in inside.notes:
            click.echo(f"# {note}")
        click.echo(yaml.safe_dump(as_entries(inside), sort_keys=False, width=100), nl=False)
    else:
        render(host, report, tree, inside)


def as_dictionary(host: Host, report: NvmlReport, tree: PcieTree, inside: Inside) -> dict[str, Any]:
    """Returns all facts about a host as plain values; fields have their units in their names."""
    usable = usable_nics(host.nics, tree)
    return {
        "host": host.name,
        "driver": report.driver or None,
        "nvml": report.error or "ok",
        "gpus": [
            asdict(gpu)
            | {
                "nic": nic.name if (nic := tree.nic_of(gpu.pci_address, usable)) else None,
                "numa_node": _numa_node(tree, gpu.pci_address),
            }
            for gpu in host.gpus
        ],
        "pairs": [
            asdict(pair) | {"distance": None if pair.distance is None else pair.distance.name}
            for pair in report.pairs
        ],
        "nics": [asdict(nic) for nic in host.nics],
        "distances": {
            gpu: {nic.name: tree.distance(gpu, nic.pci_address or "").name for nic in usable}
            for gpu in tree.of_kind("gpu")
        },
        "pcie_links": [
            asdict(link)
            | {"current": _text(link.current) or None, "most": _text(link.most) or None}
            for link in tree.links()
        ],
        "notes": inside.notes,
    }


def render(host: Host, report: NvmlReport, tree: PcieTree, inside: Inside) -> None:
    """Print a host as tables: GPUs, links of the PCIe tree, NICs, and notes."""
    to = console()
    cpu = host.cpu
    cores = f"{cpu.model or 'CPU'}, {cpu.cores} cores" if cpu else "CPU unknown"
    say(to, f"{host.name}: {cores}")
    usable = usable_nics(host.nics, tree)
    gpus = [
        {
            "GPU": gpu.index,
            "model": gpu.name + (" (MIG)" if gpu.mig else ""),
            "PCI": gpu.pci_address,
            "NUMA": _numa_node(tree, gpu.pci_address),
            "peak FLOP/s": f"{gpu.peak_flops:.4g}" if gpu.peak_flops else "unknown",
            "NVLink GB/s": _gigabytes(sum(x.capacity_Bps or 0.0 for x in gpu.nvlinks) or None),
            "NIC": _nearest(tree, gpu.pci_address, usable),
        }
        for gpu in host.gpus
    ]
    if not gpus:
        say(to, f"no GPUs: {report.error or 'NVML lists none'}")
    device_of = {a: inside.node_of.get(a, device.kind) for a, device in tree.devices.items()}
    links = [
        {
            "PCIe link to": link.address,
            "device": device_of[link.address],
            "runs at": link.current,
            "can": link.most,
            "GB/s each way": _gigabytes(link.capacity_Bps),
        }
        for link in tree.links()
    ]
    nics = [
        {
            "NIC": nic.name,
            "PCI": nic.pci_address,
            "NUMA": nic.numa_node,
            "GB/s each way": _gigabytes(nic.speed_Bps),
            "RDMA": nic.rdma_device,
        }
        for nic in host.nics
    ]
    if not nics:
        say(to, "no NICs")
    for rows in (gpus, links, nics):
        if rows:
            Grid([{k: _text(v) for k, v in row.items()} for row in rows], text=[*rows[0]]).print(to)
    for note in inside.notes:
        say(to, f"note: {note}")


def _nearest(tree: PcieTree, gpu: str, nics: Sequence[Nic]) -> str:
    nic = tree.nic_of(gpu, nics)
    return f"{nic.name} ({tree.distance(gpu, nic.pci_address or '').name})" if nic else ""


def _numa_node(tree: PcieTree, address: str) -> int | None:
    device = tree.devices.get(address)
    return device.numa_node if device is not None else None


def _gigabytes(rate_Bps: float | None) -> str:
    return "" if rate_Bps is None else f"{rate_Bps / GIGABYTE:.4g}"


def _text(value: object) -> str:
    return "" if value is None else str(value)
