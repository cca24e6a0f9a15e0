"""A process that probes for a discovery: it says hello, and then does one task after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from crux_torch._version import __version__
from crux_torch.cli.discover.channel import Superior
from crux_torch.host import nvml
from crux_torch.host.interfaces import read_nics
from crux_torch.host.machine import Host, inside_of, machine_id, network_id, read_cpu
from crux_torch.host.pcie import PcieTree
from crux_torch.host.seen import read_seen_host
from crux_torch.network.discover.survey import survey
from crux_torch.network.discover.tasks import Done, Hello, Leave, Outcome, Task


def hello(rank: int, name: str, token: str = "", *, inside: bool = True) -> Hello:
    """Returns what this host tells about itself.

    Args:
        name: of this host in the topology.
        inside: tell its inside, too.
    """
    host, notes = read_seen_host(name)
    told = None
    if inside:
        hardware = Host(name, nvml.bounded_report().gpus, read_cpu(), read_nics())
        told = inside_of(hardware, PcieTree.read())
        notes += tuple(told.notes)
    return Hello(
        rank=rank,
        host=host,
        machine=f"{machine_id()} {network_id()}",
        release=__version__,
        token=token,
        inside=msgspec.Raw(msgspec.json.encode(told)),
        notes=tuple(note[:1024] for note in notes[:64]),
    )


def work(
    superior: Superior, first: Hello, survey: Callable[[Task], Iterator[Outcome]] = survey
) -> str:
    """Does the tasks that come until there are no more; returns the problem that ended them."""
    try:
        superior.report(first)
        while True:
            order = superior.next_order()
            if order is None:
                return "the process that plans is gone"
            if isinstance(order, Leave):
                return order.problem
            for outcome in survey(order):
                superior.report(outcome)
            superior.report(Done())
    except OSError as error:
        return f"the process that plans is gone: {error}"
