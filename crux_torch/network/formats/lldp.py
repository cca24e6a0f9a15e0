"""The neighbours that LLDP told: ``lldpcli show neighbors -f json`` of hosts, and of switches.

lldpd writes a list of one entry as the entry itself, and takes a name out of an entry as its key
(``-f json``), or writes lists everywhere (``-f json0``); its ``tests/integration/test_lldpcli.py``
has both. The speed of a port comes with ``details`` only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any, NamedTuple

from crux_torch.files import parse_json
from crux_torch.network.formats.draft import Cable, Draft, some
from crux_torch.network.topology import TopologyError

#: In the description of a system that is a switch, though it runs lldpd as hosts do.
SWITCH_SYSTEMS = re.compile(
    r"SONiC|Cumulus|Arista|NX-OS|IOS|Junos|JUNOS|Onyx|MLNX-OS|NVOS|Comware|DNOS|OcNOS|IP ?Infusion"
)
_SPEED = re.compile(r"(\d+(?:\.\d+)?) ?(G?)(?:ig)?base", re.IGNORECASE)
#: Keys of a chassis of which lldpd did not make its name.
_CHASSIS_KEYS = {"id", "name", "descr", "mgmt-ip", "mgmt-iface", "capability", "ttl"}


class Neighbour(NamedTuple):
    """A neighbour at one port.

    Attributes:
        owner, port: the system that saw it, and its port.
        name, description: of the neighbour; its chassis id if it told no name.
        station: True if it says that it is a host and nothing else.
        peer_port: the neighbour's port.
        speed_Bps: of the neighbour's port; None if it did not tell.
    """

    owner: str
    port: str
    name: str
    description: str
    station: bool
    peer_port: str
    speed_Bps: float | None


def is_lldp(document: object) -> bool:
    """Returns True for the neighbours that ``lldpcli`` prints as JSON."""
    return isinstance(document, dict) and "lldp" in document


def read_lldp(texts: Mapping[str, str], switches: Collection[str] = ()) -> Draft:
    """Returns the network that systems see around them.

    Systems that name a switch's software are switches. Others are hosts if they have a file, or say
    that they only are a host.

    Args:
        texts: output of each system, by a file name whose stem is the system's name.
        switches: names or patterns (``leaf*``) of systems that are switches.

    Raises:
        TopologyError: a file is no such output, or two hosts are joined directly.
    """
    seen: list[Neighbour] = []
    for file, text in texts.items():
        seen += neighbours(PurePath(file).stem, file, text)
    owners = {PurePath(file).stem: None for file in texts}
    short = _short_names(owners, seen)
    seen = [each._replace(name=short.get(each.name, each.name)) for each in seen]
    known = {each.name for each in seen if SWITCH_SYSTEMS.search(each.description)}
    hosts = owners.keys() | {each.name for each in seen if each.station}
    draft = Draft(top="above")
    for name in dict.fromkeys((*owners, *(each.name for each in seen))):
        if name in hosts and name not in known and not _matches(name, switches):
            draft.hosts[name] = []
        else:
            draft.switches[name] = None
    taken = [name for name in owners if name in draft.switches]
    if taken:
        draft.notes.append(f"taken for switches: {some(taken)}")
    _add_cables(draft, seen)
    if not taken and len(draft.switches) > 1:
        draft.notes.append(
            "LLDP reaches one cable far: add the output of switches for the cables between them"
        )
    return draft


def neighbours(owner: str, file: str, text: str) -> Iterator[Neighbour]:
    """Yields the neighbours in the output of one system.

    Args:
        owner: name of the system.
        file: named in errors.

    Raises:
        TopologyError: it is no output of ``lldpcli show neighbors -f json``.
    """
    try:
        document = parse_json(text.encode())
    except ValueError as error:
        raise TopologyError(f"{file}: {error}") from None
    if not is_lldp(document):
        raise TopologyError(f"{file}: expected the output of lldpcli show neighbors -f json")
    for top in _list(document["lldp"]):
        for port, interface in _named(_field(top, "interface")):
            for name, chassis in _chassis(_field(interface, "chassis")):
                peer = next(iter(_list(_field(interface, "port"))), None)
                system = _text(_field(chassis, "name")) or name or _text(_field(chassis, "id"))
                if system:
                    yield Neighbour(
                        owner,
                        port,
                        system,
                        _text(_field(chassis, "descr")),
                        _is_station(chassis),
                        _peer_port(peer),
                        _speed_Bps(peer),
                    )


def _add_cables(draft: Draft, seen: list[Neighbour]) -> None:
    """Add the cables between each two systems: as many as one of the two sees."""
    nics: set[str] = set()
    sides: dict[tuple[str, str], list[Neighbour]] = {}
    for each in seen:
        sides.setdefault((each.owner, each.name), []).append(each)
    for owner, name in sides:
        if (name, owner) in sides and name < owner:
            continue
        there, back = sides[owner, name], sides.get((name, owner), [])
        if owner == name or (owner in draft.hosts and name in draft.hosts):
            raise TopologyError(
                f"{owner!r} sees {name!r}, and both count as hosts: name the switches, such as "
                "--switch 'leaf*'"
            )
        # Ports on the side of the host make its NICs.
        if owner in draft.hosts or name not in draft.hosts:
            low, high, ports = owner, name, [each.port for each in there]
            ports += [each.peer_port for each in back][len(ports) :]
        else:
            low, high, ports = name, owner, [each.port for each in back]
            ports += [each.peer_port for each in there][len(ports) :]
        speeds = [each.speed_Bps for each in (*there, *back) if each.speed_Bps]
        speed_Bps = Counter(speeds).most_common(1)[0][0] if speeds else None
        if low in draft.hosts:
            for nic in (f"{low}/{port}" for port in ports):
                if nic not in nics:
                    nics.add(nic)
                    draft.hosts[low].append(nic)
                draft.cables.append(Cable(nic, high, speed_Bps))
        else:
            draft.cables.append(Cable(low, high, speed_Bps, len(ports)))


def _short_names(owners: Mapping[str, None], seen: list[Neighbour]) -> dict[str, str]:
    """Returns the file's name of each neighbour that is called by its full domain name there."""
    short = {owner.partition(".")[0]: owner for owner in owners}
    return {
        each.name: short[each.name.partition(".")[0]]
        for each in seen
        if each.name not in owners and each.name.partition(".")[0] in short
    }


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _chassis(value: Any) -> Iterator[tuple[str, Any]]:
    for each in _list(value):
        if isinstance(each, dict) and not _CHASSIS_KEYS.intersection(each):
            yield from each.items()
        elif isinstance(each, dict):
            yield "", each


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, entry): the name is a key above the entry, or its field ``name``."""
    for each in _list(value):
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            yield each["name"], each
        elif isinstance(each, dict):
            yield from each.items()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text(value: Any) -> str:
    """Returns a text that is plain, or the ``value`` of an entry or of a list with one."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, dict):
        value = value.get("value")
    return value.strip() if isinstance(value, str) else ""


def _is_station(chassis: Any) -> bool:
    told = [_field(each, "type") for each in _list(_field(chassis, "capability"))
            if _field(each, "enabled") is True]  # fmt: skip
    return told == ["Station"]


def _peer_port(port: Any) -> str:
    """The port's interface name; a MAC address says less than the description."""
    number = next(iter(_list(_field(port, "id"))), None)
    if _field(number, "type") == "ifname":
        return _text(number)
    return _text(_field(port, "descr")) or _text(number) or "port"


def _speed_Bps(port: Any) -> float | None:
    current = _text(_field(next(iter(_list(_field(port, "auto-negotiation"))), None), "current"))
    match = _SPEED.search(current[:64])
    if match is None:
        return None
    return float(match[1]) * (1e9 if match[2] else 1e6) / 8 or None
