"""NCCL as its users configure it: who sets its classes, and what defeats a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ctypes.util import find_library

from crux_torch.apply import nccl
from crux_torch.apply.nccl import ENVIRONMENT, NcclVariables, Value, Version, has
from crux_torch.cli.doctor.finding import Check, Part
from crux_torch.settings import Settings

CLASS = "NCCL's traffic class"
ENV_PLUGIN, NET_PLUGIN = "NCCL_ENV_PLUGIN", "NCCL_NET_PLUGIN"
#: Source of a plugin that nobody named: NCCL loads libnccl-net.so and libnccl-env.so if there.
LOADER = "the loader's folders"

#: Variables that override NCCL's own view of the host, or its choice of NICs.
NCCL_CHOICES = {
    "NCCL_TOPO_FILE": "NCCL reads the host's topology from this file",
    "NCCL_IB_HCA": "NCCL uses only these RDMA devices",
    "NCCL_SOCKET_IFNAME": "NCCL uses only these interfaces",
    "NCCL_NET": "NCCL uses only this network",
    "NCCL_NET_MERGE_LEVEL": "NCCL merges NICs up to this distance into one",
    "NCCL_NET_FORCE_MERGE": "NCCL merges these NICs into one",
    "NCCL_CROSS_NIC": "a ring of NCCL may use different NICs on different hosts",
    "NCCL_NET_GDR_LEVEL": "NCCL uses GPUDirect RDMA up to this distance",
    "NCCL_P2P_DISABLE": "NCCL uses no peer-to-peer transfers over PCIe or NVLink",
    "NCCL_P2P_LEVEL": "NCCL uses peer-to-peer transfers up to this distance",
}

#: Variables under which a plan has no full effect if they are not 0, and what they change.
DEFEATS = {
    "NCCL_IB_DISABLE": "NCCL uses sockets, so the map for queue pairs has no effect on it",
    "NCCL_IB_ADAPTIVE_ROUTING": "NCCL expects a network that chooses the path of each packet: "
    "there source ports fix no path",
}


def class_order(version: Version | None) -> tuple[str, str, str]:
    """Returns the order in which NCCL looks for the class of its data, its clear-to-send messages,
    and the queue pairs that GPUs drive (GIN); empty where it has none.

    The script's ``traffic_class`` and Crux's are both the communicator's ``trafficClass``.
    """
    own = ["trafficClass"] if has("trafficClass", version) else []
    data = ["NCCL_IB_TC", *own]
    fifo = ["NCCL_IB_FIFO_TC"] if has("NCCL_IB_FIFO_TC", version) else []
    gin = ["NCCL_GIN_IB_TC"] if has("NCCL_GIN_IB_TC", version) else []
    gin += ["NCCL_IB_TC"]
    if has("ginTrafficClass", version):
        gin += ["ginTrafficClass", *own]
    orders = [data, fifo + data, gin if has("GIN", version) else []]
    of_data, of_fifo, of_gin = (", ".join([*order, "0"]) if order else "" for order in orders)
    return of_data, of_fifo, of_gin


def nccl_choices(
    env: Mapping[str, str], version: Callable[[], Version | None] = nccl.loaded_version
) -> Iterator[Check]:
    """Checks this torch's NCCL, and the variables or files that override its choices."""
    found = version()
    if not found:
        return
    yield Check("NCCL release", "ok", ".".join(map(str, found)))
    variables = NcclVariables(env, version=found)
    for variable, what in NCCL_CHOICES.items():
        chosen = variables.get(variable)
        if chosen is not None:
            part = Part("NCCL's choices", f"{what}, which may differ from what `crux host` shows")
            yield _unset(part, variable, chosen, ", unless you want this")


def traffic_class(
    env: Mapping[str, str],
    settings: Settings,
    version: Callable[[], Version | None] = nccl.loaded_version,
    find: Callable[[str], str | None] = find_library,
) -> Iterator[Check]:
    """Checks that Crux can set the traffic class of NCCL's queue pairs, and says who else does."""
    if not settings.nccl_class:
        part = Part(CLASS, "NCCL's queue pairs have no priority")
        yield part.missing("switched off: CRUX_TUNING=nccl_class=0", "unset it")
        return
    found = version()
    if not has("trafficClass", found):
        part = Part(CLASS, "communicators have no class of their own: only NCCL_IB_TC gives one")
        name = ".".join(map(str, found or ()))
        yield part.missing(f"NCCL {name} is older than 2.26.2", "install a newer NCCL")
    variables = NcclVariables(env, version=found)
    beaten = nccl.overrides(env, found)
    for override in beaten:
        part = Part(CLASS, override.what)
        yield part.missing(str(override), f"unset {override.name}{_where(override.source)}")
    plugin = _plugin(variables, ENV_PLUGIN, find) if has(ENV_PLUGIN, found) else None
    if plugin is not None:
        cost = "that plugin may override NCCL_IB_TC and others; Crux can't see its values"
        yield _unset(Part(CLASS, cost), ENV_PLUGIN, plugin)
    if not beaten and plugin is None and has("trafficClass", found):
        yield Check(CLASS, "ok", "Crux sets it when a communicator is made")
    data, fifo, gin = class_order(found)
    order = f"the first that is set counts: {data}; clear-to-send messages: {fifo}"
    yield Check("NCCL's precedence", "ok", order + (f"; GIN: {gin}" if gin else ""))


def defeats(
    env: Mapping[str, str],
    version: Callable[[], Version | None] = nccl.loaded_version,
    find: Callable[[str], str | None] = find_library,
) -> Iterator[Check]:
    """Finds variables that take traffic out of Crux's reach, or a plan's effect on it."""
    found = version()
    variables = NcclVariables(env, version=found)
    for name, cost in nccl.unreached(env, version=found).items():
        yield Part(name, cost).missing("set", f"unset {name}")
    for name, cost in DEFEATS.items():
        value = variables.get(name)
        # -2: NCCL's own word for unset.
        if value is not None and variables.integer(name) not in (None, 0, -2):
            yield _unset(Part("NCCL and the plan", cost), name, value)
    plugin = _plugin(variables, NET_PLUGIN, find)
    if plugin is not None:
        cost = "that plugin makes NCCL's connections, and may choose their class and path itself"
        yield _unset(Part("NCCL and the plan", cost), NET_PLUGIN, plugin)


def _plugin(variables: NcclVariables, name: str, find: Callable[[str], str | None]) -> Value | None:
    """The plugin that NCCL loads: the one that is named, else the one that the loader finds."""
    named = variables.get(name)
    if named is not None:
        return None if named.text.lower() == "none" else named
    kind = name.removeprefix("NCCL_").removesuffix("_PLUGIN").lower()
    library = find(f"nccl-{kind}")
    return Value(library, LOADER) if library else None


def _unset(part: Part, name: str, value: Value, unless: str = "") -> Check:
    where = _where(value.source)
    if value.source == LOADER:
        return part.missing(f"NCCL loads {value.text}", f"set {name}=none, unless you want it")
    return part.missing(f"{name}={value.text}{where}", f"unset {name}{where}{unless}")


def _where(source: str) -> str:
    return "" if source == ENVIRONMENT else f" in {source}"
