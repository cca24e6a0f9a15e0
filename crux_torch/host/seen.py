"""This host as a discovery of the network describes it: its NICs, addresses and switch ports.

lldpd hears of the switch ports at the other ends of the cables (LLDP).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from crux_torch.errors import CruxError
from crux_torch.host.interfaces import SYSFS, Nic, addresses_by_interface, entries, read_nics
from crux_torch.network.discover.fragment import SeenHost, SeenNic
from crux_torch.network.formats import lldp
from crux_torch.network.formats.lldp import Neighbour
from crux_torch.network.host_match import distinct_addresses

MAX_ADDRESSES = 64
#: Bytes of an answer of lldpcli at most; a neighbour takes a few thousand.
MAX_BYTES = 1 << 20
TIMEOUT_S = 5.0
#: The speed of the neighbour's port is one of the details.
_ARGUMENTS = ("show", "neighbors", "details", "-f", "json")
#: Time and place of a message of lldpcli.
_PREFIX = re.compile(r"^\S+ \[[^\]]*\] ")


def read_seen_host(name: str) -> tuple[SeenHost, tuple[str, ...]]:
    """Returns this host, called ``name``, and what it does not tell, in words."""
    neighbours, reason = read_neighbours(name)
    nics = seen_nics(read_nics(), addresses_by_interface(), neighbours)
    return SeenHost(name, nics), (reason,) if reason else ()


def seen_nics(
    nics: tuple[Nic, ...],
    addresses: Mapping[str, tuple[str, ...]],
    neighbours: Mapping[str, Neighbour],
    sysfs: Path = SYSFS,
) -> tuple[SeenNic, ...]:
    """Returns the NICs that have addresses for the network.

    A bond or a VLAN has the neighbour of the interfaces below it, if they have the same one.
    """
    found = []
    for nic in nics:
        own = distinct_addresses(addresses.get(nic.name, ()))[:MAX_ADDRESSES]
        if not own:
            continue
        names = [nic.name, *_lower(nic.name, sysfs)]
        heard = [neighbours[name] for name in names if name in neighbours]
        one = heard[0] if len({neighbour.name for neighbour in heard}) == 1 else None
        found.append(
            SeenNic(
                name=nic.name,
                addresses=own,
                speed_Bps=nic.speed_Bps or 0.0,
                switch=one.name[:256] if one else "",
                switch_port=one.peer_port[:256] if one and len(heard) == 1 else "",
                switch_speed_Bps=sum(each.speed_Bps or 0.0 for each in heard) if one else 0.0,
            )
        )
    return tuple(found)


def _lower(interface: str, sysfs: Path) -> list[str]:
    names = (entry.name for entry in entries(sysfs / "class" / "net" / interface))
    return [name.removeprefix("lower_") for name in names if name.startswith("lower_")]


def read_neighbours(owner: str) -> tuple[dict[str, Neighbour], str]:
    """Returns the neighbour of each interface of this host, and the reason if there are none.

    Args:
        owner: name of this host.
    """
    program = shutil.which("lldpcli") or shutil.which("lldpcli", path="/usr/sbin:/sbin")
    if program is None:
        return {}, "no lldpcli: install lldpd, and let it run, to learn the speeds of links"
    try:
        done = subprocess.run(
            [program, *_ARGUMENTS],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"lldpcli: {error}"
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        said = _PREFIX.sub("", said)
        return {}, f"lldpcli: {said or f'exit code {done.returncode}'}"
    if len(done.stdout) > MAX_BYTES:
        return {}, f"lldpcli: an answer of over {MAX_BYTES} bytes"
    try:
        found = of_interfaces(owner, done.stdout.decode(errors="replace"))
    except CruxError as error:
        return {}, str(error)
    return found, "" if found else "lldpd has heard of no neighbour: do the switches send LLDP?"


def of_interfaces(owner: str, answer: str) -> dict[str, Neighbour]:
    """Returns the neighbour of each interface in an answer of ``lldpcli``.

    An interface that heard of several, through a bridge that passes LLDP on, has none.

    Raises:
        TopologyError: it is no such answer.
    """
    found: dict[str, list[Neighbour]] = {}
    for neighbour in lldp.neighbours(owner, "lldpcli", answer):
        found.setdefault(neighbour.port, []).append(neighbour)
    return {port: each[0] for port, each in found.items() if len(each) == 1}
