"""DSCP maps: what this host is configured for, and whether the maps contradict it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from crux_torch.doctor.check import Check, Part
from crux_torch.errors import SettingsError
from crux_torch.fabric.loaders import load_topology
from crux_torch.fabric.qos import Qos, QosClass, with_qos
from crux_torch.fabric.topology import TopologyError
from crux_torch.host.qos import InterfaceQos
from crux_torch.host.rdma import RdmaDevice
from crux_torch.settings import Settings

#: Values that networks commonly give to others, and to whom.
TAKEN = {
    24: "commonly a lossless class of RoCE",
    26: "commonly the lossless class of RoCE",
    48: "CS6, network control (RFC 4594), and commonly congestion notifications (CNP) of RoCE",
    56: "CS7, reserved for network control (RFC 4594)",
}
NAME = "DSCP map"
REMEDY = "give values that the operator has set aside for Crux (docs/classes.md)"


def maps(settings: Settings) -> tuple[Settings, Qos | None, list[Check]]:
    """The settings with the topology's ``qos``, that one, and what there is to say of the maps."""
    qos = None
    try:
        if settings.topology:
            qos = load_topology(settings.topology).qos
        settings = with_qos(settings, qos)
    except TopologyError:
        pass  # said by the check of the topology
    except SettingsError as error:
        part = Part(NAME, "cruxrun does not start a job")
        return settings, None, [part.broken(str(error), "unset CRUX_DSCP_MAP")]
    if not settings.marks:
        part = Part(NAME, "no traffic is marked, so no job goes first; paths and measuring work")
        remedy = "set CRUX_DSCP_MAP, or qos in the topology (docs/classes.md)"
        return settings, qos, [part.missing("none given", remedy)]
    return settings, qos, list(_commonly_taken(settings))


def _named(settings: Settings) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Each map: its name, its key in ``qos``, and the values that Crux may send with."""
    marks = settings.marks
    for key, name, values in (
        ("tcp", "of TCP", marks.tcp),
        ("rdma", "of queue pairs", marks.rdma),
    ):
        if values:
            yield f"{NAME} {name}", key, tuple(values[n] for n in marks.usable)


def _commonly_taken(settings: Settings) -> Iterator[Check]:
    for name, _, values in _named(settings):
        taken = [f"{dscp} is {TAKEN[dscp]}" for dscp in values if dscp in TAKEN]
        told = ", ".join(map(str, values))
        if taken:
            part = Part(name, "Crux's traffic may delay what keeps the network working")
            yield part.missing(f"{told}; {'; '.join(taken)}", REMEDY)
        else:
            yield Check(name, "ok", told)


def of_interfaces(
    settings: Settings,
    qos: Qos | None,
    interfaces: Sequence[InterfaceQos],
    devices: Sequence[RdmaDevice],
) -> Iterator[Check]:
    """Checks the DSCP maps against the configuration of this host's interfaces."""
    roce = {port.interface for device in devices for port in device.ports if port.active}
    for name, key, values in _named(settings):
        said = {one.dscp: one for one in (getattr(qos, key) if qos is not None else ())}
        for interface in interfaces:
            if key == "rdma" and interface.name not in roce:
                continue
            part = f"{name} on {interface.name}"
            found = list(_contradictions(key, values, said, interface))
            if found:
                for reason, remedy in found:
                    cost = "the network would treat Crux's packets as something else"
                    yield Check(part, "broken", reason, cost, remedy)
                continue
            yield from _told(Part(part, "levels have no order on this host"), values, interface)


def _contradictions(
    key: str, values: Sequence[int], said: dict[int, QosClass], interface: InterfaceQos
) -> Iterator[tuple[str, str]]:
    if interface.trust == "pcp":
        yield (
            "it trusts the VLAN's priority (pcp), so that no DSCP value counts",
            f"mlnx_qos -i {interface.name} --trust dscp",
        )
        return
    if interface.cnp_dscp in values:
        yield f"DSCP {interface.cnp_dscp} is that of congestion notifications (cnp_dscp)", REMEDY
    lossless = [d for d in values if interface.is_lossless(d)]
    lossy = [d for d in values if interface.is_lossless(d) is False]
    if key == "tcp" and any(d not in said for d in lossless):
        unsaid = next(d for d in lossless if d not in said)
        yield f"DSCP {_at(unsaid, interface)}, which is lossless (PFC): not for TCP", REMEDY
    elif lossless and lossy:
        yield (
            f"DSCP {_at(lossless[0], interface)}, which is lossless (PFC), and DSCP "
            f"{_at(lossy[0], interface)}, which is not: a job changes its level while it runs",
            REMEDY,
        )
    for dscp in values:
        of_qos, priority = said.get(dscp), interface.priority_of.get(dscp)
        if of_qos is None or priority is None:
            continue
        if of_qos.priority not in (None, priority):
            yield (
                f"DSCP {_at(dscp, interface)}; the topology's qos says {of_qos.priority}",
                f"mlnx_qos -i {interface.name} --dscp2prio set,{dscp},{of_qos.priority}",
            )
        elif interface.is_lossless(dscp) not in (None, of_qos.lossless):
            here = "lossless (PFC)" if interface.is_lossless(dscp) else "lossy (no PFC)"
            there = "lossless" if of_qos.lossless else "lossy"
            yield (
                f"DSCP {_at(dscp, interface)}, which is {here}; the topology's qos says {there}",
                f"configure PFC of {interface.name} (docs/classes.md), or correct the qos",
            )


def _told(part: Part, values: Sequence[int], interface: InterfaceQos) -> Iterator[Check]:
    """Yields settings of the host that do not contradict the map but take its effect away."""
    shared = defaultdict(list)
    for dscp in values:
        if dscp in interface.priority_of:
            shared[interface.priority_of[dscp]].append(dscp)
    for priority, together in shared.items():
        if len(together) > 1:
            told = ", ".join(map(str, together))
            remedy = "map them to different priorities (mlnx_qos --dscp2prio, dcb app)"
            yield part.missing(f"DSCP {told} share priority {priority}", remedy)
        buffer = interface.buffer_of[priority] if interface.buffer_of else 0
        if interface.pfc and interface.pfc[priority] and interface.buffer_bytes:
            size = interface.buffer_bytes[buffer] if buffer < len(interface.buffer_bytes) else 0
            others = [p for p, b in enumerate(interface.buffer_of) if b == buffer]
            if not size or any(not interface.pfc[p] for p in others):
                why = "has no room" if not size else "is shared with lossy priorities"
                remedy = "give it one (mlnx_qos --prio2buffer --buffer_size, dcb buffer)"
                found = f"priority {priority} is lossless, and its buffer {buffer} {why}"
                yield part.missing(found, remedy)
    by_share = sorted(p for p in shared if interface.algorithms.get(p) == "ets")
    if by_share and len(shared) > 1:
        told = ", ".join(map(str, by_share))
        found = f"ets shares the link out to priorities {told}: a higher level does not go first"
        yield part.missing(found, "make them strict (mlnx_qos --tsa, dcb ets set tc-tsa)")
    cnp = interface.cnp_dscp
    if cnp is not None and interface.priority_of.get(cnp) in shared:
        found = f"congestion notifications (DSCP {_at(cnp, interface)}) share a level's priority"
        yield part.missing(found, "set cnp_dscp to a value of a higher priority")
    if interface.shares_queues and not interface.priority_of:
        found = f"{interface.shares_queues}: it sorts by socket priority, one for all DSCP values"
        yield part.missing(found, "sort by DSCP: trust dscp, or a filter of tc")
    known = ", ".join(_at(d, interface) for d in values if d in interface.priority_of)
    lossless = {interface.is_lossless(d) for d in values}
    what = " (lossless)" if lossless == {True} else " (lossy)" if lossless == {False} else ""
    if known:
        yield Check(part.name, "ok", f"{known}{what}")


def _at(dscp: int, interface: InterfaceQos) -> str:
    return f"{dscp} has priority {interface.priority_of.get(dscp)}"
