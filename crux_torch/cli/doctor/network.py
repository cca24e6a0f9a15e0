"""The network: traffic classes, queue pairs, DSCP maps, and the topology."""

from __future__ import annotations

import ctypes
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crux_torch.agreement.problems import left_out, network_of
from crux_torch.apply import verbs_shim
from crux_torch.apply.dscp import CONFIGFS, ECN_MASK, choose_ecn, class_in
from crux_torch.apply.nccl import NcclVariables
from crux_torch.cli.doctor.finding import Check, Part
from crux_torch.errors import CruxError, SettingsError
from crux_torch.host.interfaces import SYSFS, RdmaDevice
from crux_torch.host.machine import host_in
from crux_torch.host.qos import InterfaceQos
from crux_torch.network.loaders import load_topology
from crux_torch.network.probe.qos_probe import QosReport
from crux_torch.network.qos import Qos, QosClass, with_qos
from crux_torch.network.topology import Topology, TopologyError
from crux_torch.settings import Settings

ECN_NAMES = ("not ECN capable", "ECT(1)", "ECT(0)", "CE")
#: As programs and NCCL ask for them.
VERBS, MLX5 = "libibverbs.so.1", "libmlx5.so.1"
LIVE_PORT = "mlx5dv_modify_qp_udp_sport"

Loader = Callable[[str], Any]

#: Values that networks commonly give to others, and their users.
TAKEN = {
    24: "commonly a lossless class of RoCE",
    26: "commonly the lossless class of RoCE",
    48: "CS6, network control (RFC 4594), and commonly congestion notifications (CNP) of RoCE",
    56: "CS7, reserved for network control (RFC 4594)",
}
NAME = "DSCP map"
#: Hosts to which the ways are listed.
MAX_WAYS = 8
REMEDY = "give values that the operator has set aside for Crux (docs/operate/classes.md)"


def forced_classes(devices: Sequence[RdmaDevice], sysfs: Path = SYSFS) -> Iterator[Check]:
    """Finds drivers that override the class of every queue pair."""
    for device in devices:
        for port in device.ports:
            file = sysfs / "class/infiniband" / device.name / f"tc/{port.number}/traffic_class"
            forced = class_in(file)
            if forced:
                cost = "all queue pairs of that port have this class, so priorities have no effect"
                yield Check(device.name, "missing", f"{file} is {forced}", cost, f"echo 0 > {file}")


def ecn_bits(
    env: Mapping[str, str],
    settings: Settings,
    devices: Sequence[RdmaDevice],
    sysfs: Path = SYSFS,
    configfs: Path = CONFIGFS,
) -> Iterator[Check]:
    """Checks that NCCL_IB_TC does not contradict the ECN bits of queue pairs on RoCE."""
    part = "ECN of queue pairs"
    if not any(port.active for device in devices for port in device.ports):
        return
    chosen = choose_ecn(settings.roce_ecn, devices, sysfs, configfs)
    found = f"{ECN_NAMES[chosen.bits]}: {chosen.why}"
    operators = NcclVariables(env).integer("NCCL_IB_TC")
    said = chosen.bits if operators is None else operators & ECN_MASK
    if said == chosen.bits or said == ECN_MASK:
        yield Check(part, "ok", found)
        return
    cost = (
        f"NCCL_IB_TC={operators} means {ECN_NAMES[said]}; the class that Crux sets instead would "
        "change how DCQCN treats these packets"
    )
    yield Check(part, "missing", found, cost, f"set CRUX_ROCE_ECN={said}")


def verbs(load: Loader = ctypes.CDLL) -> Check:
    """Checks that libibverbs is installed."""
    part = Part("libibverbs", "no RDMA: NCCL uses sockets, which Crux steers as well")
    try:
        load(VERBS)
    except OSError as error:
        remedy = "apt-get install libibverbs1 ibverbs-providers (in the training container too)"
        return part.missing(str(error), remedy)
    return part.ok(f"{VERBS} loads")


def shim(env: Mapping[str, str]) -> Iterator[Check]:
    """Checks that Crux can put its shim in front of the libibverbs that a job loads."""
    part = Part("libibverbs shim", "Crux can't set the paths and classes of queue pairs")
    try:
        real = verbs_shim.find_real(env)
        if real is None:
            return
        made = verbs_shim.prepare(real, existing=env)
    except (CruxError, OSError) as error:
        remedy = "apt-get install libibverbs-dev, then `pip install --no-build-isolation .`"
        yield part.missing(str(error), remedy)
    else:
        yield part.ok(f"{made} for {real}")


def devices(present: Sequence[RdmaDevice], load: Loader = ctypes.CDLL) -> Iterator[Check]:
    """Checks the RDMA devices, and the changes that their live queue pairs allow."""
    if not present:
        part = Part("RDMA devices", "there are no queue pairs; Crux steers TCP connections only")
        remedy = (
            "nothing if there is no RDMA NIC; else install its driver (in a container, add "
            "--device /dev/infiniband)"
        )
        yield part.missing("none", remedy)
        return
    yield from map(_addresses, present)
    part = Part("pyverbs", "limits and rates of RDMA devices are unknown")
    if not any(device.limits for device in present):
        found_out = "it can't open a device" if find_spec("pyverbs") else "not installed"
        remedy = "apt-get install python3-pyverbs (system Python); allow access to /dev/infiniband"
        yield part.missing(found_out, remedy)
    else:
        paced = [d.name for d in present if d.limits and d.limits.rate_limit_Bps]
        yield part.ok(f"rate limits of queue pairs: {', '.join(paced) or 'on no device'}")
    yield live_ports(present, load)


def _addresses(device: RdmaDevice) -> Check:
    """Checks that the source port of a device's packets selects the path: only with RoCE v2."""
    part = Part(device.name, "its queue pairs can't follow the planned paths")
    ports = [port for port in device.ports if port.active]
    addresses = [gid.ip for port in ports for gid in port.routable]
    if addresses:
        return part.ok(f"RoCE v2 on {', '.join(dict.fromkeys(addresses))}")
    if not ports:
        return part.missing("no active port", "bring its link up")
    if any(port.link_layer == "InfiniBand" for port in ports):
        found = "InfiniBand: its subnet manager chooses the paths"
        return part.missing(
            found, "nothing; for priorities see InfiniBand in docs/operate/classes.md"
        )
    remedy = "give its interface an IP address; the device must support RoCE v2"
    return part.missing("no RoCE v2 address", remedy)


def live_ports(present: Sequence[RdmaDevice], load: Loader = ctypes.CDLL) -> Check:
    """Checks that the source port of a live queue pair can be changed; some say EOPNOTSUPP."""
    cost = "to change the path of a live queue pair, its process group switches to new connections"
    part = Part("live UDP source port", cost)
    names = [device.name for device in present if device.is_mlx5]
    if not names:
        remedy = "nothing; only NVIDIA ConnectX (mlx5) has a call for it"
        return part.missing("no mlx5 device", remedy)
    try:
        if hasattr(load(MLX5), LIVE_PORT):
            return part.ok(f"{LIVE_PORT}() for {', '.join(names)}, if the firmware allows it")
    except OSError as error:
        return part.missing(str(error), "apt-get install ibverbs-providers")
    return part.missing(f"{MLX5} lacks {LIVE_PORT}()", "install rdma-core 33 or newer")


def maps(settings: Settings) -> tuple[Settings, Qos | None, list[Check]]:
    """Returns the settings with the topology's ``qos``, that ``qos``, and checks of the maps."""
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
        remedy = "set CRUX_DSCP_MAP, or qos in the topology (docs/operate/classes.md)"
        return settings, qos, [part.missing("none given", remedy)]
    return settings, qos, list(_commonly_taken(settings))


def _named(settings: Settings) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields for each map its name, its key in ``qos``, and the values that Crux may use."""
    marks = settings.marks
    for key, name, values in (("tcp", "of TCP", marks.tcp), ("rdma", "of queue pairs", marks.rdma)):
        if values:
            yield f"{NAME} {name}", key, tuple(values[n] for n in marks.usable)


def _commonly_taken(settings: Settings) -> Iterator[Check]:
    for name, _, values in _named(settings):
        taken = [f"{dscp} is {TAKEN[dscp]}" for dscp in values if dscp in TAKEN]
        listed = ", ".join(map(str, values))
        if taken:
            part = Part(name, "Crux's traffic may delay what keeps the network working")
            yield part.missing(f"{listed}; {'; '.join(taken)}", REMEDY)
        else:
            yield Check(name, "ok", listed)


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
            yield from _host_weaknesses(
                Part(part, "levels have no order on this host"), values, interface
            )


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
                f"configure PFC of {interface.name} (docs/operate/classes.md), or correct the qos",
            )


def _host_weaknesses(part: Part, values: Sequence[int], interface: InterfaceQos) -> Iterator[Check]:
    """Yields settings of the host that do not contradict the map but take its effect away."""
    shared = defaultdict(list)
    for dscp in values:
        if dscp in interface.priority_of:
            shared[interface.priority_of[dscp]].append(dscp)
    for priority, together in shared.items():
        if len(together) > 1:
            listed = ", ".join(map(str, together))
            remedy = "map them to different priorities (mlnx_qos --dscp2prio, dcb app)"
            yield part.missing(f"DSCP {listed} share priority {priority}", remedy)
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
        listed = ", ".join(map(str, by_share))
        found = f"ets shares the link out to priorities {listed}: a higher level does not go first"
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


def marked_packets(reports: Sequence[QosReport], now_s: float) -> Iterator[Check]:
    """Yields what ``crux qos check`` found on the way to each host, the newest first."""
    cost = "levels have no order there, or are not known to have one"
    for report in reports[:MAX_WAYS]:
        part = Part(f"queues to {report.destination}", cost)
        ago_min = max(0.0, now_s - report.at) / 60
        found = f"{report.summary or 'nothing to order'} ({ago_min:.0f} min ago)"
        if not report.is_right:
            remedy = "configure the switches (docs/operate/classes.md), then `crux qos check` again"
            yield part.missing(found, remedy)
        elif not report.load_bps:
            yield part.missing(found, "give --load to `crux qos check`, to see the queues, too")
        else:
            yield part.ok(found)


def _at(dscp: int, interface: InterfaceQos) -> str:
    return f"{dscp} has priority {interface.priority_of.get(dscp)}"


def topology(settings: Settings) -> Iterator[Check]:
    """Checks the topology file, this host's place in it, and the jobs' plans."""
    loaded = None
    if not settings.topology:
        part = Part("topology", "Crux knows what jobs share only after they have seen the network")
        remedy = (
            "nothing, if routers answer probes; or write one (docs/operate/topology.md) and set "
            "CRUX_TOPOLOGY to its name"
        )
        yield part.missing("none given", remedy)
    else:
        part = Part("topology", "cruxrun does not start a job")
        try:
            loaded = load_topology(settings.topology)
        except TopologyError as error:
            yield part.broken(
                str(error), "correct CRUX_TOPOLOGY, or the file (docs/operate/topology.md)"
            )
            return
        place = _place(settings, loaded)
        yield place
        if place.state != "ok":
            return
    part = Part("plans", "the network treats this job's traffic as any other")
    said = left_out(settings, network_of(loaded))
    if said:
        yield part.missing(
            "; ".join(said), "change the setting that it names (docs/operate/settings.md)"
        )
    else:
        yield part.ok("jobs get priorities and paths")


def _place(settings: Settings, loaded: Topology) -> Check:
    part = Part("topology", "cruxrun does not start a job")
    about = f"{settings.topology}: {len(loaded.hosts)} hosts, {len(loaded.edges)} links"
    name = settings.host or socket.gethostname()
    try:
        host = host_in(loaded, settings.host)
    except TopologyError as error:
        return part.broken(f"{about}; {error}", "set CRUX_HOST, or add this host to the file")
    by_address = " by its addresses" if host != name else ""
    return part.ok(f"{about}; this host is {host}{by_address}")
